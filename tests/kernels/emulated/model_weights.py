"""The tensors of a loaded model: what kernels may read before the end of the kernel before them, and none may write."""

from __future__ import annotations

from dataclasses import fields, is_dataclass

from torch import Tensor


def tensors_of(part: object) -> list[Tensor]:
    """Return the tensors of a part of a model."""
    if isinstance(part, Tensor):
        return [part]
    if is_dataclass(part):
        part = [getattr(part, field.name) for field in fields(part)]
    return [tensor for piece in part for tensor in tensors_of(piece)] if isinstance(part, list | tuple) else []
