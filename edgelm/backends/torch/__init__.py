"""The torch backend: our Triton kernels on CUDA, and their reference ops on the CPU."""
