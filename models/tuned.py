"""Numbers that were measured, each on the device that it is for. Read by whoever builds a worker."""

from models.step_sizes import StepSizes

# A matrix product loses up to a tenth at some numbers of rows, where its tiles do not fit them or cuBLAS chooses badly: 416 rows take
# longer than 440. These lose little on an H200, at the widths of the 8B model. Products of 208 tokens take a fifth longer than those of 64.
HOPPER_STEP_SIZES = StepSizes(
    mixed=(104, 128, 160, 208, 216, 256, 312, 344, 384, 440, 480, 528, 624, 696, 888, 1024),
    cheap=208,
    usual=312,
    max_mixed_prefill=1008,
    decodes=(1, 2, 4, *range(8, 129, 8)),
    mixed_decodes=(8, 16, 24, 32, 48, 64, 96, 128),
    small_chunks=(16, 64),
    largest_chunk=512,
)

# A few cores take as long for one token as for sixteen, and then in proportion: streams wait for each token of a chunk.
CPU_STEP_SIZES = StepSizes(mixed=(32, 64, 128, 256, 512, 1024), cheap=32, usual=128, max_mixed_prefill=512)
