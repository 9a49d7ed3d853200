"""Device functions that turn stored words into operands of the tensor cores; see triton.py. No op."""
