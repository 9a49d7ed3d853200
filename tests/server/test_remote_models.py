"""Models that other servers run, behind a real front: every dialect, failures, and what never leaves the front."""

from __future__ import annotations

import base64
import gzip
import json
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.server.fake_remote import Asked, config_of, remote_server
from tests.server.harness import Front, serving, until

KEY = "sk-secret-of-the-box"
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def plain(asked: Asked) -> None:
    """Think, and greet."""
    asked.start()
    asked.chunk(role="assistant", content="")
    asked.chunk(reasoning_content="hm")
    asked.chunk(content="Hel")
    asked.chunk(content="lo")
    asked.end()


def tags(asked: Asked) -> None:
    asked.start()
    asked.chunk(content="<think>h")
    asked.chunk(content="m</think>\n\nHello")
    asked.end()


def calls(asked: Asked) -> None:
    """Call two tools; the arguments of the first come in pieces, the second has none."""
    asked.start()
    asked.chunk(tool_calls=[{"index": 0, "id": "a1", "type": "function", "function": {"name": "weather"}}])
    asked.chunk(tool_calls=[{"index": 0, "function": {"arguments": '{"city": '}}])
    asked.chunk(tool_calls=[{"index": 0, "function": {"arguments": '"Ulm"}'}}])
    asked.chunk(tool_calls=[{"index": 1, "id": "a2", "type": "function", "function": {"name": "clock"}}])
    asked.end("tool_calls")


def texts(asked: Asked) -> None:
    """Continue a text, as /v1/completions does."""
    asked.start()
    for text in ("Hel", "lo"):
        asked.event({"choices": [{"index": 0, "text": text, "finish_reason": None}]})
    asked.event({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
    asked.event({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 4}})
    asked.event(b"[DONE]")


def several(asked: Asked) -> None:
    """Continue two texts as llama-server does: a null, and the usage of each."""
    asked.start()
    asked.event(None)
    for index, text in enumerate(("one", "two")):
        usage = {"prompt_tokens": 2, "completion_tokens": 3}
        asked.event({"choices": [{"index": index, "text": text, "finish_reason": None}]})
        asked.event({"choices": [{"index": index, "text": "", "finish_reason": "stop"}], "usage": usage})
    asked.event(b"[DONE]")


def slow_texts(asked: Asked) -> None:
    """Begin with two chunks without text."""
    asked.start()
    for text in ("", "", "Hello"):
        asked.event({"choices": [{"index": 0, "text": text, "finish_reason": None}]})
    asked.event({"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]})
    asked.event(b"[DONE]")


def no_text(asked: Asked) -> None:
    """End at once; the usage comes in a chunk of its own."""
    asked.start()
    asked.event({"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]})
    asked.event({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 0}})
    asked.event(b"[DONE]")


def stopped(asked: Asked) -> None:
    """Tell the stop string, as vLLM does."""
    asked.start()
    asked.event({"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": "stop", "stop_reason": "END"}]})
    asked.event(b"[DONE]")


def logprobs(asked: Asked) -> None:
    asked.start()
    top = [{"token": "Hi", "logprob": -0.5, "bytes": [72, 105]}, {"token": "Ho", "logprob": -1.5, "bytes": [72, 111]}]
    entry = top[0] | {"top_logprobs": top}
    asked.event({"choices": [{"index": 0, "delta": {"content": "Hi"}, "logprobs": {"content": [entry]}}]})
    asked.end()


def whole(asked: Asked) -> None:
    """Answer a stream's request with one document, as small servers do."""
    message = {"role": "assistant", "content": "Hello"}
    asked.say(200, {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})


def endless(asked: Asked) -> None:
    asked.start()
    try:
        asked.wait_until_left()
    finally:
        asked.left.set()


def refusing(status: int, message: str, **headers: str) -> Callable[[Asked], None]:
    return lambda asked: asked.say(status, {"error": {"message": message, "code": None}}, **headers)


def cut(asked: Asked) -> None:
    """End in the middle of an answer."""
    asked.start()
    asked.chunk(content="Hel")


def shorter(asked: Asked) -> None:
    """Promise more bytes than come."""
    asked.say(200, b'data: {"choices": []}\n\n', Content_Type="text/event-stream", Content_Length="5000")
    asked.close_connection = True


def long_line(asked: Asked) -> None:
    asked.start()
    for _ in range(40):
        asked.wfile.write(b"x" * 2**18)


def silent(asked: Asked) -> None:
    asked.start()
    asked.left.wait(30)


def failing_late(asked: Asked) -> None:
    asked.start()
    asked.chunk(content="Hel")
    asked.event({"error": {"message": f"out of memory, key {KEY}"}})


def picky(asked: Asked) -> None:
    """Refuse what only some servers know."""
    if "stream_options" in asked.body:
        asked.say(400, {"error": {"message": "unknown field stream_options"}})
    else:
        plain(asked)


def vectors(asked: Asked) -> None:
    """Embed, as OpenAI does: the vector of a text has its length."""
    texts = [asked.body["input"]] if isinstance(asked.body["input"], str) else asked.body["input"]
    rows = [[float(len(text)), 4.0, 0.0] for text in texts]
    if asked.body.get("encoding_format") == "base64":
        rows = [base64.b64encode(struct.pack("<3f", *row)).decode() for row in rows]
    data = [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(rows)]
    asked.say(200, {"data": data[::-1], "usage": {"prompt_tokens": 7, "total_tokens": 7}})


def picky_vectors(asked: Asked) -> None:
    """Know nothing of base64."""
    if "encoding_format" in asked.body:
        asked.say(400, {"error": {"message": "unknown field encoding_format"}})
    else:
        vectors(asked)


def odd_vectors(document: Any) -> Callable[[Asked], None]:
    return lambda asked: asked.say(200, document if isinstance(document, bytes) else {"data": document})


def bomb(asked: Asked) -> None:
    """Send few bytes that are many."""
    asked.say(200, gzip.compress(bytes(2**24)), Content_Type="application/json", Content_Encoding="gzip")


def many_headers(asked: Asked) -> None:
    asked.say(200, b"{}", **{f"X_{number}": "x" * 4000 for number in range(200)})


def longer(asked: Asked) -> None:
    """Send more bytes than promised."""
    text = b'data: {"choices":[{"index":0,"delta":{"content":"Hi"},"finish_reason":"stop"}]}\n\n'
    asked.say(200, text * 3, Content_Type="text/event-stream", Content_Length=str(len(text)))
    asked.close_connection = True


def deep(asked: Asked) -> None:
    asked.start()
    asked.event(b"[" * 100_000)


def informing(asked: Asked) -> None:
    """Promise an answer, and promise it again."""
    while True:
        asked.wfile.write(b"HTTP/1.1 103 Early Hints\r\n\r\n")


def bad_sizes(asked: Asked) -> None:
    """Break the form of a body in pieces."""
    asked.send_response(200)
    asked.send_header("Content-Type", "text/event-stream")
    asked.send_header("Transfer-Encoding", "chunked")
    asked.end_headers()
    asked.wfile.write(b"ffffffffffffffffffffff\r\ndata: {}\r\n")
    asked.close_connection = True


def dripping(asked: Asked) -> None:
    """Send a header that has no end, a byte at a time."""
    asked.wfile.write(b"HTTP/1.1 200 OK\r\nX-Long: ")
    while not asked.left.wait(0.0005):
        asked.wfile.write(b"x" * 4096)


def many_deltas(asked: Asked) -> None:
    """Name choices, calls and indices that nobody asked for."""
    asked.start()
    for index in (-1, 7, 2**40, "a", None):
        asked.event({"choices": [{"index": index, "delta": {"tool_calls": [{"index": index, "function": 3}]}}, 5]})
    asked.event({"choices": {"index": 0}, "usage": [1]})
    asked.chunk(content="Hello")
    asked.end()


def llama_server_models(asked: Asked) -> None:
    asked.say(200, {"data": [{"id": "llama_server", "owned_by": "llamacpp", "meta": {"n_ctx": 4096}}]})


BEHAVIOURS: dict[str, Callable[[Asked], None]] = {
    "llama_server": plain,
    "llama_server models": llama_server_models,
    "blind": refusing(500, "image input is not supported - hint: if this is unexpected, you may need the mmproj"),
    "vectors": vectors,
    "picky_vectors": picky_vectors,
    "few_vectors": odd_vectors([]),
    "unlike_vectors": odd_vectors([{"embedding": [1.0]}, {"embedding": [1.0, 2.0]}]),
    "odd_numbers": odd_vectors([{"embedding": [1.0]}, {"embedding": ["a"]}]),
    "no_numbers": odd_vectors(b'{"data": [{"embedding": [1.0]}, {"embedding": [NaN]}]}'),
    "no_base64": odd_vectors([{"embedding": "AAAA"}, {"embedding": "!"}]),
    "no_document": odd_vectors(b"<html>"),
    "deep_document": odd_vectors(b"[" * 100_000),
    "no_embeddings": refusing(501, "This server does not support embeddings. Start it with `--embeddings`"),
    "bomb": bomb,
    "many_headers": many_headers,
    "longer": longer,
    "deep": deep,
    "informing": informing,
    "bad_sizes": bad_sizes,
    "dripping": dripping,
    "many_deltas": many_deltas,
    "plain": plain,
    "tags": tags,
    "calls": calls,
    "texts": texts,
    "several": several,
    "slow_texts": slow_texts,
    "no_text": no_text,
    "stopped": stopped,
    "logprobs": logprobs,
    "whole": whole,
    "endless": endless,
    "picky": picky,
    "unauthorized": refusing(401, f"Incorrect API key provided: {KEY}"),
    "busy": refusing(429, "too many", Retry_After="7"),
    "broken": refusing(500, "it fell over"),
    "loading": refusing(503, "Loading model"),
    "unknown": refusing(404, "no such model"),
    "picked": refusing(400, f"temperature is odd, {KEY}"),
    "full": refusing(400, "This model's maximum context length is 4096 tokens"),
    "html": lambda asked: asked.say(200, b"<html>hello</html>", Content_Type="text/html"),
    "text": lambda asked: asked.say(200, b"data: hello\n\n", Content_Type="text/event-stream"),
    "json": lambda asked: asked.say(200, b"[]"),
    "moved": lambda asked: asked.say(307, b"", Location="/plain/v1/chat/completions"),
    "zipped": lambda asked: asked.say(200, b"x", Content_Type="text/event-stream", Content_Encoding="gzip"),
    "cut": cut,
    "shorter": shorter,
    "long_line": long_line,
    "silent": silent,
    "failing_late": failing_late,
}


class Setting(NamedTuple):
    """A front with remote models, and the requests that these get."""

    front: Front
    seen: list[Asked]
    address: str
    environment: dict[str, str]

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command of the user whose front it is."""
        command = [sys.executable, "-m", "edgelm", *words]
        quiet = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
        return subprocess.run(command, check=False, env=self.environment, **quiet)

    def post(self, path: str, document: dict[str, Any], **headers: str) -> Any:
        return self.front.http.post(path, json=document, headers=headers)


@pytest.fixture(scope="module")
def remote(environment: dict[str, str], models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    folder = tmp_path_factory.mktemp("remote")
    key_file = folder / "key"
    key_file.write_text(KEY + "\n")
    key_file.chmod(0o600)
    with remote_server(BEHAVIOURS) as (address, seen):
        tables: dict[str, dict[str, Any]] = {
            name: {"endpoint": f"{address}/{name}/v1", "api_key_file": str(key_file), "timeout": 20}
            for name in BEHAVIOURS
            if " " not in name
        }
        tables["plain"] |= {"alias": "big", "model": "their-name", "headers": {"X-Team": "edge"}}
        for name in ("silent", "informing", "dripping"):
            tables[name] |= {"timeout": 0.3, "connect_timeout": 2}
        tables["gone"] = {"endpoint": "http://127.0.0.1:9/v1", "connect_timeout": 2}
        tables["tiny"] = {"endpoint": f"{address}/plain/v1", "model": "their-name"}
        tables["second"] = {"endpoint": [f"{address}/broken/v1", f"{address}/plain/v1"], "model": "their-name"}
        tables["second_vectors"] = {"endpoint": [f"{address}/{name}/v1" for name in ("unknown", "vectors")]}
        config = folder / "config"
        config.mkdir()
        (config / "config.toml").write_text(config_of(tables))
        own = environment | {"EDGELM_CONFIG_DIR": str(config)}
        log = folder / "front.log"
        with serving(own, models / "tiny.gguf", "--log-format", "json", log=log) as front:
            yield Setting(front, seen, address, own)
        said = log.read_text()
    print(said)
    assert "Traceback" not in said
    assert KEY not in said
    assert "tiny is the name of a model here too" in said


def ask(setting: Setting, model: str, **fields: Any) -> Any:
    document = {"model": model, "messages": [{"role": "user", "content": "hi"}]} | fields
    return setting.post("/v1/chat/completions", document)


def lines_of(setting: Setting, path: str, document: dict[str, Any]) -> list[str]:
    with setting.front.http.stream("POST", path, json=document) as answer:
        assert answer.status_code == 200, answer.read()
        return [line for line in answer.iter_lines() if line]


def test_a_chat_gets_text_reasoning_usage_and_cached_tokens(remote: Setting) -> None:
    answer = ask(remote, "big").json()
    assert answer["model"] == "big"
    message = answer["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("Hello", "hm")
    assert answer["choices"][0]["finish_reason"] == "stop"
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (9, 4)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 5}
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 2}
    asked = remote.seen[-1]
    assert asked.body["model"] == "their-name"
    assert asked.headers["Authorization"] == f"Bearer {KEY}"
    assert asked.headers["X-Team"] == "edge"


def test_a_stream_has_the_same(remote: Setting) -> None:
    document = {"model": "plain", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    lines = lines_of(remote, "/v1/chat/completions", document | {"stream_options": {"include_usage": True}})
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line[6:]) for line in lines[:-1]]
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"]) == "Hello"
    assert chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 5


def test_reasoning_in_tags_is_reasoning(remote: Setting) -> None:
    message = ask(remote, "tags").json()["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("Hello", "hm")


def test_anthropics_messages(remote: Setting) -> None:
    document = {
        "model": "plain",
        "max_tokens": 50,
        "messages": [{"role": "user", "content": "hi"}],
        "system": "Be brief",
    }
    answer = remote.post("/v1/messages", document).json()
    assert [(block["type"], block.get("thinking") or block.get("text")) for block in answer["content"]] == [
        ("thinking", "hm"),
        ("text", "Hello"),
    ]
    assert answer["usage"]["cache_read_input_tokens"] == 5
    assert answer["stop_reason"] == "end_turn"
    assert remote.seen[-1].body["messages"][0] == {"role": "system", "content": "Be brief"}
    assert remote.seen[-1].body["max_tokens"] == 50
    kinds = [line[7:] for line in lines_of(remote, "/v1/messages", document | {"stream": True}) if line[0] == "e"]
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"


def test_responses_are_stored_and_continued(remote: Setting) -> None:
    first = remote.post("/v1/responses", {"model": "plain", "input": "hi"}).json()
    assert first["status"] == "completed"
    assert first["output"][-1]["content"][0]["text"] == "Hello"
    remote.post("/v1/responses", {"model": "plain", "input": "again", "previous_response_id": first["id"]})
    contents = [message["content"] for message in remote.seen[-1].body["messages"]]
    assert contents == ["hi", "Hello", "again"]
    kinds = [
        line[7:]
        for line in lines_of(remote, "/v1/responses", {"model": "plain", "input": "hi", "stream": True})
        if line[0] == "e"
    ]
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"


def test_ollamas_routes(remote: Setting) -> None:
    messages = [{"role": "user", "content": "hi"}]
    lines = [
        json.loads(line) for line in lines_of(remote, "/api/chat", {"model": "plain:latest", "messages": messages})
    ]
    assert "".join(line["message"]["content"] for line in lines) == "Hello"
    assert lines[-1]["eval_count"] == 4
    answer = remote.post("/api/generate", {"model": "plain", "prompt": "hi", "stream": False}).json()
    assert answer["response"] == "Hello"
    assert remote.post("/api/generate", {"model": "plain"}).json()["done_reason"] == "load"
    assert "plain:latest" in [model["name"] for model in remote.front.http.get("/api/tags").json()["models"]]
    shown = remote.post("/api/show", {"model": "plain"}).json()
    assert shown["capabilities"] == ["completion", "tools"]


def test_completions_of_a_text(remote: Setting) -> None:
    answer = remote.post("/v1/completions", {"model": "texts", "prompt": "Once", "max_tokens": 4}).json()
    assert answer["choices"][0]["text"] == "Hello"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert remote.seen[-1].path == "/texts/v1/completions"
    assert remote.seen[-1].body["prompt"] == "Once"
    assert remote.post("/completion", {"model": "texts", "prompt": "Once"}).json()["content"] == "Hello"


def test_completions_of_several_texts(remote: Setting) -> None:
    answer = remote.post("/v1/completions", {"model": "several", "prompt": ["a", "b"]}).json()
    assert [choice["text"] for choice in answer["choices"]] == ["one", "two"]
    assert remote.seen[-1].body["prompt"] == ["a", "b"]
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (4, 6)


def test_the_stop_string_is_told(remote: Setting) -> None:
    document = {"model": "stopped", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
    answer = remote.post("/v1/messages", document | {"stop_sequences": ["END"]}).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "END")


def test_calls_of_tools_in_every_dialect(remote: Setting) -> None:
    chat = ask(remote, "calls", tools=[WEATHER], tool_choice="required").json()["choices"][0]
    assert chat["finish_reason"] == "tool_calls"
    assert [(call["id"], call["function"]) for call in chat["message"]["tool_calls"]] == [
        ("a1", {"name": "weather", "arguments": '{"city": "Ulm"}'}),
        ("a2", {"name": "clock", "arguments": "{}"}),
    ]
    assert remote.seen[-1].body["tools"] == [WEATHER]
    assert remote.seen[-1].body["tool_choice"] == "required"
    document = {"model": "calls", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
    blocks = remote.post("/v1/messages", document).json()["content"]
    assert [block["input"] for block in blocks] == [{"city": "Ulm"}, {}]
    output = remote.post("/v1/responses", {"model": "calls", "input": "hi"}).json()["output"]
    assert [item["arguments"] for item in output] == ['{"city": "Ulm"}', "{}"]
    lines = lines_of(remote, "/api/chat", {"model": "calls", "messages": [{"role": "user", "content": "hi"}]})
    found = [call for line in lines for call in json.loads(line)["message"].get("tool_calls", ())]
    assert [call["function"]["arguments"] for call in found] == [{"city": "Ulm"}, {}]


def test_a_schema_and_what_the_other_server_decides_are_passed_on(remote: Setting) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    extra = {"temperature": 0.5, "top_k": 3, "seed": 7, "stop": ["END"], "logit_bias": {"5": -1}, "n": 1}
    ask(remote, "plain", response_format=form, reasoning_effort="low", **extra)
    body = remote.seen[-1].body
    assert body["response_format"]["json_schema"]["schema"] == SCHEMA
    assert body["reasoning_effort"] == "low"
    assert (body["temperature"], body["top_k"], body["seed"], body["stop"]) == (0.5, 3, 7, ["END"])
    assert body["logit_bias"] == {"5": -1}


def test_logprobs_pass(remote: Setting) -> None:
    answer = ask(remote, "logprobs", logprobs=True, top_logprobs=2).json()
    (entry,) = answer["choices"][0]["logprobs"]["content"]
    assert (entry["token"], entry["logprob"], entry["bytes"]) == ("Hi", -0.5, [72, 105])
    assert [top["token"] for top in entry["top_logprobs"]] == ["Hi", "Ho"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "a+"}, "grammar"),
        ({"grammar": 'root ::= "a"'}, "grammar"),
        ({"draft": "ngram"}, "draft"),
        ({"repeatable": True}, "repeatable"),
    ],
)
def test_what_only_an_engine_here_can_do_is_refused(remote: Setting, fields: dict[str, Any], param: str) -> None:
    count = len(remote.seen)
    answer = ask(remote, "plain", **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "unsupported_by_remote"
    assert answer.json()["error"]["param"] == param
    assert len(remote.seen) == count


def test_routes_of_local_models_say_where_the_model_is(remote: Setting) -> None:
    for path, document in (
        ("/tokenize", {"model": "plain", "content": "hi"}),
        ("/models/load", {"model": "plain"}),
        ("/infill", {"model": "plain", "input_prefix": "a", "input_suffix": "b"}),
    ):
        answer = remote.post(path, document)
        assert answer.status_code == 400, path
        assert "plain runs at 127.0.0.1:" in answer.text


def test_tokens_are_counted_by_the_other_server(remote: Setting) -> None:
    turns = [{"role": "user", "content": "hi"}]
    counted = remote.post("/v1/messages/count_tokens", {"model": "plain", "messages": turns})
    assert counted.json() == {"input_tokens": 9}
    assert remote.seen[-1].body["max_tokens"] == 1
    counted = remote.post("/v1/responses/input_tokens", {"model": "plain", "input": "hi"})
    assert counted.json() == {"object": "response.input_tokens", "input_tokens": 9}
    silent = remote.post("/v1/messages/count_tokens", {"model": "whole", "messages": turns})
    assert silent.status_code == 502
    assert "tells no token counts" in silent.text


def test_a_picture_by_its_address_is_not_fetched_by_another_server(remote: Setting) -> None:
    part = {"type": "image_url", "image_url": {"url": "http://10.0.0.1/a.png"}}
    answer = ask(remote, "plain", messages=[{"role": "user", "content": [part]}])
    assert answer.status_code == 400
    part["image_url"] = {"url": "data:image/png;base64,AAAA"}
    assert ask(remote, "plain", messages=[{"role": "user", "content": [part]}]).status_code == 200
    assert remote.seen[-1].body["messages"][0]["content"] == [part]


def test_the_list_and_ps_show_where_a_model_runs(remote: Setting) -> None:
    where = remote.address.removeprefix("http://")
    listed = {model["id"]: model["edgelm"] for model in remote.front.http.get("/v1/models").json()["data"]}
    assert listed["plain"]["remote"] == where
    assert listed["big"]["alias_of"] == "plain"
    assert listed["tiny"]["remote"] == where, "the name of the table comes first"
    assert (
        until("its context", lambda: remote.front.http.get("/v1/models/calls").json()["edgelm"].get("context")) == 4096
    )
    shown = remote.front.ps("plain")
    assert (shown["engine"], shown["device"], shown["state"]) == ("remote", where, "ready")
    assert remote.front.ps("gone")["state"] == "failed"


def test_metrics_count_its_tokens(remote: Setting) -> None:
    ask(remote, "whole")
    ask(remote, "plain")
    lines = remote.front.http.get("/metrics").text.splitlines()
    name = 'edgelm:generation_tokens_total{model_name="plain"}'
    (line,) = [line for line in lines if line.startswith(name)]
    assert float(line.split()[-1]) >= 4


@pytest.mark.parametrize(
    ("model", "status", "words"),
    [
        ("unauthorized", 502, "refuses the key of this server"),
        ("busy", 429, "too many requests: too many"),
        ("broken", 502, "status 500: it fell over"),
        ("loading", 503, "Loading model"),
        ("unknown", 502, "has no model 'unknown'"),
        ("picked", 400, "temperature is odd"),
        ("full", 400, "maximum context length"),
        ("html", 502, "answers with text/html"),
        ("text", 502, "no JSON"),
        ("json", 502, "no chunk of an answer"),
        ("moved", 502, "redirects"),
        ("zipped", 502, "not with events"),
        ("cut", 502, "in the middle"),
        ("shorter", 502, "in the middle"),
        ("long_line", 502, "no stream of events"),
        ("silent", 504, "was silent"),
        ("gone", 503, "cannot be reached"),
        ("bomb", 502, "not with events"),
        ("many_headers", 503, "closes the connection"),
        ("deep", 502, "no JSON"),
        ("informing", 504, "was silent"),
        ("bad_sizes", 502, "in the middle"),
        ("dripping", 503, "closes the connection"),
    ],
)
def test_failures_name_the_server_and_keep_their_meaning(remote: Setting, model: str, status: int, words: str) -> None:
    answer = ask(remote, model)
    assert answer.status_code == status, answer.text
    message = answer.json()["error"]["message"]
    assert words in message
    assert f"{model} runs at 127.0.0.1:" in message
    assert KEY not in answer.text + str(answer.headers)
    if model == "busy":
        assert answer.headers["retry-after"] == "7"
    if model == "full":
        assert answer.json()["error"]["code"] == "context_length_exceeded"
    document = {"model": model, "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
    assert remote.post("/v1/messages", document).json()["type"] == "error"
    assert words in remote.post("/api/chat", document | {"stream": False}).json()["error"]


def test_more_bytes_than_promised_and_answers_to_nothing_are_left_out(remote: Setting) -> None:
    for model, text in (("longer", "Hi"), ("many_deltas", "Hello")):
        answer = ask(remote, model)
        assert answer.json()["choices"][0]["message"]["content"] == text, answer.text
        assert len(answer.json()["choices"]) == 1


def test_no_redirect_is_followed(remote: Setting) -> None:
    count = len(remote.seen)
    ask(remote, "moved")
    assert [asked.path.split("/")[1] for asked in remote.seen[count:]] == ["moved"]


def test_a_failure_in_the_middle_is_the_last_event(remote: Setting) -> None:
    document = {"model": "failing_late", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    lines = lines_of(remote, "/v1/chat/completions", document)
    assert "Hel" in "".join(lines)
    assert "out of memory" in json.loads(lines[-1][6:])["error"]["message"]
    assert KEY not in "".join(lines)


def test_a_field_that_the_server_refuses_is_omitted(remote: Setting) -> None:
    answer = ask(remote, "picky")
    assert answer.json()["choices"][0]["message"]["content"] == "Hello"
    assert "stream_options" not in remote.seen[-1].body


def test_a_server_that_does_not_stream_is_understood(remote: Setting) -> None:
    answer = ask(remote, "whole").json()
    assert answer["choices"][0]["message"]["content"] == "Hello"
    assert "told no token counts" in answer["edgelm"]["notes"][0]


def test_a_client_that_leaves_ends_the_stream_there(remote: Setting) -> None:
    events = remote.front.events("endless", "hi", max_tokens=1000)
    assert next(events)
    next(events)
    asked = until("it is asked", lambda: next((a for a in remote.seen if a.path.startswith("/endless/")), None))
    events.close()
    assert asked.left.wait(30)


def test_another_server_takes_over_before_the_first_token(remote: Setting) -> None:
    for _ in range(4):
        assert ask(remote, "second").json()["choices"][0]["message"]["content"] == "Hello"
    assert {asked.path.split("/")[1] for asked in remote.seen[-5:]} == {"broken", "plain"}


def test_run_answers_through_the_front(remote: Setting) -> None:
    done = remote.command("run", "big", "hi", "--temperature", "0.5", "--stop", "END", "--json-object", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["text"], document["reasoning"], document["finish_reason"]) == ("Hello", "hm", "stop")
    assert document["usage"] == {"prompt_tokens": 9, "cached_tokens": 5, "completion_tokens": 4}
    body = remote.seen[-1].body
    assert (body["model"], body["messages"]) == ("their-name", [{"role": "user", "content": "hi"}])
    assert (body["temperature"], body["stop"], body["response_format"]) == (0.5, ["END"], {"type": "json_object"})
    assert remote.command("run", "plain", "hi").stdout == "Hello\n"
    for flag in ("--raw", "--save"):
        refused = remote.command("run", "plain", "hi", flag)
        assert refused.returncode == 2
        assert "which another server runs" in refused.stderr
    failed = remote.command("run", "broken", "hi")
    assert failed.returncode == 1
    assert "it fell over" in failed.stderr


@pytest.mark.parametrize(
    "words",
    [
        *(["convert", "x.gguf"], ["quantize", "x.gguf", "--to", "Q8_0"], ["rm", "--yes"], "doctor --gpu".split()),
        *(["show"], ["plan"], ["pull"], ["serve", "--port", "0"], ["eval", "x.txt", "--against", "plain"]),
    ],
    ids=lambda words: words[0],
)
def test_a_command_that_needs_the_files_says_where_the_model_runs(
    remote: Setting, words: list[str], tmp_path: Path
) -> None:
    (tmp_path / "x.txt").write_text("text")
    command, *rest = (str(tmp_path / word) if word.startswith("x.") else word for word in words)
    done = remote.command(command, "starter" if command == "eval" else "plain", *rest)
    assert done.returncode == 1, done.stdout
    assert done.stderr.startswith(f"error: plain runs on another server ({remote.address}/plain/v1): its files are not")


def test_list_and_ps_mark_it(remote: Setting) -> None:
    rows = {row["name"]: row for row in json.loads(remote.command("list", "--json").stdout)}
    assert rows["plain"]["place"] == "remote"
    assert rows["plain"]["endpoints"] == [f"{remote.address}/plain/v1"]
    assert f"runs at {remote.address}/plain/v1" in remote.command("list").stdout
    shown = next(line for line in remote.command("ps").stdout.splitlines() if line.startswith("plain "))
    assert f"remote on {remote.address.removeprefix('http://')}" in shown


def test_vectors_in_every_dialect(remote: Setting) -> None:
    asked = {"model": "vectors", "input": ["hey", "hello"], "dimensions": 3, "truncate_prompt_tokens": -1}
    answer = remote.post("/v1/embeddings", asked).json()
    assert [item["embedding"] for item in answer["data"]] == [[3.0, 4.0, 0.0], [5.0, 4.0, 0.0]]
    assert answer["usage"]["prompt_tokens"] == 7
    assert remote.seen[-1].body == asked | {"encoding_format": "base64"}
    cut = remote.post("/v1/embeddings", {"model": "vectors", "input": "hey", "dimensions": 2}).json()
    assert cut["data"][0]["embedding"] == pytest.approx([0.6, 0.8]), "cut as an engine here cuts, to the length 1"
    spelled = remote.post("/v1/embeddings", {"model": "vectors", "input": "hey", "encoding_format": "base64"}).json()
    assert struct.unpack("<3f", base64.b64decode(spelled["data"][0]["embedding"])) == (3.0, 4.0, 0.0)
    ollama = remote.post("/api/embed", {"model": "vectors:latest", "input": ["hey"]}).json()
    assert (ollama["embeddings"], ollama["prompt_eval_count"]) == ([[3.0, 4.0, 0.0]], 7)
    assert remote.post("/api/embed", {"model": "vectors:latest", "input": []}).json()["embeddings"] == []
    older = remote.post("/api/embeddings", {"model": "vectors", "prompt": "hey"}).json()
    assert older == {"embedding": [3.0, 4.0, 0.0]}


def test_a_server_that_knows_no_base64_is_asked_for_numbers(remote: Setting) -> None:
    answer = remote.post("/v1/embeddings", {"model": "picky_vectors", "input": ["hey"]}).json()
    assert answer["data"][0]["embedding"] == [3.0, 4.0, 0.0]


@pytest.mark.parametrize(
    "model", ["few_vectors", "unlike_vectors", "odd_numbers", "no_numbers", "no_base64", "no_document", "deep_document"]
)
def test_what_are_no_vectors_is_an_error(remote: Setting, model: str) -> None:
    answer = remote.post("/v1/embeddings", {"model": model, "input": ["a", "b"]})
    assert answer.status_code == 502
    assert answer.json()["error"]["code"] == "remote_not_understood"


def test_a_server_without_vectors_says_so_and_stays_well(remote: Setting) -> None:
    for _ in range(4):
        answer = remote.post("/v1/embeddings", {"model": "no_embeddings", "input": "a"})
        assert answer.status_code == 400
        assert "makes no embeddings: This server does not support embeddings" in answer.text
    assert remote.front.ps("no_embeddings")["state"] == "ready"


def test_a_server_that_makes_vectors_is_found_behind_one_that_does_not(remote: Setting) -> None:
    count = len(remote.seen)
    for _ in range(4):
        answer = remote.post("/v1/embeddings", {"model": "second_vectors", "input": "hey"})
        assert answer.status_code == 200, answer.text
    assert {asked.path.split("/")[1] for asked in remote.seen[count:]} == {"unknown", "vectors"}


def test_embed_prints_the_vectors_of_another_server(remote: Setting) -> None:
    done = remote.command("embed", "vectors", "hey", "hello")
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        {"index": 0, "text": "hey", "tokens": None, "embedding": [3.0, 4.0, 0.0]},
        {"index": 1, "text": "hello", "tokens": None, "embedding": [5.0, 4.0, 0.0]},
    ], done.stderr
    table = remote.command("embed", "vectors", "hey", "--format", "table", "-v")
    assert "VECTOR OF 3" in table.stdout
    assert "1 texts, 7 tokens" in table.stderr
    failed = remote.command("embed", "no_embeddings", "hey")
    assert failed.returncode == 1
    assert "makes no embeddings" in failed.stderr


def test_ollamas_list_of_running_models_has_it(remote: Setting) -> None:
    until("its context", lambda: remote.front.http.get("/v1/models/calls").json()["edgelm"].get("context"))
    running = {model["name"]: model for model in remote.front.http.get("/api/ps").json()["models"]}
    assert running["calls:latest"]["context_length"] == 4096
    assert running["calls:latest"]["size"] == 0
    assert "gone:latest" not in running


def test_llama_servers_routes_know_it(remote: Setting) -> None:
    until("its context", lambda: remote.front.http.get("/v1/models/calls").json()["edgelm"].get("context"))
    props = remote.front.http.get("/props", params={"model": "calls"}).json()
    assert props["default_generation_settings"] == {"n_ctx": 4096}
    assert (props["model_alias"], props["is_sleeping"]) == ("calls", False)
    assert remote.front.http.get("/slots", params={"model": "calls"}).json() == []


def test_top_counts_its_tokens(remote: Setting) -> None:
    ask(remote, "plain")
    document = json.loads(remote.command("top", "--once", "--json").stdout)
    line = next(model for model in document["models"] if model["model"] == "plain")
    assert (line["state"], line["running"], line["waiting"], line["rss_bytes"]) == ("ready", 0, 0, None)
    assert line["time_to_first_token_s"] > 0
    assert line["prefix_cache_hit_share"] == pytest.approx(5 / 9, abs=0.3)
    assert "plain " in remote.command("top", "--once").stdout


def test_a_picture_that_a_server_cannot_see_is_the_clients_mistake(remote: Setting) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    for _ in range(4):
        answer = ask(remote, "blind", messages=[{"role": "user", "content": [part]}])
        assert answer.status_code == 400
        assert "image input is not supported" in answer.text
    assert remote.front.ps("blind")["state"] == "ready"


def test_llama_server_gets_a_schema_for_an_object(remote: Setting) -> None:
    until("its context", lambda: remote.front.http.get("/v1/models/llama_server").json()["edgelm"].get("context"))
    for model, kind in (("llama_server", "json_schema"), ("plain", "json_object")):
        assert ask(remote, model, response_format={"type": "json_object"}).status_code == 200
        assert remote.seen[-1].body["response_format"]["type"] == kind


def test_a_required_call_that_a_server_does_not_make_is_noted(remote: Setting) -> None:
    answer = ask(remote, "plain", tools=[WEATHER], tool_choice="required").json()
    assert "called no tool" in json.dumps(answer)
    assert "called no tool" not in json.dumps(ask(remote, "calls", tools=[WEATHER], tool_choice="required").json())


def test_an_echo_of_a_text_is_made_here(remote: Setting) -> None:
    document = {"model": "texts", "prompt": "Say: ", "echo": True, "max_tokens": 4}
    answer = remote.post("/v1/completions", document).json()
    assert answer["choices"][0]["text"] == "Say: Hello"
    assert "echo" not in remote.seen[-1].body
    streamed = "".join(lines_of(remote, "/v1/completions", document | {"stream": True}))
    assert streamed.index("Say: ") < streamed.index("Hel")
    refused = remote.post("/v1/completions", document | {"logprobs": 1})
    assert refused.json()["error"]["param"] == "echo"


@pytest.mark.parametrize(
    ("model", "prompt", "texts"),
    [
        ("slow_texts", "Say: ", ["Say: Hello"]),
        ("no_text", "Say: ", ["Say: "]),
        ("several", ["a ", "b "], ["a one", "b two"]),
    ],
)
def test_an_echo_is_made_once_before_chunks_without_text(
    remote: Setting, model: str, prompt: str | list[str], texts: list[str]
) -> None:
    answer = remote.post("/v1/completions", {"model": model, "prompt": prompt, "echo": True}).json()
    assert [choice["text"] for choice in answer["choices"]] == texts
