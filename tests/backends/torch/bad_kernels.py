"""Kernels that cannot be compiled: one has an error, the other ends the process that asks for it."""

from __future__ import annotations

import os
import signal
from typing import Any

import triton
import triton.language as tl


@triton.jit
def wrong_kernel(x_ptr):
    tl.static_assert(False, "this kernel\nis wrong")


def __getattr__(name: str) -> Any:
    if name == "deadly_kernel":
        os.kill(os.getpid(), signal.SIGKILL)
    raise AttributeError(name)
