"""Requests that are almost right: a valid body of every route with a few changes, all drawn from one generator.

Owns the changes. Sends nothing.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.server.odd_values import ROLES, junk, odd_value
from tests.server.valid_requests import VALID

MAX_TOKENS = 4
LIMITS = {  # fields that keep an answer short
    "/v1/chat/completions": ("max_tokens", "max_completion_tokens"),
    "/v1/completions": ("max_tokens",),
    "/v1/responses": ("max_output_tokens",),
    "/v1/messages": ("max_tokens",),
    "/v1/messages/count_tokens": (),
    "/v1/responses/input_tokens": (),
    "/api/chat": (),  # in its options
    "/api/generate": (),
    "/api/embed": (),
    "/api/embeddings": (),
    "/api/show": (),
    "/completion": ("n_predict",),
    "/infill": ("n_predict",),
    "/tokenize": (),
    "/detokenize": (),
    "/apply-template": (),
}
BODY_PATHS = tuple(LIMITS)
OTHER_PATHS = ("/v1/models", "/v1/models/{}", "/v1/responses/{}", "/v1/responses/{}/input_items", "/v1/{}", "/{}")
LOOKS = (
    "/health",
    "/edgelm/ps",
    "/",
    "/api/version",
    "/api/tags",
    "/api/ps",
    "/props",
    "/slots",
    "/props?model={}",
    "/tokenizer_info",
)
ODD_HEADERS = [
    {"content-type": ""},
    {"content-type": "text/plain"},
    {"content-type": "application/xml"},
    {"content-type": "application/json; charset=utf-16"},
    {"content-type": "APPLICATION/JSON"},
    {"content-type": "multipart/form-data; boundary=x"},
    {"content-encoding": "gzip"},
    {"prefer": "wait=x"},
    {"anthropic-version": "1999-01-01"},
    {"authorization": "Bearer \xff"},
    {"accept": "image/png"},
]
RIGHT = 0.65  # of the requests: they reach the engine, the others test refusals
FITTING: dict[str, list[Any]] = {
    "temperature": [0, 0.3, 1, 1.7, 1e-9, 50],
    "top_p": [0, 0.1, 0.9, 1],
    "top_k": [-1, 0, 1, 40, 10**6],
    "min_p": [0, 0.05, 0.999],
    "seed": [0, 3, 2**31, -1],
    "frequency_penalty": [0, 1.5, -2],
    "presence_penalty": [0, 1.5, -2],
    "repetition_penalty": [1, 1.3, 0.01],
    "logit_bias": [{}, {"5": 1.5}, {"5": -100, "6": 100, "7": 0}, {str(token): -100 for token in range(300)}],
    "speculation": [True, False, None],
    "draft": ["auto", "ngram", "mtp", "off", "oracle", None],
    "keep_alive": ["5m", -1, 600, "1h30m"],
    "unknown": [None, {"a": [1]}, "x" * 3000],
}
STOPS: list[Any] = [[], ["x"], ["\n", " "], ["\N{GRINNING FACE}"], ["a", "e", "i", "o", "u"], ["x" * 1024] * 64]
TEXT_NAMES = frozenset(
    {"content", "text", "prompt", "input", "system", "instructions", "suffix", "input_prefix", "input_suffix"}
    | {"thinking", "description", "filename", "output", "arguments"}
)
FITTING_TEXTS = [
    "a",
    " ",
    "\x00",
    "Hi\r\n\t there",
    "\N{GRINNING FACE} e\u0301 \u202e",
    "\ud800 half",
    "<|im_end|></think><tool_call>",
    '{"a": 1}',
    "data: [DONE]\n\n",
    "{{ 7 * 7 }} %s%n",
    "word " * 200,
    "x" * 500,
]


@dataclass(frozen=True)
class FuzzedRequest:
    """A request as it is sent."""

    method: str
    path: str
    content: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def route(self) -> str:
        return self.path.partition("?")[0]


def fuzzed(rng: random.Random, response_ids: Sequence[str]) -> FuzzedRequest:
    """Return a request; some of those of /v1/responses continue or read one of these responses."""
    if rng.random() < 0.04:
        return _without_body(rng, response_ids)
    path = rng.choice(BODY_PATHS)
    data = copy.deepcopy(rng.choice(VALID[path])) | {"model": "starter", "stream": rng.random() < 0.4}
    if data.get("previous_response_id"):
        data["previous_response_id"] = rng.choice(response_ids)
    if is_right := rng.random() < RIGHT:
        for _ in range(rng.randrange(6)):
            _fit(rng, path, data)
    else:
        if path.startswith("/v1/") and path != "/v1/completions" and rng.random() < 0.1:
            data = copy.deepcopy(rng.choice(VALID[rng.choice(BODY_PATHS)])) | {"model": "starter"}  # of another API
        for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
            _mutate(rng, data)
    _limit(path, data)
    headers = {"content-type": "application/json"}
    if not is_right and rng.random() < 0.1:
        headers |= rng.choice(ODD_HEADERS)
    content = json.dumps(data, ensure_ascii=rng.random() < 0.5).encode(
        "utf-8", "replace" if is_right else "surrogatepass"
    )
    return FuzzedRequest("POST", path, content if is_right else _broken(rng, content, data), headers)


def _fit(rng: random.Random, path: str, data: dict[str, Any]) -> None:
    """Change one place of a body so that it stays right."""
    match rng.randrange(6):
        case 0 | 1:
            options = data.setdefault("options", {}) if path in ("/api/chat", "/api/generate") else data
            stop = "stop_sequences" if path.startswith("/v1/messages") else "stop"
            name, values = rng.choice([*FITTING.items(), (stop, STOPS)])
            options[name] = rng.choice(values)
        case 2:
            texts = [(at, key) for at, key in _places(data) if key in TEXT_NAMES and isinstance(at[key], str)]
            if texts:
                container, key = rng.choice(texts)
                container[key] = rng.choice(FITTING_TEXTS)
        case 3:
            turns = data.get("messages") or data.get("input")
            if isinstance(turns, list):
                users = [
                    index for index, turn in enumerate(turns) if isinstance(turn, dict) and turn.get("role") == "user"
                ]
                if users:
                    at = rng.choice(users)
                    turns[at:at] = [copy.deepcopy(turns[at]) for _ in range(rng.choice([1, 1, 2, 20]))]
        case 4:
            data[f"x_{rng.randrange(5)}"] = junk(rng)
        case _:
            data["stream"] = rng.random() < 0.5


def _without_body(rng: random.Random, response_ids: Sequence[str]) -> FuzzedRequest:
    name = rng.choice(
        [
            *response_ids,
            "starter",
            "resp_none",
            "%00",
            "%ff",
            "a%2fb",
            "..%2f..",
            "x" * 5000,
            "%F0%9F%98%80",
            "?order=asc",
            "{}",
        ]
    )
    path = rng.choice(OTHER_PATHS).format(name)
    method = rng.choice(["GET", "GET", "GET", "DELETE", "POST", "PUT", "PATCH", "OPTIONS", "HEAD"])
    if method == "DELETE" and any(kept in path for kept in response_ids):
        method = "GET"  # later requests continue it
    if rng.random() < 0.3:
        path = rng.choice([*BODY_PATHS, *LOOKS]).format(name)
    content = rng.choice([b"", b"{}", b"[]", b"\xff"]) if method in ("POST", "PUT", "PATCH") else b""
    query = rng.choice(["", "", "?order=asc", "?order=x&order=desc", "?limit=-1&after=%00", "?include[]=x&stream=true"])
    if "?" in path:
        query = ""
    return FuzzedRequest(method, path + query, content, {"content-type": "application/json"} if content else {})


def _mutate(rng: random.Random, data: dict[str, Any]) -> None:
    """Change one place of a body."""
    container, key = rng.choice(_places(data))
    value = container[key]
    match rng.randrange(9):
        case 0:
            del container[key]
        case 1 if isinstance(container, dict):
            container[rng.choice([str(key).upper(), f"{key}_", "", "type", "name", "role", "content"])] = container.pop(
                key
            )
        case 1 | 2 if isinstance(container, list):
            container.insert(key, copy.deepcopy(value))
        case 3:
            container[key] = rng.choice([[value], {"type": value}, {str(key): value}, str(value), [[[[value]]]]])
        case 4 if isinstance(value, list | dict) and value:
            container[key] = type(value)()
        case 5:
            name = rng.choice(
                [
                    "tools",
                    "tool_choice",
                    "response_format",
                    "structured_outputs",
                    "guided_json",
                    "guided_regex",
                    "guided_grammar",
                    "guided_choice",
                    "grammar",
                    "json_schema",
                    "text",
                    "output_config",
                    "functions",
                    "thinking",
                    "stop",
                    "logit_bias",
                    "n",
                    "logprobs",
                    "best_of",
                    "prompt",
                    "input",
                    "messages",
                ]
            )
            data[name] = odd_value(rng, name)
        case 6 if key == "role":
            container[key] = rng.choice(ROLES)
        case _ if isinstance(key, str):
            container[key] = odd_value(rng, key)
        case _:
            container[key] = junk(rng)


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Return every container below a value with one of its keys; those near the top more often."""
    places = []
    for key, inner in [*value.items()] if isinstance(value, dict) else [*enumerate(value)]:
        places.append((value, key))
        if isinstance(inner, dict | list):
            places += _places(inner)
    return places or [({"": None}, "")]


def _limit(path: str, data: dict[str, Any]) -> None:
    """Keep a valid answer short."""
    for name in LIMITS[path]:
        value = data.get(name)
        if value is None or (isinstance(value, int) and not 0 <= value <= MAX_TOKENS):
            data[name] = MAX_TOKENS
    if path in ("/api/chat", "/api/generate"):
        options = data.setdefault("options", {})
        if options is None or isinstance(options, dict):
            data["options"] = {**(options or {}), "num_predict": MAX_TOKENS}


def _broken(rng: random.Random, content: bytes, data: dict[str, Any]) -> bytes:
    """Return a body as bytes, which in some are not quite JSON."""
    if rng.random() < 0.5:
        content = content.replace(b"Infinity", b"1e999").replace(b": NaN", b": 9e309")
    match rng.randrange(60):
        case 0:
            return content[: rng.randrange(len(content))]
        case 1:
            at = rng.randrange(len(content))
            return content[:at] + bytes([rng.randrange(256)]) + content[at + 1 :]
        case 2:
            at = rng.randrange(len(content))
            return (
                content[:at] + rng.choice([b"\xff", b"\xed\xa0\x80", b"\xc0\x80", b"\x00", b'"', b"\\"]) + content[at:]
            )
        case 3:
            return rng.choice([b"\xef\xbb\xbf", b"\xff\xfe", b" \n\t", b"\x00"]) + content
        case 4:
            return content + rng.choice([b"{}", b"\x00", b",", b"\n\n", content])
        case 5:
            name = rng.choice([*data]) if data else "a"
            if name not in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
                pair = json.dumps({name: junk(rng)}).encode()
                return pair[:-1] + b"," + content[1:]
            return content
        case 6:
            return json.dumps(data).encode(rng.choice(["utf-16", "utf-32", "utf-7"]))
        case 7:
            depth = rng.choice([100, 300, 20_000])
            return b'{"model":"starter","max_tokens":1,"messages":' + b"[" * depth + b"]" * depth + b"}"
        case 8:
            return rng.choice([b"", b"null", b"[]", b'"x"', b"3", b"{}", b"NaN", b"{", b"\x1f\x8b\x08"])
    return content
