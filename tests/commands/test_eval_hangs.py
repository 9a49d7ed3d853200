"""`edgelm eval` on a GPU that hangs: the row fails, the others go on, and what cannot be loaded is llama.cpp's."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

import pytest

from edgelm.commands import job
from edgelm.commands.eval import Task
from edgelm.commands.eval_output import Form
from edgelm.commands.eval_table import eval_models
from tests.tiny import write_tiny

ROOT = Path(__file__).resolve().parents[2]
TEXT = "Once upon a time there was a little girl. She said hello to the big dog and her friend.\n"


@pytest.fixture
def models(server_environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with models, a text, and workers whose GPU hangs with two of the models."""
    monkeypatch.setattr(job, "WORKER", "tests.commands.hanging_worker")
    for name, value in (server_environment | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}).items():
        monkeypatch.setenv(name, value)
    for name, layers in (("fine", 3), ("step", 2), ("load", 1)):
        write_tiny(tmp_path / f"{name}.gguf", context=512, quant="q8_0", layers=layers)
    (tmp_path / "text.txt").write_text(TEXT * 20)
    return tmp_path


def test_a_row_whose_gpu_hangs_fails_and_the_others_go_on(models: Path, capfd: pytest.CaptureFixture[str]) -> None:
    paths = [str(models / f"{name}.gguf") for name in ("step", "load", "fine")]
    task = Task(models / "text.txt", window=64, limit=2)
    code = eval_models(paths, task, {"kv": "k8v4"}, ("f16",), speed=False, form=Form(as_csv=True))
    assert code == 1
    out, err = capfd.readouterr()
    rows = {row["label"]: row for row in csv.DictReader(io.StringIO(out))}
    hangs = r"the GPU hangs: the evaluation of 63 tokens did not end within \d s; try again; see what nvidia-smi says"
    assert re.fullmatch(hangs, rows["step"]["error"])
    assert not rows["fine"]["error"]
    assert not rows["load"]["error"]
    piece = r"note: CUDA is not used: the GPU hangs: a piece of loading the model did not end within \d s"
    assert len(re.findall(piece, err)) == 1
    assert "Traceback" not in err
