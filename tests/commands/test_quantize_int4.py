"""`edgelm quantize --to int4…` as its user sees it: the lines, the errors, and what a kill leaves."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from edgelm.base.errors import EdgeLMError
from edgelm.checkpoints.quantization import quantization_section
from edgelm.commands.quantize_int4 import quantize_int4
from edgelm.library.scan import scan
from tests.commands.test_torch_engine import write_tokenizer
from tests.counts import Count


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.models.tiny_models import build, write  # takes torch, in each process that collects tests

    path = tmp_path_factory.mktemp("tiny-llama")
    size = write_tokenizer(path)
    return write(build("tied", vocab_size=size, num_hidden_layers=2).half(), path)


def test_a_folder_is_written_and_described(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    quantize_int4(str(folder), str(out), to="int4", group=32)
    assert "14 matrices in 4 bits: plain rounding, groups of 32; the others as they were" in capsys.readouterr().out
    section = quantization_section(json.loads((out / "config.json").read_text()))
    assert section["quant_method"] == "compressed-tensors"
    with pytest.raises(EdgeLMError, match="out exists already"):
        quantize_int4(str(folder), str(out), to="int4", group=32)


@pytest.mark.parametrize(
    ("source", "options", "reason"),
    [
        ("some.gguf", {"to": "int4"}, "some.gguf is a GGUF, and packed INT4 is made from safetensors; name the folder"),
        ("nothing", {"to": "int5"}, "--to int5 is unknown; give int4, int4-awq, int4-gptq"),
        ("nothing", {"to": "int4", "group": 48}, "--group is 48; give 32, 64, 128"),
        ("nothing", {"to": "int4", "calibration": "text"}, "--to int4 needs no calibration"),
    ],
)
def test_wrong_flags_are_told_at_once(source: str, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(EdgeLMError) as error:
        quantize_int4(source, "out", **options)
    assert reason in str(error.value)


def test_without_torch_the_extra_is_named(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec

    def hidden(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == "torch" else find(name, package)

    monkeypatch.setattr("edgelm.commands.quantize_int4.find_spec", hidden)
    with pytest.raises(EdgeLMError, match=r"torch, which is not installed; type: .*edgelm\[cuda\]"):
        quantize_int4(str(folder), str(tmp_path / "out"), to="int4")


PROGRAM = """
import sys
from edgelm.commands.quantize_int4 import quantize_int4
quantize_int4(sys.argv[1], sys.argv[2], to="int4-gptq", group=32)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL][: Count(test=1, soak=2)])
def test_a_kill_leaves_nothing_that_is_listed(
    folder: Path, tmp_path: Path, number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The hidden folder is no model for `edgelm list`, and the same command goes on from it."""
    out, hidden = tmp_path / "out", tmp_path / ".out.part"
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(folder), str(out)], stderr=subprocess.PIPE)
    deadline = time.monotonic() + 100
    try:
        while process.poll() is None and not (hidden / "layer-00000.safetensors").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    listed = [model.path for model in scan(folders=[tmp_path]).models if model.path.is_relative_to(tmp_path)]
    if not out.exists():  # else it was done before the signal came
        assert not listed
        assert number != signal.SIGINT or b"the same command continues after the last finished layer" in said
        quantize_int4(str(folder), str(out), to="int4-gptq", group=32, as_json=True)
        document = json.loads(capsys.readouterr().out)
        assert (document["method"], document["matrices"]) == ("int4-gptq", 14)
    assert len(list(out.glob("*.safetensors"))) == 3
    assert not list(tmp_path.glob(".*"))
