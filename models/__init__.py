"""Architectures of the torch executor; imported as `edgelm.models`."""
