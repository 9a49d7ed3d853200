"""How well a model predicts a text, and how far a smaller version of it is from a larger one."""
