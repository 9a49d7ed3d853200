"""The numbers of a model that a folder's config.json gives, read with their types and ranges checked.

Owns the names that families have for the same number, and the part of a configuration that describes the decoder.
Knows nothing of tensors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgelm.errors import ModelError
from edgelm.weights.checks import MAX_CONTEXT, MAX_VOCAB
from edgelm.weights.json_scan import read_json
from edgelm.weights.mapped import DOWNLOAD, shown
from edgelm.weights.shape import MAX_HEAD_LEN, MAX_HEADS, MAX_LAYERS, MAX_WIDTH, is_integer

CONFIG = "config.json"
MAX_ROPE_THETA = 1e15
DECODERS = ("text_config", "llm_config", "language_config")  # where a model reads images or sound as well
# layers that keep no keys and values
WITHOUT_KV = frozenset({"linear_attention", "conv", "mamba", "mamba2", "recurrent", "moe", "mlp"})
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
WIDTH = ("hidden_size", "n_embd", "d_model")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_query_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "multi_query_group_num")
HEAD_LEN = ("head_dim", "kv_channels", "attention_head_dim")
CONTEXT = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx")


class FolderConfig:
    """A folder's config.json. What its methods raise is a ModelError."""

    def __init__(self, folder: Path) -> None:
        self.whole = read_json(folder / CONFIG)
        self.decoder = dict(self.whole)  # the values that hold for the decoder
        for name in DECODERS:
            part = self.whole.get(name)
            if isinstance(part, dict):
                self.decoder |= part
        self._check_fractions()
        self.layers = self.number(LAYERS, 1, MAX_LAYERS)
        self.width = self.number(WIDTH, 1, MAX_WIDTH)
        self.context = self.number(CONTEXT, 1, MAX_CONTEXT, 0)
        self.vocab_size = self.number(("vocab_size",), 1, MAX_VOCAB, 0)
        self.heads = self.per_layer(HEADS, MAX_HEADS) or [0] * self.layers

    @property
    def architecture(self) -> str:
        """Return `model_type`, or else the first of `architectures`."""
        named = self.whole.get("architectures")
        for value in (self.whole.get("model_type"), named[0] if isinstance(named, list) and named else None):
            if isinstance(value, str) and 0 < len(value) <= 64 and value.isprintable():
                return value
        raise ModelError(f"{CONFIG} does not say which architecture the model has", DOWNLOAD)

    @property
    def kv_heads(self) -> list[int]:
        """Key-value heads of each layer, 0 for one that keeps no keys and values or shares another's."""
        shared = self.decoder.get("multi_query") is True and not self.decoder.get("new_decoder_architecture")
        alone = self._latent or shared  # one head for all
        kv_heads = [1] * self.layers if alone else self.per_layer(KV_HEADS, MAX_HEADS) or list(self.heads)
        for query, kv in zip(self.heads, kv_heads, strict=True):
            if query and kv and query % kv:
                raise damaged(f"{query} attention heads cannot share {kv} key-value heads")
        every = self.number(("full_attention_interval",), 0, self.layers, 0)
        behind = self.number(("num_kv_shared_layers",), 0, self.layers, 0)
        kinds = self._kinds()
        for i in range(self.layers):
            without = kinds[i] in WITHOUT_KV if kinds else every and (i + 1) % every
            if without or i >= self.layers - behind or not self.heads[i]:
                kv_heads[i] = 0
        return kv_heads

    @property
    def head_lens(self) -> tuple[int, int]:
        """Numbers of one head's key, and of its value: 0 where values are a view of the keys (latent attention)."""
        if self._latent:
            rotated = self.number(("qk_rope_head_dim",), 0, MAX_HEAD_LEN, 0)
            return self.number(("kv_lora_rank",), 1, MAX_HEAD_LEN) + rotated, 0
        key = self.number(HEAD_LEN, 1, MAX_HEAD_LEN, max(1, self.width // max(1, *self.heads, 1)))
        return key, self.number(("v_head_dim",), 1, MAX_HEAD_LEN, key)

    @property
    def sliding_window(self) -> int:
        """Positions that a layer with a window sees; 0: no layer has one."""
        if self.decoder.get("use_sliding_window") is False:
            return 0
        return self.number(("sliding_window",), 0, 2**32, 0)

    def number(self, names: tuple[str, ...], low: int, high: int, default: int | None = None) -> int:
        """Return the first of some keys that is there. Raises ModelError where none is and there is no default."""
        for name in names:
            value = self.decoder.get(name)
            if value is None:
                continue
            if not is_integer(value) or not low <= value <= high:
                raise damaged(f"{name} is {said(value)}, where {low:,} to {high:,} are possible")
            return value
        if default is None:
            raise damaged(f"{names[0]} is missing")
        return default

    def per_layer(self, names: tuple[str, ...], high: int) -> list[int] | None:
        """Return a key that is one number for all layers, or a list of one for each; None where it is missing."""
        name = next((name for name in names if self.decoder.get(name) is not None), None)
        if name is None:
            return None
        value = self.decoder[name]
        if not isinstance(value, list):
            return [self.number((name,), 0, high)] * self.layers
        if len(value) != self.layers:
            raise damaged(f"{name} has {len(value):,} entries for {self.layers} layers")
        for entry in value:
            if not is_integer(entry) or not 0 <= entry <= high:
                raise damaged(f"{name} holds {said(entry)}, where 0 to {high:,} are possible")
        return list(value)

    @property
    def _latent(self) -> bool:
        return self.decoder.get("kv_lora_rank") is not None

    def _kinds(self) -> list[Any]:
        """Return what each layer is, where the configuration says so."""
        for name in ("layer_types", "layers_block_type"):
            kinds = self.decoder.get(name)
            if isinstance(kinds, list) and len(kinds) >= self.layers:
                return [kind if isinstance(kind, str) else "" for kind in kinds]
        return []

    def _check_fractions(self) -> None:
        """Check the numbers that would make NaN of all logits."""
        for name, value in self.decoder.items():
            epsilon = name.endswith(("_eps", "_epsilon"))
            if not (epsilon or name == "rope_theta") or value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not _within(value, epsilon):
                possible = "0 to 1 is" if epsilon else f"1 to {MAX_ROPE_THETA:.0e} is"
                raise damaged(f"{shown(name)} is {said(value)}, where {possible} possible")


def damaged(what: str) -> ModelError:
    """Return the error for a configuration that cannot be true."""
    return ModelError(f"{CONFIG} is damaged or wrongly made: {what}", DOWNLOAD)


def said(value: object) -> str:
    """Return how a value looks in an error message."""
    if is_integer(value) and abs(value) < 2**64:
        return f"{value:,}"
    if isinstance(value, float | bool):
        return str(value).lower()
    names = {str: "a text", list: "a list", dict: "an object", int: "a number of many digits"}
    return names.get(type(value), "nothing")


def _within(value: float, epsilon: bool) -> bool:
    return 0 <= value <= 1 if epsilon else 1 <= value <= MAX_ROPE_THETA
