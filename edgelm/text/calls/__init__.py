"""Tool calls as a model writes them: the formats, and how to find that of a model."""
