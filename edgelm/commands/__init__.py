"""The work of each command: parse, call, print."""
