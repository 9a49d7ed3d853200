"""Places: variables move the folders of our files, and those of other programs that we read."""

from __future__ import annotations

from pathlib import Path

from edgelm.base.places import Places


def test_places_can_be_moved() -> None:
    moved = Places({"EDGELM_DATA_DIR": "/there", "HF_HUB_CACHE": "/hub"})
    assert moved.data == Path("/there")
    assert moved.hub == Path("/hub")
    assert Places({}).config.name == "edgelm"
