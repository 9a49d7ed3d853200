"""A performance model: how long a compiled launch takes on a GPU that is not here. Every figure is simulated."""
