"""Device functions that turn rows of q and blocks of the cache into operands of the tensor cores; see triton.py."""
