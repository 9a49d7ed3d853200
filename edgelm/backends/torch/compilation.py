"""The source, types and options of a kernel to be compiled, and its place in Triton's cache on disk.

Owns finding out which kernels some work will launch, without launching them, and compiling one of them in any process:
no GPU is needed for that, and none is touched. Knows nothing of models and processes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from triton import knobs
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.compiler import compile as compile_source
from triton.runtime.cache import get_cache_key, get_cache_manager
from triton.runtime.jit import JITFunction

ELF = b"\x7fELF"  # a binary begins with it


@dataclass(frozen=True, slots=True)
class Compilation:
    """One kernel for one kind of arguments. It can be pickled."""

    module: str
    name: str
    signature: dict[str, str]  # the type of each argument
    constants: dict[tuple[int, ...], object]  # values of constexprs, by position
    attributes: dict[tuple[int, ...], Any]  # what is known of arguments, such as their alignment
    options: dict[str, Any]
    target: tuple[str, int, int]  # backend, compute capability, threads of a warp
    key: str = field(compare=False, default="")  # by which Triton finds the kernel in this process

    def run(self) -> None:
        """Compile it into the cache on disk, where it may already be. Raises the errors of Triton's compiler."""
        compile_source(self._source, target=GPUTarget(*self.target), options=self.options)

    @property
    def is_done(self) -> bool:
        """Whether the cache on disk has it. A damaged entry is removed: Triton would fail on it at each start."""
        backend = make_backend(GPUTarget(*self.target))
        options = backend.parse_options(dict(self.options))
        key = get_cache_key(self._source, backend, options, env_vars=get_cache_invalidating_env_vars())
        folder = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
        stem = self.name[:150]
        name = f"{stem}.json"
        files = folder.get_group(name) or {}
        if name not in files:
            return False
        if _is_whole(Path(files[name]), files.get(f"{stem}.{backend.binary_ext}")):
            return True
        if group := folder.get_file(f"__grp__{name}"):  # without it, Triton compiles the kernel
            with suppress(OSError):
                Path(group).unlink()
        return False

    @property
    def _source(self) -> ASTSource:
        kernel = getattr(import_module(self.module), self.name)
        return ASTSource(kernel, self.signature, self.constants, self.attributes)


def _is_whole(metadata: Path, binary: str | None) -> bool:
    """Return whether Triton can read an entry: after a power cut files may be empty, and cleaners remove some."""
    try:
        json.loads(metadata.read_bytes())
        with Path(binary or "").open("rb") as file:
            return file.read(len(ELF)) == ELF
    except (OSError, ValueError):
        return False


@contextmanager
def recording() -> Iterator[list[Compilation]]:
    """Look up the kernels that the block launches, but launch none; yield those that this process does not have.

    All other work of the block is done, with numbers that no kernel wrote.
    """
    missing: dict[tuple[str, str], Compilation] = {}
    found: list[Compilation] = []
    look_up, hook = JITFunction.run, knobs.runtime.jit_cache_hook

    def run(kernel: Any, *args: Any, **options: Any) -> Any:
        return look_up(kernel, *args, **{**options, "warmup": True})

    def note(**given: Any) -> bool:
        kernel, key = given["fn"].jit_function, given["key"]
        if (kernel.__name__, key) not in missing:
            compilation = missing[kernel.__name__, key] = _compilation(kernel, key, given["compile"])
            found.append(compilation)
        return True  # not to be compiled now

    JITFunction.run, knobs.runtime.jit_cache_hook = run, note
    try:
        yield found
    finally:
        JITFunction.run, knobs.runtime.jit_cache_hook = look_up, hook


def _compilation(kernel: Any, key: str, given: dict[str, Any]) -> Compilation:
    stored = json.loads(given["specialization_data"])["options"]
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in stored.items()}
    (attributes,) = given["configs"]
    target = kernel.device_caches[given["device"]][2]
    return Compilation(
        module=kernel.__module__,
        name=kernel.__name__,
        signature=dict(given["signature"]),
        constants=dict(given["constants"]),
        attributes=dict(attributes),
        options=options,
        target=(target.backend, target.arch, target.warp_size),
        key=key,
    )
