"""The worker that compiles kernels into Triton's cache on disk, for compiling.py. It needs no GPU, and sees none."""

from __future__ import annotations

import base64
import os
import pickle
import resource
import signal

from triton.compiler.errors import CompilationError

from edgelm.backends.torch.compiling import HINT, Compile, Compiled
from edgelm.base.errors import DeviceError
from edgelm.base.workers.child import Child, answer_requests

MAX_LENGTH = 200  # characters of a foreign message


def _compile(request: Compile, child: Child) -> None:
    compilation = pickle.loads(base64.b64decode(request.pickled))  # noqa: S301 - our parent wrote it
    try:
        compilation.run()
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
        line = lines[-1] if isinstance(error, CompilationError) else lines[0]  # it begins with the place in the source
        reason = f"{type(error).__name__}: {line[:MAX_LENGTH]}".removesuffix(": ")
        raise DeviceError(f"the GPU's kernel {compilation.name} cannot be compiled: {reason}", HINT) from error
    child.send(Compiled())


def _end_compiler() -> None:
    """Kill the assembler that may run; it is in the group of this process, which the parent has made for it."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the parent tells of a crash
    answer_requests({Compile: _compile}, _end_compiler)
