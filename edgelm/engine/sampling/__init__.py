"""Sampling: the choice of a token from logits, on the host and on the device."""
