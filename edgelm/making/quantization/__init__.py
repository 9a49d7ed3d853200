"""Quantization: fewer bits for the weights of a model, where they cost least; calibration and its texts."""
