"""From the tensors of a checkpoint to a model on its device."""
