"""Attention of prompts: many rows of a sequence, on whole tiles of the tensor cores; see triton.py."""
