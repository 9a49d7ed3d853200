"""An emulator of PTX: what Triton compiles for a GPU runs on the CPU, in numpy, with checks that no GPU has."""
