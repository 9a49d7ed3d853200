"""Pictures in every dialect of a real front, by the clients of others; and what no model reads."""

from __future__ import annotations

import base64
import struct
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from tests.seeing import png, write_pair
from tests.seeing_model import require_libmtmd
from tests.server.harness import LIMIT_S, Front, serving
from tests.tiny import write_tiny

require_libmtmd()

MODEL, BLIND = "tiny-qwen3vl", "blind"
DATA = base64.b64encode(png(200, 120)).decode()
URL = f"data:image/png;base64,{DATA}"
QUESTION = "What is this?"
NUM_TOKENS = 6


def chat(*parts: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": [*parts]}], "max_tokens": NUM_TOKENS} | {
        "temperature": 0
    }


def image(url: str = URL) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


TEXT = {"type": "text", "text": QUESTION}


@contextmanager
def pictures_of_another_host() -> Iterator[str]:
    """Serve the picture at every path; yield address and port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(base64.b64decode(DATA))

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def front(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    folder = tmp_path_factory.mktemp("models")
    model, _ = write_pair(folder / "pair", "qwen3vl")
    blind = write_tiny(folder / f"{BLIND}.gguf", chat_template="{{ messages[0].content }}")
    log = tmp_path_factory.mktemp("log") / "front.log"
    with pictures_of_another_host() as host:
        seen = {"EDGELM_PICTURE_HOST": host, "EDGELM_CTX": "1024"}
        with serving(environment | seen, model, blind, log=log) as running:
            running.picture_host = host
            yield running
    said = log.read_text()
    print(said)
    assert "Traceback" not in said


@pytest.fixture(scope="module")
def client(front: Front) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{front.address}/v1", api_key="any", timeout=LIMIT_S, max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def expected(front: Front) -> tuple[str, int]:
    """The answer of chat completions, and the tokens of its prompt."""
    answer = httpx2.post(f"{front.address}/v1/chat/completions", json=chat(image(), TEXT), timeout=LIMIT_S).json()
    assert answer["usage"]["prompt_tokens"] > 24
    return answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens"]


def test_chat_completions_stream_it_too(client: openai.OpenAI, expected: tuple[str, int]) -> None:
    events = [*client.chat.completions.create(**chat(image(), TEXT), stream=True)]
    assert "".join(event.choices[0].delta.content or "" for event in events if event.choices) == expected[0]


def test_responses(client: openai.OpenAI, expected: tuple[str, int]) -> None:
    content: Any = [
        {"type": "input_image", "image_url": URL, "detail": "auto"},
        {"type": "input_text", "text": QUESTION},
    ]
    asked: Any = {"model": MODEL, "input": [{"role": "user", "content": content}]}
    answer = client.responses.create(**asked, max_output_tokens=NUM_TOKENS, temperature=0)
    assert (answer.output_text, answer.usage and answer.usage.input_tokens) == expected
    assert client.responses.input_tokens.count(**asked).input_tokens == expected[1]
    more: Any = client.responses.create(
        model=MODEL, previous_response_id=answer.id, input="And now?", max_output_tokens=4, temperature=0
    )
    assert more.usage.input_tokens > expected[1]
    assert more.usage.input_tokens_details.cached_tokens >= expected[1] - 1


def test_messages(front: Front, expected: tuple[str, int]) -> None:
    block: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}
    asked: Any = [{"role": "user", "content": [block, {"type": "text", "text": QUESTION}]}]
    with anthropic.Anthropic(base_url=front.address, api_key="any", timeout=LIMIT_S, max_retries=0) as client:
        answer: Any = client.messages.create(
            model=MODEL, messages=asked, max_tokens=NUM_TOKENS, extra_body={"temperature": 0}
        )
        usage = answer.usage
        counted = client.messages.count_tokens(model=MODEL, messages=asked).input_tokens
        url: Any = {"type": "image", "source": {"type": "url", "url": "https://example.com/cat.png"}}
        with pytest.raises(anthropic.BadRequestError, match="nothing is fetched"):
            client.messages.create(model=MODEL, messages=[{"role": "user", "content": [url]}], max_tokens=4)
        call: Any = {"type": "tool_use", "id": "call_1", "name": "look", "input": {}}
        result: Any = {"type": "tool_result", "tool_use_id": "call_1", "content": [block]}
        history: Any = [*asked, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
        shown = client.messages.count_tokens(model=MODEL, messages=history).input_tokens
    assert "".join(block.text for block in answer.content) == expected[0]
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == expected[1] == counted
    assert shown > counted + 24, "the result of a tool may be a picture"


def test_ollama(front: Front, expected: tuple[str, int]) -> None:
    def post(path: str, **fields: Any) -> dict[str, Any]:
        options = {"temperature": 0, "num_predict": NUM_TOKENS}
        body = {"model": MODEL, "stream": False, "options": options} | fields
        answer: dict[str, Any] = httpx2.post(f"{front.address}{path}", json=body, timeout=LIMIT_S).json()
        return answer

    answer = post("/api/chat", messages=[{"role": "user", "content": QUESTION, "images": [DATA]}])
    assert (answer["message"]["content"], answer["prompt_eval_count"]) == expected
    generated = post("/api/generate", prompt=QUESTION, images=[DATA])
    assert (generated["response"], generated["prompt_eval_count"]) == expected
    assert "images" in post("/api/generate", prompt=QUESTION, images=[DATA], raw=True)["error"]
    assert "vision" in post("/api/show")["capabilities"]
    assert "vision" not in post("/api/show", model=BLIND)["capabilities"]


def test_a_picture_of_a_host_that_the_owner_allows(front: Front, expected: tuple[str, int]) -> None:
    url = f"http://{front.picture_host}/cat.png"
    answer = httpx2.post(f"{front.address}/v1/chat/completions", json=chat(image(url), TEXT), timeout=LIMIT_S).json()
    assert (answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens"]) == expected


@pytest.mark.parametrize("path", ["/completion", "/v1/completions"])
def test_llama_servers_form_of_a_prompt_with_pictures(front: Front, path: str) -> None:
    prompt: dict[str, Any] = {"prompt_string": "What is <__media__>?", "multimodal_data": [DATA]}
    for asked in (prompt, [prompt]):
        answer = httpx2.post(
            f"{front.address}{path}", json={"model": MODEL, "prompt": asked, "max_tokens": 2}, timeout=LIMIT_S
        )
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "unsupported_content")
        assert "multimodal_data is not read here: send pictures in messages" in error["message"]
    text = {"model": MODEL, "prompt": {"prompt_string": "Hello"}, "max_tokens": 2}
    assert httpx2.post(f"{front.address}{path}", json=text, timeout=LIMIT_S).status_code == 200


def test_llama_server_says_who_sees(front: Front) -> None:
    for model, sees in ((MODEL, True), (BLIND, False)):
        props = httpx2.get(f"{front.address}/props", params={"model": model}, timeout=LIMIT_S).json()
        assert props["modalities"]["vision"] is sees


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_that_does_not_see_names_those_that_do(client: openai.OpenAI, stream: bool) -> None:
    """They are files that the server was given."""
    with pytest.raises(openai.BadRequestError, match=f"this model reads no images; these here do: .*{MODEL}") as raised:
        client.chat.completions.create(**chat(image(), TEXT) | {"model": BLIND, "stream": stream})
    assert raised.value.code == "unsupported_content"


def header(width: int, height: int) -> bytes:
    """Return a PNG of so many pixels whose data is short."""
    body = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pieces = ((b"IHDR", body), (b"IDAT", zlib.compress(bytes(100))), (b"IEND", b""))
    chunks = (
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in pieces
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


@pytest.mark.parametrize(
    "data",
    [b"", b"GIF89a", png(64, 64)[:300], header(60_000, 60_000), header(1, 100_000), b"<svg xmlns='x'/>", bytes(5000)],
    ids=["empty", "gif", "truncated", "bomb", "thin", "svg", "zeros"],
)
def test_what_is_no_picture_gets_one_clear_line(client: openai.OpenAI, data: bytes) -> None:
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(**chat(image(url), TEXT))
    message = str(raised.value.body["message"]) if isinstance(raised.value.body, dict) else ""
    assert "picture" in message
    assert "\n" not in message
    assert len(message) < 200


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "http://127.0.0.1/cat.png"}},
        {"type": "image_url", "image_url": {"url": "/etc/passwd"}},
        {"type": "image_url", "image_url": {}},
        {"type": "image_url"},
        {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}},
    ],
)
def test_other_addresses_and_parts_are_refused(client: openai.OpenAI, part: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(**chat(part, TEXT))
