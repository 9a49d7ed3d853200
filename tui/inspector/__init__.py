"""The inspector: the steps of an engine as they happen."""
