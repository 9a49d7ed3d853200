"""The model library: names, files on this disk, what fits this machine."""
