"""The terminal chat, a client of the endpoint; imported as `edgelm.tui`."""
