"""Triton kernels, each beside its reference in plain torch; imported as `edgelm.kernels`."""
