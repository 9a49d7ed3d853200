"""The longest gap of a running stream beside each body that costs a server the most.

    python -m tests.bench.bench_hostile [NAME …] [--model FILE] [--limit 20]

Starts a front of its own, with a tiny model of random weights unless FILE is another one. An answer of that model is
streamed all the time; each body goes to the same model, so that its front and its engine parse it. Prints for each body
the longest gap between two chunks of the stream from its first byte to its answer, for at most `--limit` seconds, and
the answer. A NAME is the beginning of a body's name.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from tests.server.harness import ENDLESS, Front, body, serving, until
from tests.tiny import write_tiny

MIB = 2**20
BIG = 14 * MIB
SETTLE_S = 0.5  # of the stream before a body, and behind its answer
CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"

Make = Callable[[str], tuple[str, bytes]]


def filled(piece: bytes) -> bytes:
    """Return a body whose unknown field is a text of 14 MiB."""
    return b'{"unknown":"' + piece * (BIG // len(piece)) + b'"}'


def chat(**fields: Any) -> Make:
    return lambda model: (CHAT, json.dumps(body(model, "hi", **fields) | {"max_tokens": 1}).encode())


def text(path: str, **fields: Any) -> Make:
    return lambda model: (path, json.dumps({"model": model, "prompt": "hi", "max_tokens": 1} | fields).encode())


def raw(make: Callable[[], bytes]) -> Make:
    """Return a chat in front of these bytes, which begin an object."""
    return lambda model: (CHAT, json.dumps(body(model, "hi", max_tokens=1)).encode()[:-1] + b"," + make()[1:])


def asked(path: str, **fields: Any) -> Make:
    return lambda model: (path, json.dumps({"model": model} | fields).encode())


def function(index: int, parameters: Any = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": f"tool_{index}", "parameters": parameters or {"type": "object"}}}


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


STOPS = ["ab" * 100_000 + str(index) for index in range(64)]
MANY = [f"tool_{index}" for index in range(45_000)]
WIDE = {"type": "object", "properties": {f"a{index}": {"type": "string"} for index in range(4000)}}
BODIES: dict[str, Make] = {
    "digits": raw(lambda: filled(b"9" * 199 + b" ")),
    "exponents": raw(lambda: filled(b"1e99 ")),
    "plain text": raw(lambda: filled(b"a")),
    "escapes": raw(lambda: filled(b"\\n")),
    "backslashes": raw(lambda: filled(b"\\\\")),
    "halves": raw(lambda: filled(b"\\ud800")),
    "a half at the end": raw(lambda: filled(b"\\n")[:-2] + b'\\ud800"}'),
    "no JSON": lambda _: (CHAT, b"x" * BIG),
    "JSON cut off": lambda model: (CHAT, json.dumps(body(model, "x" * BIG)).encode()[:-3]),
    "one large number": raw(lambda: b'{"unknown":' + b"9" * BIG + b"}"),
    "large numbers": raw(lambda: b'{"unknown":[' + b",".join([b"0." + b"9" * 280] * 45_000) + b"]}"),
    "a long message": lambda model: (CHAT, json.dumps(body(model, "hello " * (BIG // 6))).encode()),
    "a long prompt": text(TEXT, prompt="hello " * (BIG // 6)),
    "a long llama prompt": text("/completion", prompt="hello " * (BIG // 6)),
    "stop, n=3": chat(stop=STOPS, n=3),
    "stop, one of 1 MB, n=16": chat(stop="ab" * 500_000, n=16),
    "stop of completions": text(TEXT, stop=STOPS),
    "stop of responses": asked(RESPONSES, input="hi", stop=STOPS, max_output_tokens=1),
    "stop of messages": asked(MESSAGES, messages=[user("hi")], max_tokens=1, stop_sequences=STOPS),
    "stop of Ollama": asked("/api/chat", messages=[user("hi")], options={"stop": STOPS, "num_predict": 1}),
    "stop of llama-server": text("/completion", stop=STOPS),
    "logit_bias, n=16": chat(logit_bias={str(index % 500 + index * 512): 1 for index in range(4096)}, n=16),
    "log-probabilities, n=16": asked(
        CHAT, messages=[user("hi")], max_tokens=400, n=16, logprobs=True, top_logprobs=20, **ENDLESS
    ),
    "JSON in a text": chat(guided_json="[" + "1," * (BIG // 2) + "1]"),
    "lists in a text": chat(guided_json="[" + "[]," * (BIG // 3) + "1]"),
    "schema": chat(json_schema={"type": "string", "description": "x" * BIG}),
    "wide schema": chat(json_schema=WIDE),
    "regex": chat(guided_regex="a" * BIG),
    "lark": chat(guided_grammar="start: " + "a " * (BIG // 2)),
    "gbnf": chat(grammar="root ::= " + "a " * (BIG // 2)),
    "choices": chat(guided_choice=[f"{index}" + "x" * 3000 for index in range(4096)]),
    "many choices": chat(structured_outputs={"choice": MANY}),
    "many tools": chat(tools=[function(index) for index in range(4000)]),
    "many tools, required": chat(tools=[function(index) for index in range(4000)], tool_choice="required"),
    "a tool with a long text": chat(tools=[function(1, {"type": "object", "description": "x" * BIG})]),
    "a wide tool": chat(tools=[function(1, WIDE)], tool_choice="required"),
    "allowed tools": chat(
        tools=[function(index) for index in range(2000)],
        tool_choice={"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
    ),
    "allowed tools of responses": asked(
        RESPONSES,
        input="hi",
        max_output_tokens=1,
        tools=[{"type": "function", "name": name} for name in MANY[:2000]],
        tool_choice={"type": "allowed_tools", "tools": [{"name": name} for name in MANY[:20_000]]},
    ),
    "names": chat(tools=[{"type": "function", "function": {"name": "x" * BIG}}]),
    "metadata": chat(metadata={"a": "x" * BIG}),
    "metadata of responses": asked(RESPONSES, input="hi", max_output_tokens=1, metadata={"a": "x" * BIG}),
    "user": chat(user="x" * BIG),
    "effort": chat(reasoning_effort="x" * BIG),
    "template options": chat(chat_template_kwargs={"documents": ["x" * BIG]}),
    "prediction": chat(prediction={"type": "content", "content": "hello " * (BIG // 6)}),
    "past": chat(edgelm={"past": [user("hello " * (BIG // 6))]}),
    "keep_alive": chat(keep_alive="1" * BIG),
    "arguments": asked(
        CHAT,
        max_tokens=1,
        messages=[
            user("hi"),
            {
                "role": "assistant",
                "tool_calls": [{"id": "1", "function": {"name": "a", "arguments": "[" + "1," * (BIG // 2) + "1]"}}],
            },
            {"role": "tool", "tool_call_id": "1", "content": "x"},
        ],
    ),
    "many messages": asked(CHAT, max_tokens=1, messages=[user("x" * 3000) for _ in range(4000)]),
    "many items": asked(RESPONSES, max_output_tokens=1, input=[user("x" * 3000) for _ in range(4000)]),
    "encrypted reasoning": asked(
        RESPONSES,
        max_output_tokens=1,
        input=[user("hi"), {"type": "reasoning", "encrypted_content": "ZWRn" * (BIG // 4)}],
    ),
    "response_fields": text("/completion", response_fields=["a/" * 1500 + str(index) for index in range(4096)]),
    "response id": asked(RESPONSES, input="hi", previous_response_id="x" * BIG),
    "tokenize": asked("/tokenize", content="hello " * (MIB // 6), with_pieces=True),
    "detokenize": asked("/detokenize", tokens=[300] * 45_000),
    "files": asked(
        "/infill",
        input_prefix="a",
        input_suffix="b",
        n_predict=1,
        input_extra=[{"filename": "f" * 1500, "text": "x" * 1500} for _ in range(4000)],
    ),
    "load": asked("/models/load", keep_alive="9" * BIG),
    "show": asked("/api/show", name="x" * BIG),
}


class Stream:
    """An answer that goes on while the block runs, and when its chunks arrived."""

    def __init__(self, front: Front, model: str) -> None:
        self._address = urlsplit(front.address)
        self._body = json.dumps(body(model, "hi", **ENDLESS) | {"max_tokens": 30_000, "stream": True})
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self.arrivals: list[float] = []

    def longest_gap_s(self, begin: float, end: float) -> float:
        """Return the longest gap that a part of this time lies in."""
        times = [*self.arrivals, time.monotonic()]
        return max((b - a for a, b in pairwise(times) if b > begin and a < end), default=0.0)

    def _read(self) -> None:
        with suppress(OSError, http.client.HTTPException):
            while not self._over.is_set():
                connection = http.client.HTTPConnection(str(self._address.hostname), self._address.port, timeout=120)
                connection.request("POST", CHAT, self._body, {"content-type": "application/json"})
                answer = connection.getresponse()
                while not self._over.is_set() and answer.read1(65_536):
                    self.arrivals.append(time.monotonic())
                connection.close()

    def __enter__(self) -> Self:
        self._thread.start()
        time.sleep(SETTLE_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(10)


def post(front: Front, path: str, content: bytes, limit_s: float) -> str:
    """Send a body; return its answer in words."""
    address = urlsplit(front.address)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=limit_s)
    try:
        connection.request("POST", path, content, {"content-type": "application/json", "prefer": "wait"})
        answer = connection.getresponse()
        data = answer.read()
        return f"{answer.status} {data[:90].decode(errors='replace') if answer.status >= 400 else ''}".strip()
    except TimeoutError:
        return f"no answer in {limit_s:.0f} s"
    except OSError as error:
        return f"the connection ended: {error}"
    finally:
        connection.close()


def measure(front: Front, model: str, make: Make, limit_s: float) -> str:
    path, content = make(model)
    with Stream(front, model) as stream:
        begin = time.monotonic()
        said = post(front, path, content, limit_s)
        end = time.monotonic()
        time.sleep(SETTLE_S)
        beside = stream.longest_gap_s(begin, end + SETTLE_S / 2)
        alone = stream.longest_gap_s(stream.arrivals[1], begin)
    with suppress(AssertionError):
        until("the server is idle", lambda: front.ps(model)["requests"] == 0)
    size = len(content) / MIB
    return f"gap {beside * 1e3:6.0f} ms (alone {alone * 1e3:.0f}), {size:.1f} MiB in {end - begin:.2f} s: {said}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--limit", type=float, default=20)
    args = parser.parse_args()
    chosen = {name: make for name, make in BODIES.items() if not args.names or name.startswith(tuple(args.names))}
    with tempfile.TemporaryDirectory(prefix="edgelm-hostile-", ignore_cleanup_errors=True) as home:
        path = args.model or write_tiny(Path(home, "long.gguf"), context=32_768, seed=1)
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("EDGELM_", "HF_"))}
        places = {
            f"EDGELM_{kind}_DIR": str(Path(home, kind.lower())) for kind in ("CONFIG", "DATA", "RUNTIME", "CACHE")
        }
        with serving(clean | places | {"EDGELM_SPEC": "off"}, path, log=Path(home, "log")) as front:
            assert front.chat(path.stem, max_tokens=1).status_code == 200
            for name, make in chosen.items():
                print(f"{name:28} {measure(front, path.stem, make, args.limit)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
