"""`edgelm run --know`: the model reads passages of files, and the user sees which."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.commands.test_run import Edgelm, error_of
from tests.tiny import write_tiny

# The model writes the roles and the length of what it got: behind the system message comes the question.
CHAT = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
GUIDE = "# Guide\n\n## Install\n\nRun `make chat`.\n\n## Models\n\n`edgelm list` shows the models here.\n"
QUESTION = "which command shows me the models?"
SHORT = ("--max-tokens", "3", "--temperature", "0")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "chat": write_tiny(folder / "chat.gguf", context=8192, chat_template=CHAT),
        "text": write_tiny(folder / "text.gguf", context=8192),
        "small": write_tiny(folder / "small.gguf", context=256, chat_template=CHAT),
    }


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    folder = tmp_path / "notes"
    folder.mkdir()
    (folder / "guide.md").write_text(GUIDE)
    (folder / "picture.png").write_bytes(b"\x89PNG")
    return folder


def test_the_note_names_what_the_model_reads(edgelm: Edgelm, models: dict[str, Path], notes: Path) -> None:
    done = edgelm("run", models["chat"], QUESTION, "--know", notes, *SHORT)
    assert done.returncode == 0
    assert b"note: not read: picture.png (not a text file)\n" in done.stderr
    assert "read: 1 guide.md › Models\n" in done.stderr.decode()
    assert b"guide.md" not in done.stdout


@pytest.mark.parametrize("kind", ["chat", "text"])
def test_json_has_the_passages_and_the_prompt_is_longer_by_them(
    edgelm: Edgelm, models: dict[str, Path], notes: Path, kind: str
) -> None:
    plain = json.loads(edgelm("run", models[kind], QUESTION, "--json", *SHORT).stdout)
    assert "passages" not in plain
    document = json.loads(edgelm("run", models[kind], QUESTION, "--know", notes, "--json", *SHORT).stdout)
    text = "## Models\n\n`edgelm list` shows the models here."
    name = "guide.md › Models"
    assert document["passages"] == [{"name": name, "source": "guide.md", "heading": "Models", "text": text}]
    more = document["usage"]["prompt_tokens"] - plain["usage"]["prompt_tokens"]
    assert more > len(text) / 8  # no token of this vocabulary is longer


def test_the_files_are_read_again_and_several_may_be_named(
    edgelm: Edgelm, models: dict[str, Path], notes: Path, tmp_path: Path
) -> None:
    (tmp_path / "more.txt").write_text("The models are in a folder.")
    flags = ("--know", notes, "--know", tmp_path / "more.txt", "--json", *SHORT)
    names = [p["name"] for p in json.loads(edgelm("run", models["chat"], QUESTION, *flags).stdout)["passages"]]
    assert names == ["guide.md › Models", "more.txt"]
    (notes / "guide.md").write_text("# Recipes\n\nApples.\n")
    names = [p["name"] for p in json.loads(edgelm("run", models["chat"], QUESTION, *flags).stdout)["passages"]]
    assert names == ["more.txt"]


def test_a_question_that_no_passage_fits(edgelm: Edgelm, models: dict[str, Path], notes: Path) -> None:
    done = edgelm("run", models["chat"], "hello", "--know", notes, "--json", *SHORT)
    assert b"read: nothing: no passage fits the question\n" in done.stderr
    assert json.loads(done.stdout)["passages"] == []


def test_a_small_context_has_no_room(edgelm: Edgelm, models: dict[str, Path], notes: Path) -> None:
    done = edgelm("run", models["small"], QUESTION, "--know", notes, *SHORT)
    assert done.returncode == 0
    assert b"read: nothing: the context has no room; raise --ctx\n" in done.stderr


def test_raw_and_know_are_wrong_usage(edgelm: Edgelm, models: dict[str, Path], notes: Path) -> None:
    done = edgelm("run", models["chat"], "hi", "--raw", "--know", notes)
    assert (done.returncode, done.stderr.count(b"\n")) == (2, 1)
    assert b"--raw and --know cannot be used together" in done.stderr


def test_what_cannot_be_read_is_one_line(edgelm: Edgelm, models: dict[str, Path], notes: Path) -> None:
    (notes / "empty").mkdir()
    (notes / "server.pem").write_text("key")
    for path, expected in (
        (notes / "missing", "does not exist; name a folder"),
        (notes / "empty", "there is nothing to read in"),
        (notes / "server.pem", "cannot be knowledge: it may hold a key"),
    ):
        assert expected in error_of(edgelm("run", models["chat"], "hi", "--know", path))


def test_the_starter_reads_the_guide(edgelm: Edgelm) -> None:
    flags = ("--json", "--max-tokens", "60", "--temperature", "0")
    document = json.loads(edgelm("run", "starter", "how do I stop an answer?", *flags).stdout)
    assert [passage["name"] for passage in document["passages"]] == ["chat › Stop an answer, or quit"]
    assert "`Esc`" in document["text"]
    document = json.loads(edgelm("run", "starter", "Who wrote the Iliad?", *flags).stdout)
    assert [passage["name"] for passage in document["passages"]] == ["models › A larger model for this machine"]
    assert document["text"].startswith("Sorry, I know only edgelm")
    assert "passages" not in json.loads(edgelm("run", "starter", "hello", "--raw", *flags).stdout)


@pytest.mark.parametrize(
    "question",
    [
        "could I perhaps connect from my phone to it",
        "Wie lade ich ein Modell?",
        "Comment réduire l'utilisation de la mémoire ?",
        "怎样使用 gpu",
    ],
)
def test_capitals_do_not_change_the_starters_answer(edgelm: Edgelm, question: str) -> None:
    flags = ("--json", "--max-tokens", "60", "--temperature", "0")
    answers = [json.loads(edgelm("run", "starter", asked, *flags).stdout) for asked in (question, question.upper())]
    assert len({answer["usage"]["prompt_tokens"] for answer in answers}) == 1, "it reads the same tokens"
    assert answers[0]["text"] == answers[1]["text"]
    assert not answers[1]["text"].startswith("Sorry")


def test_the_starter_answers_where_nothing_can_be_indexed(edgelm: Edgelm, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = edgelm("run", "starter", "hello", *SHORT, EDGELM_CACHE_DIR=str(tmp_path / "file"))
    assert done.returncode == 0
    assert b"note: the guide is not read: " in done.stderr
    assert b"Traceback" not in done.stderr
