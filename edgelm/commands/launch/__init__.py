"""Coding agents on a model of this machine: what each one is told, the server that it asks, the files that it reads."""
