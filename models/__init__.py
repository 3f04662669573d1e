"""Model architectures of the Qwen3-VL family and their kernels; imports neither `engine` nor `server`.

Read in this order:

    config/      a checkpoint's folder as typed values, and the registry of architectures
    decoders/    what the engine asks of a model (`contract`), and the models
    layers/      what decoders are made of
    weights/     formats of matrices
    vision/      the tower
    checkpoint/  which tensor of a checkpoint goes where
    cache/       what a sequence leaves behind: pages of keys and values, recurrent states
    media/       sizes, videos and positions, for the server too
    parallel/    tensor parallelism
    kernels/     operations (`ops`) and attention (`paged`, `varlen`); `reference` (torch), `triton` (`--backend portable`), `hopper`
    scaffold/    writes model folders without a download
    demo/        a small trained model
"""
