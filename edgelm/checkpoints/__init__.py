"""Model files: headers, configurations and checks of GGUF and safetensors, without torch."""
