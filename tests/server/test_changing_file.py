"""A model whose file is cut, rewritten or deleted while a front serves it: who asks is told, and nothing else ends."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.harness import LIMIT_S, Front, serving, until
from tests.tiny import write_tiny

LONG = {"max_tokens": 20_000, "temperature": 0}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems may deliver another signal")


def write_model(path: Path, seed: int = 0) -> Path:
    # f16 is not repacked: llama.cpp reads all of it from the mapped file, token by token
    return write_tiny(path, quant="f16", context=32_768, endless=True, seed=seed)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model.gguf")


@pytest.fixture
def front(environment: dict[str, str], model: Path, models: Path, tmp_path: Path) -> Iterator[Front]:
    with serving(
        environment | {"EDGELM_RUNTIME_DIR": str(tmp_path / "run")}, model, models / "tiny.gguf", log=tmp_path / "log"
    ) as running:
        yield running
    assert "Traceback" not in (tmp_path / "log").read_text()


def answer(front: Front) -> str:
    reply = front.chat("model", max_tokens=20, temperature=0)
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["choices"][0]["message"]["content"]
    return text


def test_a_file_that_is_cut_in_the_middle_of_an_answer(front: Front, model: Path) -> None:
    true, text = model.read_bytes(), answer(front)
    front.chat("tiny")
    other = front.ps("tiny")["pid"]
    events = front.events("model", **LONG)
    assert "choices" in next(events)
    os.truncate(model, 4096)
    *_, last = events
    assert last["error"]["code"] == "engine_died"
    assert "model.gguf changed while it was in use" in last["error"]["message"]
    until("it was tried again", lambda: front.ps("model")["state"] == "failed")
    refused = front.chat("model")
    assert refused.status_code == 503
    assert "model.gguf is cut short" in refused.json()["error"]["message"]
    assert front.chat("tiny").status_code == 200
    assert front.ps("tiny")["pid"] == other
    listed = {each["id"]: each for each in front.http.get("/v1/models").json()["data"]}
    assert {"model", "tiny"} <= listed.keys()
    model.write_bytes(true)
    assert until("it is loaded again", lambda: front.chat("model").status_code == 200)
    assert answer(front) == text


def test_a_file_that_was_written_into_is_loaded_again(front: Front, model: Path) -> None:
    """Nobody reads it at that time, so no signal tells of it."""
    first = answer(front)
    engine = front.ps("model")["pid"]
    write_model(model, seed=9)
    second = answer(front)
    assert front.ps("model")["pid"] != engine
    assert second != first


def test_a_file_that_is_deleted_serves_on(front: Front, model: Path) -> None:
    text = answer(front)
    engine = front.ps("model")["pid"]
    events = front.events("model", max_tokens=200, temperature=0)
    assert "choices" in next(events)
    model.unlink()
    *_, last = events
    assert last["choices"][0]["finish_reason"] == "length"
    assert front.ps("model")["pid"] == engine
    write_model(model)
    assert answer(front) == text
    assert front.ps("model")["pid"] != engine, "a file in its place may be another model"


def test_a_file_that_is_replaced_by_renaming_is_loaded_for_the_next_request(front: Front, model: Path) -> None:
    first = answer(front)
    engine = front.ps("model")["pid"]
    events = front.events("model", max_tokens=200, temperature=0)
    assert "choices" in next(events)
    write_model(model.with_name("new"), seed=9).rename(model)
    second: list[str] = []
    asking = threading.Thread(target=lambda: second.append(answer(front)))
    asking.start()
    *_, last = events
    assert last["choices"][0]["finish_reason"] == "length", "it ends with the old model"
    asking.join(LIMIT_S)
    assert second[0] != first
    assert front.ps("model")["pid"] != engine
    assert front.ps("model")["error"] is None
    assert answer(front) == second[0]
