"""Ollama's routes of a real front: what a client of Ollama finds, and who may load, unload and pull."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest

from edgelm.base.workers.messages import Ready
from edgelm.server.api.dialects import COUNTS, DIALECTS, POOLED, TEXTS
from edgelm.server.models import Listed
from edgelm.server.routes.ollama import _running
from tests.library.test_ollama_store import store_model
from tests.ports import free_port
from tests.server.fake_engines import footprint
from tests.server.harness import ENDLESS, Front, read_line, serving, until

FAST = {"options": {"num_predict": 3, "temperature": 0}}


def chat(front: Front, **fields: Any) -> httpx2.Response:
    asked = {"model": "tiny:latest", "messages": [{"role": "user", "content": "hello"}], **FAST}
    return front.http.post("/api/chat", json=asked | fields)


def lines(answer: httpx2.Response) -> list[dict[str, Any]]:
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


def test_probes(front: Front) -> None:
    for method in ("GET", "HEAD"):
        answer = front.http.request(method, "/")
        assert (answer.status_code, answer.text) == (200, "Ollama is running" if method == "GET" else "")
    major, minor, _ = map(int, front.http.get("/api/version").json()["version"].split("."))
    assert (major, minor) >= (0, 7), "VS Code wants 0.6.4"


def test_a_look_loads_nothing(own: dict[str, str], models: Path, tmp_path: Path) -> None:
    with serving(own, models / "tiny.gguf", log=tmp_path / "log") as front:
        tags = front.http.get("/api/tags").json()["models"]
        assert {"starter:latest", "tiny:latest"} <= {model["name"] for model in tags}
        assert all(len(model["digest"]) == 64 and model["size"] and model["modified_at"] for model in tags)
        shown = front.http.post("/api/show", json={"model": "tiny"}).json()
        assert shown["capabilities"] == ["completion"], "it has no template for tools"
        assert shown["model_info"]["llama.context_length"] == 512
        assert shown["parameters"] == "num_ctx 512"
        assert front.http.get("/props").json()["default_generation_settings"] == {"n_ctx": 512}
        assert front.http.get("/slots").json() == []
        assert front.http.get("/api/ps").json() == {"models": []}
        assert front.ps()["models"] == []


def test_a_stream_and_a_whole_answer(front: Front) -> None:
    got = lines(chat(front))
    whole = chat(front, stream=False).json()
    assert "".join(line["message"]["content"] for line in got) == whole["message"]["content"]
    assert (got[-1]["done"], got[-1]["done_reason"], got[-1]["eval_count"]) == (True, "length", 3)
    assert whole["model"] == "tiny:latest"
    text = front.http.post(
        "/api/generate", json={"model": "tiny", "prompt": "the", "raw": True, "stream": False} | FAST
    )
    assert text.json()["prompt_eval_count"] < whole["prompt_eval_count"]
    (running,) = [model for model in front.http.get("/api/ps").json()["models"] if model["name"] == "tiny:latest"]
    assert running["context_length"] == 512
    assert running["size"] == front.ps("tiny")["predicted_bytes"]
    assert running["size_vram"] == 0


def test_without_a_content_type_a_program_is_heard_and_a_page_is_not(front: Front) -> None:
    asked = json.dumps({"model": "tiny", "stream": False, "messages": [{"role": "user", "content": "x"}]} | FAST)
    form = {"content-type": "application/x-www-form-urlencoded"}  # as `curl -d` sends it
    for headers in ({}, form):
        assert front.http.post("/api/chat", content=asked, headers=headers).status_code == 200
    for more in (
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-mode": "no-cors"},
        {"origin": front.address},
        {"x-forwarded-for": "10.0.0.1"},
        {"content-type": "text/plain"},
    ):
        assert front.http.post("/api/chat", content=asked, headers=form | more).status_code == 415, more
    for route in (*DIALECTS, *COUNTS, *TEXTS, *POOLED, "/models/load", "/models/unload", "/api/show"):
        assert front.http.post(route, content=b"{}", headers=form).status_code == 400, f"{route} has read it"
        assert front.http.post(route, content=b"{}").status_code == 400, route
        assert front.http.post(route, content=b"{}", headers={"content-type": "text/plain"}).status_code == 415, route
    chat = {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
    for route in ("/v1/chat/completions", "/v1/messages"):
        assert front.http.post(route, content=json.dumps(chat), headers=form).status_code == 200
    refused = front.http.post("/api/chat", content=asked, headers=form | {"host": "evil.example"})
    assert (refused.status_code, list(refused.json())) == (403, ["error"])


def test_loading_and_unloading(front: Front) -> None:
    loaded = front.http.post("/api/generate", json={"model": "tiny", "keep_alive": "20m"})
    assert (loaded.json()["done_reason"], front.ps("tiny")["keep_alive_s"]) == ("load", 1200)
    assert front.http.post("/api/generate", json={"model": "tiny", "keep_alive": 1e300}).status_code == 200
    assert front.http.get("/api/ps").json()["models"][0]["expires_at"] > "2050", "as a date"
    pid = front.ps("tiny")["pid"]
    assert chat(front, options={**FAST["options"], "num_ctx": 32_768}).status_code == 200
    assert front.ps("tiny")["pid"] == pid, "another num_ctx loads nothing again"
    away = {"x-forwarded-for": "10.0.0.1"}
    refused = front.http.post("/api/chat", json={"model": "tiny", "keep_alive": 0}, headers=away)
    assert (refused.status_code, "admin" in refused.json()["error"]) == (403, True)
    unloaded = front.http.post("/api/chat", json={"model": "tiny", "keep_alive": 0})
    assert unloaded.json()["done_reason"] == "unload"
    until("it is unloaded", lambda: front.ps("tiny") is None)
    again = front.http.post("/api/chat", json={"model": "tiny", "keep_alive": 0})
    assert again.status_code == 200, "as Ollama: it is not loaded, and that is what is wanted"


def test_errors_have_ollamas_form(front: Front) -> None:
    missing = chat(front, model="llama3:8b")
    assert (missing.status_code, list(missing.json())) == (404, ["error"])
    too_long = [{"role": "user", "content": "the " * 2000}]
    assert chat(front, messages=too_long, stream=False).status_code == 400  # a stream may begin before the engine
    assert front.http.post("/api/show", json={"model": 3}).json()["error"]
    assert front.http.get("/api/nothing").json() == {"error": "GET /api/nothing: not found"}


def test_an_engine_that_dies_is_the_last_line(front: Front) -> None:
    endless = {"model": "long", "prompt": "the", "raw": True, "options": ENDLESS | {"num_predict": 30_000}}
    got = []
    with front.http.stream("POST", "/api/generate", json=endless) as answer:
        for line in answer.iter_lines():
            got.append(json.loads(line))
            if len(got) == 3:
                os.kill(front.ps("long")["pid"], signal.SIGKILL)
    assert all("response" in line for line in got[:-1])
    assert list(got[-1]) == ["error"]


def test_pulling_needs_the_right_to_it(front: Front) -> None:
    assert [line["status"] for line in lines(front.http.post("/api/pull", json={"model": "tiny"}))] == [
        "pulling manifest",
        "success",
    ]
    assert front.http.post("/api/pull", json={"name": "tiny:latest", "stream": False}).json() == {"status": "success"}
    away = front.http.post("/api/pull", json={"model": "tiny"}, headers={"x-forwarded-for": "10.0.0.1"})
    assert away.status_code == 403
    wrong = lines(front.http.post("/api/pull", json={"model": "no such name"}))
    assert list(wrong[-1]) == ["error"]
    assert front.http.post("/api/pull", json={"model": "no such name", "stream": False}).status_code == 404


def test_a_model_of_ollamas_store_answers_at_the_second_port(own: dict[str, str], tmp_path: Path) -> None:
    blob = store_model(tmp_path / "store", "small:1b")
    before = blob.stat()
    with httpx2.Client() as free:
        port = free_port()
        store = {"OLLAMA_MODELS": str(tmp_path / "store")}
        with serving(own | store, "--ollama-port", str(port), log=tmp_path / "log") as front:
            second = f"http://127.0.0.1:{port}"
            assert "ollama:small:1b" in [model["name"] for model in free.get(f"{second}/api/tags").json()["models"]]
            asked = {"model": "small:1b", "prompt": "the", "raw": True, "stream": False} | FAST
            assert free.post(f"{second}/api/generate", json=asked, timeout=60).json()["done"]
            assert front.ps("ollama:small:1b")["state"] == "ready"
            shown, listed = (
                subprocess.run(
                    [sys.executable, "-m", "edgelm", "ps", *flags], env=own, capture_output=True, text=True, check=True
                ).stdout
                for flags in ([], ["--json"])
            )
            assert f"at {front.address}, for Ollama's clients at {second} (pid {front.process.pid})" in shown
            assert json.loads(listed)["ollama_address"] == second
    assert blob.stat().st_mtime_ns == before.st_mtime_ns


def test_the_start_tells_both_addresses(own: dict[str, str]) -> None:
    port = free_port()
    command = [sys.executable, "-m", "edgelm", "serve", "--port", "0", "--ollama-port", str(port)]
    with subprocess.Popen(command, env=own, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as server:
        try:
            line = read_line(server).decode()
        finally:
            server.terminate()
    assert re.fullmatch(
        rf"edgelm listens at http://127.0.0.1:\d+/v1, and for Ollama's clients at http://127.0.0.1:{port} .*\n", line
    )


@pytest.mark.parametrize(
    ("device", "plan", "size", "vram"),
    [
        ("CUDA0, 20 of 37 layers", {"device": "gpu", "offloaded": 60}, 100, 60),
        ("CUDA0", {"device": "gpu", "offloaded": 60}, 100, 100),  # main memory holds only what no GPU takes
        ("NVIDIA GeForce RTX 3060", {"device": "cuda"}, 40, 40),
        ("cpu", {}, 40, 0),
    ],
)
def test_what_lies_on_a_gpu_is_told_as_ollama_does(
    tmp_path: Path, device: str, plan: dict[str, Any], size: int, vram: int
) -> None:
    (tmp_path / "m.gguf").touch()
    listed = Listed("m", tmp_path / "m.gguf", 0, {})
    slot = SimpleNamespace(
        footprint=footprint(40, **plan),
        process=SimpleNamespace(info=Ready("m", "llama", device, 512)),
        keep_alive_s=1.0,
        idle_s=0.0,
    )
    entry = _running(listed, slot)
    assert (entry["size"], entry["size_vram"]) == (size, vram)
