"""`edgelm run MODEL PICTURE… PROMPT`: what reaches the engine, what is saved, and one line for what cannot be sent."""

from __future__ import annotations

import base64
import io
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from edgelm.base.workers.messages import Result, RunJob, Text
from edgelm.commands import run as run_module
from edgelm.commands.cli import run_cli
from edgelm.jobs.run import _chat_request
from tests.library.projector_file import write_projector
from tests.tiny import write_tiny

DOCUMENT = {
    "text": "A cat.", "finish_reason": "stop",
    "usage": {"prompt_tokens": 9, "cached_tokens": 0, "completion_tokens": 3},
    "timings": {"first_token_ms": 1.0, "decode_tokens_per_second": 9.0, "prompt_ms": 1.0},
    "speculation": {"drafted": 0, "accepted": 0},
}  # fmt: skip


def picture(color: str, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (40, 30), color).save(file, kind)
    return file.getvalue()


def url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


class Edgelm:
    """The command, with a worker that only notes its job."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys
        self.jobs: list[RunJob] = []

        @contextmanager
        def run_job(job: RunJob, *_: Any) -> Iterator[Iterator[Any]]:
            self.jobs.append(job)
            yield iter([Text("A cat."), Result(dict(DOCUMENT))])

        monkeypatch.setattr(run_module, "run_job", run_job)

    def __call__(self, *arguments: str | Path, stdin: bytes = b"") -> tuple[int, str]:
        """Return the exit code and standard error."""
        pipe = io.TextIOWrapper(io.BytesIO(stdin))
        self._monkeypatch.setattr(sys, "stdin", pipe)
        self._monkeypatch.setattr(sys, "argv", ["edgelm", "run", *map(str, arguments)])
        code = run_cli()
        return code, self._capsys.readouterr().err


@pytest.fixture
def edgelm(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Edgelm:
    monkeypatch.chdir(home)
    return Edgelm(monkeypatch, capsys)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    write_projector(tmp_path / "models" / "mmproj-m.gguf")
    return write_tiny(tmp_path / "models" / "m.gguf")


def test_pictures_stand_before_the_prompt_in_their_order(edgelm: Edgelm, model: Path, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture("red"))
    (tmp_path / "b b.JPG").write_bytes(picture("blue", "JPEG"))
    assert edgelm(model, "a.png", tmp_path / "b b.JPG", "-", "Which differ?", stdin=picture("white"))[0] == 0
    (job,) = edgelm.jobs
    urls = (url(picture("red")), url(picture("blue", "JPEG"), "jpeg"), url(picture("white")))
    assert (job.prompt, job.images) == ("Which differ?", urls)
    content = _chat_request(job, ()).messages[0]["content"]
    assert content == [
        *({"type": "image_url", "image_url": {"url": each}} for each in urls),
        {"type": "text", "text": "Which differ?"},
    ]


def test_a_picture_on_standard_input_needs_no_dash(edgelm: Edgelm, model: Path) -> None:
    assert edgelm(model, "What is it?", stdin=picture("red"))[0] == 0
    assert edgelm(model, "-", "What is it?", stdin=picture("red"))[0] == 0
    assert edgelm.jobs[0] == edgelm.jobs[1]
    assert edgelm.jobs[0].images == (url(picture("red")),)


def test_texts_are_read_as_before(edgelm: Edgelm, model: Path) -> None:
    assert edgelm(model, "Sum it up.", stdin=b"a text")[0] == 0
    assert edgelm(model, "Is cat.png a good name?")[0] == 0
    assert [(job.prompt, job.images) for job in edgelm.jobs] == [
        ("Sum it up.\n\na text", ()),
        ("Is cat.png a good name?", ()),
    ]
    assert _chat_request(edgelm.jobs[1], ()).messages[0]["content"] == "Is cat.png a good name?"


def test_a_chat_keeps_its_pictures_and_sends_them_again(edgelm: Edgelm, model: Path, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture("red"))
    assert edgelm(model, "a.png", "What is it?", "--save")[0] == 0
    (tmp_path / "a.png").unlink()
    assert edgelm("-c", "And its colour?")[0] == 0
    said = [(said.role, said.text, said.images) for said in edgelm.jobs[1].before]
    assert said == [("user", "What is it?", edgelm.jobs[0].images), ("assistant", "A cat.", ())]
    (tmp_path / "b.png").write_bytes(picture("blue"))
    assert edgelm("-c", "b.png", "And this?")[0] == 0
    assert (edgelm.jobs[2].prompt, edgelm.jobs[2].images) == ("And this?", (url(picture("blue")),))
    code, output = edgelm("-c", "--mmproj", "off", "Go on")[:2]
    assert (code, output.count("left out for m, which reads no pictures: a.png, b.png")) == (0, 1)
    job = edgelm.jobs[-1]
    assert (job.prompt, job.images, [said.images for said in job.before]) == ("Go on", (), [()] * len(job.before))
    assert job.before[0].text == "*a.png (a picture)*\n\nWhat is it?"


Case = tuple[Callable[[Path], tuple[str | Path, ...]], int, str]
REFUSED: dict[str, Case] = {
    "no projector": (lambda at: (write_tiny(at / "blind.gguf"), at / "a.png", "?"), 1, "blind reads no pictures"),
    "--mmproj off": (lambda at: (at / "models/m.gguf", at / "a.png", "?", "--mmproj", "off"), 1, "--mmproj off"),
    "--raw": (lambda at: (at / "models/m.gguf", at / "a.png", "?", "--raw"), 2, "--raw and pictures"),
    "no file": (lambda at: (at / "models/m.gguf", "none.png", "?"), 1, "none.png does not exist"),
    "a text": (lambda at: (at / "models/m.gguf", "text.png", "?"), 1, "text.png is not a picture"),
    "cut off": (lambda at: (at / "models/m.gguf", "cut.png", "?"), 1, "cut.png is damaged or cut off"),
    "two prompts": (lambda at: (at / "models/m.gguf", "a.png", "What", "is"), 2, "unexpected extra argument (is)"),
    "nothing piped": (lambda at: (at / "models/m.gguf", "-", "?"), 1, "standard input is empty"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_sent_is_one_line(case: str, edgelm: Edgelm, model: Path, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture("red"))
    (tmp_path / "cut.png").write_bytes(picture("red")[:70])
    (tmp_path / "text.png").write_bytes(b"a text")
    arguments, exit_code, words = REFUSED[case]
    code, errors = edgelm(*arguments(tmp_path))
    assert (code, edgelm.jobs) == (exit_code, [])
    assert words in errors
    assert len(errors.splitlines()) == 1


def test_models_that_read_pictures_are_named(
    edgelm: Edgelm, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.png").write_bytes(picture("red"))
    blind = write_tiny(tmp_path / "blind.gguf")
    assert "edgelm pull gemma3:4b" in edgelm(blind, "a.png", "?")[1]
    monkeypatch.setenv("EDGELM_MODEL_DIRS", str(model.parent))
    assert "blind reads no pictures; these here do: m" in edgelm(blind, "a.png", "?")[1]
