"""This machine: cores, memory, GPUs, and the measurements of them that are kept."""
