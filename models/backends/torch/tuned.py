"""Numbers of this backend that were measured, in one place: on a few cores."""

from models.step_sizes import StepSizes

# A few cores take as long for one token as for sixteen, and then in proportion: streams wait for each token of a chunk, also
# for its attention: 64 tokens behind 10,000 take 0.2 s.
STEP_SIZES = StepSizes(mixed=(32, 64), cheap=32, usual=64, usual_sparse=64, max_mixed_prefill=64)
