"""Each kernel of the model against its bound: `python -m bench kernels`."""
