"""Benchmarks: `python -m bench` lists them."""

BENCHMARKS = {  # name -> module, description
    "images": ("bench.probe", "time to first token against the number of images in a request (the multi-image probe)"),
    "load": ("bench.load", "many clients: rates, and percentiles of latencies; --rate sends at a fixed rate"),
    "chat": ("bench.chat", "growing conversations, a shared document, repeated requests; --replicas checks several engines"),
    "video": ("bench.video", "time to first token of new clips and of further questions about them"),
    "accuracy": ("bench.accuracy", "correct answers of the demo model"),
    "drafts": ("bench.drafts", "time per token with and without speculative decoding, and accepted draft tokens"),
    "stress": ("bench.stress", "mixed traffic with aborts for a long time: errors, free blocks, growth of memory"),
    "faults": ("bench.faults", "signals to each process in each phase of a request"),
    "guard": ("bench.guard", "promised and measured values of docs/promises.md"),
    "profile": ("bench.profile", "idle times of the GPU during a prefill"),
    "kernels": ("bench.kernels", "each kernel against its bound"),
    "proxy": ("bench.proxy", "cost of the affinity proxy"),
    "compare": ("bench.compare", "this version against an older one, in turn on one machine"),
    "row": ("bench.row", "all cells of a model's row in the published tables, in one run"),
    "tables": ("bench.tables", "write the tables of README.md and docs/benchmarks.md"),
}
