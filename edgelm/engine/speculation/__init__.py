"""Speculative decoding: drafters, their acceptance, and the throttle that stops drafts that lose time."""
