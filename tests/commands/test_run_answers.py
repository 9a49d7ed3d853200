"""`edgelm run`: answers in a given form, and reasoning before an answer, as a user sees them."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.commands.test_run import TIMEOUT_S, Edgelm, error_of
from tests.tiny import EOS, FIRST_BYTE, SPACE, vocabulary, write_tiny

CHAT = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
THINKING = (
    "{% for m in messages %}{{ m.content.split('</think>')[-1] }}\n{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>"
    "{% else %}{{ reasoning_effort }}<think>\n{% endif %}"
)
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "size": {"enum": ["s", "m"]}},
    "required": ["ok", "size"],
    "additionalProperties": False,
}
OBJECT = re.compile(r'\{"ok": (true|false), "size": "[sm]"\}')
GREEDY = ("--temperature", "0")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    words = vocabulary(512)
    script = [
        FIRST_BYTE + ord("\n"),
        words.index(SPACE + "m"),
        *_spelled("</think>"),
        words.index(SPACE + "hello"),
        EOS,
    ]
    return {
        "text": write_tiny(folder / "text.gguf", context=512),
        "chat": write_tiny(folder / "chat.gguf", context=512, chat_template=CHAT),
        "thinking": write_tiny(folder / "thinking.gguf", context=512, chat_template=THINKING, script=tuple(script)),
    }


def _spelled(text: str) -> list[int]:
    """Return the tokens of a text of single characters."""
    words = vocabulary(512)
    return [words.index(char) if char in words else FIRST_BYTE + ord(char) for char in text]


@pytest.fixture
def file(tmp_path: Path) -> Callable[[str, str], Path]:
    def write(name: str, text: str) -> Path:
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


def told(done: subprocess.CompletedProcess[bytes]) -> bytes:
    """Return the standard error of a run, without the progress that a busy machine is shown."""
    return b"".join(line for line in done.stderr.splitlines(keepends=True) if not line.startswith(b"loading "))


# -- forms ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [(), ("--raw",), ("--spec", "off"), ("--engine", "torch", "--device", "cpu")])
def test_an_answer_is_exactly_the_json_of_a_schema(
    edgelm: Edgelm, models: dict[str, Path], file: Callable[[str, str], Path], more: tuple[str, ...]
) -> None:
    schema = file("s.json", json.dumps(SCHEMA))
    done = edgelm("run", models["chat"], "hello", "--schema", schema, *more)
    assert (done.returncode, told(done)) == (0, b"")
    assert OBJECT.fullmatch(done.stdout.decode().removesuffix("\n"))


def test_each_kind_of_grammar_rules_the_answer(
    edgelm: Edgelm, models: dict[str, Path], file: Callable[[str, str], Path]
) -> None:
    cases: list[tuple[tuple[str | Path, ...], str]] = [
        (("--regex", "[a-f]{3}[0-9]"), "[a-f]{3}[0-9]"),
        (("--choice", "apple pie", "--choice", "é?"), "apple pie|é\\?"),
        (("--grammar", file("no-suffix", 'root ::= "a" [0-9] "b"')), "a[0-9]b"),
        (("--grammar", file("g.lark", 'start: "x" /[0-9]/ "y"')), "x[0-9]y"),
    ]
    for flags, pattern in cases:
        done = edgelm("run", models["text"], "hello", *flags)
        assert (done.returncode, told(done)) == (0, b""), flags
        assert re.fullmatch(pattern, done.stdout.decode().removesuffix("\n")), flags


def test_the_json_document_of_a_constrained_answer_is_that_of_any(
    edgelm: Edgelm, models: dict[str, Path], file: Callable[[str, str], Path]
) -> None:
    plain = json.loads(edgelm("run", models["chat"], "hello", "--json", "--max-tokens", "3").stdout)
    schema = file("s.json", json.dumps(SCHEMA))
    document = json.loads(edgelm("run", models["chat"], "hello", "--json", "--schema", schema).stdout)
    assert set(document) == set(plain)
    assert json.loads(document["text"])["size"] in {"s", "m"}
    assert document["finish_reason"] == "stop"
    assert len(document["token_ids"]) == document["usage"]["completion_tokens"]


def test_an_answer_that_is_cut_off_is_reported_as_incomplete(edgelm: Edgelm, models: dict[str, Path]) -> None:
    done = edgelm("run", models["chat"], "hello", "--regex", "[a-z]{50}", "--max-tokens", "4")
    assert done.returncode == 0
    assert re.fullmatch(rb"[a-z]{4,49}\n", done.stdout)
    assert done.stderr == b"note: the answer is incomplete: 4 tokens are the limit; raise --max-tokens\n"
    plain = edgelm("run", models["chat"], "hello", "--max-tokens", "4", "--json")
    assert (plain.returncode, plain.stderr) == (0, done.stderr)
    assert json.loads(plain.stdout)["finish_reason"] == "length"


def test_two_forms_at_once_are_wrong_usage(edgelm: Edgelm, models: dict[str, Path]) -> None:
    for flags, expected in {
        ("--regex", "a", "--choice", "b"): b"--regex and --choice cannot be used together",
        ("--schema", "missing", "--json-object", "--grammar", "g"): b"--schema and --json-object and --grammar cannot",
        ("--raw", "--think", "low"): b"--raw and --think cannot be used together",
        ("--think", "hard"): b"--think",
    }.items():
        done = edgelm("run", models["chat"], "hi", *flags)
        assert (done.returncode, done.stderr.count(b"\n")) == (2, 1), done
        assert done.stderr.startswith(b"error: "), done
        assert expected in done.stderr, done


def test_a_bad_grammar_is_one_line_that_names_the_cause(
    edgelm: Edgelm, models: dict[str, Path], tmp_path: Path, file: Callable[[str, str], Path]
) -> None:
    cases: list[tuple[tuple[str | Path, ...], str]] = [
        (("--schema", tmp_path / "missing.json"), "missing.json cannot be read: No such file"),
        (("--schema", file("odd.json", '{"$ref": "other.json"}')), "other.json"),
        (("--grammar", file("name.gbnf", "root ::= nothing")), "Rule 'nothing' not found"),
        (("--regex", "[0-9"), "unclosed character class"),
    ]
    for flags, expected in cases:
        message = error_of(edgelm("run", models["text"], "hi", *flags))
        assert expected in message, flags
        assert "edgelm failed" not in message
        assert "strict" not in message
        assert flags[0] == "--regex" or str(flags[1]) in message, "the file is named"


# -- reasoning -----------------------------------------------------------------------------------------------------


def test_reasoning_is_not_part_of_the_answer(edgelm: Edgelm, models: dict[str, Path]) -> None:
    done = edgelm("run", models["thinking"], "hi", *GREEDY)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"hello\n", b"")


def test_a_terminal_shows_reasoning_dim_on_standard_error(edgelm: Edgelm, models: dict[str, Path]) -> None:
    parent, child = pty.openpty()
    done = subprocess.run(
        [*edgelm.command, "run", str(models["thinking"]), "hi", *GREEDY],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=child,
        timeout=TIMEOUT_S,
        env=edgelm.environment,
        check=False,
    )
    os.close(child)
    shown = b""
    try:
        while more := os.read(parent, 4096):
            shown += more
    except OSError:  # the end of a terminal
        pass
    os.close(parent)
    assert (done.returncode, done.stdout) == (0, b"hello\n")
    assert b"\x1b[2mm\x1b[22m" in shown
    assert shown.endswith(b"\n\x1b[22m")  # the answer begins on a line of its own
    assert b"think>" not in shown


def test_think_reaches_the_chat_template(edgelm: Edgelm, models: dict[str, Path]) -> None:
    def document(*flags: str) -> dict[str, object]:
        done = edgelm("run", models["thinking"], "hi", *GREEDY, "--json", *flags)
        result: dict[str, object] = json.loads(done.stdout)
        return result

    off, low, auto = document("--think", "off"), document("--think", "low"), document("--think", "auto")
    assert (str(off["text"]).strip(), "reasoning" in off) == ("hello", False)
    assert (low["text"], low["reasoning"]) == (auto["text"], auto["reasoning"]) == ("hello", "m")
    assert low["usage"]["prompt_tokens"] > auto["usage"]["prompt_tokens"]  # type: ignore[index]
    assert len(auto["token_ids"]) == auto["usage"]["completion_tokens"]  # type: ignore[arg-type,index]


def test_a_grammar_rules_the_answer_behind_the_reasoning(
    edgelm: Edgelm, models: dict[str, Path], file: Callable[[str, str], Path]
) -> None:
    for flags, pattern in (
        (("--schema", file("s.json", json.dumps(SCHEMA))), OBJECT.pattern),
        (("--grammar", file("g.gbnf", 'root ::= "a" | "b"')), "[ab]"),
    ):
        done = edgelm("run", models["thinking"], "hi", *GREEDY, "--json", *flags)
        assert done.returncode == 0, done
        document = json.loads(done.stdout)
        assert document["reasoning"] == "m", flags
        assert re.fullmatch(pattern, document["text"]), flags


def test_reasoning_without_an_answer_is_reported(edgelm: Edgelm, models: dict[str, Path]) -> None:
    done = edgelm("run", models["thinking"], "hi", *GREEDY, "--max-tokens", "2")
    assert (done.returncode, done.stdout) == (0, b"")
    assert done.stderr == b"note: the answer is incomplete: 2 tokens are the limit; raise --max-tokens\n"
