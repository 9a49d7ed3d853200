"""The configurations of docs/machines.md: edgelm behind edgelm over TLS, and the forms of vLLM and SGLang.

vLLM and SGLang do not run here: recorders answer in the forms that their documentation and sources show.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest

from edgelm.base.runtime import trusting
from edgelm.server.own_certificates import OwnCertificates
from tests.server.fake_remote import Asked, config_of, remote_server
from tests.server.harness import Front, serving, until

KEY, KEY_THERE = "key-of-the-clients", "key-between-servers"


def _private(file: Path, text: str) -> str:
    file.write_text(text)
    file.chmod(0o600)
    return str(file)


class Chain:
    """Two servers with tiny models and TLS, and a front before them."""

    def __init__(self, front: Front, inner: list[Front], http: httpx2.Client) -> None:
        self.front, self.inner, self.http = front, inner, http

    def post(self, path: str, document: dict[str, Any], key: str = KEY) -> Any:
        return self.http.post(path, json=document, headers={"authorization": f"Bearer {key}"})


@pytest.fixture(scope="module")
def chain(environment: dict[str, str], models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chain]:
    if shutil.which("openssl") is None:
        pytest.skip("makes certificates with openssl")
    folder = tmp_path_factory.mktemp("chain")
    own = OwnCertificates(folder / "tls")
    own.renew("box", ["127.0.0.1", "localhost", "box"])
    there = _private(folder / "there", f"front {KEY_THERE}\n")
    tls = ("--tls-cert", own.server, "--tls-key", own.key)
    with ExitStack() as stack:
        inner = []
        for number in (1, 2):
            places = {f"EDGELM_{kind}_DIR": str(folder / f"{kind}{number}") for kind in ("CONFIG", "DATA", "RUNTIME")}
            arguments = (models / "tiny.gguf", "--api-key-file", there, *tls)
            inner.append(stack.enter_context(serving(environment | places, *arguments, log=folder / f"log{number}")))
        table = {
            "endpoint": [f"{one.address}/v1" for one in inner],
            "model": "tiny",
            "api_key_file": _private(folder / "key", KEY_THERE),
            "ca_file": str(own.authority),
        }
        config = folder / "config"
        config.mkdir()
        (config / "config.toml").write_text(config_of({"big": table}))
        clients = _private(folder / "clients", f"one {KEY}\ntwo another-client-key\n")
        outer = environment | {"EDGELM_CONFIG_DIR": str(config)}
        front = stack.enter_context(serving(outer, "--api-key-file", clients, log=folder / "log"))
        http = stack.enter_context(httpx2.Client(base_url=front.address, timeout=60, trust_env=False))
        for one in inner:
            one.http = stack.enter_context(
                httpx2.Client(base_url=one.address, verify=trusting(own.authority), timeout=60, trust_env=False)
            )
        yield Chain(front, inner, http)


def test_every_dialect_reaches_an_edgelm_behind_edgelm(chain: Chain) -> None:
    turns = [{"role": "user", "content": "hello"}]
    chat = chain.post("/v1/chat/completions", {"model": "big", "messages": turns, "max_tokens": 4}).json()
    assert chat["usage"]["completion_tokens"] == 4
    messages = chain.post("/v1/messages", {"model": "big", "messages": turns, "max_tokens": 4}).json()
    assert messages["usage"]["output_tokens"] == 4
    ollama = chain.post(
        "/api/chat", {"model": "big", "messages": turns, "stream": False, "options": {"num_predict": 4}}
    )
    assert ollama.json()["eval_count"] == 4
    text = chain.post("/v1/completions", {"model": "big", "prompt": "the old", "max_tokens": 4}).json()
    assert text["usage"]["completion_tokens"] == 4


def test_stored_responses_belong_to_the_front_and_to_the_key(chain: Chain) -> None:
    asked = {"model": "big", "input": "hello", "max_output_tokens": 16}
    first = chain.post("/v1/responses", asked).json()
    more = {**asked, "previous_response_id": first["id"]}
    assert chain.post("/v1/responses", more).status_code == 200
    assert chain.post("/v1/responses", more, key="another-client-key").status_code == 404
    there = {"authorization": f"Bearer {KEY_THERE}"}
    for inner in chain.inner:
        assert inner.http.get(f"/v1/responses/{first['id']}", headers=there).status_code == 404


def test_keys_of_clients_are_unknown_behind_the_front(chain: Chain) -> None:
    assert chain.post("/v1/chat/completions", {"model": "big", "messages": []}, key=KEY_THERE).status_code == 401
    for inner in chain.inner:
        assert inner.http.get("/v1/models", headers={"authorization": f"Bearer {KEY}"}).status_code == 401


def test_both_servers_get_requests_and_one_is_enough(chain: Chain) -> None:
    document = {"model": "big", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    for _ in range(4):
        assert chain.post("/v1/chat/completions", document).status_code == 200
    there = {"authorization": f"Bearer {KEY_THERE}"}
    for inner in chain.inner:
        assert inner.http.get("/edgelm/top", headers=there).json()["models"][0]["counts"]["generation_tokens_total"]
    chain.inner[0].process.kill()
    chain.inner[0].process.wait()
    for _ in range(4):
        assert chain.post("/v1/chat/completions", document).status_code == 200


def vllm(asked: Asked) -> None:
    """Answer in vLLM's form: nulls, a reason of the stop, reasoning by its newer name."""
    if asked.body["messages"][0]["content"] == "too long":
        message = "This model's maximum context length is 4096 tokens. However, you requested 9000 tokens."
        asked.say(400, {"error": {"message": message, "type": "BadRequestError", "param": None, "code": 400}})
        return
    asked.start()
    extra = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}

    def chunk(delta: dict[str, Any], **more: Any) -> None:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, "token_ids": None}
        asked.event(extra | {"choices": [choice | more], "prompt_token_ids": None})

    chunk({"role": "assistant", "content": ""})
    chunk({"reasoning": "hm"})
    chunk({"content": "Hello"})
    chunk({"content": ""}, finish_reason="stop", stop_reason="END")
    usage = {"prompt_tokens": 9, "total_tokens": 12, "completion_tokens": 3, "prompt_tokens_details": None}
    asked.event(extra | {"choices": [], "usage": usage})
    asked.event(b"[DONE]")


def sglang(asked: Asked) -> None:
    """Answer in SGLang's form."""
    if asked.body["messages"][0]["content"] == "too long":
        message = "Requested token count exceeds the model's maximum context length of 4096 tokens."
        asked.say(400, {"object": "error", "message": message, "type": "BadRequestError", "param": None, "code": 400})
        return
    asked.start()

    def chunk(reason: str | None = None, matched: str | None = None, **delta: Any) -> None:
        delta = {"role": None, "content": None, "reasoning_content": None, "tool_calls": None} | delta
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason, "matched_stop": matched}
        asked.event({"id": "1", "object": "chat.completion.chunk", "choices": [choice], "usage": None})

    chunk(role="assistant", content="")
    chunk(reasoning_content="hm")
    chunk(content="Hello")
    chunk("stop", "END")
    usage = {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 5}}
    asked.event({"id": "1", "choices": [], "usage": usage | {"reasoning_tokens": 1}})
    asked.event(b"[DONE]")


@pytest.fixture(scope="module")
def makes(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    folder = tmp_path_factory.mktemp("makes")
    with remote_server({"vllm": vllm, "sglang": sglang}) as (address, _):
        (folder / "config.toml").write_text(
            config_of({name: {"endpoint": f"{address}/{name}/v1"} for name in ("vllm", "sglang")})
        )
        with serving(environment | {"EDGELM_CONFIG_DIR": str(folder)}, log=folder / "log") as front:
            yield front


@pytest.mark.parametrize("make", ["vllm", "sglang"])
def test_the_forms_of_other_servers_are_understood(makes: Front, make: str) -> None:
    document = {"model": make, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
    message = makes.http.post("/v1/messages", json=document | {"stop_sequences": ["END"]}).json()
    assert [part["type"] for part in message["content"]] == ["thinking", "text"]
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "END")
    assert message["usage"]["output_tokens"] == 3
    chat = makes.http.post("/v1/chat/completions", json=document).json()
    assert chat["choices"][0]["message"]["reasoning_content"] == "hm"
    assert chat["usage"]["prompt_tokens"] == 9
    document["messages"] = [{"role": "user", "content": "too long"}]
    refused = makes.http.post("/v1/chat/completions", json=document)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    entry = until("its context", lambda: makes.http.get(f"/v1/models/{make}").json()["edgelm"].get("context"))
    assert entry == 4096
    assert json.loads(makes.http.get("/api/ps").text)["models"]
