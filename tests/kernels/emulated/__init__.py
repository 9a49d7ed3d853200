"""Compiled kernels, run on the CPU: cases of every kernel, mutations of their PTX, and whole models.

Owns what is emulated, and how its results are judged. tests/kernels/ptx is the emulator. Triton must not interpret in
the process, so tests run `python -m tests.kernels.emulated.run` as a child.
"""
