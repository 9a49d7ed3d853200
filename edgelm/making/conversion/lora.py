"""Merging LoRA adapters into the weights of a folder, a few rows at a time.

    merge = open_merge(lora, folder, resources)       # checks all names, shapes and numbers
    merge.require_used(sources)                       # the tensors of the folder that the conversion reads
    rows = merge("model.layers.0.mlp.up_proj.weight", rows, first)

Owns the arithmetic: W + scaling * B @ A in float32, DoRA's lengths, and tensors that are replaced. Knows nothing of
where the rows come from or go to. The format of an adapter is in checkpoints/adapter.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgelm.base.errors import ModelError
from edgelm.base.places import expand_home
from edgelm.base.setting_checks import split_scale
from edgelm.checkpoints.adapter import Adapter, LowRank, Whole, open_adapter, plain_name
from edgelm.checkpoints.files import shown
from edgelm.checkpoints.safetensors import open_safetensors

Array = NDArray[np.float32]

OUTPUT = "lm_head.weight"
EMBEDDING = "embed_tokens.weight"
OTHER_MODEL = "give an adapter that was trained on this model"


@dataclass(frozen=True, slots=True)
class _Change:
    """One change of a tensor, by one adapter. `scale` is the user's, beside the adapter's own scaling."""

    adapter: Adapter
    change: LowRank | Whole
    scale: float


class Merge:
    """The adapters of a conversion, applied one after the other. Call it with rows of any tensor of the folder.

    `shapes` are those of all tensors of the folder, by name; `scales` are one for each adapter. Raises ModelError for
    an adapter that changes a tensor which is not there, or has another shape, and for numbers that are not finite.
    """

    def __init__(
        self, adapters: Sequence[Adapter], shapes: Mapping[str, tuple[int, ...]], scales: Sequence[float] | None = None
    ) -> None:
        self._shapes = shapes
        self._by_plain = {plain_name(name): name for name in shapes}
        self._changes: dict[str, list[_Change]] = {}
        self._matrices: dict[int, tuple[Array, Array]] = {}  # A and B of the changes of `_current`
        self._current = ""
        self._adapters = list(zip(adapters, scales or [1.0] * len(adapters), strict=True))
        for adapter, scale in self._adapters:
            self._add(adapter, scale)

    @property
    def key(self) -> str:
        """Stands for the adapters by their content, in order, and their scales: the same key, the same result."""
        return " ".join(f"{adapter.content().hex()}:{scale:g}" for adapter, scale in self._adapters)

    @property
    def names(self) -> frozenset[str]:
        """The tensors of the folder that change."""
        return frozenset(self._changes)

    def __call__(self, name: str, rows: Array, first: int = 0) -> Array:
        """Return rows of a tensor with all adapters merged into them: [n, columns], or [n, 1] or [n] of a bias.

        `rows` are those from `first` on, in the folder's order. They stay as they are.
        """
        changes = self._changes.get(name)
        if not changes:
            return rows
        assert rows.shape[1:] in (self._shapes[name][1:], self._shapes[name][1:] or (1,)), (rows.shape, name)
        assert first + len(rows) <= self._shapes[name][0], (rows.shape, name)
        if name != self._current:
            self._current, self._matrices = name, {}
        for change in changes:
            rows = self._changed(change, rows, first)
        if not np.isfinite(rows).all():
            raise ModelError(f"{shown(name)} is not finite with {changes[-1].adapter.name}", OTHER_MODEL)
        return rows

    def require_used(self, sources: Iterable[str]) -> None:
        """Raise ModelError if an adapter changes another tensor than these, which are all that is read."""
        for name in sorted(self.names.difference(sources)):
            message = f"{self._changes[name][0].adapter.name} changes {shown(name)}, which has no place in the result"
            raise ModelError(message, OTHER_MODEL)

    # -- checks ----------------------------------------------------------------------------------------------------

    def _add(self, adapter: Adapter, scale: float) -> None:
        for whole in adapter.whole.values():
            if whole.trained and scale != 1:
                message = f"{adapter.name} replaces {shown(whole.name)}, which has no scale"
                raise ModelError(message, f"give {adapter.name} without :{scale:g}")
            self._add_one(adapter, whole, whole.name, whole.shape, 1.0)
        for change in adapter.low_rank.values():
            self._add_one(adapter, change, f"{change.module}.weight", change.shape, scale)
        adapter.require_finite()

    def _add_one(
        self, adapter: Adapter, change: LowRank | Whole, target: str, shape: tuple[int, ...], scale: float
    ) -> None:
        plain = plain_name(target)
        name = target if target in self._shapes else self._by_plain.get(plain)
        if name is None:
            raise ModelError(f"{adapter.name} changes {shown(target)}, which this model does not have", OTHER_MODEL)
        if self._shapes[name] != shape:
            sizes = (" x ".join(map(str, sizes)) for sizes in (shape, self._shapes[name]))
            message = f"{adapter.name} changes {shown(name)} as {next(sizes)}, and this model's is {next(sizes)}"
            raise ModelError(message, OTHER_MODEL)
        if plain == EMBEDDING and OUTPUT not in map(plain_name, self._shapes):
            raise ModelError(
                f"{adapter.name} changes the embedding, which is the output matrix of this model, too",
                "save the model with both matrices, or merge the adapter with PEFT",
            )
        self._changes.setdefault(name, []).append(_Change(adapter, change, scale))

    # -- arithmetic ------------------------------------------------------------------------------------------------

    def _changed(self, change: _Change, rows: Array, first: int) -> Array:
        last = first + len(rows)
        part = change.change
        if isinstance(part, Whole):
            return change.adapter.tensor(part.source, first, last).reshape(rows.shape)
        a, b = self._loaded(change)
        delta = a.T[first:last] @ b.T if part.embedding else b[first:last] @ a
        delta *= np.float32(part.scaling * change.scale)
        merged: Array = rows + delta
        if part.magnitude:
            lengths = np.linalg.norm(merged, axis=1)
            magnitude = change.adapter.tensor(part.magnitude).reshape(-1)[first:last]  # [n]
            scaled: Array = merged * (magnitude / np.maximum(lengths, np.finfo(np.float32).tiny))[:, None]
            return scaled
        return merged

    def _loaded(self, change: _Change) -> tuple[Array, Array]:
        """Return A and B of a change, which are kept while the rows are of the same tensor."""
        if id(change) not in self._matrices:
            assert isinstance(change.change, LowRank)
            a, b = (change.adapter.tensor(source) for source in (change.change.a, change.change.b))
            self._matrices[id(change)] = a, b
        return self._matrices[id(change)]


def open_merge(lora: Sequence[str], folder: Path, resources: ExitStack) -> Merge:
    """Open adapters, ADAPTER or ADAPTER:SCALE, for the model in a folder; `resources` close them. Raises ModelError."""
    adapters, scales = [], []
    for text in lora:
        name, scale = split_scale(text)
        if name.endswith(".gguf"):
            raise ModelError(f"{shown(name)} is a GGUF, and only an adapter of PEFT's can be merged", "give its folder")
        adapters.append(resources.enter_context(open_adapter(Path(expand_home(name)))))
        scales.append(scale)
    with open_safetensors(folder) as model:
        return Merge(adapters, {name: tensor.shape for name, tensor in model.tensors.items()}, scales)
