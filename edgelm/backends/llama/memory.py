"""Predicts the memory of a model in llama.cpp from its header, before loading and without llama.cpp.

    weights     copied: tensors that llama.cpp repacks for this processor │ mapped: the rest of the file
    KV cache    allocated in full at the start, sliding windows included (`swa_full`)
    workspace   attention scores or feed-forward, whichever is larger │ logits │ vocabulary │ Python

The formulas of the compute buffers were fitted to llama.cpp's own reports; a `BufferSource` can replace them by its
exact numbers (buffers.py). Owns the ggml types of the KV modes and the micro-batch. Knows nothing of free memory.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import NamedTuple, Self

from edgelm.backends.followed_heads import HEADS_WINDOW
from edgelm.backends.plan import DeviceMemory, MachineMemory
from edgelm.base.kv_modes import LLAMA_KV
from edgelm.base.machine.cpu import processor_flags
from edgelm.base.places import own_places
from edgelm.checkpoints.gguf_parse import TENSOR_TYPES, TensorType
from edgelm.checkpoints.summary import ModelFacts, TensorFacts, WeightBytes

MIB = 2**20
GGML_TYPES = {kind.name: kind for kind in TENSOR_TYPES.values()}
MAX_COMPUTE_BYTES = 256 * MIB  # bound on the attention scores, by which the micro-batch is chosen
MAX_MICRO_BATCH = 512
CELLS = 256  # llama.cpp rounds a context up to a multiple of this
MAX_ROWS = 64  # sampled rows of a step
REPEATABLE_KV = tuple(name for name, mode in LLAMA_KV.items() if mode.key_type != "F16")  # repeatable.py tells why

# Measured by tests/bench/bench_plan.py; the first three on engines that serve, tests/server/test_predicted_memory.py.
PROCESS_BYTES = 118 * MIB  # Python, its packages, llama.cpp's and their code, the workers for templates and grammars
TOKEN_BYTES = 800  # for each token of the vocabulary: in llama.cpp, in our tokenizer and sampler, and for grammars
USUAL_ROWS = 16  # of the logits, whose other rows are allocated and never touched
AROUND_BYTES = MIB // 2  # pages that the system maps around a small tensor between copied ones
LOOKED_UP_BYTES = 96 * MIB  # resident pages of a lookup table after a long conversation's 1,500 tokens
LAYER_SECONDS = 60e-6  # a layer's work that does not grow with the weights: threads wait for each other
VOCAB_SECONDS = 12e-9  # sampling, for each token of the vocabulary
FLASH_SECONDS = 0.35e-9  # flash attention, for each number of a head's keys and values, on one core
STEP_SECONDS = 0.3e-3  # the engine's own work, for each step
AMX = "AMX"  # among the repacked types: the types of AMX_TYPES, where AMX's kernels take a tensor
AMX_ROWS = 32


class AmxType(NamedTuple):
    """How AMX's buffer holds a tensor type (ggml-cpu/amx)."""

    columns: int  # a tensor's are a multiple of these
    added: float = 0  # to the bytes of a tensor, as a share of them: sums for which its instructions have no place


AMX_TYPES = {
    "Q4_0": AmxType(32),
    "Q4_1": AmxType(32),
    "Q8_0": AmxType(32, 4 / 34),
    "Q4_K": AmxType(256, 4 / 144),
    "Q5_K": AmxType(256, 4 / 176),
    "Q6_K": AmxType(256),
    "IQ4_XS": AmxType(256, 2 / 136),
    "F16": AmxType(16),
}


class Buffers(NamedTuple):
    """The buffers that a context allocates, in bytes."""

    kv: int  # recurrent states included
    compute: int  # for a full micro-batch that attends to a full cache


BufferSource = Callable[[str, int], Buffers]  # called with a KV mode and a context length


class LlamaMemory:
    """The memory of one model in llama.cpp: a `plan.EngineMemory`.

    `copied_types` are the tensor types that llama.cpp repacks on this processor (`repacked_types`); without its fast
    kernels there are none.
    With `heads`, those that predict several tokens have a context of their own. `buffers` replaces the formulas by
    llama.cpp's own sizes (`measured_by`).
    """

    def __init__(
        self,
        model: ModelFacts,
        *,
        sequences: int,
        copied_types: Iterable[str] = (),
        buffers: BufferSource | None = None,
        repeatable: bool = False,
        heads: bool = False,
    ) -> None:
        self._model = model
        self._heads = heads
        self._sequences = sequences
        self._copied_types = frozenset(copied_types)
        self._repeatable = repeatable
        self._source = buffers or self.estimated_buffers
        self._cached: dict[tuple[str, int], Buffers] = {}

    def measured_by(self, buffers: BufferSource) -> Self:
        """Return a copy that takes the buffer sizes from `buffers`."""
        return type(self)(
            self._model, sequences=self._sequences, copied_types=self._copied_types, buffers=buffers, heads=self._heads
        )

    @property
    def process_bytes(self) -> int:
        return PROCESS_BYTES

    @property
    def kv_modes(self) -> tuple[str, ...]:
        return REPEATABLE_KV if self._repeatable else tuple(LLAMA_KV)

    def refusal(self, kv: str) -> str:
        """Return why the model cannot have a KV mode; empty: it can."""
        if kv not in LLAMA_KV:
            return f"is not among the KV caches of llama.cpp ({', '.join(LLAMA_KV)})"
        if kv not in self.kv_modes:
            return f"is not repeatable in llama.cpp ({', '.join(self.kv_modes)} are)"
        summary = self._model.summary
        layers = zip(summary.kv_heads, summary.key_lens, summary.value_lens, strict=True)
        head_lens = {(key_len, value_len) for heads, key_len, value_len in layers if heads}
        for key_len, value_len in sorted(head_lens):
            if reason := head_refusal(kv, key_len, value_len):
                return reason
        key_type, value_type = kv_types(kv)
        if key_type != value_type and any(not value_len for _, value_len in head_lens):
            return "needs separate keys and values, and this model stores both as one"
        return ""

    @cached_property
    def weights(self) -> WeightBytes:
        """The weights: repacked copies (whose mapped pages are given back), mapped tensors, and some rows of tables."""
        tensors, copied = self._model.tensors, self._copied
        mapped = [tensor for tensor in tensors if self._is_multiplied(tensor) and tensor.name not in copied]
        tables = [tensor for tensor in tensors if _is_table(tensor) and tensor not in mapped]
        resident = sum(copied.values()) + sum(tensor.nbytes for tensor in mapped)
        resident += sum(min(tensor.nbytes, LOOKED_UP_BYTES) for tensor in tables)
        around = AROUND_BYTES * sum(tensor.nbytes < AROUND_BYTES for tensor in mapped if not _is_adapter(tensor))
        return WeightBytes(
            resident=resident + min(around, sum(copied.values())),
            copied=sum(copied.values()),
            load_peak=sum(tensor.nbytes for tensor in tensors) + sum(copied.values()) + self._base_bytes,
            read_per_token=int(sum(self._read_bytes(tensor) for tensor in tensors if self._is_multiplied(tensor))),
        )

    def kv_bytes_per_token(self, kv: str) -> float:
        summary = self._model.summary
        layers = zip(summary.kv_heads, summary.key_lens, summary.value_lens, strict=True)
        return sum(heads * kv_head_bytes(kv, key_len, value_len) for heads, key_len, value_len in layers)

    def resident_bytes(self, kv: str, context: int) -> int:
        return self.weights.resident

    def devices(self, kv: str, context: int) -> tuple[DeviceMemory, ...]:
        return ()

    def kv_bytes(self, kv: str, context: int) -> int:
        return self._buffers(kv, context).kv

    def workspace_bytes(self, kv: str, context: int) -> int:
        """Return the compute buffer, a step's logits, the CPU backend's scratch, the vocabulary and the process."""
        logits = 4 * USUAL_ROWS * self._model.summary.vocab_size
        return self._base_bytes + self._touched_compute(kv, context) + logits + self._scratch_bytes(kv, context)

    def token_seconds(self, machine: MachineMemory, kv: str, context: int) -> float:
        summary = self._model.summary
        own = self._sequences if self._repeatable else 1
        read = self.weights.read_per_token + (self.kv_bytes(kv, context) / own if context else 0)
        attention = self.flash_seconds(context) / machine.cores if self._flash(kv) else 0.0
        fixed = STEP_SECONDS + LAYER_SECONDS * summary.layers + VOCAB_SECONDS * summary.vocab_size
        return read / machine.read_bytes_per_s + attention + fixed

    def flash_seconds(self, context: int) -> float:
        """Estimate one core's time for the flash attention of one token after `context` tokens."""
        summary = self._model.summary
        layers = zip(summary.kv_heads, summary.key_lens, summary.value_lens, strict=True)
        return FLASH_SECONDS * context * summary.heads * sum(key + value for heads, key, value in layers if heads)

    # -- buffers ---------------------------------------------------------------------------------------------------

    def estimated_buffers(self, kv: str, context: int) -> Buffers:
        """Return the buffers that llama.cpp allocates for a context, by formula."""
        own = self._sequences if self._repeatable else 1  # each sequence has cells of its own
        layer = self._layer_bytes(kv, context)
        position, compute = self.kv_bytes_per_token(kv), max(layer, self._logit_bytes(MAX_ROWS))
        if self._heads:
            position += self._head_bytes_per_token(kv)
            compute += max(layer * HEADS_WINDOW // self._batch(kv, context), self._logit_bytes(self._sequences))
        return Buffers(int(position * padded(context) * own) + self._model.state_bytes * self._sequences, compute)

    def _head_bytes_per_token(self, kv: str) -> float:
        """Return the bytes of one position in the cache of the heads: one layer, as those that attend."""
        summary = self._model.summary
        return max(summary.kv_heads) * kv_head_bytes(kv, summary.key_lens[-1], summary.value_lens[-1])

    def _layer_bytes(self, kv: str, context: int) -> int:
        """Return the bytes of the graph that are live at its peak inside a layer."""
        summary, flash, cells = self._model.summary, self._flash(kv), padded(context)
        scores = 0 if flash else summary.heads * cells
        live = max(scores + self._attention_live(), self._feed_forward_live())  # floats per token at the peak
        mask = cells * (2 if flash else 4) * (2 if summary.sliding_window else 1)
        return self._batch(kv, context) * (mask + 4 * live)

    def _logit_bytes(self, rows: int) -> int:
        """Return the bytes of logits inside the graph, with the last hidden states."""
        return 4 * rows * (self._model.summary.vocab_size + self._model.summary.width)

    def _touched_compute(self, kv: str, context: int) -> int:
        """Return the part of the compute buffer that is used: of a large vocabulary, the usual rows."""
        used = max(self._layer_bytes(kv, context), self._logit_bytes(USUAL_ROWS))
        return self._buffers(kv, context).compute - max(0, self._logit_bytes(MAX_ROWS) - used)

    def embedding_bytes(self, size: int, batch: int, *, flash: bool, cached: bool) -> int:
        """Return the bytes of a context for embeddings of `size` tokens, `batch` at a time; `cached`: with a KV cache.

        Such a context computes the logits of every token, too.
        """
        summary, cells = self._model.summary, padded(size)
        scores = 0 if flash else 2 * summary.heads * cells
        live = max(scores + self._attention_live(), self._feed_forward_live())
        rows = 2 * (summary.vocab_size if cached else 0) + 2 * summary.width  # in the graph, and in the output
        kv = int(self.kv_bytes_per_token("f16") * cells) * (1 if flash else 2) if cached else 0  # f16 or F32
        return kv + 4 * batch * (cells + live + rows) + self._model.state_bytes

    def _flash(self, kv: str) -> bool:
        return self._repeatable or LLAMA_KV[kv].flash

    def _buffers(self, kv: str, context: int) -> Buffers:
        if (kv, context) not in self._cached:
            self._cached[kv, context] = self._source(kv, context)
        return self._cached[kv, context]

    def _batch(self, kv: str, context: int) -> int:
        return min(micro_batch(context, self._model.summary.heads, self._flash(kv)), max(context, CELLS))

    def _scratch_bytes(self, kv: str, context: int) -> int:
        """Return the CPU backend's work buffer: attention weights in f16, or a layer's input in 8 bits."""
        summary = self._model.summary
        scores = 0 if self._flash(kv) else 2 * summary.heads * padded(context)
        return self._batch(kv, context) * max(scores, self._feed_forward_live() // 2)

    @cached_property
    def _queries(self) -> int:
        """The length of a token's queries over all heads, at least the hidden size."""
        summary = self._model.summary
        return max(summary.width, summary.heads * max([0, *summary.key_lens, *summary.value_lens]))

    def _attention_live(self) -> int:
        """Return the floats per token that are live at once in attention, without the scores."""
        summary = self._model.summary
        keys = [heads * length for heads, length in zip(summary.kv_heads, summary.key_lens, strict=True)]
        return 3 * summary.width + 2 * self._queries + 2 * max([0, *keys])

    def _feed_forward_live(self) -> int:
        """Return the floats per token that are live at once in the widest feed-forward."""
        model, width = self._model, self._model.summary.width
        dense = max((tensor.shape[1] for tensor in model.tensors if _is_part(tensor, "ffn_up", 2)), default=0)
        experts = [tensor.shape[1] for tensor in model.tensors if _is_part(tensor, "ffn_up_exps", 3)]
        experts += [tensor.shape[1] // 2 for tensor in model.tensors if _is_part(tensor, "ffn_gate_up_exps", 3)]
        expert = max(experts, default=0)
        return max(3 * dense + 3 * self._queries, model.experts_used * (2 * width + expert) + width)

    @property
    def _base_bytes(self) -> int:
        return PROCESS_BYTES + TOKEN_BYTES * self._model.summary.vocab_size

    # -- weights ---------------------------------------------------------------------------------------------------

    @cached_property
    def _copied(self) -> dict[str, int]:
        """The bytes of each tensor that llama.cpp copies and repacks."""
        sizes = {tensor.name: self._copied_bytes(tensor) for tensor in self._model.tensors}
        return {name: nbytes for name, nbytes in sizes.items() if nbytes}

    def _copied_bytes(self, tensor: TensorFacts) -> int:
        """Return the bytes of a tensor's copy; 0: there is none."""
        is_matrix = len(tensor.shape) in (2, 3) and tensor.shape[1] % 8 == 0 and tensor.name.endswith(".weight")
        if not is_matrix or not self._is_multiplied(tensor):
            return 0
        amx = AMX_TYPES.get(tensor.type) if AMX in self._copied_types and "_exps." not in tensor.name else None
        if amx and tensor.shape[0] % amx.columns == 0 == tensor.shape[1] % AMX_ROWS:
            return round(tensor.nbytes * (1 + amx.added))
        return tensor.nbytes if tensor.type in self._copied_types else 0

    def _is_multiplied(self, tensor: TensorFacts) -> bool:
        """Return whether every token reads all of a tensor; of the embedding, only if it is the output matrix too."""
        return not _is_table(tensor) or (self._model.tied and tensor.name == "token_embd.weight")

    def _read_bytes(self, tensor: TensorFacts) -> float:
        """Return the bytes that one token reads of a multiplied tensor: only the active experts."""
        model = self._model
        share = model.experts_used / model.experts if model.experts and "_exps." in tensor.name else 1
        return tensor.nbytes * share


def _is_table(tensor: TensorFacts) -> bool:
    """Return whether a tensor is a lookup table, which llama.cpp never repacks."""
    return "_embd" in tensor.name


def _is_adapter(tensor: TensorFacts) -> bool:
    """Return whether a tensor is of a LoRA adapter, which is copied from its own file."""
    return tensor.name.endswith((".lora_a", ".lora_b"))


def _is_part(tensor: TensorFacts, name: str, dims: int) -> bool:
    return tensor.name.endswith(f".{name}.weight") and len(tensor.shape) == dims


def padded(context: int) -> int:
    """Return the number of cells that llama.cpp allocates for a context."""
    return -(-context // CELLS) * CELLS


def kv_types(kv: str) -> tuple[TensorType, TensorType]:
    """Return the ggml types of keys and of values in a KV mode."""
    mode = LLAMA_KV[kv]
    return GGML_TYPES[mode.key_type], GGML_TYPES[mode.value_type]


def head_refusal(kv: str, key_len: int, value_len: int) -> str:
    """Return why heads of these sizes cannot be stored; empty: they can.

    llama.cpp computes NaN without an error where a head is not a whole number of quantization blocks.
    """
    for name, kind, head_len in zip(("key", "value"), kv_types(kv), (key_len, value_len), strict=True):
        if head_len % kind.block_len:
            return f"needs {name} heads of a multiple of {kind.block_len} numbers, this model's have {head_len}"
    return ""


def kv_head_bytes(kv: str, key_len: int, value_len: int) -> float:
    """Return the bytes of one position of one head in one layer, its key and its value."""
    key, value = kv_types(kv)
    return key_len * key.block_bytes / key.block_len + value_len * value.block_bytes / value.block_len


def micro_batch(context: int, num_heads: int, flash: bool) -> int:
    """Return llama.cpp's `n_ubatch`: without flash attention, the scores take 4 x heads x n_ubatch x n_ctx bytes."""
    size = MAX_MICRO_BATCH
    while not flash and size > 64 and 4 * num_heads * size * context > MAX_COMPUTE_BYTES:
        size //= 2
    return size


def repacked_types(machine: str = "", flags: frozenset[str] | None = None) -> frozenset[str]:
    """Return the tensor types that llama.cpp 0.3.36 repacks on this processor (ggml-cpu/repack.cpp), and AMX.

    A llama.cpp that was compiled without AMX copies less than these.
    """
    machine = machine or platform.machine()
    if machine in ("x86_64", "AMD64"):
        if flags is None:
            flags = processor_flags() or frozenset({"avx2"})  # nearly all processors in use have it
        types = {"Q4_0", "Q4_K", "IQ4_NL", "MXFP4"} if "avx2" in flags else set()
        if "avx512f" in flags:
            types |= {"Q2_K"}
        if {"amx_int8", "avx512_vnni"} <= flags and not own_places().no_amx:
            types |= {AMX}
        return frozenset(types)
    if machine in ("arm64", "aarch64"):
        return frozenset({"Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "IQ4_NL", "MXFP4"})
    return frozenset()
