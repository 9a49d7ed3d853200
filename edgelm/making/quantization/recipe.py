"""The types that a quantized GGUF gets.

A type is named as llama.cpp names it: a file type such as Q4_K_M, whose rule chooses the types of the tensors, and the
type of a tensor such as Q4_K.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Recipe:
    """A file type, and the types of single tensors where they are to differ from its rule."""

    file_type: str
    tensor_types: Mapping[str, str] = field(default_factory=dict)  # by the names of tensors in the GGUF
    pure: bool = False  # every matrix has the type of the file's name; no rule makes some of them larger
    named: str = ""  # the type that the file states, where it is another
