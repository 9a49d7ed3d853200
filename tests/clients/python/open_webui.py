"""Open WebUI: the requests of its backend by hand, after routers/ollama.py and our notes on 0.12.

Its package needs gigabytes. The checks read what its code reads.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import httpx
from checks import ADDRESS, MODEL, PATIENCE_S, check, main

HEADERS = {"User-Agent": "Mozilla/5.0 (compatible; Open WebUI)"}
http = httpx.Client(base_url=ADDRESS, timeout=PATIENCE_S, headers=HEADERS)
NAME = f"{MODEL}:latest"
USER = [{"role": "user", "content": "Hello there"}]


def post(path: str, body: dict[str, Any]) -> httpx.Response:
    """Send JSON as its aiohttp session does: as bytes, with the content type of JSON."""
    answer = http.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    answer.raise_for_status()
    return answer


@check
def the_connection_is_verified() -> None:
    assert http.get("/api/version").json()["version"].split(".")


@check
def the_list_of_ollamas_models() -> None:
    models = {model["model"]: model for model in http.get("/api/tags").json()["models"]}
    assert NAME in models
    assert models[NAME]["name"]
    assert models[NAME]["details"]["family"]
    post("/api/generate", {"model": NAME})
    running = {model["name"]: model for model in http.get("/api/ps").json()["models"]}[NAME]
    assert datetime.fromisoformat(running["expires_at"]).tzinfo


@check
def a_chat_of_ollama() -> None:
    body = {
        "model": NAME, "messages": USER, "stream": True, "keep_alive": "5m",
        "options": {"temperature": 0.7, "num_ctx": 4096, "num_predict": 16, "repeat_penalty": 1.1, "mirostat": 0},
    }  # fmt: skip
    with http.stream(
        "POST", "/api/chat", content=json.dumps(body), headers={"Content-Type": "application/json"}
    ) as got:
        assert got.headers["content-type"] == "application/x-ndjson"
        lines = [json.loads(line) for line in got.iter_lines()]
    assert "".join(line["message"]["content"] for line in lines)
    usage = lines[-1]  # utils/response.py makes OpenAI's usage of these
    for name in ("prompt_eval_count", "eval_count", "prompt_eval_duration", "eval_duration", "total_duration"):
        assert isinstance(usage[name], int), name


@check
def a_title_in_one_piece() -> None:
    body = {"model": NAME, "messages": USER, "stream": False, "options": {"num_predict": 8}}
    assert post("/api/chat", body).json()["message"]["role"] == "assistant"


@check
def unloading() -> None:
    assert post("/api/generate", {"model": NAME, "keep_alive": 0, "prompt": ""}).json()["done"]


@check
def documents_become_vectors() -> None:
    body = {"input": ["hello", "world"], "model": NAME, "truncate": True}
    assert len(post("/api/embed", body).json()["embeddings"]) == 2
    old = {"model": NAME, "prompt": "hello"}
    assert post("/api/embeddings", old).json()["embedding"]


@check
def the_connection_to_openais_api() -> None:
    models = http.get("/v1/models", headers={"Authorization": "Bearer any"}).json()
    assert MODEL in [model["id"] for model in models["data"]]
    body = {
        "model": MODEL,
        "messages": USER,
        "stream": True,
        "max_tokens": 8,
        "stream_options": {"include_usage": True},
    }
    with http.stream("POST", "/v1/chat/completions", content=json.dumps(body),
                     headers={"Content-Type": "application/json"}) as got:  # fmt: skip
        data = [line[6:] for line in got.iter_lines() if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    assert any(json.loads(chunk).get("usage") for chunk in data[:-1])


@check
def llama_cpps_router() -> None:
    assert http.get("/models").status_code == 200
    assert post("/models/load", {"model": MODEL}).json()["success"]
    assert http.get("/props", params={"model": MODEL}).json()["default_generation_settings"]["n_ctx"]
    assert post("/models/unload", {"model": MODEL}).json()["success"]


@check
def pulling_shows_progress() -> None:
    with http.stream("POST", "/api/pull", content=json.dumps({"name": NAME}),
                     headers={"Content-Type": "application/json"}) as got:  # fmt: skip
        lines = [json.loads(line) for line in got.iter_lines()]
    assert lines[-1]["status"] == "success"


@check
def an_error_has_a_text() -> None:
    answer = http.post("/api/chat", json={"model": "nothing", "messages": USER})
    assert answer.status_code == 404
    assert "nothing" in answer.json()["error"]


if __name__ == "__main__":
    main(number="0.12 (by hand)")
