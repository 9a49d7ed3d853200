"""The projector that a model is loaded with: found, its header checked, and the one of this model.

Owns what happens with one that cannot be used. library/projectors.py finds it, checkpoints/projector.py reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from edgelm.base.config import Settings
from edgelm.base.errors import ModelError
from edgelm.checkpoints.projector import Projector, read_projector, require_fit
from edgelm.checkpoints.summary import ModelSummary
from edgelm.library.projectors import find_projector


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
