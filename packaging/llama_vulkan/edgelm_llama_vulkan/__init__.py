"""llama.cpp's backend for GPUs with Vulkan: lib/libggml-vulkan.so, which edgelm loads beside edgelm-llama's libraries.

It belongs to one build of edgelm-llama, the one with the same version.
"""
