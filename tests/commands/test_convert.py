"""`edgelm convert` as a user sees it: the result, what was checked, one line for each error, and Ctrl-C."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from edgelm.base.disk import unfinished
from edgelm.base.errors import EdgeLMError, ModelError, UsageError
from edgelm.checkpoints.gguf import open_gguf
from edgelm.checkpoints.safetensors import open_safetensors
from edgelm.commands.convert import convert_model, target_file
from edgelm.making.conversion import check as check_module
from edgelm.making.conversion.check import check_gguf
from edgelm.making.conversion.convert import Source, convert_folder
from tests.adapters import PREFIX, write_adapter
from tests.commands.test_run import TIMEOUT_S, Edgelm, error_of


def folder_of(name: str, folder: Path, **changes: Any) -> Path:
    from tests.making.conversion.folders import folder_of as write  # takes torch, in each process that collects tests

    return write(name, folder, **changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of("llama3", tmp_path_factory.mktemp("models") / "tiny-llama")


def test_a_folder_becomes_a_checked_file(edgelm: Edgelm, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.gguf"
    done = edgelm("convert", folder, out, "--to", "q8_0")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.decode().splitlines()
    assert re.fullmatch(rf"{re.escape(str(out))}: \d+ kB, 43 tensors, Q8_0, F32", lines[0])
    assert re.match(
        r"checked: logits of 48 tokens, llama.cpp on the file against torch on the folder: mean KL", lines[1]
    )
    assert "exists; give another name, or --force" in error_of(edgelm("convert", folder, out), code=2)


def test_an_adapter_is_merged(edgelm: Edgelm, folder: Path, tmp_path: Path) -> None:
    layer = "model.layers.1.mlp.up_proj"
    with open_safetensors(folder) as model:
        shape = model.tensors[f"{layer}.weight"].shape
        before = model.array(f"{layer}.weight").astype(np.float32)
    adapter = write_adapter(tmp_path / "adapter", {layer: shape}, rank=4, alpha=8.0)
    low = load_file(adapter / "adapter_model.safetensors")
    delta = 2 * low[f"{PREFIX}{layer}.lora_B.weight"] @ low[f"{PREFIX}{layer}.lora_A.weight"]  # alpha over rank
    out = tmp_path / "merged.gguf"
    done = edgelm("convert", folder, out, "--lora", f"{adapter}:0.5", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["lora"] == [f"{adapter}:0.5"]
    assert document["check"]["method"] == "logits"  # of the folder with the adapter
    with open_gguf(out) as made:
        np.testing.assert_allclose(made.dequantized("blk.1.ffn_up.weight"), before + delta / 2, atol=1e-5)


def test_adapters_that_cannot_be_merged(folder: Path, tmp_path: Path) -> None:
    def error(lora: str) -> str:
        out = str(tmp_path / "out.gguf")
        with pytest.raises(EdgeLMError) as caught:
            convert_model(
                str(folder), out, {}, to="source", lora=[lora], check=False, force=False, as_json=False, verbose=False
            )
        return str(caught.value)

    other = write_adapter(tmp_path / "other", {"model.layers.1.mlp.up_proj": (8, 8)})
    assert "give an adapter that was trained on this model" in error(str(other))
    assert "there is no adapter" in error(str(tmp_path / "none"))
    assert "a scale such as :0.5" in error(f"{other}:nan")
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_the_document_of_a_result(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "model.gguf"
    out.write_text("an old file")
    convert_model(str(folder), str(out), {}, to="source", check=False, force=True, as_json=True, verbose=False)
    document = json.loads(capfd.readouterr().out)
    assert document["file"] == str(out)
    assert document["types"] == {"F32": 43}
    assert document["bytes"] == out.stat().st_size > 100_000
    assert document["check"] == {"method": "none", "reason": "--no-check was given"}


def test_names_that_cannot_be_converted(folder: Path, tmp_path: Path) -> None:
    def error(name: Path, to: str = "source") -> str:
        out = str(tmp_path / "out.gguf")
        with pytest.raises(EdgeLMError) as caught:
            convert_model(str(name), out, {}, to=to, check=False, force=False, as_json=False, verbose=False)
        return str(caught.value)

    gguf = tmp_path / "own.gguf"
    convert_folder(folder, gguf)
    assert "is a GGUF already" in error(gguf)
    text = tmp_path / "notes.txt"
    text.write_text("no model")
    assert "notes.txt is not a GGUF file" in error(text)
    assert "has no config.json" in error(tmp_path)
    assert "--to Q4_K is not a type of convert" in error(folder, to="Q4_K")


def test_names_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a folder"):
        target_file(str(tmp_path), force=False)
    with pytest.raises(UsageError, match="does not end in"):
        target_file(str(tmp_path / "model.bin"), force=False)
    with pytest.raises(UsageError, match="there is no folder"):
        target_file(str(tmp_path / "none" / "model.gguf"), force=False)


def test_without_torch_the_tensors_are_read_back(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_module, "find_spec", lambda _: None)
    found = []

    def check(source: Source, part: Path) -> None:
        found.append(check_gguf(source, part, threads=1, stage=lambda _: None))
        with part.open("r+b") as file:
            file.seek(-40, 2)
            byte = file.read(1)
            file.seek(-40, 2)
            file.write(bytes([byte[0] ^ 1]))
        check_gguf(source, part, threads=1, stage=lambda _: None)

    with pytest.raises(ModelError, match="on the disk is not what was written"):
        convert_folder(folder, tmp_path / "model.gguf", check=check)
    assert found[0].method == "tensors"
    assert found[0].detail["tensors"] == 43
    assert "torch is not installed" in found[0].reason
    assert not list(tmp_path.iterdir())


def test_other_logits_than_the_folders_are_an_error(folder: Path, tmp_path: Path) -> None:
    """The check knows nothing of the layout: a file with rows in a wrong order is found by its logits."""
    out = tmp_path / "model.gguf"

    def check(source: Source, part: Path) -> None:
        swapped = {tensor.name: tensor for tensor in source.layout.tensors}
        with part.open("r+b") as file:
            data = file.read()
            q = swapped["blk.0.attn_q.weight"]
            rows = b"".join(bytes(piece) for piece in q.content.pieces(source.reader, q.kind))
            at = data.index(rows)
            half = len(rows) // 2
            file.seek(at)
            file.write(rows[half:] + rows[:half])
        check_gguf(source, part, threads=1, stage=lambda _: None)

    with pytest.raises(ModelError, match="computes other logits than the folder"):
        convert_folder(folder, out, check=check)
    assert not list(tmp_path.iterdir())


def test_the_command_imports_no_torch() -> None:
    """The plain installation has neither torch nor the libraries of Hugging Face."""
    script = (
        "import sys\n"
        "names = 'torch transformers safetensors tokenizers sentencepiece'.split()\n"
        "sys.modules.update(dict.fromkeys(names))\n"
        "import edgelm.making.conversion.worker, edgelm.commands.convert\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=TIMEOUT_S)


def test_ctrl_c_says_how_to_go_on(edgelm: Edgelm, tmp_path: Path) -> None:
    folder = folder_of("llama2", tmp_path / "folder", hidden_size=512, intermediate_size=4096, head_dim=128)
    out = tmp_path / "model.gguf"
    process = edgelm.start("convert", folder, out, "--to", "Q8_0", "--no-check")
    deadline = time.monotonic() + TIMEOUT_S
    while not (unfinished(out).exists() and unfinished(out).stat().st_size > 2**20) and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    assert re.fullmatch(r"note: stopped after .* of .*; the same command goes on there\n", errors.decode())
    assert not out.exists()
