"""Between text and tokens: tokenizers, incremental decoding, stop strings."""
