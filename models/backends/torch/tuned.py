"""Numbers of this backend that were measured, in one place: on a few cores."""

from models.step_sizes import StepSizes

# A few cores take as long for one token as for sixteen, and then in proportion: streams wait for each token of a chunk.
STEP_SIZES = StepSizes(mixed=(32, 64, 128, 256, 512, 1024), cheap=32, usual=128, usual_sparse=128, max_mixed_prefill=512)
