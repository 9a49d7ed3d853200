"""Device functions of the matmul; see triton.py. No op."""
