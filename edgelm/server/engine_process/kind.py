"""Refuses a request that a model of another kind would answer, by the name under which the client asked for it."""

from __future__ import annotations

from dataclasses import replace

from edgelm.backends.model import LoadedModel
from edgelm.checkpoints.summary import ModelKind


def require_kind(loaded: LoadedModel, kind: ModelKind, asked: str) -> None:
    """Raise RequestError if the model is of another kind; the title in its file may be another name than `asked`."""
    replace(loaded, name=asked or loaded.name).require(kind)
