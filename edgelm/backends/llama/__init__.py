"""The llama.cpp backend: it runs any GGUF on any CPU, and on the GPUs that its build supports."""
