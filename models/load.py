"""From the tensors of a file to a decoder: which of them belong together, and what only they can tell.

Owns fusing matrices that are multiplied together, tied embeddings, optional biases, and refusing a file whose tensors
are not all understood. Knows no format: a source gives matrices by their names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from edgelm.errors import ModelError
from edgelm.kernels.layout import TILE, DenseWeight, Weight, fuse_gated, fuse_rows, same_planes
from edgelm.kernels.matmul import Norm
from edgelm.kernels.rope import Rope
from edgelm.models.config import LayerConfig, ModelConfig
from edgelm.models.decoder import Attention, Decoder, FeedForward, Layer, Linear, Weights
from edgelm.models.moe import Experts, Stack
from edgelm.models.rope import RopeConfig, build_rope

ROPE_DIVISORS = ("rope_freqs.weight", "rope_factors_short.weight")  # of a GGUF
LONG_ROPE_DIVISORS = "rope_factors_long.weight"
# a language model that is a part of a larger one, or that was saved without its output matrix
DECODER = re.compile(r"\A(?:model\.|language_model\.)*(?=(?:layers|embed_tokens|norm)\.)")
OUTPUT = re.compile(r"\A(?:model\.|language_model\.)+(?=lm_head\.)")
LAYER = re.compile(r"(?:model\.layers|blk)\.(\d+)\.")
UNUSED = re.compile(r".*(?:rotary_emb\.inv_freq|attn_rot_embd\.weight|\.[qkv]_scale)")
RowChoice = slice | Tensor | None


class WeightSource(Protocol):
    """The weights of one model, by their names in its files. All raise ModelError for what cannot be used."""

    @property
    def names(self) -> Collection[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...  # the columns last

    def matrix(
        self,
        name: str,
        device: torch.device | str = "cpu",
        *,
        rows: RowChoice = None,
        transposed: bool = False,
        exact: bool = False,
    ) -> Weight: ...

    def stack(
        self,
        names: Sequence[str],
        device: torch.device | str = "cpu",
        *,
        rows: RowChoice = None,
        transposed: bool = False,
        exact: bool = False,
    ) -> Weight: ...

    def vector(self, name: str, device: torch.device | str = "cpu") -> Tensor: ...  # float32


def load(
    config: ModelConfig,
    source: WeightSource,
    device: torch.device | str,
    dtype: torch.dtype,
    implementation: str,
    progress: Callable[[int, int], None] | None = None,
    *,
    context: int | None = None,
) -> Decoder:
    """Load all weights to a device and return the decoder over them.

    `progress` is told how many of how many layers are loaded. `context` is how many positions will be served, of
    which some kinds of RoPE depend; default: what the model was made for. Raises ModelError.
    """
    loader = _Loader(config, source, torch.device(device), dtype, context or config.context)
    layers = []
    for i, layer in enumerate(config.layers):
        layers.append(Layer(loader.attention(i, layer), loader.experts(i) if layer.sparse else loader.feed_forward(i)))
        if progress is not None:
            progress(i + 1, len(config.layers))
    embedding, output = loader.ends()
    weights = Weights(
        embedding=embedding, layers=tuple(layers), norm=loader.norm(config.names.final_norm), output=output
    )
    loader.require_all_used()
    return Decoder(config, weights, dtype, implementation)


class _Loader:
    """Takes tensors from a source by the names of the model's family, and remembers which."""

    def __init__(
        self, config: ModelConfig, source: WeightSource, device: torch.device, dtype: torch.dtype, context: int
    ) -> None:
        self._config = config
        self._names = config.names
        self._source = source
        self._device = device
        self._dtype = dtype
        self._context = context
        self._files = {OUTPUT.sub("", DECODER.sub("model.", name, count=1), count=1): name for name in source.names}
        self._used: set[str] = set()
        self._ropes: dict[RopeConfig, Rope] = {}

    def attention(self, i: int, layer: LayerConfig) -> Attention:
        config, names = self._config, self._names
        q_rows, kv_rows = config.heads * config.head_dim, config.kv_heads * config.head_dim
        sizes = (q_rows, kv_rows, kv_rows)
        if self._has(names.qkv, i):
            qkv = [self._linear(names.qkv, i, sizes=sizes)]
        else:
            named = zip((names.q, names.k, names.v), sizes, strict=True)
            qkv = [self._linear(name, i, sizes=(rows,)) for name, rows in named]
        sinks = self._vector(names.sinks.format(i=i), config.heads) if config.family.sinks else None
        return Attention(
            norm=self.norm(names.attention_norm, i),
            qkv=tuple(_fused(qkv)),
            out=self._linear(names.out, i, sizes=(config.width,), columns=q_rows),
            rope=None if layer.rope is None else self._rope(layer.rope),
            window=layer.window,
            q_norm=self._norm_weight(names.q_norm, i, config.head_dim) if config.family.qk_norm else None,
            k_norm=self._norm_weight(names.k_norm, i, config.head_dim) if config.family.qk_norm else None,
            sinks=sinks,
            post_norm=self._post_norm(names.attention_post_norm, i),
        )

    def feed_forward(self, i: int) -> FeedForward:
        config, names = self._config, self._names
        if names.gate_up and self._has(names.gate_up, i) and not self._has(names.gate, i):
            gate_up = self._split_gate_up(i)
        else:
            rows = self._rows(names.gate, i)
            gate_up = _gated([self._linear(name, i, sizes=(rows,)) for name in (names.gate, names.up)])
        width = sum(sum(each.sizes) for each in gate_up) // 2
        return FeedForward(
            norm=self.norm(names.feed_norm, i),
            gate_up=gate_up,
            down=self._linear(names.down, i, sizes=(config.width,), columns=width),
            post_norm=self._post_norm(names.feed_post_norm, i),
        )

    def experts(self, i: int) -> Experts:
        config, names = self._config, self._names
        experts = config.experts
        assert experts is not None
        router = self._linear(names.router, i, sizes=(experts.count,), exact=True)
        gate_up, down = self._fused_experts(i) if names.expert_gate_up else self._separate_experts(i)
        for stack in (*gate_up, down):
            if stack.weight.num_matrices != experts.count:
                raise ModelError(f"layer {i} has {stack.weight.num_matrices} experts, where {experts.count} should be")
        return Experts(
            norm=self.norm(names.feed_norm, i),
            router=router.weight,
            router_bias=router.bias,
            gate_up=gate_up,
            down=down,
            used=experts.used,
            routing=experts.routing,
            normalised=experts.normalised,
        )

    def ends(self) -> tuple[Weight, Linear]:
        """Return the embedding and the output matrix: of many models one and the same, under either name."""
        names = self._names
        has_embedding, has_output = self._has(names.embedding), self._has(names.output)
        embedding = self._linear(names.output if has_output and not has_embedding else names.embedding)
        if has_embedding and has_output and not self._config.tied:
            output = self._linear(names.output)
        else:
            output = Linear(embedding.weight, self._optional_bias(names.output))
        return embedding.weight, output

    def norm(self, name: str, i: int = 0) -> Norm:
        return Norm(self._norm_weight(name, i, self._config.width), self._config.norm_eps)

    def require_all_used(self) -> None:
        """Raise ModelError where a layer has a tensor that was not used: the model computes what is not known here."""
        for name in sorted(self._files.keys() - self._used):
            match = LAYER.match(name)
            if match and int(match[1]) < len(self._config.layers) and not UNUSED.fullmatch(name):
                raise ModelError(f"{self._config.family.name} with a tensor {name} is not supported")

    # -- names ---------------------------------------------------------------------------------------------------------

    def _file_name(self, name: str) -> str:
        """Return what the files call a tensor, and remember that it is used. Raises ModelError where it is missing."""
        if name not in self._files:
            raise ModelError(f"the model has no tensor {name}", "download it again")
        self._used.add(name)
        return self._files[name]

    def _shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(self._file_name(name))

    def _has(self, name: str, i: int = 0) -> bool:
        return f"{name.format(i=i)}.weight" in self._files

    def _rows(self, name: str, i: int) -> int:
        return self._shape(f"{name.format(i=i)}.weight")[0]

    # -- tensors -------------------------------------------------------------------------------------------------------

    def _linear(
        self, name: str, i: int = 0, *, sizes: tuple[int, ...] = (), columns: int = 0, exact: bool = False
    ) -> Linear:
        """Load a matrix of rows `sizes`, and its bias where it has one."""
        file_name = self._file_name(f"{name.format(i=i)}.weight")
        shape = self._source.shape(file_name)
        if len(shape) != 2 or shape[1] != (columns or self._config.width) or (sizes and shape[0] != sum(sizes)):
            rows = sum(sizes) if sizes else "any"
            wanted = f"{rows} x {columns or self._config.width}"
            raise ModelError(
                f"tensor {file_name} is {' x '.join(map(str, shape))}, where {wanted} should be",
                "download the model again",
            )
        weight = self._converted(self._source.matrix(file_name, self._device, exact=exact))
        return Linear(weight, self._optional_bias(name, i), sizes or (weight.rows,))

    def _split_gate_up(self, i: int) -> tuple[Linear, ...]:
        """Load gate and up that a file has in one matrix, with their tiles in turn."""
        name = self._names.gate_up
        width = self._rows(name, i) // 2
        bias = self._optional_bias(name, i)
        file_name = self._file_name(f"{name.format(i=i)}.weight")
        if width % TILE:
            halves = [slice(0, width), slice(width, 2 * width)]
            loaded = [self._converted(self._source.matrix(file_name, self._device, rows=rows)) for rows in halves]
            biases = [None, None] if bias is None else list(torch.split(bias, width))
            return tuple(Linear(each, part, (width,)) for each, part in zip(loaded, biases, strict=True))
        order = _in_turn(torch.arange(width), torch.arange(width, 2 * width))
        weight = self._converted(self._source.matrix(file_name, self._device, rows=order))
        bias = None if bias is None else bias[order.to(bias.device)]
        return (Linear(replace(weight, gated=True), bias, (2 * width,)),)

    def _separate_experts(self, i: int) -> tuple[tuple[Stack, ...], Stack]:
        gate, up, down = (
            self._expert_stack(name, i)
            for name in (self._names.expert_gate, self._names.expert_up, self._names.expert_down)
        )
        if gate.weight.rows % TILE or not same_planes([gate.weight, up.weight]):
            return (gate, up), down
        bias = None
        if gate.bias is not None and up.bias is not None:
            bias = _in_turn(gate.bias, up.bias)
        return (Stack(fuse_gated(gate.weight, up.weight), bias),), down

    def _expert_stack(self, name: str, i: int) -> Stack:
        experts = self._config.experts
        assert experts is not None
        if "{e}" not in name:
            weight = self._source.matrix(self._file_name(f"{name.format(i=i)}.weight"), self._device)
            return Stack(self._converted(weight), self._optional_bias(name, i))
        file_names = [self._file_name(f"{name.format(i=i, e=e)}.weight") for e in range(experts.count)]
        return Stack(self._converted(self._source.stack(file_names, self._device)))

    def _fused_experts(self, i: int) -> tuple[tuple[Stack, ...], Stack]:
        """Load experts whose matrices are [columns, rows], rows of gate and up in turn (gpt-oss)."""
        gate_up, down = (name.format(i=i) for name in (self._names.expert_gate_up, self._names.expert_down))
        width = self._shape(gate_up)[-1] // 2
        orders: list[Tensor] = [torch.arange(0, 2 * width, 2), torch.arange(1, 2 * width, 2)]
        if width % TILE == 0:
            orders = [_in_turn(*orders)]
        stacks = []
        bias = self._plain(f"{gate_up}_bias")
        for order in orders:
            weight = self._converted(
                self._source.matrix(self._file_name(gate_up), self._device, rows=order, transposed=True)
            )
            weight = replace(weight, gated=len(orders) == 1)
            stacks.append(Stack(weight, None if bias is None else bias[:, order.to(bias.device)].contiguous()))
        weight = self._converted(self._source.matrix(self._file_name(down), self._device, transposed=True))
        return tuple(stacks), Stack(weight, self._plain(f"{down}_bias"))

    def _optional_bias(self, name: str, i: int = 0) -> Tensor | None:
        return self._plain(f"{name.format(i=i)}.bias")

    def _plain(self, name: str) -> Tensor | None:
        return self._source.vector(self._file_name(name), self._device) if name in self._files else None

    def _vector(self, name: str, size: int) -> Tensor:
        vector = self._source.vector(self._file_name(name), self._device)
        if vector.shape != (size,):
            sizes = " x ".join(map(str, vector.shape))
            raise ModelError(f"tensor {name} is {sizes}, where {size} should be", "download the model again")
        return vector

    def _norm_weight(self, name: str, i: int, size: int) -> Tensor:
        return self._vector(f"{name.format(i=i)}.weight", size) + self._config.norm_offset

    def _post_norm(self, name: str, i: int) -> Tensor | None:
        return self._norm_weight(name, i, self._config.width) if self._config.family.post_norms else None

    def _rope(self, config: RopeConfig) -> Rope:
        if config not in self._ropes:
            self._ropes[config] = build_rope(self._with_divisors(config), self._context, self._device)
        return self._ropes[config]

    def _with_divisors(self, config: RopeConfig) -> RopeConfig:
        """Add what a GGUF states of the frequencies as tensors."""
        plain = next((name for name in ROPE_DIVISORS if name in self._files), None)
        if plain is None or config.divisors:
            return config
        divisors = tuple(self._vector(plain, config.dim // 2).tolist())
        if LONG_ROPE_DIVISORS not in self._files:
            return replace(config, divisors=divisors)
        long_divisors = tuple(self._vector(LONG_ROPE_DIVISORS, config.dim // 2).tolist())
        return replace(config, kind="longrope", divisors=divisors, long_divisors=long_divisors)

    def _converted(self, weight: Weight) -> Weight:
        """Return a matrix of plain numbers in the type of the activations, where that is one of 16 bits."""
        if isinstance(weight, DenseWeight) and self._dtype != torch.float32 and weight.data.dtype != self._dtype:
            return replace(weight, data=weight.data.to(self._dtype))
        return weight


def _fused(linears: list[Linear]) -> list[Linear]:
    """Join neighbours that can be one matrix."""
    joined = [linears[0]]
    for linear in linears[1:]:
        last = joined[-1]
        same_bias = (last.bias is None) == (linear.bias is None)
        if same_bias and same_planes([last.weight, linear.weight]):
            bias = None if last.bias is None or linear.bias is None else torch.cat([last.bias, linear.bias])
            joined[-1] = Linear(fuse_rows([last.weight, linear.weight]), bias, last.sizes + linear.sizes)
        else:
            joined.append(linear)
    return joined


def _gated(pair: list[Linear]) -> tuple[Linear, ...]:
    """Join gate and up with their tiles in turn, where they can be one matrix."""
    gate, up = pair
    same_bias = (gate.bias is None) == (up.bias is None)
    if not same_bias or gate.weight.rows % TILE or not same_planes([gate.weight, up.weight]):
        return gate, up
    bias = None if gate.bias is None or up.bias is None else _in_turn(gate.bias, up.bias)
    return (Linear(fuse_gated(gate.weight, up.weight), bias, gate.sizes + up.sizes),)


def _in_turn(gate: Tensor, up: Tensor) -> Tensor:
    """Return tiles of gate and up in turn, along the last dimension."""
    tiles = [each.reshape(*each.shape[:-1], -1, TILE) for each in (gate, up)]
    return torch.stack(tiles, -2).flatten(-3)
