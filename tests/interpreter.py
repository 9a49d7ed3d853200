"""Triton's interpreter without work that changes no result: it was two thirds of the time of interpreted kernels."""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import cache
from typing import Any


def quicken_interpreter() -> None:
    """Change the interpreter of this process. Releases of Triton that differ inside stay as they are."""
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):  # an older release
        return
    # Each addition of integers is computed again in 64 bits, for an assertion that is off without `debug`.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
    interpreter._get_np_dtype = _looked_up_once(interpreter)
    interpreter._patch_lang = _patch_once(interpreter)


def _looked_up_once(interpreter: Any) -> Any:
    """Return `_get_np_dtype` that keeps what it found: it makes a table of all types at each call."""
    look_up, tl = interpreter._get_np_dtype, interpreter.tl
    found = cache(look_up)

    def np_dtype(kind: Any) -> Any:
        scalar = kind.element_ty if isinstance(kind, tl.block_type) else kind
        return look_up(scalar) if isinstance(scalar, tl.pointer_type) else found(scalar)

    return np_dtype


def _patch_once(interpreter: Any) -> Any:
    """Return `_patch_lang` for a launch: it patched the whole language again at each call of a device function."""
    patch_lang, scope_type = interpreter._patch_lang, interpreter._LangPatchScope
    patched: list[Any] = []  # the modules of this launch; empty between launches

    class LaunchScope(scope_type):  # type: ignore[misc, valid-type]
        def restore(self) -> None:
            super().restore()
            patched.clear()

    def patch(fn: Any) -> Any:
        seen = [value for value in fn.__globals__.values() if inspect.ismodule(value)]
        new = [module for module in (interpreter.tl, interpreter.tl.core) if module in seen and module not in patched]
        if patched and not new:
            return scope_type()
        scope = patch_lang(fn)
        if not patched:
            first = LaunchScope()
            first._changes = scope._changes
            scope = first
        patched.extend(new)
        return scope

    return patch
