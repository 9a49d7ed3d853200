"""Long work tells its progress and the time left to a pipe, too: a line now and then."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgelm.base.workers.messages import Result, Status
from edgelm.commands import convert, job
from edgelm.commands.quantize import QuantizeJob, _follow
from edgelm.making.conversion.messages import Written
from edgelm.making.quantization.recipe import Recipe


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "LINE_INTERVAL_S", 0.0)


def test_quantize(capsys: pytest.CaptureFixture[str]) -> None:
    work = QuantizeJob(source=Path("a.gguf"), destination=Path("b.gguf"), recipe=Recipe("Q4_0"))
    lines = ["importance matrix: 3 of 58 windows of text, 2:10 min left", "quantizing 1 of 30: blk.0, 4 s left"]
    assert _follow(iter([*map(Status, lines), Result({"path": "b.gguf"})]), work) == {"path": "b.gguf"}
    assert capsys.readouterr().err.splitlines() == lines


def test_convert(capsys: pytest.CaptureFixture[str]) -> None:
    bar = convert._Bar(terminal=False)
    with bar:
        bar.show(Written(1_000_000, 9_000_000))
        bar.show(Written(5_000_000, 9_000_000))
        bar.show(Status("checking the logits"))
    first, second, third = capsys.readouterr().err.splitlines()
    assert first == "1.00 MB of 9.00 MB"
    assert second.startswith("5.00 MB of 9.00 MB, ")
    assert second.endswith(" left")
    assert third == "checking the logits"
