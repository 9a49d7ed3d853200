"""`edgelm serve --draft`: the draft model is loaded beside each model, watched, and reported where it is missing."""

from __future__ import annotations

import os
from pathlib import Path

from tests.server.harness import serving
from tests.tiny import write_tiny


def test_a_draft_model_that_was_written_into_is_loaded_again(own: dict[str, str], models: Path, tmp_path: Path) -> None:
    draft = write_tiny(tmp_path / "draft.gguf", layers=1)
    environment = own | {"EDGELM_SPEC": "4", "EDGELM_DRAFT": str(draft)}
    with serving(environment, models / "tiny.gguf", log=tmp_path / "log") as front:
        assert front.chat(temperature=0).status_code == 200
        first = front.ps("tiny")["pid"]
        assert front.chat(temperature=0).status_code == 200
        assert front.ps("tiny")["pid"] == first
        before = draft.stat()
        write_tiny(draft, layers=1, seed=0)
        os.utime(draft, ns=(before.st_atime_ns, before.st_mtime_ns + 1_000_000))
        assert front.chat(temperature=0).status_code == 200
        assert front.ps("tiny")["pid"] != first
        draft.unlink()


def test_a_draft_model_that_is_missing_is_told_to_the_client(own: dict[str, str], models: Path, tmp_path: Path) -> None:
    environment = own | {"EDGELM_SPEC": "4", "EDGELM_DRAFT": str(tmp_path / "none.gguf")}
    with serving(environment, models / "tiny.gguf", log=tmp_path / "log") as front:
        reply = front.chat()
        assert reply.status_code == 503
        assert "does not exist; give the path" in reply.json()["error"]["message"]
