"""Benchmarks: `python -m bench` lists them."""

BENCHMARKS = {  # name -> description
    "images": "time to first token against the number of images in a request (the multi-image probe)",
    "load": "many clients: rates, and percentiles of latencies; --rate sends at a fixed rate",
    "goodput": "the highest rate of arrivals at which requests keep their limits",
    "video": "time to first token of new clips and of other questions about them",
    "accuracy": "correct answers of the demo model",
    "drafts": "time per token with and without speculative decoding, and accepted draft tokens",
    "lora": "time per token and throughput with LoRA adapters, and of other requests of the same engine",
    "stress": "mixed traffic with aborts for a long time: errors, free blocks, growth of memory",
    "guard": "promised and measured values of docs/promises.md",
    "profile": "kernels of requests, idle times of the GPU, and distinct experts of a step",
    "kernels": "products, experts and attention against their bounds",
    "compare": "this version against an older one, in turn on one machine",
    "row": "all cells of a model's row in the published tables, in one run",
    "tables": "write the tables of README.md and docs/benchmarks.md",
}
