"""`edgelm serve` with a draft model or an adapter: it is watched with each model, and reported where it is missing."""

from __future__ import annotations

import os
from pathlib import Path

from edgelm.checkpoints.gguf import open_gguf
from tests.adapters import write_adapter
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


def test_an_adapter_is_read_for_the_next_request(own: dict[str, str], models: Path, tmp_path: Path) -> None:
    model, folder = models / "tiny.gguf", tmp_path / "adapter"
    with open_gguf(model) as gguf:
        columns, rows = gguf.tensors["blk.0.ffn_down.weight"].shape
    shapes = {"model.layers.0.mlp.down_proj": (rows, columns)}
    with serving(own, model, "--lora", folder, log=tmp_path / "log") as front:
        reply = front.chat()
        assert reply.status_code == 503
        assert "there is no adapter" in reply.json()["error"]["message"]
        processes = []
        for seed in (0, 1):
            write_adapter(folder, shapes, seed=seed)
            for _ in range(2):
                assert front.chat(temperature=0).status_code == 200
                processes.append(front.ps("tiny")["pid"])
        assert processes[0] == processes[1] != processes[2] == processes[3]
