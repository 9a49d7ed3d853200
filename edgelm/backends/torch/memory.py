"""The memory of a model in the torch executor, by formulas over the file's header, without torch.

    weights     matrices in the kernels' layouts (kernels/layout.py), small tensors as float32
    KV cache    blocks of 32 positions, and one more block for each sequence that may run
    workspace   activations of the largest step │ logits │ sampling │ sums of attention │ scratch of prefill │ CUDA and
                torch │ CUDA graphs: the same for their largest step, since all graphs share one piece of memory

Owns these formulas; tests/backends/torch/test_memory.py compares them with real allocations. Knows nothing of free
memory. It imports neither torch nor the kernels, since `edgelm plan` shows the same numbers from another process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from math import prod
from typing import NamedTuple

from edgelm.backends.followed_heads import HEADS_WINDOW
from edgelm.backends.plan import DeviceMemory, DraftModel, MachineMemory, Option, Plan, plan
from edgelm.backends.torch.graph_sizes import VERIFY_LEN, GraphSize, graph_sizes
from edgelm.base.config import Settings
from edgelm.base.kv_modes import TORCH_KV
from edgelm.checkpoints.summary import HEADS, ModelFacts, TensorFacts, WeightBytes

MIB = 2**20
BLOCK_LEN = 32  # positions
GROUP = 32  # numbers of a head that share a scale
# bits of a packed weight with its scales, by the type in the file; other types are not repacked
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
OWN_BYTES = {"cuda": 600 * MIB, "cpu": 350 * MIB}  # CUDA context, torch, compiled kernels
MAX_CONTEXT_BYTES = 350 * MIB  # of these, at most, are a CUDA context: what is measured as one may be another program's
SCRATCH_BYTES = 256 * MIB  # of prefill, at most: a matrix, or a part of it, dequantized to 16 bits
GRAPH_BYTES = 2 * MIB  # of a captured graph, in addition to the memory that it works in: an estimate
SAMPLED_ROWS = 64  # of a step
MAX_ATTENTION_BYTES = 256 * MIB  # of partial sums at one time; a single sequence may need more
SPLIT_PROGRAMS, MIN_SPLIT, MAX_GROUPS = 256, 512, 4  # the values of kernels/attention/launch.py
ACTIVATION_ROWS = 10  # float32 rows of the hidden size that live at one time, per token of a step
STEP_TOKENS = {"cuda": 1024, "cpu": 512}  # large, since a step of more than a few rows dequantizes all weights
SMALL_STEP = 512  # tokens, where memory is short
LAYER_SECONDS = {"cuda": 12e-6, "cpu": 2e-3}  # per layer, in addition to reading its weights
STEP_SECONDS = 0.2e-3
RING = 64  # inputs of a token that a recurrent layer keeps for each sequence (kernels/delta)
HEADS_LEN = 1024  # positions that the head which predicts ahead sees of a sequence, before it begins anew
MAX_CODED_HEAD = 256  # heads of 512 (Gemma 4): int8 spills 76 registers on sm_90, k6v4 432


class TorchMemory:
    """The memory of one model in the torch executor; implements `backends.plan.EngineMemory`."""

    def __init__(
        self,
        model: ModelFacts,
        *,
        sequences: int,
        device: str = "cuda",
        max_tokens: int = 0,
        quantize: str = "off",
        context_bytes: int = 0,
        heads: bool = False,
    ) -> None:
        """Take the facts of a model and its settings; max_tokens 0: the device's default for a step.

        `context_bytes` are those of a CUDA context that was there when the free memory was read. `heads`: its head that
        predicts ahead drafts.
        """
        self._context_bytes = min(context_bytes, MAX_CONTEXT_BYTES) if device == "cuda" else 0
        self._model = model
        self._sequences = sequences
        self._device = device
        self._max_tokens = max_tokens or STEP_TOKENS[device]
        self._quantize = quantize
        self._heads = heads

    @property
    def process_bytes(self) -> int:
        return OWN_BYTES[self._device] - self._context_bytes

    @property
    def kv_modes(self) -> tuple[str, ...]:
        return tuple(TORCH_KV)

    def refusal(self, kv: str) -> str:
        """Return why the model cannot have a KV mode; empty if it can."""
        if kv not in TORCH_KV:
            return f"is not among the KV caches of the torch engine ({', '.join(TORCH_KV)})"
        if (
            kv != "f16"
            and self._device == "cuda"
            and (widest := max(self._model.summary.key_lens, default=0)) > MAX_CODED_HEAD
        ):
            return f"would be slow: its kernels have too few registers for heads of {widest}"
        return ""

    @cached_property
    def weights(self) -> WeightBytes:
        """All weights are on the device. A token reads all of them except the embedding and unused experts."""
        sizes = {tensor.name: self._packed_bytes(tensor) for tensor in self._loaded}
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
        """Return the bytes of one position, with the padding of heads and of pairs of groups."""
        summary = self._model.summary
        layers = zip(summary.kv_heads, summary.key_lens, strict=True)
        return float(sum(heads * head_bytes(kv, length) for heads, length in layers if heads))

    def resident_bytes(self, kv: str, context: int) -> int:
        return self.weights.resident

    def devices(self, kv: str, context: int) -> tuple[DeviceMemory, ...]:
        return ()

    def kv_bytes(self, kv: str, context: int) -> int:
        states = num_states(self._sequences) * self._state_bytes
        own = int(self.kv_bytes_per_token(kv) * capacity(context, self._sequences))
        return own + states + self._head_bytes(kv)

    def _head_bytes(self, kv: str) -> int:
        """Return the bytes of the head's cache, and of the hidden states that it reads."""
        if not self._heads:
            return 0
        summary = self._model.summary
        layer = max(range(len(summary.kv_heads)), key=summary.kv_heads.__getitem__)
        position = summary.kv_heads[layer] * head_bytes(kv, summary.key_lens[layer])
        rows = SAMPLED_ROWS + 3 * HEADS_WINDOW * self._sequences
        size = 2 if self._device == "cuda" else 4
        return self._sequences * HEADS_LEN * position + rows * summary.width * size

    @cached_property
    def _state_bytes(self) -> int:
        """Return the bytes of one sequence's state in all recurrent layers: matrices, and the inputs of RING tokens."""
        if not self._model.state_bytes:
            return 0
        size = 2 if self._device == "cuda" else 4  # of an activation
        channels = heads = window = 0
        for tensor in self._model.tensors:
            if tensor.name.endswith((".ssm_conv1d.weight", ".conv1d.weight")):
                channels += tensor.shape[-1]
                window += (tensor.shape[0] - 1) * tensor.shape[-1]
            elif tensor.name.endswith((".ssm_a", ".A_log")):
                heads += tensor.shape[-1]
        # llama.cpp keeps the convolution's window as float32 in place of the ring
        return self._model.state_bytes - 4 * window + RING * (channels + 2 * heads) * size

    def workspace_bytes(self, kv: str, context: int) -> int:
        vocab_size = max(self._model.summary.vocab_size, 1)
        logits = SAMPLED_ROWS * vocab_size * 4 * 2  # where all graphs write, and of a step without one
        if self._device == "cuda":
            scratch = self._dequantized_bytes + self._attention_bytes(context) + sampler_bytes(SAMPLED_ROWS, vocab_size)
            scratch += (
                staged_bytes(SAMPLED_ROWS, vocab_size) + self.graph_bytes(context) + self._num_graphs * GRAPH_BYTES
            )
        else:  # the reference dequantizes a whole matrix to float32
            shapes = [tensor.shape for tensor in self._model.tensors if len(tensor.shape) > 1]
            scratch = 4 * max((prod(shape[-2:]) for shape in shapes), default=0)
        return self.process_bytes + self._max_tokens * self._token_bytes + logits + scratch

    def graph_bytes(self, context: int) -> int:
        """Return the bytes in which the CUDA graphs work: of the largest one, since only one runs at a time."""
        tokens = self._graph_sizes[-1].tokens
        scratch = sampler_bytes(tokens, max(self._model.summary.vocab_size, 1))  # it has a copy of the logits
        return tokens * self._token_bytes + scratch + self._chunk_sum_bytes(tokens, context)

    def token_seconds(self, machine: MachineMemory, kv: str, context: int) -> float:
        """Estimate the seconds of decoding one token of one sequence, after `context` tokens."""
        read = self.weights.read_per_token + context * self.kv_bytes_per_token(kv) + 2 * self._state_bytes
        return read / machine.read_bytes_per_s + LAYER_SECONDS[self._device] * self._model.summary.layers + STEP_SECONDS

    @property
    def _token_bytes(self) -> int:
        """The activations of a token of a step. Logits are not among them: a few rows of a step have any."""
        summary = self._model.summary
        widest = max((shape[1] for shape in self._matrices), default=summary.width)
        return (ACTIVATION_ROWS * summary.width + 2 * min(widest, 8 * summary.width)) * 4

    @property
    def _dequantized_bytes(self) -> int:
        """The scratch in which a prompt's matrices are dequantized one at a time; gate and up are one."""
        largest = max((2 * 2 * prod(shape) for shape in self._matrices), default=0)
        return SCRATCH_BYTES if self._model.experts else min(SCRATCH_BYTES, largest)

    @cached_property
    def _matrices(self) -> list[tuple[int, ...]]:
        """The shapes of the matrices that all tokens of a step are multiplied with: [columns, rows]."""
        return [tensor.shape for tensor in self._model.tensors if len(tensor.shape) == 2 and not _is_end(tensor.name)]

    @cached_property
    def _graph_sizes(self) -> list[GraphSize]:
        return graph_sizes(self._sequences, self._max_tokens)

    @property
    def _num_graphs(self) -> int:
        """Those of the model, and one of the sampler for each number of rows."""
        return len(self._graph_sizes) + len({size.tokens for size in self._graph_sizes})

    @cached_property
    def _head_width(self) -> int:
        """Numbers of the widest head, with padding; 0: there is no attention."""
        summary = self._model.summary
        widths = [-(-head_dim // GROUP) * GROUP for head_dim in summary.key_lens]
        return max(widths, default=0) if any(summary.kv_heads) else 0

    def _chunk_sum_bytes(self, tokens: int, context: int) -> int:
        """Return the bytes of attention's sums in a step that decodes or verifies."""
        positions = -(-context // BLOCK_LEN) * BLOCK_LEN
        heads = self._model.summary.heads
        return chunk_sum_bytes(tokens, self._sequences, heads, self._head_width, positions) if self._head_width else 0

    def _attention_bytes(self, context: int) -> int:
        """Return the bytes of attention's sums for a full context, without those of graphs, and of prompts."""
        if not self._head_width:
            return 0
        summary = self._model.summary
        positions = -(-context // BLOCK_LEN) * BLOCK_LEN
        return self._chunk_sum_bytes(self._max_tokens, context) + max(
            (
                split_sum_bytes(tokens, summary.heads, max(summary.kv_heads), self._head_width, positions)
                for tokens in range(VERIFY_LEN + 1, self._max_tokens + 1)
            ),
            default=0,
        )

    @property
    def _loaded(self) -> list[TensorFacts]:
        """The tensors that are loaded: those of the head only where it drafts, and of two that of the other file."""
        tensors = self._model.tensors
        beside = any(tensor.name.startswith(HEADS) for tensor in tensors)
        joint = "nextn.eh_proj.weight"
        own = {tensor.name.removesuffix(joint) for tensor in tensors if tensor.name.endswith(f".{joint}")} | {"mtp."}
        unused = {block for block in own if not (self._heads and block.startswith(HEADS) is beside)}
        return [tensor for tensor in tensors if not tensor.name.startswith(tuple(unused))]

    @property
    def _tied(self) -> bool:
        names = {tensor.name for tensor in self._model.tensors}
        return not names & {"output.weight", "lm_head.weight"}

    def _packed_bytes(self, tensor: TensorFacts) -> int:
        """Return the bytes of a tensor on the device."""
        numbers = prod(tensor.shape)
        if len(tensor.shape) < 2:
            return 4 * numbers
        bits = PACKED_BITS.get(tensor.type)
        if self._quantize == "int4" and tensor.type in WIDE:
            bits = INT4_BITS
        return tensor.nbytes if bits is None else int(numbers * bits / 8)


class TorchPlan(NamedTuple):
    """A plan, and what the executor has to be made with for it."""

    plan: Plan
    sequences: int
    step_tokens: int


def plan_for_torch(
    model: ModelFacts,
    draft: ModelFacts | None,
    settings: Settings,
    machine: MachineMemory,
    device: str,
    *,
    context_bytes: int = 0,
    least_context: int = 0,
    with_options: bool = False,
) -> TorchPlan:
    """Plan a model. Where memory is short, steps are shorter, and then fewer sequences run at a time, at least one.

    Its head drafts if that costs none of the cache. `context_bytes`: as for TorchMemory. Raises EdgeLMError, as `plan`
    does.
    """

    def planned(sequences: int, step_tokens: int, *, heads: bool = False) -> TorchPlan:
        def memory(facts: ModelFacts) -> TorchMemory:
            return TorchMemory(
                facts,
                sequences=sequences,
                device=device,
                max_tokens=step_tokens,
                quantize=settings.quantize,
                context_bytes=context_bytes,
                heads=heads and facts is model,
            )

        beside = DraftModel.of(draft, memory(draft)) if draft else None
        own = memory(model)
        chosen = plan(
            model, settings, machine, own, draft=beside, least_context=least_context, with_options=with_options
        )
        return TorchPlan(replace(chosen, heads=heads), sequences, step_tokens)

    best = _best(planned, settings, device)
    if not may_use_head(model, settings):
        return best
    drafting = planned(best.sequences, best.step_tokens, heads=True)
    if drafting.plan.chosen is None or _rank(drafting.plan.chosen) != _rank(best.plan.chosen):
        return best
    return drafting._replace(plan=replace(drafting.plan, note=best.plan.note))


def _best(planned: Callable[[int, int], TorchPlan], settings: Settings, device: str) -> TorchPlan:
    """Return the plan of the sequences and tokens of a step that leave the most to the cache."""
    usual = planned(settings.parallel, STEP_TOKENS[device])
    if usual.plan.preferred or device != "cuda":
        return usual
    sequences = settings.parallel
    found = [usual, planned(sequences, SMALL_STEP)]
    while sequences > 1:
        sequences //= 2
        found.append(planned(sequences, SMALL_STEP))
    best = min(found, key=lambda one: _rank(one.plan.chosen))  # of equal ones, the one with the most sequences
    if best.sequences == settings.parallel or best.plan.note:
        return best
    note = f"{best.sequences} of --parallel {settings.parallel} requests run at a time: the GPU has no memory for more"
    return best._replace(plan=replace(best.plan, note=note))


def may_use_head(model: ModelFacts, settings: Settings) -> bool:
    """Tell whether the head of a model that predicts ahead may draft, if there is memory for it."""
    return model.mtp_heads > 0 and settings.may_draft("mtp")


def _rank(option: Option | None) -> tuple[int, int]:
    """Return how good a choice is, the best the least: a long context first, then an exact cache."""
    return (0, 0) if option is None else (-option.context, [*TORCH_KV].index(option.kv))


def _is_end(name: str) -> bool:
    """Return whether a tensor is the embedding or the output matrix, of which a step takes a few rows."""
    return any(end in name for end in ("token_embd", "embed_tokens", "output.weight", "lm_head")) and "attn" not in name


def head_bytes(kv: str, head_dim: int) -> int:
    """Return the bytes of the key and the value of one head at one position."""
    width = -(-head_dim // GROUP) * GROUP
    groups = width // GROUP
    size = 0
    mode = TORCH_KV[kv]
    for bits in (mode.key_bits, mode.value_bits):
        size += width * bits // 8
        if bits < 16:
            size += 2 * (1 if mode.scale_per_head else groups)
    return size + (8 if mode.key_bits == 6 and groups % 2 else 0)  # 6-bit groups are stored in pairs


def capacity(context: int, sequences: int) -> int:
    """Return the number of allocated positions: whole blocks, and one more for the last block of each sequence."""
    return (-(-context // BLOCK_LEN) + sequences) * BLOCK_LEN


def num_states(sequences: int) -> int:
    """Return the number of slots for states: of sequences that run, and of as many prefixes, at least 4."""
    return sequences + max(sequences, 4)


def num_chunks(length: int) -> int:
    """Return the number of chunks of a context in attention: 256 positions each, longer after the first 16,384."""
    octave, start = 0, 0
    while length - 1 >= start + (16384 << octave):
        start += 16384 << octave
        octave += 1
    return 64 * octave + (length - 1 - start >> (8 + octave)) + 1


def chunk_sum_bytes(tokens: int, sequences: int, num_heads: int, width: int, positions: int) -> int:
    """Return the most bytes of attention's sums for chunks of contexts: of each row, `width` numbers and two stats.

    A launch takes as many sequences as fit MAX_ATTENTION_BYTES, four at a time where there are four, and at least one.
    """
    row_bytes = num_heads * num_chunks(positions) * (width + 2) * 4
    rows = min(tokens, min(sequences, 32) * VERIFY_LEN)
    fitting = MAX_ATTENTION_BYTES // row_bytes
    most = fitting // (4 * VERIFY_LEN) * 4 * VERIFY_LEN or fitting // VERIFY_LEN * VERIFY_LEN or fitting
    return min(rows, max(most, min(tokens, VERIFY_LEN))) * row_bytes


def sampler_bytes(rows: int, num_vocab: int) -> int:
    """Return the bytes of the sampler's scratch: of each row a copy of the logits, a list, bins, and sums of chunks."""
    chunks = -(-num_vocab // 2048)
    own = rows * (4 * (2048 * chunks + 8192) + 4 * (256 + 8192 + 1) + chunks * 4)
    return own + (rows + rows % 2) * chunks * 8 * 35  # at multiples of 16 bytes


def staged_bytes(rows: int, num_vocab: int) -> int:
    """Return the bytes of what rows are sampled by, and of their answers.

    They are sampled by parameters, masks, and the biases and histories of a launch.
    """
    return rows * (8 * 16 + 4 * -(-num_vocab // 32) + 8 * 24) + num_vocab * (4 + 8 + 4 + 4)


def split_sum_bytes(tokens: int, num_heads: int, num_kv_heads: int, width: int, positions: int) -> int:
    """Return the bytes of attention's sums for the parts of a prompt's context; 0 if the context is not split."""
    rows = 64 if width // GROUP <= MAX_GROUPS else 32  # of a tile
    tiles = tokens * (num_heads // num_kv_heads) // rows + 1
    splits = min(SPLIT_PROGRAMS // (tiles * num_kv_heads), positions // MIN_SPLIT)
    return splits * tokens * num_heads * (width + 2) * 4 if splits > 1 else 0
