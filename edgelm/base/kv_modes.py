"""The KV modes: how precisely a cache stores keys and values, and which engine has each mode.

Owns the names and the bits. The engines own the layout: backends/llama/memory.py maps ggml types to their sizes,
kernels/cache the planes of the torch engine (tests/base/test_kv_modes.py compares both with this table).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LlamaKV:
    """The ggml types of keys and values in llama.cpp. It quantizes values only with flash attention."""

    key_type: str
    value_type: str
    flash: bool  # slows down decoding in long contexts


@dataclass(frozen=True, slots=True)
class KVMode:
    """One value of `--kv`."""

    name: str
    help: str
    key_bits: int  # without the scales
    value_bits: int
    llama: LlamaKV | None  # None: llama.cpp has no such cache
    torch: bool  # whether the torch engine has it
    scale_per_head: bool = False  # torch: one scale a head instead of one for 32 numbers


# The most exact first, as measured: docs/results/eval-kv-2026-11-21.txt, eval-kv-2026-11-28.txt.
_TABLE = (
    KVMode("f16", "16-bit floats", 16, 16, LlamaKV("F16", "F16", flash=False), torch=True),
    KVMode("k8v16", "8-bit keys, 16-bit values", 8, 16, LlamaKV("Q8_0", "F16", flash=False), torch=False),
    KVMode("int8", "8-bit integers", 8, 8, LlamaKV("Q8_0", "Q8_0", flash=True), torch=True),
    KVMode("fp8", "8-bit floats (e4m3)", 8, 8, None, torch=True, scale_per_head=True),
    KVMode("k6v4", "rotated 6-bit keys, rotated 4-bit values", 6, 4, None, torch=True),
    KVMode("k8v4", "8-bit keys, 4-bit values", 8, 4, LlamaKV("Q8_0", "Q4_0", flash=True), torch=True),
)
KV_MODES = {mode.name: mode for mode in _TABLE}
LLAMA_KV = {mode.name: mode.llama for mode in _TABLE if mode.llama}
TORCH_KV = {mode.name: mode for mode in _TABLE if mode.torch}
