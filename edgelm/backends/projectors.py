"""The files that a model is loaded with beside its own: a projector that reads pictures, and heads that draft.

Owns the check that they are of this model, and what happens with those that are not. library/projectors.py finds them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from edgelm.base.config import Settings
from edgelm.base.errors import ModelError
from edgelm.checkpoints.files import shown
from edgelm.checkpoints.gguf import GGUF, open_gguf
from edgelm.checkpoints.llama_checks import check_heads_for_llama
from edgelm.checkpoints.projector import Projector, read_projector, require_fit
from edgelm.checkpoints.summary import PREDICTING, ModelFacts, ModelSummary, has_only_heads, model_facts
from edgelm.library.projectors import find_projector, heads_of


def fitting_projector(
    settings: Settings, model: Path, summary: ModelSummary, warn: Callable[[str], None] = lambda _: None
) -> Projector | None:
    """Return the projector of a model; None: it reads no pictures.

    One that was found by its name and cannot be used is left out, and `warn` gets the reason. Raises ModelError for one
    that the settings name.
    """
    if (path := find_projector(settings, model)) is None:
        return None
    try:
        projector = read_projector(path)
        require_fit(projector, summary)
    except ModelError as error:
        if settings.mmproj != "auto":
            raise
        warn(error.message)
        return None
    return projector


ANOTHER = "take the file mtp-….gguf of the same model"


class HeadsFile(NamedTuple):
    """A file of heads that fits a model."""

    path: Path
    facts: ModelFacts


def names_heads(draft: Path | None) -> bool:
    """Tell whether --draft names a file of heads, not a smaller model. Raises ModelError."""
    if draft is None or draft.is_dir():
        return False
    with open_gguf(draft) as gguf:
        return has_only_heads(gguf)


def fitting_heads(
    settings: Settings, model: Path, facts: ModelFacts, draft: Path | None, warn: Callable[[str], None] = lambda _: None
) -> HeadsFile | None:
    """Return the file of the heads that draft for a model; None: there is none, or the model has heads itself.

    `draft` is the file of --draft. What was found by its name and cannot be used is left out, and `warn` gets the
    reason. Raises ModelError for a file that --draft names.
    """
    if not settings.may_draft("mtp"):
        return None
    named = draft if names_heads(draft) else None
    path = named or (None if facts.mtp_heads or facts.summary.kind != "text" else heads_of(model))
    if path is None:
        return None
    try:
        with open_gguf(path) as gguf:
            _require_heads_of(gguf, facts.summary)
            return HeadsFile(path, model_facts(gguf))
    except ModelError as error:
        if named:
            raise
        warn(error.message)
        return None


def heads_beside(settings: Settings, model: Path, warn: Callable[[str], None] = lambda _: None) -> HeadsFile | None:
    """Return the file of heads that lies beside a model and drafts for it; None: there is none."""
    if model.is_dir():
        return None
    with open_gguf(model) as gguf:
        return fitting_heads(settings, model, model_facts(gguf), None, warn)


def _require_heads_of(gguf: GGUF, model: ModelSummary) -> None:
    """Raise ModelError for a file that holds no heads, heads that no engine can run, or those of another model."""
    if not has_only_heads(gguf):
        raise ModelError(f"{gguf.name} holds no heads that draft for another file's model", ANOTHER)
    check_heads_for_llama(gguf)
    heads = model_facts(gguf)
    own, other = ((facts.architecture, facts.width, facts.vocab_size) for facts in (model, heads.summary))
    if own == other and not heads.mtp_heads:
        kind = f"{gguf.values.get('nextn_predict_layers')} layers of {shown(gguf.architecture)}"
        raise ModelError(
            f"the heads of {gguf.name} ({kind}) do not draft here: one layer of {' or '.join(sorted(PREDICTING))} does",
            "--draft ngram drafts from texts",
        )
    if own != other:
        raise ModelError(
            f"{gguf.name} does not hold the heads of this model: it has {_text(*other)}, the model {_text(*own)}",
            ANOTHER,
        )


def _text(architecture: str, width: int, vocab_size: int) -> str:
    return f"{shown(architecture)} of width {width:,} with {vocab_size:,} tokens"
