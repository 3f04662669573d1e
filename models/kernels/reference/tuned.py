"""Tuned parameters of this backend, measured on a few cores."""

from models.kernels.step_sizes import StepSizes
from models.vision.shares import SplitCosts

# Streams wait for every token of a chunk and its attention.
STEP_SIZES = StepSizes(mixed=(32, 64), cheap=32, usual=64, usual_sparse=64, max_mixed_prefill=64, verify_rows=32)

SPLIT_COSTS = SplitCosts(fixed=64, exchanged=0.05, square=6600)  # a patch takes milliseconds
