"""The tensors of a GGUF for a folder of safetensors: their names, sizes, types, and what each is made from.

Owns the mapping for all families, by their tables of names; reads no numbers but those of two tied matrices.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from edgelm.base.errors import ModelError
from edgelm.kernels.delta_sizes import DeltaSizes
from edgelm.making.conversion.number_types import Kind, Target, kind_for
from edgelm.making.conversion.reader import FolderReader, spans
from edgelm.making.conversion.tensors import (
    MXFP4_BLOCK,
    Content,
    MXFP4Rows,
    Numbers,
    OutTensor,
    Part,
    Rows,
    TransposedRows,
)
from edgelm.models.config import ModelConfig
from edgelm.models.families import FOLDER_NEXT, GGUF_NEXT, LAYER, UNUSED, Family, decoder_name, family_of_gguf
from edgelm.models.rope_config import RopeConfig

DOWNLOAD = "download all files of the model into one folder"
TOWERS = re.compile(r"(?:model\.)*(?:vision|audio|multi_?modal|embed_vision|embed_audio)\w*\.")
ALWAYS_F32 = re.compile(r".*(?:norm|ffn_gate_inp|ssm_conv1d)\.weight")


@dataclass(frozen=True, slots=True)
class Layout:
    """The tensors of a GGUF, and those of the folder that it has no place for."""

    tensors: tuple[OutTensor, ...]
    towers: tuple[str, ...]  # tensors of the parts that read images or sound
    left_out: tuple[str, ...]  # others: outside of the decoder's layers, or without an effect

    @property
    def types(self) -> dict[str, int]:
        """How many tensors have a type, by its name."""
        return dict(Counter(tensor.kind.name for tensor in self.tensors).most_common())


def plan_layout(config: ModelConfig, reader: FolderReader, target: Target) -> Layout:
    """Return the tensors of the GGUF. Raises ModelError where a tensor is missing, has another size, or is unknown."""
    planner = _Planner(config, reader, target)
    tensors = tuple(planner.tensors())
    return Layout(tensors, *planner.unused())


def target_family(config: ModelConfig) -> Family:
    """Return the family whose architecture a GGUF of this model states: Mistral's and Mixtral's is Llama."""
    family = family_of_gguf(config.family.gguf or "llama")
    assert family is not None
    return family


def rope_numbers(config: ModelConfig) -> dict[str, tuple[float, ...]]:
    """Return the divisors of frequencies that llama.cpp reads as tensors, by their names there."""
    rope = global_rope(config)
    if rope is None:
        return {}
    if rope.kind == "llama3":
        return {"rope_freqs.weight": tuple(_llama3_divisors(rope))}
    if rope.kind == "longrope":
        return {"rope_factors_long.weight": rope.long_divisors, "rope_factors_short.weight": rope.divisors}
    if rope.divisors:
        return {"rope_freqs.weight": rope.divisors}
    return {}


def global_rope(config: ModelConfig) -> RopeConfig | None:
    """Return the rotation of the layers without a window, if there are such, else of the others."""
    ropes = sorted((layer for layer in config.layers if layer.rope), key=lambda layer: layer.window > 0)
    return ropes[0].rope if ropes else None


def _llama3_divisors(rope: RopeConfig) -> Iterator[float]:
    """Yield how often slower each pair turns than without the extension of the context (Llama 3.1)."""
    plain = 1.0 / np.float32(rope.theta) ** (np.arange(0, rope.dim, 2, dtype=np.float32) / rope.dim)
    for frequency in plain.tolist():
        turns = rope.original_context * frequency / (2 * math.pi)
        blend = (turns - rope.low_frequency) / (rope.high_frequency - rope.low_frequency)
        blend = min(max(blend, 0.0), 1.0)
        yield 1 / ((1 - blend) / rope.factor + blend)


@dataclass
class _Planner:
    """Yields the tensors of a GGUF, and records which tensors of the folder were used."""

    config: ModelConfig
    reader: FolderReader
    target: Target
    used: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.files = {decoder_name(name): name for name in self.reader.model.tensors}
        self.family = target_family(self.config)
        self.ours, self.theirs = self.config.names, self.family.gguf_names

    def tensors(self) -> Iterator[OutTensor]:
        config = self.config
        yield from self._numbers()
        yield from self._ends()
        for i in range(len(config.layers)):
            yield from self.layer(i)
        yield self._norm(self.ours.final_norm, self.theirs.final_norm, 0, config.hidden_size)
        if config.next_layer and f"{FOLDER_NEXT.joint}.weight" in self.files:
            yield from self._next_head()

    def unused(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the tensors of towers, and the others that are left out. Raises ModelError for one of a layer."""
        left = sorted(self.files.keys() - self.used)
        for name in left:
            match = LAYER.match(name)
            if match and int(match[1]) < len(self.config.layers) and not UNUSED.fullmatch(name):
                raise ModelError(f"{self.config.family.name} with a tensor {name} cannot be converted")
        towers = tuple(name for name in left if TOWERS.match(self.files[name]))
        return towers, tuple(name for name in left if name not in towers)

    # -- parts of the model --------------------------------------------------------------------------------------------

    def layer(self, i: int) -> Iterator[OutTensor]:
        config, layer = self.config, self.config.layers[i]
        yield from self._delta_net(i, layer.delta) if layer.delta else self._attention(i)
        beside, shared = config.family.dense_beside_experts, self.ours.shared_gate
        yield self._norm(self.ours.feed_norm, self.theirs.feed_norm, i, config.hidden_size)
        if not layer.sparse or beside or shared:
            yield from self._feed_forward(i)
        if layer.sparse and shared:
            yield self._shared_gate(i)
        if layer.sparse:
            yield from self._experts_beside(i) if beside else self._experts(i)

    def _next_head(self) -> Iterator[OutTensor]:
        """Yield the head that predicts the token after the next one: in a GGUF, one more layer."""
        i, width = len(self.config.layers), self.config.hidden_size
        ours, theirs = FOLDER_NEXT, GGUF_NEXT
        yield from replace(self, config=self.config.with_next_layer()).layer(i)
        yield self._matrix(f"{ours.joint}.weight", theirs.joint.format(i=i), rows=width, columns=2 * width)
        for our, their in (
            (ours.embedding_norm, theirs.embedding_norm),
            (ours.hidden_norm, theirs.hidden_norm),
            (ours.norm, theirs.norm),
        ):
            if our != ours.norm or f"{our}.weight" in self.files:
                yield self._norm(our, their, i, width)
        for our, their in ((ours.embedding, theirs.embedding), (ours.output, theirs.output)):
            if f"{our}.weight" in self.files:
                yield self._matrix(f"{our}.weight", their.format(i=i), columns=width)

    def _numbers(self) -> Iterator[OutTensor]:
        for name, values in rope_numbers(self.config).items():
            yield OutTensor(name, (len(values),), Kind.F32, Numbers(values))

    def _ends(self) -> Iterator[OutTensor]:
        embedding, output = f"{self.ours.embedding}.weight", f"{self.ours.output}.weight"
        has_embedding, has_output = embedding in self.files, output in self.files
        if self.config.tied is False and not (has_embedding and has_output):
            missing = output if has_embedding else embedding
            raise ModelError(
                f"the folder has no tensor {missing}, and its config.json does not tie both ends", DOWNLOAD
            )
        first = embedding if has_embedding else output
        width = self.config.hidden_size
        yield self._matrix(first, self.theirs.embedding, columns=width)
        if not (has_embedding and has_output):
            return
        if self.config.tied and self._equal(embedding, output):
            self.used.add(output)
            return
        yield self._matrix(output, self.theirs.output, rows=self._sizes(embedding)[0], columns=width)

    def _attention(self, i: int) -> Iterator[OutTensor]:
        config, ours, theirs = self.config, self.ours, self.theirs
        layer = config.layers[i]
        out_columns, kv_rows = config.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
        q_rows = 2 * out_columns if config.family.delta else out_columns  # with the gates of its heads
        width, sizes = config.hidden_size, (q_rows, kv_rows, kv_rows)
        yield self._norm(ours.attention_norm, theirs.attention_norm, i, width)
        fused = f"{ours.qkv.format(i=i)}.weight" in self.files
        if fused and self.family.gguf == "phi3":
            yield from self._linear(ours.qkv, theirs.qkv, i, sum(sizes), width)
        else:
            head = layer.head_dim if self.family.gguf_interleaved else 0
            starts = (0, q_rows, q_rows + kv_rows)
            named = zip((ours.q, ours.k, ours.v), (theirs.q, theirs.k, theirs.v), (head, head, 0), strict=True)
            for (our, their, head_rows), rows, start in zip(named, sizes, starts, strict=True):
                if our == ours.v and layer.keys_are_values:
                    continue
                cut = (start, sum(sizes)) if fused else None
                yield from self._linear(ours.qkv if fused else our, their, i, rows, width, head_rows, cut)
        yield from self._linear(ours.out, theirs.out, i, width, out_columns)
        if config.family.qk_norm:
            yield self._norm(ours.q_norm, theirs.q_norm, i, layer.head_dim)
            yield self._norm(ours.k_norm, theirs.k_norm, i, layer.head_dim)
        if config.family.sinks:
            yield self._vector(ours.sinks.format(i=i), theirs.sinks.format(i=i), config.num_heads)
        if config.family.post_norms:
            yield self._norm(ours.attention_post_norm, theirs.attention_post_norm, i, width)

    def _feed_forward(self, i: int) -> Iterator[OutTensor]:
        ours, theirs, width = self.ours, self.theirs, self.config.hidden_size
        fused = f"{ours.gate_up.format(i=i)}.weight" in self.files
        inner = self._sizes(f"{(ours.gate_up if fused else ours.gate).format(i=i)}.weight")[0] // (2 if fused else 1)
        if theirs.gate_up:
            yield from self._fused_gate_up(i, inner, fused=fused)
        else:
            for our, their, start in ((ours.gate, theirs.gate, 0), (ours.up, theirs.up, inner)):
                cut = (start, 2 * inner) if fused else None
                yield from self._linear(ours.gate_up if fused else our, their, i, inner, width, 0, cut)
        yield from self._linear(ours.down, theirs.down, i, width, inner)
        if self.config.family.post_norms:
            yield self._norm(ours.feed_post_norm, theirs.feed_post_norm, i, width)
        if (scale := ours.layer_scale.format(i=i)) in self.files:
            yield self._vector(scale, theirs.layer_scale.format(i=i), 1)

    def _fused_gate_up(self, i: int, inner: int, *, fused: bool) -> Iterator[OutTensor]:
        """Yield gate and up as one matrix, which a folder has as one or as two."""
        ours, width = self.ours, self.config.hidden_size
        if fused:
            yield from self._linear(ours.gate_up, self.theirs.gate_up, i, 2 * inner, width)
            return
        names = [self._used(f"{name.format(i=i)}.weight", (inner, width)) for name in (ours.gate, ours.up)]
        parts = tuple(Part(name, 0, inner) for name in names)
        yield self._tensor(f"{self.theirs.gate_up.format(i=i)}.weight", (2 * inner, width), Rows(parts))

    def _experts(self, i: int) -> Iterator[OutTensor]:
        config, ours, theirs = self.config, self.ours, self.theirs
        assert config.experts is not None
        count, width = config.experts.count, config.hidden_size
        yield from self._linear(ours.router, theirs.router, i, count, width)
        if ours.expert_gate_up:
            yield from self._transposed_experts(i, count, width)
            return
        if (stacked := ours.expert_gate_then_up.format(i=i)) in self.files:
            yield from self._stacked_experts(i, stacked, count, width)
            return
        inner = self._sizes(f"{ours.expert_gate.format(i=i, e=0)}.weight")[0]
        for our, their, sizes in (
            (ours.expert_gate, theirs.expert_gate, (inner, width)),
            (ours.expert_up, theirs.expert_up, (inner, width)),
            (ours.expert_down, theirs.expert_down, (width, inner)),
        ):
            names = [self._used(f"{our.format(i=i, e=e)}.weight", sizes) for e in range(count)]
            parts = tuple(Part(name, 0, sizes[0]) for name in names)
            yield self._tensor(f"{their.format(i=i)}.weight", (count, *sizes), Rows(parts))

    def _stacked_experts(self, i: int, gate_up: str, count: int, width: int) -> Iterator[OutTensor]:
        """Yield experts that are two tensors in the folder: gate and up of all, and down of all."""
        theirs = self.theirs
        down = self.ours.expert_down.replace(".{e}", "").format(i=i)
        inner = self._shape(down)[-1]
        source = self._used(gate_up, shape=(count, 2 * inner, width))
        for their, first in ((theirs.expert_gate, 0), (theirs.expert_up, inner)):
            parts = tuple(Part(source, 2 * inner * e + first, inner) for e in range(count))
            yield self._tensor(f"{their.format(i=i)}.weight", (count, inner, width), Rows(parts))
        whole = Part(self._used(down, shape=(count, width, inner)), 0, count * width)
        yield self._tensor(f"{theirs.expert_down.format(i=i)}.weight", (count, width, inner), Rows((whole,)))

    def _shared_gate(self, i: int) -> OutTensor:
        """Return the gate of the expert that all tokens use: a matrix of one row here, a vector there."""
        name, width = f"{self.ours.shared_gate.format(i=i)}.weight", self.config.hidden_size
        content = Rows((Part(self._used(name, (1, width)), 0, 1),))
        return self._tensor(f"{self.theirs.shared_gate.format(i=i)}.weight", (width,), content)

    def _delta_net(self, i: int, sizes: DeltaSizes) -> Iterator[OutTensor]:
        """Yield a gated delta net. llama.cpp has value head h read the key head h modulo their number."""
        ours, theirs, width = self.ours, self.theirs, self.config.hidden_size
        heads, per_key = sizes.num_value_heads, sizes.num_value_heads // sizes.num_key_heads
        order = tuple(key * per_key + j for j in range(per_key) for key in range(sizes.num_key_heads))
        keys, conv = sizes.channels - sizes.value_width, ours.delta_conv.format(i=i)

        def rows(name: str, their: str, first: int, of_head: int, columns: int) -> OutTensor:
            """Return a matrix whose first rows stay, and those of value heads are put in order; 0 columns: a vector."""
            num = first + heads * of_head
            shape = (num, columns) if columns else (num,)
            stored = (num, 1, columns) if name == conv and len(self._shape(name)) == 3 else shape
            file = self._used(name, shape=stored)
            parts = [Part(file, first + of_head * head, of_head) for head in order]
            whole = tuple([Part(file, 0, first), *parts] if first else parts)
            return self._tensor(their, shape, Rows(whole, logarithms=name.endswith(".A_log")))

        yield self._norm(ours.attention_norm, theirs.attention_norm, i, width)
        for our, their, first, of_head in (
            (ours.delta_qkv, theirs.delta_qkv, keys, sizes.value_dim),
            (ours.delta_z, theirs.delta_z, 0, sizes.value_dim),
            (ours.delta_beta, theirs.delta_beta, 0, 1),
            (ours.delta_alpha, theirs.delta_alpha, 0, 1),
        ):
            yield rows(f"{our.format(i=i)}.weight", f"{their.format(i=i)}.weight", first, of_head, width)
        yield rows(conv, theirs.delta_conv.format(i=i), keys, sizes.value_dim, sizes.window)
        yield rows(ours.delta_decay.format(i=i), theirs.delta_decay.format(i=i), 0, 1, 0)
        yield rows(ours.delta_bias.format(i=i), theirs.delta_bias.format(i=i), 0, 1, 0)
        norm, their = (f"{name.format(i=i)}.weight" for name in (ours.delta_norm, theirs.delta_norm))
        yield self._vector(norm, their, sizes.value_dim)
        out = self._used(f"{ours.delta_out.format(i=i)}.weight", (width, sizes.value_width))
        content = Rows((Part(out, 0, width),), blocks=order)
        yield self._tensor(f"{theirs.delta_out.format(i=i)}.weight", (width, sizes.value_width), content)

    def _experts_beside(self, i: int) -> Iterator[OutTensor]:
        """Yield the experts beside a dense feed-forward (Gemma 4), whose matrices are stacked in the folder, too."""
        config, ours, theirs = self.config, self.ours, self.theirs
        assert config.experts is not None
        count, width = config.experts.count, config.hidden_size
        for name in ("dense_post_norm", "expert_norm", "expert_post_norm"):
            yield self._norm(getattr(ours, name), getattr(theirs, name), i, width)
        yield from self._linear(ours.router, theirs.router, i, count, width)
        yield self._vector(ours.router_scale.format(i=i), theirs.router_scale.format(i=i), width)
        yield self._vector(ours.expert_scale.format(i=i), theirs.expert_scale.format(i=i), count)
        gate_up, down = ours.expert_gate_then_up.format(i=i), ours.expert_down.replace(".{e}", "").format(i=i)
        inner = self._shape(down)[-1]
        for our, their, shape in (
            (gate_up, theirs.expert_gate_then_up.format(i=i), (count, 2 * inner, width)),
            (down, f"{theirs.expert_down.format(i=i)}.weight", (count, width, inner)),
        ):
            yield self._tensor(their, shape, Rows((Part(self._used(our, shape=shape), 0, count * shape[1]),)))

    def _transposed_experts(self, i: int, count: int, width: int) -> Iterator[OutTensor]:
        """Yield the experts of gpt-oss: gate and up alternate, and plain weights are stored [columns, rows]."""
        gate_up, down = self.ours.expert_gate_up.format(i=i), self.ours.expert_down.format(i=i)
        packed = f"{gate_up}_blocks" in self.files
        inner = self._shape(f"{gate_up}_bias")[-1] // 2
        for name, their, sizes, first, step in (
            (gate_up, self.theirs.expert_gate, (inner, width), 0, 2),
            (gate_up, self.theirs.expert_up, (inner, width), 1, 2),
            (down, self.theirs.expert_down, (width, inner), 0, 1),
        ):
            bias = self._used(f"{name}_bias", shape=(count, sizes[0] * step))
            part = Part(bias, first, count * sizes[0], step)
            base = their.format(i=i)
            yield self._tensor(f"{base}.bias", (count, sizes[0]), Rows((part,), flat=True))
            if packed:
                yield self._packed_experts(name, f"{base}.weight", (count, *sizes), first, step)
                continue
            source = self._used(name, shape=(count, sizes[1], sizes[0] * step))
            yield self._tensor(f"{base}.weight", (count, *sizes), TransposedRows(source, count, first, step))

    def _packed_experts(self, name: str, their: str, shape: tuple[int, ...], first: int, step: int) -> OutTensor:
        count, rows, columns = shape
        if columns % MXFP4_BLOCK:
            raise ModelError(
                f"the rows of {name} are no whole number of MXFP4 blocks",
                "download the model again (edgelm pull --verify MODEL)",
            )
        blocks = self._used(f"{name}_blocks", shape=(count, rows * step, columns // MXFP4_BLOCK, 16))
        scales = self._used(f"{name}_scales", shape=(count, rows * step, columns // MXFP4_BLOCK))
        if any(self.reader.tensor(used).dtype.bits != 8 for used in (blocks, scales)):
            raise ModelError(
                f"{name} is not in MXFP4, as its name says", "download the model again (edgelm pull --verify MODEL)"
            )
        return OutTensor(their, shape, Kind.MXFP4, MXFP4Rows(blocks, scales, first, step))

    # -- one tensor ----------------------------------------------------------------------------------------------------

    def _linear(
        self,
        our: str,
        their: str,
        i: int,
        rows: int,
        columns: int,
        head_rows: int = 0,
        cut: tuple[int, int] | None = None,
    ) -> Iterator[OutTensor]:
        """Yield a matrix, and its bias if it has one. `cut`: its first row in a larger one, and the rows of that."""
        start, total = cut or (0, rows)
        base, name = our.format(i=i), their.format(i=i)
        source = self._used(f"{base}.weight", (total, columns))
        content = Rows((Part(source, start, rows),), head_rows)
        yield self._tensor(f"{name}.weight", (rows, columns), content)
        if f"{base}.bias" in self.files:
            bias = self._used(f"{base}.bias", shape=(total,))
            yield self._tensor(f"{name}.bias", (rows,), Rows((Part(bias, start, rows),), head_rows))

    def _matrix(self, our: str, their: str, *, rows: int = 0, columns: int) -> OutTensor:
        rows = rows or self._sizes(our)[0]
        part = Part(self._used(our, (rows, columns)), 0, rows)
        return self._tensor(f"{their}.weight", (rows, columns), Rows((part,)))

    def _norm(self, our: str, their: str, i: int, size: int) -> OutTensor:
        offset = self.config.norm_offset
        return self._vector(f"{our.format(i=i)}.weight", f"{their.format(i=i)}.weight", size, offset)

    def _vector(self, our: str, their: str, size: int, offset: float = 0.0) -> OutTensor:
        part = Part(self._used(our, shape=(size,)), 0, size)
        return self._tensor(their, (size,), Rows((part,), offset=offset))

    def _tensor(self, name: str, shape: tuple[int, ...], content: Content) -> OutTensor:
        kinds = [
            kind_for(self.target, self.reader.tensor(source).dtype.name, shape[-1])
            for source in dict.fromkeys(content.sources)
        ]
        plain = len(shape) == 1 or not name.endswith(".weight") or ALWAYS_F32.fullmatch(name)
        kind = Kind.F32 if plain or any(kind != kinds[0] for kind in kinds) else kinds[0]
        return OutTensor(name, shape, kind, content)

    # -- the folder's tensors ------------------------------------------------------------------------------------------

    def _shape(self, name: str) -> tuple[int, ...]:
        if name not in self.files:
            raise ModelError(f"the folder has no tensor {name}", DOWNLOAD)
        return self.reader.tensor(self.files[name]).shape

    def _sizes(self, name: str) -> tuple[int, int]:
        shape = self._shape(name)
        if len(shape) != 2:
            raise wrong_size(name, shape, "a matrix")
        return shape[0], shape[1]

    def _used(self, name: str, sizes: tuple[int, int] | None = None, *, shape: tuple[int, ...] = ()) -> str:
        """Return a tensor's name in the files and record its use. Raises ModelError for another shape."""
        expected = sizes or shape
        if self._shape(name) != expected:
            raise wrong_size(name, self._shape(name), " x ".join(map(str, expected)))
        self.used.add(name)
        return self.files[name]

    def _equal(self, one: str, other: str) -> bool:
        """Compare two matrices that the configuration ties. As in transformers, different ones are not tied."""
        names = [self.files[one], self.files[other]]
        rows, columns = self.reader.sizes(names[0])
        if self.reader.sizes(names[1]) != (rows, columns):
            return False
        return all(
            np.array_equal(self.reader.rows(names[0], first, count), self.reader.rows(names[1], first, count))
            for first, count in spans(rows, columns)
        )


def wrong_size(name: str, shape: tuple[int, ...], expected: str) -> ModelError:
    """Return the error for a tensor of another shape."""
    sizes = " x ".join(map(str, shape)) or "one number"
    return ModelError(
        f"tensor {name} is {sizes}, but must be {expected}", "download the model again (edgelm pull --verify MODEL)"
    )
