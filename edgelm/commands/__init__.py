"""The commands: each parses its input, calls the rest of edgelm, and prints the result."""
