"""Embedding models, rerankers and models of text behind one front, asked with openai's client."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx2
import numpy as np
import openai
import pytest

from tests.bert_folders import bert_folder
from tests.server.harness import Front, serving, until
from tests.tiny import write_tiny
from tests.tiny_bert import tiny_bert, write_bert


@pytest.fixture(scope="module")
def front(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    folder = tmp_path_factory.mktemp("models")
    models = [
        write_bert(tiny_bert(), folder / "bert.gguf"),
        write_bert(tiny_bert(ranks=True), folder / "ranker.gguf", "rank"),
        write_tiny(folder / "tiny.gguf", context=512),
        bert_folder(folder / "folder"),
    ]
    log = tmp_path_factory.mktemp("log") / "front.log"
    with serving(environment, *models, "--log-format", "json", log=log) as running:
        yield running
    assert "Traceback" not in log.read_text()


@pytest.fixture(scope="module")
def client(front: Front) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{front.address}/v1", api_key="none", max_retries=0) as client:
        yield client


def vectors(client: openai.OpenAI, model: str, texts: Any, **fields: Any) -> np.ndarray[Any, Any]:
    response = client.embeddings.create(model=model, input=texts, **fields)
    return np.array([entry.embedding for entry in response.data], np.float32)


@pytest.mark.parametrize("model", ["bert", "tiny", "folder"])
def test_openais_client_gets_normalized_vectors(client: openai.OpenAI, model: str) -> None:
    texts = ["the cat", "a dog sat on the mat", "the cat"]
    as_base64 = vectors(client, model, texts)  # the client asks for base64
    assert np.abs(as_base64 - vectors(client, model, texts, encoding_format="float")).max() < 1e-5
    assert np.linalg.norm(as_base64, axis=1) == pytest.approx(np.ones(3), abs=1e-6)
    assert np.abs(as_base64[0] - as_base64[2]).max() < 1e-5
    cut = vectors(client, model, "the cat", dimensions=8)[0]
    assert cut == pytest.approx(as_base64[0, :8] / np.linalg.norm(as_base64[0, :8]), abs=1e-5)
    usage = client.embeddings.create(model=model, input="the cat").usage
    assert usage.prompt_tokens == usage.total_tokens > 0


def test_the_log_of_requests_has_their_tokens(front: Front, client: openai.OpenAI) -> None:
    usage = client.embeddings.create(model="bert", input=["the cat", "a dog"]).usage
    ranking = {"model": "ranker", "query": "a cat", "documents": ["the cat", "a dog"]}
    ranked = front.http.post("/v1/rerank", json=ranking).json()["usage"]["total_tokens"]

    def logged(route: str) -> list[int]:
        lines = [json.loads(line) for line in front.log.read_text().splitlines() if f'"{route}"' in line]
        return [line["prompt_tokens"] for line in lines if line["status"] == 200]

    assert usage.prompt_tokens in until("the request is logged", lambda: logged("/v1/embeddings"))
    assert until("the ranking is logged", lambda: logged("/v1/rerank")) == [ranked]


def test_what_a_model_does_not_do_is_said_in_a_line(front: Front, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="bert computes embeddings and writes no text; take a model"):
        client.chat.completions.create(model="bert", messages=[{"role": "user", "content": "hello"}])
    with pytest.raises(openai.BadRequestError, match="ranker ranks documents and computes no embeddings"):
        client.embeddings.create(model="ranker", input="a")
    answer = front.http.post("/v1/rerank", json={"model": "bert", "query": "q", "documents": ["a"]})
    assert answer.status_code == 400
    assert "take a reranker" in answer.json()["error"]["message"]


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}


@pytest.mark.parametrize(
    ("path", "fields", "model"),
    [
        ("/v1/chat/completions", CHAT, "bert"),
        ("/v1/completions", {"prompt": "hello"}, "bert"),
        ("/v1/responses", {"input": "hello"}, "bert"),
        ("/v1/messages", CHAT, "bert"),
        ("/v1/messages/count_tokens", CHAT, "bert"),
        ("/api/chat", CHAT, "bert"),
        ("/api/generate", {"prompt": "hello"}, "bert"),
        ("/completion", {"prompt": "hello"}, "bert"),
        ("/apply-template", CHAT, "bert"),
        ("/v1/rerank", {"query": "q", "documents": ["a"]}, "bert"),
        ("/v1/embeddings", {"input": "a"}, "ranker"),
        ("/api/embed", {"input": "a"}, "ranker"),
    ],
)
def test_errors_name_the_model_that_was_asked_for(front: Front, path: str, fields: dict[str, Any], model: str) -> None:
    """Not the title in its file."""
    answer = front.http.post(path, json={"model": f"{model}:latest", **fields})
    assert answer.status_code == 400
    assert f"{model}:latest " in answer.text


def test_errors_name_the_input(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model="bert", input=["cat", "cat " * 900])
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "input"
    assert "input 1 has 902 tokens" in str(caught.value)
    with pytest.raises(openai.BadRequestError, match="check_embedding_ctx_length=False"):
        client.embeddings.create(model="bert", input=[[9906, 1917]])
    assert vectors(client, "bert", "cat " * 900, extra_body={"truncate": True}).shape == (1, 64)


@pytest.mark.parametrize("given", ["", []])
def test_no_input_has_no_vectors_for_a_client_of_ollama(front: Front, given: str | list[str]) -> None:
    answer = front.http.post("/api/embed", json={"model": "bert", "input": given})
    assert (answer.status_code, answer.json()["embeddings"]) == (200, [])
    assert front.http.post("/v1/embeddings", json={"model": "bert", "input": given}).status_code == 400, "as OpenAI's"


def test_an_empty_text_among_others_has_a_vector_for_a_client_of_ollama(front: Front) -> None:
    def embedded(*texts: str) -> list[list[float]]:
        answer = front.http.post("/api/embed", json={"model": "bert", "input": texts})
        assert answer.status_code == 200, answer.text
        rows: list[list[float]] = answer.json()["embeddings"]
        return rows

    first, empty, last = embedded("the cat", "", "a dog")
    assert (first, last) == (
        pytest.approx(embedded("the cat")[0], abs=1e-4),
        pytest.approx(embedded("a dog")[0], abs=1e-4),
    )
    assert np.linalg.norm(empty) == pytest.approx(1, abs=1e-4)


def test_the_list_of_models_tells_their_kinds(front: Front) -> None:
    models = {model["id"]: model["edgelm"]["kind"] for model in front.http.get("/v1/models").json()["data"]}
    assert models | {"bert": "embedding", "folder": "embedding", "ranker": "rerank", "tiny": "text"} == models


def test_documents_are_ranked(front: Front) -> None:
    body = {"model": "ranker", "query": "what is the capital", "documents": ["the cat", "berlin is the capital", "日"]}
    for route in ("/v1/rerank", "/v2/rerank", "/rerank"):
        results = front.http.post(route, json=body).json()["results"]
        scores = [entry["relevance_score"] for entry in results]
        assert sorted(scores, reverse=True) == scores
        assert {entry["index"] for entry in results} == {0, 1, 2}
        assert all(0 <= score <= 1 for score in scores)


def test_work_for_a_client_that_left_ends(front: Front, client: openai.OpenAI) -> None:
    vectors(client, "bert", "cat")  # it is loaded
    body = {"model": "bert", "input": ["cat " * 600] * 4000}
    leaving = httpx2.Client(base_url=front.address, timeout=1.0, trust_env=False)
    with leaving, pytest.raises(httpx2.TimeoutException):
        leaving.post("/v1/embeddings", json=body)
    until("no request is open", lambda: front.ps("bert")["requests"] == 0)
    assert vectors(client, "bert", "dog").shape == (1, 64)


def test_many_clients_at_once_get_their_own_vectors(client: openai.OpenAI) -> None:
    texts = [f"text {number} of the cat" for number in range(12)]
    expected = vectors(client, "bert", texts)
    results: dict[int, np.ndarray[Any, Any]] = {}

    def ask(index: int) -> None:
        results[index] = vectors(client, "bert", texts[index])[0]

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, vector in results.items():
        assert np.abs(vector - expected[index]).max() < 1e-5
    assert len(results) == len(texts)


def test_raw_base64_is_little_endian_float32(front: Front, client: openai.OpenAI) -> None:
    body = {"model": "bert", "input": "the cat", "encoding_format": "base64"}
    data = base64.b64decode(front.http.post("/v1/embeddings", json=body).json()["data"][0]["embedding"])
    assert np.abs(np.frombuffer(data, "<f4") - vectors(client, "bert", "the cat")[0]).max() < 1e-5
