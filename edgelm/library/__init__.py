"""The model library: names, the catalogue, pulls from the hub, and the models on this disk."""
