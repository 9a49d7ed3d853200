"""edgelm: run a language model on your own machine."""

import os

# huggingface_hub reads it once, at its import: without it, a pull also asks for a list of agents, and names torch.
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"

__version__ = "0.6.0"
