"""edgelm: run a language model on your own machine."""

__version__ = "0.6.0.dev0"
