"""Building a decoder from the tensors of a model.

Owns fusing matrices that are multiplied together, tied embeddings, optional biases, and refusing a model with unknown
tensors. Knows no format: a source gives matrices by their names.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from edgelm.base.errors import ModelError
from edgelm.checkpoints.gguf import GGUF
from edgelm.checkpoints.safetensors import Safetensors
from edgelm.kernels.delta_sizes import DeltaSizes
from edgelm.kernels.layout import TILE, DenseWeight, Weight, fuse_gated, fuse_rows, same_planes
from edgelm.kernels.matmul import Norm
from edgelm.kernels.rope import Rope
from edgelm.models.config import LayerConfig, ModelConfig, read_config
from edgelm.models.decoder import (
    Attention,
    Decoder,
    DeltaNet,
    DenseAndExperts,
    Feed,
    FeedForward,
    Layer,
    Linear,
    SharedAndExperts,
    Weights,
)
from edgelm.models.families import FOLDER_NEXT, GGUF_NAMES, GGUF_NEXT, LAYER, UNUSED, NextNames, decoder_name
from edgelm.models.loading.sources import FolderSource, GGUFSource, WeightSource
from edgelm.models.moe import Experts, Stack
from edgelm.models.next_head import Entrance, NextHead
from edgelm.models.rope import build_rope, uses_long
from edgelm.models.rope_config import RopeConfig

ROPE_DIVISORS = ("rope_freqs.weight", "rope_factors_short.weight")  # in a GGUF
LONG_ROPE_DIVISORS = "rope_factors_long.weight"

log = logging.getLogger(__name__)


def load(
    config: ModelConfig,
    source: WeightSource,
    device: torch.device | str,
    dtype: torch.dtype,
    implementation: str,
    *,
    context: int | None = None,
    only_layers: Sequence[int] | None = None,
) -> Decoder:
    """Load all weights to a device and return the decoder over them. Raises ModelError.

    To the device "meta", all is checked and no numbers are read. `context` is the number of positions to be served, on
    which some kinds of RoPE depend; default: the trained context. With `only_layers` the decoder has these layers only,
    which is enough to try the ops of a model; a layer that is named more than once is loaded once.
    """
    loader = _Loader(config, source, torch.device(device), dtype, context or config.context)
    chosen = range(len(config.layers)) if only_layers is None else only_layers
    loaded = {i: loader.layer(i) for i in dict.fromkeys(chosen)}
    embedding, output = loader.ends()
    weights = Weights(
        embedding=embedding, layers=tuple(loaded[i] for i in chosen), norm=loader.final_norm(), output=output
    )
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)  # from here on, kernels may read weights before earlier kernels end
    if only_layers is not None:
        return Decoder(replace(config, layers=tuple(config.layers[i] for i in chosen)), weights, dtype, implementation)
    loader.require_all_used()
    return Decoder(config, weights, dtype, implementation)


def load_layer(config: ModelConfig, source: WeightSource, i: int, device: torch.device | str, context: int) -> Layer:
    """Load one layer, for a computation in float32 with positions up to `context`. Raises ModelError."""
    return _Loader(config, source, torch.device(device), torch.float32, context).layer(i)


def load_next_head(decoder: Decoder, config: ModelConfig, source: WeightSource, context: int) -> NextHead | None:
    """Load the head that predicts the token after the next one for a loaded model; None: its files have none.

    `config` and `source` are of the files with the head: the model's own, or one beside it. Raises ModelError.
    """
    if config.next_layer is None:
        return None
    names = GGUF_NEXT if config.names.final_norm == GGUF_NAMES.final_norm else FOLDER_NEXT
    loader = _Loader(config.with_next_layer(), source, decoder.device, decoder.dtype, context)
    i = len(config.layers)
    return loader.next_head(names, i, decoder) if loader.has(names.joint, i) else None


def unreadable_reason(model: GGUF | Safetensors, metadata: Mapping[str, Any]) -> str | None:
    """Return in one line why a model cannot be loaded, else None: what `load` finds before it reads any numbers.

    `metadata` is that of the GGUF, or the config.json of the folder.
    """
    try:
        source = GGUFSource(model) if isinstance(model, GGUF) else FolderSource(model, metadata)
        load(read_config(metadata), source, "meta", torch.float32, "reference")
    except ModelError as error:
        return error.message
    return None


class _Loader:
    """Loads tensors from a source by the names of the model's family, and records which were used."""

    def __init__(
        self, config: ModelConfig, source: WeightSource, device: torch.device, dtype: torch.dtype, context: int
    ) -> None:
        self._config = config
        self._names = config.names
        self._source = source
        self._device = device
        self._dtype = dtype
        self._context = context
        self._files = {decoder_name(name): name for name in source.names}
        self._used: set[str] = set()
        self._ropes: dict[RopeConfig, Rope] = {}

    def layer(self, i: int) -> Layer:
        layer = self._config.layers[i]
        mixer = self.attention(i, layer) if layer.delta is None else self.delta_net(i, layer.delta)
        return Layer(mixer, self.feed(i, layer))

    def next_head(self, names: NextNames, i: int, decoder: Decoder) -> NextHead:
        """Load the head whose layer has this number. It shares what its files do not have with the decoder."""
        shared = zip(decoder.config.layers, decoder.weights.layers, strict=True)
        mixers = [(layer.rope, own.attention) for layer, own in shared]
        self._ropes |= {
            rope: mixer.rope for rope, mixer in mixers if rope and isinstance(mixer, Attention) and mixer.rope
        }
        hidden_size, weights = self._config.hidden_size, decoder.weights
        entrance = Entrance(
            self.norm(names.embedding_norm, i),
            self.norm(names.hidden_norm, i),
            self._linear(names.joint, i, sizes=(hidden_size,), columns=2 * hidden_size),
        )
        own = Weights(
            embedding=self._linear(names.embedding, i).weight if self.has(names.embedding, i) else weights.embedding,
            layers=(self.layer(i),),
            norm=self.norm(names.norm, i) if self.has(names.norm, i) else weights.norm,
            output=self._linear(names.output, i) if self.has(names.output, i) else weights.output,
        )
        config = replace(self._config, layers=(self._config.layers[i],), next_layer=None)
        return NextHead(config, own, entrance, decoder.dtype, decoder.implementation)

    def feed(self, i: int, layer: LayerConfig) -> Feed:
        names = self._names
        if not layer.sparse:
            return self.feed_forward(i, names.feed_post_norm)
        if names.shared_gate:
            gate = self._shared_gate(names.shared_gate.format(i=i) + ".weight")
            return SharedAndExperts(
                shared=self.feed_forward(i, ""), experts=self.experts(i, names.feed_norm), gate=gate
            )
        if not self._config.family.dense_beside_experts:
            return self.experts(i, names.feed_norm)
        hidden_size = self._config.hidden_size
        return DenseAndExperts(
            dense=self.feed_forward(i, names.dense_post_norm),
            experts=self.experts(i, names.expert_norm),
            router_norm=self._vector(names.router_scale.format(i=i), hidden_size) * hidden_size**-0.5,
            expert_post_norm=self._norm_weight(names.expert_post_norm, i, hidden_size),
            post_norm=self._norm_weight(names.feed_post_norm, i, hidden_size),
        )

    def attention(self, i: int, layer: LayerConfig) -> Attention:
        config, names = self._config, self._names
        head_dim = layer.head_dim
        q_rows, kv_rows = config.num_heads * head_dim, layer.num_kv_heads * head_dim
        sizes = (2 * q_rows if config.family.delta else q_rows, kv_rows, kv_rows)
        if self.has(names.qkv, i):
            qkv = [self._linear(names.qkv, i, sizes=sizes)]
        else:
            named = list(zip((names.q, names.k, names.v), sizes, strict=True))
            without = layer.keys_are_values or (layer.keys_are_values is None and not self.has(names.v, i))
            qkv = [self._linear(name, i, sizes=(rows,)) for name, rows in named[: 2 if without else 3]]
        sinks = self._vector(names.sinks.format(i=i), config.num_heads) if config.family.sinks else None
        return Attention(
            norm=self.norm(names.attention_norm, i),
            qkv=tuple(_fused(qkv)),
            out=self._linear(names.out, i, sizes=(config.hidden_size,), columns=q_rows),
            rope=None if layer.rope is None else self._rope(layer.rope),
            window=layer.window,
            head_dim=head_dim,
            num_kv_heads=layer.num_kv_heads,
            q_norm=self._norm_weight(names.q_norm, i, head_dim) if config.family.qk_norm else None,
            k_norm=self._norm_weight(names.k_norm, i, head_dim) if config.family.qk_norm else None,
            v_norm=torch.ones(head_dim, device=self._device) if config.family.value_norm else None,
            sinks=sinks,
            post_norm=self._post_norm(names.attention_post_norm, i),
            gated=config.family.delta,
        )

    def delta_net(self, i: int, sizes: DeltaSizes) -> DeltaNet:
        names, heads = self._names, sizes.num_value_heads
        inputs = [
            self._linear(names.delta_qkv, i, sizes=(sizes.channels,)),
            self._linear(names.delta_z, i, sizes=(sizes.value_width,)),
            # a few rows, by which S shrinks and grows at each token: they stay exact
            self._linear(names.delta_beta, i, sizes=(heads,), exact=True),
            self._linear(names.delta_alpha, i, sizes=(heads,), exact=True),
        ]
        conv, decay = (names.delta_conv.format(i=i), names.delta_decay.format(i=i))
        shapes = ((sizes.channels, sizes.window), (sizes.channels, 1, sizes.window))  # of a GGUF, of a folder
        if self._shape(conv) not in shapes:
            raise _wrong_shape(conv, self._shape(conv), f"{sizes.channels} x {sizes.window}")
        factor = self._vector(decay, heads)
        return DeltaNet(
            norm=self.norm(names.attention_norm, i),
            inputs=tuple(_fused(inputs)),
            conv=self._source.vector(self._file_name(conv), self._device).view(shapes[0]),
            decay=-factor.exp() if names.delta_decay.endswith("_log") else factor,
            bias=self._vector(names.delta_bias.format(i=i), heads),
            head_norm=self._vector(f"{names.delta_norm.format(i=i)}.weight", sizes.value_dim),
            out=self._linear(names.delta_out, i, sizes=(self._config.hidden_size,), columns=sizes.value_width),
            sizes=sizes,
        )

    def feed_forward(self, i: int, post_norm: str) -> FeedForward:
        config, names = self._config, self._names
        if names.gate_up and self.has(names.gate_up, i) and not self.has(names.gate, i):
            gate_up = self._split_gate_up(i)
        else:
            rows = self._rows(names.gate, i)
            gate_up = _gated([self._linear(name, i, sizes=(rows,)) for name in (names.gate, names.up)])
        width = sum(sum(linear.sizes) for linear in gate_up) // 2
        return FeedForward(
            norm=self.norm(names.feed_norm, i),
            gate_up=gate_up,
            down=self._linear(names.down, i, sizes=(config.hidden_size,), columns=width),
            post_norm=self._post_norm(post_norm, i),
            scale=self._layer_scale(i),
        )

    def experts(self, i: int, norm: str) -> Experts:
        config, names = self._config, self._names
        experts = config.experts
        assert experts is not None
        router = self._linear(names.router, i, sizes=(experts.count,), exact=True)
        gate_up, down = self._fused_experts(i) if names.expert_gate_up else self._separate_experts(i)
        for stack in (*gate_up, down):
            if stack.weight.num_matrices != experts.count:
                raise ModelError(f"layer {i} has {stack.weight.num_matrices} experts instead of {experts.count}")
        scale = names.expert_scale.format(i=i)
        return Experts(
            norm=self.norm(norm, i),
            router=router.weight,
            router_bias=router.bias,
            gate_up=gate_up,
            down=down,
            used=experts.used,
            routing=experts.routing,
            normalised=experts.normalised,
            scale=self._vector(scale, experts.count) if scale else None,
        )

    def ends(self) -> tuple[Weight, Linear]:
        """Return the embedding and the output matrix. In many models they are one, under either name."""
        names, tied = self._names, self._config.tied
        has_embedding, has_output = self.has(names.embedding), self.has(names.output)
        if tied is False and not (has_embedding and has_output):
            missing = names.output if has_embedding else names.embedding
            message = f"the model has no tensor {missing}.weight, and its config.json does not tie input and output"
            raise ModelError(message, "download it again; if it was made so, set tie_word_embeddings to true")
        embedding = self._linear(names.output if has_output and not has_embedding else names.embedding)
        if has_embedding and has_output and not (tied and self._ends_are_equal()):
            output = self._linear(names.output)
        else:
            output = Linear(embedding.weight, self._optional_bias(names.output))
        return embedding.weight, output

    def _ends_are_equal(self) -> bool:
        """Compare two matrices that the configuration ties. As in transformers, different ones are not tied."""
        names = [self._file_name(f"{name}.weight") for name in (self._names.embedding, self._names.output)]
        if self._device.type == "meta":  # nothing is read, so both are checked
            return False
        if self._source.equal(*names):
            return True
        log.warning("the config.json ties %s to %s, but they differ: both are used", *names[::-1])
        return False

    def norm(self, name: str, i: int = 0) -> Norm:
        return Norm(self._norm_weight(name, i, self._config.hidden_size), self._config.stream_eps)

    def final_norm(self) -> Norm:
        """Return the norm before the output matrix, with the divisor of the logits in it."""
        weight, eps = self.norm(self._names.final_norm)
        divisor = self._config.logit_divisor
        return Norm(weight if divisor == 1 else weight / divisor, eps)

    def _layer_scale(self, i: int) -> float:
        name = self._names.layer_scale.format(i=i)
        return float(self._vector(name, 1, device="cpu")[0]) if name in self._files else 1.0

    def require_all_used(self) -> None:
        """Raise ModelError where a layer has an unused tensor: the model has an operation that is not known here."""
        for name in sorted(self._files.keys() - self._used):
            match = LAYER.match(name)
            if match and int(match[1]) < len(self._config.layers) and not UNUSED.fullmatch(name):
                raise ModelError(f"{self._config.family.name} with a tensor {name} is not supported")

    # -- names ---------------------------------------------------------------------------------------------------------

    def _file_name(self, name: str) -> str:
        """Return a tensor's name in the files and record its use. Raises ModelError where it is missing."""
        if name not in self._files:
            raise ModelError(f"the model has no tensor {name}", "download it again")
        self._used.add(name)
        return self._files[name]

    def _shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(self._file_name(name))

    def has(self, name: str, i: int = 0) -> bool:
        return f"{name.format(i=i)}.weight" in self._files

    def _rows(self, name: str, i: int) -> int:
        return self._shape(f"{name.format(i=i)}.weight")[0]

    # -- tensors -------------------------------------------------------------------------------------------------------

    def _linear(
        self, name: str, i: int = 0, *, sizes: tuple[int, ...] = (), columns: int = 0, exact: bool = False
    ) -> Linear:
        """Load a matrix whose rows have `sizes`, with its bias if it has one."""
        file_name = self._file_name(f"{name.format(i=i)}.weight")
        shape = self._source.shape(file_name)
        if len(shape) != 2 or shape[1] != (columns or self._config.hidden_size) or (sizes and shape[0] != sum(sizes)):
            rows = sum(sizes) if sizes else "any"
            raise _wrong_shape(file_name, shape, f"{rows} x {columns or self._config.hidden_size}")
        weight = self._converted(self._source.matrix(file_name, self._device, exact=exact))
        return Linear(weight, self._optional_bias(name, i), sizes or (weight.rows,))

    def _split_gate_up(self, i: int) -> tuple[Linear, ...]:
        """Load gate and up from the one matrix of a file, with alternating tiles."""
        name = self._names.gate_up
        width = self._rows(name, i) // 2
        bias = self._optional_bias(name, i)
        file_name = self._file_name(f"{name.format(i=i)}.weight")
        if width % TILE:
            halves = [slice(0, width), slice(width, 2 * width)]
            loaded = [self._converted(self._source.matrix(file_name, self._device, rows=rows)) for rows in halves]
            biases = [None, None] if bias is None else list(torch.split(bias, width))
            return tuple(Linear(half, part, (width,)) for half, part in zip(loaded, biases, strict=True))
        order = _alternating(torch.arange(width), torch.arange(width, 2 * width))
        weight = self._converted(self._source.matrix(file_name, self._device, rows=order))
        bias = None if bias is None else bias[order.to(bias.device)]
        return (Linear(replace(weight, gated=True), bias, (2 * width,)),)

    def _separate_experts(self, i: int) -> tuple[tuple[Stack, ...], Stack]:
        if (name := self._names.expert_gate_then_up.format(i=i)) in self._files:
            return self._gate_then_up(name), self._expert_stack(self._names.expert_down, i)
        gate, up, down = (
            self._expert_stack(name, i)
            for name in (self._names.expert_gate, self._names.expert_up, self._names.expert_down)
        )
        if gate.weight.rows % TILE or not _fusible([gate.weight, up.weight]):
            return (gate, up), down
        bias = None
        if gate.bias is not None and up.bias is not None:
            bias = _alternating(gate.bias, up.bias)
        return (Stack(fuse_gated(gate.weight, up.weight), bias),), down

    def _gate_then_up(self, name: str) -> tuple[Stack, ...]:
        """Load the gate and up of all experts from one tensor, with alternating tiles."""
        width = self._shape(name)[1] // 2
        halves = torch.arange(width), torch.arange(width, 2 * width)
        orders = halves if width % TILE else (_alternating(*halves),)
        loaded = [
            self._converted(self._source.matrix(self._file_name(name), self._device, rows=rows)) for rows in orders
        ]
        return tuple(Stack(replace(weight, gated=len(orders) == 1)) for weight in loaded)

    def _expert_stack(self, name: str, i: int) -> Stack:
        experts = self._config.experts
        assert experts is not None
        bare = name.replace(".{e}", "").format(i=i)  # of a folder's stacked parameter
        if "{e}" not in name or bare in self._files:
            file_name = self._file_name(bare if bare in self._files else f"{bare}.weight")
            return Stack(self._converted(self._source.matrix(file_name, self._device)), self._plain(f"{bare}.bias"))
        file_names = [self._file_name(f"{name.format(i=i, e=e)}.weight") for e in range(experts.count)]
        return Stack(self._converted(self._source.stack(file_names, self._device)))

    def _shared_gate(self, name: str) -> Weight:
        """Load a matrix of one row, which a GGUF has as a vector. It stays exact."""
        width = self._config.hidden_size
        row = self._source.vector(self._file_name(name), self._device)
        if row.shape not in ((width,), (1, width)):
            raise _wrong_shape(name, tuple(row.shape), f"1 x {width}")
        return self._converted(DenseWeight(row.view(1, width)))

    def _fused_experts(self, i: int) -> tuple[tuple[Stack, ...], Stack]:
        """Load experts whose matrices are [columns, rows], with alternating rows of gate and up (gpt-oss)."""
        gate_up, down = (name.format(i=i) for name in (self._names.expert_gate_up, self._names.expert_down))
        width = self._shape(gate_up)[-1] // 2
        orders: list[Tensor] = [torch.arange(0, 2 * width, 2), torch.arange(1, 2 * width, 2)]
        if width % TILE == 0:
            orders = [_alternating(*orders)]
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

    def _vector(self, name: str, size: int, device: torch.device | str = "") -> Tensor:
        vector = self._source.vector(self._file_name(name), device or self._device)
        if vector.shape != (size,):
            raise _wrong_shape(name, vector.shape, str(size))
        return vector

    def _norm_weight(self, name: str, i: int, size: int) -> Tensor:
        return self._vector(f"{name.format(i=i)}.weight", size).add_(self._config.norm_offset)  # a copy of the file's

    def _post_norm(self, name: str, i: int) -> Tensor | None:
        return self._norm_weight(name, i, self._config.hidden_size) if self._config.family.post_norms else None

    def _rope(self, config: RopeConfig) -> Rope:
        if config not in self._ropes:
            whole = self._with_divisors(config)
            checked_only = self._device.type == "meta"
            self._ropes[config] = build_rope(whole, self._context, "cpu" if checked_only else self._device)
            if whole.kind == "longrope" and not checked_only:
                factors = "long" if uses_long(whole, self._context) else "short"
                message = "with a context of %d, RoPE has the %s factors; the short ones hold up to %d"
                log.info(message, self._context, factors, whole.original_context)
        return self._ropes[config]

    def _with_divisors(self, config: RopeConfig) -> RopeConfig:
        """Add the frequency divisors that a GGUF has as tensors."""
        plain = next((name for name in ROPE_DIVISORS if name in self._files), None)
        if plain is None or config.divisors or config.undivided:
            return config
        divisors = self._divisors(plain, config)
        if LONG_ROPE_DIVISORS not in self._files:
            return replace(config, divisors=divisors)
        return replace(
            config, kind="longrope", divisors=divisors, long_divisors=self._divisors(LONG_ROPE_DIVISORS, config)
        )

    def _divisors(self, name: str, config: RopeConfig) -> tuple[float, ...]:
        return tuple(self._vector(name, config.dim // 2, device="cpu").tolist())

    def _converted(self, weight: Weight) -> Weight:
        """Return a matrix of plain numbers in the dtype of the activations, unless that is float32."""
        if isinstance(weight, DenseWeight) and self._dtype != torch.float32 and weight.data.dtype != self._dtype:
            return replace(weight, data=weight.data.to(self._dtype))
        return weight


def _fusible(weights: list[Weight]) -> bool:
    """Tell whether weights can be joined. On "meta" they need not be, and torch would import its compiler for it."""
    return weights[0].device.type != "meta" and same_planes(weights)


def _fused(linears: list[Linear]) -> list[Linear]:
    """Join neighbouring matrices where their formats allow it."""
    joined = [linears[0]]
    for linear in linears[1:]:
        last = joined[-1]
        same_bias = (last.bias is None) == (linear.bias is None)
        if same_bias and _fusible([last.weight, linear.weight]):
            bias = None if last.bias is None or linear.bias is None else torch.cat([last.bias, linear.bias])
            joined[-1] = Linear(fuse_rows([last.weight, linear.weight]), bias, last.sizes + linear.sizes)
        else:
            joined.append(linear)
    return joined


def _gated(pair: list[Linear]) -> tuple[Linear, ...]:
    """Join gate and up with alternating tiles, where their formats allow it."""
    gate, up = pair
    same_bias = (gate.bias is None) == (up.bias is None)
    if not same_bias or gate.weight.rows % TILE or not _fusible([gate.weight, up.weight]):
        return gate, up
    bias = None if gate.bias is None or up.bias is None else _alternating(gate.bias, up.bias)
    return (Linear(fuse_gated(gate.weight, up.weight), bias, gate.sizes + up.sizes),)


def _alternating(gate: Tensor, up: Tensor) -> Tensor:
    """Return alternating tiles of gate and up, along the last dimension."""
    tiles = [half.reshape(*half.shape[:-1], -1, TILE) for half in (gate, up)]
    return torch.stack(tiles, -2).flatten(-3)


def _wrong_shape(name: str, shape: tuple[int, ...], expected: str) -> ModelError:
    sizes = " x ".join(map(str, shape))
    return ModelError(f"tensor {name} is {sizes}, but must be {expected}", "download the model again")
