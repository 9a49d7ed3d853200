"""`edgelm serve --lora`: a missing adapter is told to the client, and one that was trained again is loaded again."""

from __future__ import annotations

from pathlib import Path

from edgelm.checkpoints.gguf import open_gguf
from tests.adapters import write_adapter
from tests.server.harness import serving


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
