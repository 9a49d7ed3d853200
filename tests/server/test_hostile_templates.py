"""A chat template that writes escape sequences into its error: one clean line, at the endpoint and at a terminal."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.harness import Front, serving
from tests.tiny import write_tiny

# It would write the clipboard, the title, the line above, and turn the text around.
ERROR = r"bad\x1b]52;c;aGVsbG8=\x07\x1b[2J\x1b]0;title\x07\x9b1A\r\nsecond\u202eline"
TEMPLATE = '{{ raise_exception("' + ERROR + '") }}'
CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]")
LIMIT_S = 120
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model") / "hostile.gguf", chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def front(environment: dict[str, str], model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with serving(environment, model, log=tmp_path_factory.mktemp("log") / "front.log") as running:
        yield running


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 4}),
        ("/v1/responses", {"input": "hello"}),
        ("/api/chat", {"messages": MESSAGES}),
        ("/v1/chat/completions", {"messages": MESSAGES, "stream": True}),
        ("/apply-template", {"messages": MESSAGES}),
    ],
)
def test_the_endpoint_answers_with_one_clean_line(front: Front, path: str, body: dict[str, object]) -> None:
    reply = front.http.post(path, json={"model": "hostile", **body})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert "bad" in message
    assert "second" in message
    assert not CONTROL.search(message)
    assert "\n" not in message


def test_terminals_get_one_clean_line(front: Front, model: Path, environment: dict[str, str]) -> None:
    for arguments in (
        ["run", str(model), "hello"],
        ["--plain", "--endpoint", f"{front.address}/v1", "--model", "hostile"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "edgelm", *arguments],
            env=environment,
            input="hello\n",
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        shown = done.stdout + done.stderr
        line = next((line for line in shown.splitlines() if "bad" in line), "")
        assert "second" in line, shown
        assert not CONTROL.search(shown), shown
