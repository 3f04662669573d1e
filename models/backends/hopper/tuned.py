"""Numbers of this backend that were measured, in one place: on an H200, at the widths of the 8B model."""

SPLIT_TOKENS = 304  # with more, cuBLAS fills the device with a whole product, too
