"""The HTTP endpoint: a front process, and what an engine process serves."""
