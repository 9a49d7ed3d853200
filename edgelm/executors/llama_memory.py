"""How llama.cpp lays out its memory for a model, by formulas over the header: without llama.cpp, before loading.

    weights     copied: what llama.cpp rearranges for the processor   │ mapped: the rest of the file
    KV cache    all of it from the start, sliding windows included (`swa_full`)
    workspace   attention scores or feed-forward, whichever is larger │ logits │ vocabulary │ Python

The formulas of the compute buffers were fitted to what llama.cpp itself reports; `buffers` may take their place with
its own numbers (llama_buffers.py). Owns the KV modes and the choice of the micro-batch. Knows nothing of what is free.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Self

from edgelm.executors.cgroup import read_text
from edgelm.weights.facts import ModelFacts, TensorFacts, WeightBytes

MIB = 2**20
_F16, _Q4_0, _Q8_0 = 1, 2, 8  # ggml types
_BYTES = {_F16: 2.0, _Q4_0: 18 / 32, _Q8_0: 34 / 32}  # a value
MAX_COMPUTE_BYTES = 256 * MIB  # of attention scores, by which the micro-batch is chosen
MAX_MICRO_BATCH = 512
CELLS = 256  # a context is rounded up to a multiple
MAX_ROWS = 64  # sampled rows of a step

# Measured by tests/bench/bench_plan.py.
PROCESS_BYTES = 66 * MIB  # Python, its packages, llama.cpp's and their code
TOKEN_BYTES = 450  # of the vocabulary: text, ranks and merges in llama.cpp, arrays of the sampler
AROUND_BYTES = MIB // 2  # that the system maps around a small tensor which lies between copied ones
LOOKED_UP_BYTES = 96 * MIB  # of a matrix whose rows are looked up: the pages of a long conversation's 1,500 tokens
LAYER_SECONDS = 60e-6  # a layer's work that does not grow with the weights: threads that wait for each other
VOCAB_SECONDS = 12e-9  # of sampling, for each token of the vocabulary
STEP_SECONDS = 0.3e-3  # of the engine, for each step


@dataclass(frozen=True, slots=True)
class KVMode:
    """How keys and values are stored. A quantized V needs flash attention, which slows decoding of long contexts."""

    type_k: int
    type_v: int
    flash: bool


KV_MODES = {  # the most exact first
    "f16": KVMode(_F16, _F16, flash=False),
    "k8v16": KVMode(_Q8_0, _F16, flash=False),
    "int8": KVMode(_Q8_0, _Q8_0, flash=True),
    "k8v4": KVMode(_Q8_0, _Q4_0, flash=True),
}


class Buffers(NamedTuple):
    """What a context allocates, in bytes."""

    kv: int  # with recurrent states
    compute: int  # of a full micro-batch that attends to a full cache


BufferSource = Callable[[str, int], Buffers]  # of a KV mode and a context


class LlamaMemory:
    """The memory of one model in llama.cpp: `library.plan.EngineMemory`.

    `copied_types` are the tensor types that llama.cpp rearranges on this processor (`repacked_types`); none without
    its fast kernels. `buffers` are llama.cpp's own sizes, where it was asked (`measured_by`).
    """

    def __init__(
        self,
        model: ModelFacts,
        *,
        sequences: int,
        copied_types: Iterable[str] = (),
        buffers: BufferSource | None = None,
    ) -> None:
        self._model = model
        self._sequences = sequences
        self._copied_types = frozenset(copied_types)
        self._source = buffers or self.estimated_buffers
        self._known: dict[tuple[str, int], Buffers] = {}

    def measured_by(self, buffers: BufferSource) -> Self:
        """Return the same with llama.cpp's own sizes."""
        return type(self)(self._model, sequences=self._sequences, copied_types=self._copied_types, buffers=buffers)

    @property
    def kv_modes(self) -> tuple[str, ...]:
        return tuple(KV_MODES)

    def refusal(self, kv: str) -> str:
        """Return why the model cannot have a KV mode: llama.cpp computes NaN for some, without a word."""
        if kv not in KV_MODES:
            return f"is not among the KV caches of llama.cpp ({', '.join(KV_MODES)})"
        summary, mode = self._model.summary, KV_MODES[kv]
        layers = zip(summary.kv_heads, summary.key_lens, summary.value_lens, strict=True)
        lens = {(key_len, value_len) for heads, key_len, value_len in layers if heads}
        for key_len, value_len in sorted(lens):
            for what, kind, length in (("key", mode.type_k, key_len), ("value", mode.type_v, value_len)):
                if not whole_blocks(kind, length):
                    return f"needs {what} heads of a multiple of 32, this model's have {length}"
        if mode.type_k != mode.type_v and any(not value_len for _, value_len in lens):
            return "needs keys apart from values, and this model keeps both in one"
        return ""

    @cached_property
    def weights(self) -> WeightBytes:
        """Weights stay in the copy, whose mapped pages are given back, or in the file; of lookup tables some rows."""
        tensors, copied = self._model.tensors, self._copied
        in_place = [each for each in tensors if self._is_multiplied(each) and each.name not in copied]
        looked_up = [each for each in tensors if _is_table(each) and each not in in_place]
        resident = sum(copied.values()) + sum(each.nbytes for each in in_place)
        resident += sum(min(each.nbytes, LOOKED_UP_BYTES) for each in looked_up)
        around = AROUND_BYTES * sum(each.nbytes < AROUND_BYTES for each in in_place)
        return WeightBytes(
            resident=resident + min(around, sum(copied.values())),
            copied=sum(copied.values()),
            load_peak=sum(each.nbytes for each in tensors) + sum(copied.values()) + self._base_bytes,
            read_per_token=int(sum(self._read_bytes(each) for each in tensors if self._is_multiplied(each))),
        )

    def kv_bytes_per_token(self, kv: str) -> float:
        summary = self._model.summary
        layers = zip(summary.kv_heads, summary.key_lens, summary.value_lens, strict=True)
        return sum(heads * kv_head_bytes(kv, key_len, value_len) for heads, key_len, value_len in layers)

    def kv_bytes(self, kv: str, context: int) -> int:
        return self._buffers(kv, context).kv

    def workspace_bytes(self, kv: str, context: int) -> int:
        """Return the compute buffer, the logits of a step, the CPU's scratch memory, the vocabulary and the process."""
        logits = 4 * MAX_ROWS * self._model.summary.vocab_size
        return self._base_bytes + self._buffers(kv, context).compute + logits + self._scratch_bytes(kv, context)

    def token_seconds(self, read_bytes_per_s: float, kv: str, context: int) -> float:
        summary = self._model.summary
        read = self.weights.read_per_token + (self.kv_bytes(kv, context) if context else 0)
        fixed = STEP_SECONDS + LAYER_SECONDS * summary.layers + VOCAB_SECONDS * summary.vocab_size
        return read / read_bytes_per_s + fixed

    # -- buffers ---------------------------------------------------------------------------------------------------

    def estimated_buffers(self, kv: str, context: int) -> Buffers:
        """Return what llama.cpp will allocate for a context, by formula."""
        summary, flash, cells = self._model.summary, KV_MODES[kv].flash, padded(context)
        scores = 0 if flash else summary.heads * cells
        live = max(scores + self._attention_live(), self._feed_forward_live())  # numbers of a token, where most live
        mask = cells * (2 if flash else 4) * (2 if summary.sliding_window else 1)
        logits = 4 * MAX_ROWS * (summary.vocab_size + summary.width)  # before they leave the graph
        return Buffers(
            kv=int(self.kv_bytes_per_token(kv) * cells) + self._model.state_bytes * self._sequences,
            compute=max(self._batch(kv, context) * (mask + 4 * live), logits),
        )

    def _buffers(self, kv: str, context: int) -> Buffers:
        if (kv, context) not in self._known:
            self._known[kv, context] = self._source(kv, context)
        return self._known[kv, context]

    def _batch(self, kv: str, context: int) -> int:
        return min(micro_batch(context, self._model.summary.heads, KV_MODES[kv].flash), max(context, CELLS))

    def _scratch_bytes(self, kv: str, context: int) -> int:
        """Return the CPU backend's own buffer: attention weights in f16, or a layer's input in 8 bits."""
        summary = self._model.summary
        scores = 0 if KV_MODES[kv].flash else 2 * summary.heads * padded(context)
        return self._batch(kv, context) * max(scores, self._feed_forward_live() // 2)

    @cached_property
    def _queries(self) -> int:
        """The numbers of all heads of a token, at least the model's width."""
        summary = self._model.summary
        return max(summary.width, summary.heads * max([0, *summary.key_lens, *summary.value_lens]))

    def _attention_live(self) -> int:
        """Return the numbers of a token that live at the same time in attention, scores not counted."""
        summary = self._model.summary
        keys = [heads * length for heads, length in zip(summary.kv_heads, summary.key_lens, strict=True)]
        return 3 * summary.width + 2 * self._queries + 2 * max([0, *keys])

    def _feed_forward_live(self) -> int:
        """Return the numbers of a token that live at the same time in the widest feed-forward."""
        model, width = self._model, self._model.summary.width
        dense = max((each.shape[1] for each in model.tensors if _is_part(each, "ffn_up", 2)), default=0)
        expert = max((each.shape[1] for each in model.tensors if _is_part(each, "ffn_up_exps", 3)), default=0)
        return max(3 * dense + 3 * self._queries, model.experts_used * (2 * width + expert) + width)

    @property
    def _base_bytes(self) -> int:
        return PROCESS_BYTES + TOKEN_BYTES * self._model.summary.vocab_size

    # -- weights ---------------------------------------------------------------------------------------------------

    @cached_property
    def _copied(self) -> dict[str, int]:
        """Return the bytes of each tensor of which llama.cpp makes a rearranged copy."""
        return {each.name: each.nbytes for each in self._model.tensors if self._is_copied(each)}

    def _is_copied(self, tensor: TensorFacts) -> bool:
        is_matrix = len(tensor.shape) in (2, 3) and tensor.shape[1] % 8 == 0 and tensor.name.endswith(".weight")
        return is_matrix and self._is_multiplied(tensor) and tensor.type in self._copied_types

    def _is_multiplied(self, tensor: TensorFacts) -> bool:
        """Whether all of a tensor takes part in each token: the embedding does where it is the output matrix too."""
        return not _is_table(tensor) or (self._model.tied and tensor.name == "token_embd.weight")

    def _read_bytes(self, tensor: TensorFacts) -> float:
        """Return what one token reads of a tensor that is multiplied: of the experts, those that it uses."""
        model = self._model
        share = model.experts_used / model.experts if model.experts and "_exps." in tensor.name else 1
        return tensor.nbytes * share


def _is_table(tensor: TensorFacts) -> bool:
    """Whether rows are looked up in a tensor, which only the file's own layout allows."""
    return "_embd" in tensor.name


def _is_part(tensor: TensorFacts, name: str, dims: int) -> bool:
    return tensor.name.endswith(f".{name}.weight") and len(tensor.shape) == dims


def padded(context: int) -> int:
    """Return the cells that llama.cpp makes for a context."""
    return -(-context // CELLS) * CELLS


def whole_blocks(kind: int, head_len: int) -> bool:
    """Tell whether a head can be stored in a ggml type."""
    return kind == _F16 or head_len % 32 == 0


def kv_head_bytes(kv: str, key_len: int, value_len: int) -> float:
    """Return what one head of one layer takes in the cache for a position, in bytes."""
    mode = KV_MODES[kv]
    return key_len * _BYTES[mode.type_k] + value_len * _BYTES[mode.type_v]


def micro_batch(context: int, num_heads: int, flash: bool) -> int:
    """Return llama.cpp's `n_ubatch`: without flash attention, the scores take 4 x heads x n_ubatch x n_ctx bytes."""
    size = MAX_MICRO_BATCH
    while not flash and size > 64 and 4 * num_heads * size * context > MAX_COMPUTE_BYTES:
        size //= 2
    return size


def repacked_types(machine: str = "", flags: frozenset[str] | None = None, root: Path = Path("/")) -> frozenset[str]:
    """Return the tensor types that llama.cpp 0.3.36 rearranges on this processor (ggml-cpu/repack.cpp)."""
    machine = machine or platform.machine()
    if machine in ("x86_64", "AMD64"):
        flags = _processor_flags(root) if flags is None else flags
        types = {"Q4_0", "Q4_K", "IQ4_NL", "MXFP4"} if "avx2" in flags else set()
        return frozenset(types | {"Q2_K"} if "avx512f" in flags else types)
    if machine in ("arm64", "aarch64"):
        return frozenset({"Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "IQ4_NL", "MXFP4"})
    return frozenset()


def _processor_flags(root: Path) -> frozenset[str]:
    for line in (read_text(root / "proc/cpuinfo") or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return frozenset(value.split())
    return frozenset({"avx2"})  # where the system does not tell: nearly all that run today
