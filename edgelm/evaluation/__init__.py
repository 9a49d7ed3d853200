"""Evaluation: how well a model predicts a text, and how far its predictions are from a reference."""
