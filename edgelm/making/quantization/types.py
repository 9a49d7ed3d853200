"""The types of llama.cpp: those of whole files, whose rules mix types of tensors, and those of tensors.

Owns their names, numbers and bits. Which tensor gets which type within a file is llama.cpp's own rule.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import NamedTuple

from edgelm.base.errors import UsageError
from edgelm.checkpoints.gguf_parse import TENSOR_TYPES, TensorType

COPY = "COPY"
LIST = "edgelm quantize --list shows all"


class FileType(NamedTuple):
    """A type of a file. `tensor` is the type of most of its matrices."""

    name: str
    id: int  # of llama.cpp's enum llama_ftype
    tensor: str
    needs_importance: bool = False  # llama.cpp refuses it without an importance matrix
    note: str = ""

    @property
    def bits(self) -> float:
        """Bits per weight of most matrices."""
        return bits_of(self.tensor)

    @property
    def is_quantized(self) -> bool:
        return self.name not in ("F32", "F16", "BF16", COPY)


_TERNARY = "for models that were trained with weights of -1, 0 and 1"
_ROWS = (
    FileType("F32", 0, "F32"),
    FileType("F16", 1, "F16"),
    FileType("BF16", 32, "BF16"),
    FileType("Q8_0", 7, "Q8_0", note="nearly the same answers as F16"),
    FileType("Q6_K", 18, "Q6_K"),
    FileType("Q5_K_M", 17, "Q5_K", note="with more bits for half of attn_v and ffn_down"),
    FileType("Q5_K_S", 16, "Q5_K"),
    FileType("Q5_1", 9, "Q5_1"),
    FileType("Q5_0", 8, "Q5_0"),
    FileType("Q4_K_M", 15, "Q4_K", note="the usual choice; more bits for half of attn_v and ffn_down"),
    FileType("Q4_K_S", 14, "Q4_K", note="with more bits for a few of attn_v and ffn_down"),
    FileType("Q4_1", 3, "Q4_1"),
    FileType("Q4_0", 2, "Q4_0", note="the fastest on some processors"),
    FileType("IQ4_NL", 25, "IQ4_NL"),
    FileType("IQ4_XS", 30, "IQ4_XS"),
    FileType("MXFP4_MOE", 38, "MXFP4", note="experts in MXFP4, the rest in Q8_0"),
    FileType("Q3_K_L", 13, "Q3_K", note="with Q5_K for attn_v, attn_output and ffn_down"),
    FileType("Q3_K_M", 12, "Q3_K", note="with Q4_K for attn_v, attn_output and ffn_down"),
    FileType("Q3_K_S", 11, "Q3_K"),
    FileType("IQ3_M", 27, "IQ3_S", note="with Q4_K for attn_v and attn_output"),
    FileType("IQ3_S", 26, "IQ3_S"),
    FileType("IQ3_XS", 22, "IQ3_S", True, "with IQ3_XXS for attn_q and attn_k"),
    FileType("IQ3_XXS", 23, "IQ3_XXS", True),
    FileType("Q2_K", 10, "Q2_K", note="with Q3_K for attn_v, attn_output and ffn_down"),
    FileType("Q2_K_S", 21, "Q2_K", True),
    FileType("IQ2_M", 29, "IQ2_S", True),
    FileType("IQ2_S", 28, "IQ2_XS", True),
    FileType("IQ2_XS", 20, "IQ2_XS", True),
    FileType("IQ2_XXS", 19, "IQ2_XXS", True),
    FileType("IQ1_M", 31, "IQ1_M", True),
    FileType("IQ1_S", 24, "IQ1_S", True),
    FileType("TQ2_0", 37, "TQ2_0", note=_TERNARY),
    FileType("TQ1_0", 36, "TQ1_0", note=_TERNARY),
    FileType("Q2_0", 41, "Q2_0", note=_TERNARY),
    FileType("Q1_0", 40, "Q1_0", note="for models that were trained with weights of -1 and 1"),
    FileType(COPY, 0, "F32", note="no new types: joins a split file"),
)
FILE_TYPES = {row.name: row for row in _ROWS}
ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M", "MXFP4": "MXFP4_MOE"}

# Of a tensor. llama.cpp has no function that quantizes to the others.
CHOICES: dict[str, TensorType] = {
    kind.name: kind
    for kind in TENSOR_TYPES.values()
    if kind.name not in ("I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K", "NVFP4")
}
# Without importance data llama.cpp refuses the first ones for any tensor but embedding and output; with the second
# ones it would abort there, too.
NEED_IMPORTANCE = frozenset({"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS"})
ABORT_WITHOUT = frozenset({"IQ1_S", "IQ2_XXS", "IQ2_XS"})


def bits_of(tensor_type: str) -> float:
    """Return the bits per weight of a tensor's type."""
    kind = CHOICES[tensor_type]
    return 8 * kind.block_bytes / kind.block_len


def file_type(name: str) -> FileType:
    """Return the type of a file by its name, in any case. Raises UsageError."""
    key = name.strip().upper().replace("-", "_")
    if match := FILE_TYPES.get(ALIASES.get(key, key)):
        return match
    raise UsageError(f"{name!r} is no type of a file", _suggestion(key, [*FILE_TYPES, *ALIASES]))


def tensor_type(name: str) -> TensorType:
    """Return the type of a tensor by its name, in any case. Raises UsageError."""
    key = name.strip().upper().replace("-", "_")
    if match := CHOICES.get(key):
        return match
    if key in FILE_TYPES:
        raise UsageError(
            f"{name!r} is a mixture for a whole file, no type of a tensor", f"give {FILE_TYPES[key].tensor}"
        )
    raise UsageError(f"{name!r} is no type of a tensor", _suggestion(key, CHOICES))


def _suggestion(key: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(key, list(names), 3, cutoff=0.5)
    return f"did you mean {' or '.join(near)}? {LIST}" if near else LIST
