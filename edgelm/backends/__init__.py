"""The backends that run a model, one package each, and the choice between them."""
