"""Readers and layouts of model files."""
