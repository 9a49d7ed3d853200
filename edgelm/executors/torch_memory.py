"""How the torch executor lays out its memory for a model, by formulas over the header: before torch is imported.

    weights     matrices as the kernels' layouts (weights/packed.py), small tensors as float32
    KV cache    blocks of 32 positions, one more for each sequence that may run
    workspace   activations of the largest step │ logits │ parts of attention │ scratch of prefill │ driver and torch

Owns these formulas; tests/executors/test_torch_memory.py compares them with what is allocated. Knows nothing of what is
free, and imports neither torch nor the kernels: `edgelm plan` shows the same numbers from another process.
"""

from __future__ import annotations

from functools import cached_property
from math import prod

from edgelm.weights.facts import ModelFacts, TensorFacts, WeightBytes

MIB = 2**20
BLOCK_LEN = 32  # positions
GROUP = 32  # of a head's numbers that share a scale
# Bits of a packed weight, scales included, by the type in a file; what is not here stays as it is.
PACKED_BITS = {
    "Q4_0": 4.5,
    "Q4_1": 5.0,
    "Q4_K": 4.625,
    "Q5_0": 5.5,
    "Q5_1": 6.0,
    "Q5_K": 5.625,
    "Q6_K": 6.5625,
    "Q8_0": 8.5,
    "IQ4_NL": 4.5,
    "IQ4_XS": 4.3125,
    "MXFP4": 4.25,
}
INT4_BITS = 4.5  # of --quantize int4: groups of 64 with a scale and a zero
WIDE = frozenset({"F16", "BF16", "F32"})
KV_BITS = {"f16": (16, 16), "int8": (8, 8), "fp8": (8, 8), "k8v4": (8, 4), "k6v4": (6, 4)}  # of a key, of a value
KV_MODES = ("f16", "int8", "fp8", "k6v4", "k8v4")  # the most exact first (docs/results/eval-kv-2026-11-21.txt)
OWN_BYTES = {"cuda": 600 * MIB, "cpu": 350 * MIB}  # the driver's context, torch, compiled kernels
SCRATCH_BYTES = 256 * MIB  # of prefill: one matrix, or a part of it, as 16-bit numbers
VERIFY_LEN = 16  # rows of a sequence whose attention is summed up in parts
GRAPH_TOKENS = 16  # of the largest step that a graph runs: it has memory of its own
MAX_ATTENTION_BYTES = 256 * MIB  # of the parts of contexts at one time, but for one sequence alone
SPLIT_PROGRAMS, MIN_SPLIT, MAX_GROUPS = 256, 512, 4  # as kernels/attention/launch.py has them
ACTIVATION_ROWS = 10  # float32 rows of the model's width that live at one time, for each token of a step
STEP_TOKENS = {"cuda": 1024, "cpu": 512}  # of a step: weights of more than a few rows are made 16 bits wide for each
LAYER_SECONDS = {"cuda": 12e-6, "cpu": 2e-3}  # of a layer, beside reading its weights
STEP_SECONDS = 0.2e-3


class TorchMemory:
    """The memory of one model in the torch executor: `library.plan.EngineMemory`."""

    def __init__(
        self, model: ModelFacts, *, sequences: int, device: str = "cuda", max_tokens: int = 0, quantize: str = "off"
    ) -> None:
        """Take a model's facts, and how it is run; 0 tokens: as many in a step as there are on that device."""
        self._model = model
        self._sequences = sequences
        self._device = device
        self._max_tokens = max_tokens or STEP_TOKENS[device]
        self._quantize = quantize

    @property
    def kv_modes(self) -> tuple[str, ...]:
        return KV_MODES

    def refusal(self, kv: str) -> str:
        """Return why the model cannot have a KV mode."""
        if kv not in KV_BITS:
            return f"is not among the KV caches of the torch engine ({', '.join(KV_BITS)})"
        return ""

    @cached_property
    def weights(self) -> WeightBytes:
        """All weights are on the device; what is read for a token is all but the rows that are looked up."""
        sizes = {each.name: self._packed_bytes(each) for each in self._model.tensors}
        resident = sum(sizes.values())
        table = next((name for name in sizes if "embed_tokens" in name or name == "token_embd.weight"), None)
        looked_up = 0 if self._tied or table is None else sizes[table]
        model = self._model
        experts = sum(size for name, size in sizes.items() if "exps" in name or ".experts." in name)
        used = experts * model.experts_used // model.experts if model.experts else experts
        return WeightBytes(
            resident=resident,
            copied=resident,
            load_peak=resident + SCRATCH_BYTES,
            read_per_token=resident - looked_up - experts + used,
        )

    def kv_bytes_per_token(self, kv: str) -> float:
        """Return what one more position takes, padding of heads and pairs of groups included."""
        summary = self._model.summary
        layers = zip(summary.kv_heads, summary.key_lens, strict=True)
        return float(sum(heads * head_bytes(kv, length) for heads, length in layers if heads))

    def kv_bytes(self, kv: str, context: int) -> int:
        return int(self.kv_bytes_per_token(kv) * capacity(context, self._sequences))

    def workspace_bytes(self, kv: str, context: int) -> int:
        summary = self._model.summary
        widest = max((each.shape[-1] for each in self._model.tensors if len(each.shape) == 2), default=summary.width)
        tokens = self._max_tokens * (ACTIVATION_ROWS * summary.width + 2 * min(widest, 8 * summary.width)) * 4
        logits = 64 * max(summary.vocab_size, 1) * 4 * 2
        if self._device == "cuda":
            scratch = SCRATCH_BYTES + self._attention_bytes(context)
        else:  # the reference makes float32 numbers of a whole matrix
            scratch = 4 * max((prod(each.shape[-2:]) for each in self._model.tensors if len(each.shape) > 1), default=0)
        return OWN_BYTES[self._device] + tokens + logits + scratch

    def token_seconds(self, read_bytes_per_s: float, kv: str, context: int) -> float:
        """Estimate the time of one token of one sequence at that depth."""
        read = self.weights.read_per_token + context * self.kv_bytes_per_token(kv)
        return read / read_bytes_per_s + LAYER_SECONDS[self._device] * self._model.summary.layers + STEP_SECONDS

    def _attention_bytes(self, context: int) -> int:
        """Return what attention keeps of the parts of a full context: in a graph, in other steps, and of prompts."""
        summary = self._model.summary
        width = max((-(-length // GROUP) * GROUP for length in summary.key_lens), default=0)
        kv_heads = max(summary.kv_heads, default=0)
        if not width or not kv_heads:
            return 0
        positions = -(-context // BLOCK_LEN) * BLOCK_LEN
        graph_tokens = min(GRAPH_TOKENS, self._max_tokens)
        return (
            parts_bytes(graph_tokens, self._sequences, summary.heads, width, positions)
            + parts_bytes(self._max_tokens, self._sequences, summary.heads, width, positions)
            + max(
                (
                    prompt_bytes(tokens, summary.heads, kv_heads, width, positions)
                    for tokens in range(VERIFY_LEN + 1, self._max_tokens + 1)
                ),
                default=0,
            )
        )

    @property
    def _tied(self) -> bool:
        names = {each.name for each in self._model.tensors}
        return not names & {"output.weight", "lm_head.weight"}

    def _packed_bytes(self, tensor: TensorFacts) -> int:
        """Return what a tensor takes on the device."""
        numbers = prod(tensor.shape)
        if len(tensor.shape) < 2:
            return 4 * numbers
        bits = PACKED_BITS.get(tensor.type)
        if self._quantize == "int4" and tensor.type in WIDE:
            bits = INT4_BITS
        return tensor.nbytes if bits is None else int(numbers * bits / 8)


def head_bytes(kv: str, head_dim: int) -> int:
    """Return the bytes of one position of one head, its key and its value."""
    width = -(-head_dim // GROUP) * GROUP
    groups = width // GROUP
    size = 0
    for bits in KV_BITS[kv]:
        size += width * bits // 8
        if bits < 16:
            size += 2 * (1 if kv == "fp8" else groups)
    return size + (8 if kv == "k6v4" and groups % 2 else 0)


def capacity(context: int, sequences: int) -> int:
    """Return how many positions are allocated for a context: whole blocks, and one for each sequence's last."""
    return (-(-context // BLOCK_LEN) + sequences) * BLOCK_LEN


def num_chunks(length: int) -> int:
    """Return in how many parts attention reads a context: of 256 positions, and longer ones behind the first 8,192."""
    octave, start = 0, 0
    while length - 1 >= start + (8192 << octave):
        start += 8192 << octave
        octave += 1
    return 32 * octave + (length - 1 - start >> (8 + octave)) + 1


def parts_bytes(tokens: int, sequences: int, heads: int, width: int, positions: int) -> int:
    """Return what attention keeps at most for the rows and parts of a table's positions: a sum and two numbers each.

    As many sequences are done at once as have room for theirs, one in any case.
    """
    of_row = heads * num_chunks(positions) * (width + 2) * 4
    rows = min(tokens, min(sequences, 32) * VERIFY_LEN)
    return min(rows * of_row, max(MAX_ATTENTION_BYTES, min(tokens, VERIFY_LEN) * of_row))


def prompt_bytes(tokens: int, heads: int, kv_heads: int, width: int, positions: int) -> int:
    """Return what attention keeps of the parts of one prompt's context; 0: it is not cut."""
    rows = 64 if width // GROUP <= MAX_GROUPS else 32  # of a tile
    tiles = tokens * (heads // kv_heads) // rows + 1
    splits = min(SPLIT_PROGRAMS // (tiles * kv_heads), positions // MIN_SPLIT)
    return splits * tokens * heads * (width + 2) * 4 if splits > 1 else 0
