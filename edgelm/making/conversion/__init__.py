"""Conversion: a folder of safetensors as a GGUF, with its tokenizer, template and adapters."""
