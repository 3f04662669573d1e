"""Benchmarks of each kernel against its bound: `python -m bench kernels`."""
