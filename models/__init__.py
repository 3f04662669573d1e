"""Model architectures of the Qwen3-VL family and their kernels; imports neither `engine` nor `server`.

Read in this order:

    config/      a checkpoint's folder as typed values, and the registry of architectures
    decoders/    interface of a model (`contract`), and the models
    layers/      components of decoders
    weights/     formats of matrices
    vision/      the tower
    checkpoint/  mapping of a checkpoint's tensors to parameters
    cache/       per-sequence caches: pages of keys and values, recurrent states
    media/       sizes and positions of media, also for the server
    parallel/    tensor parallelism
    kernels/     operations (`ops`) and attention (`paged`, `varlen`); `reference` (torch), `triton` (`--backend portable`), `hopper`
    scaffold/    writes model folders without a download
    demo/        a small trained model
"""
