"""Triton kernels, each with a reference in plain torch; imported as `edgelm.kernels`."""
