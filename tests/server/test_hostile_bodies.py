"""Bodies that cost a parser the most: others are answered meanwhile, and the front stays small."""

from __future__ import annotations

import http.client
import json
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.counts import Count
from tests.server.harness import LIMIT_S, Front, Watch, body, serving

MIB = 2**20
VALUES = Count(test=1_000_000, soak=7_800_000)
MESSAGES = Count(test=40_000, soak=300_000)
TEXT_BYTES = Count(test=4 * MIB, soak=15 * MIB)
CHUNKS = Count(test=100_000, soak=500_000)
AT_ONCE = Count(test=6, soak=24)
MAX_HEALTH_S = 1.5  # before these bodies were limited it was 10 s and more
MAX_RSS_BYTES = 300 * MIB

HEAD = b'{"model":"starter","max_tokens":1,"messages":['
USER = b'{"role":"user","content":'
PART = b'{"type":"text","text":"a"}'


def messages(item: bytes, count: int) -> bytes:
    return HEAD + b",".join([item] * count) + b"]}"


def field(name: bytes, value: bytes) -> bytes:
    return HEAD + USER + b'"hi"}],"' + name + b'":' + value + b"}"


def text(piece: str) -> bytes:
    encoded = piece.encode()
    return HEAD + USER + b'"' + encoded * (TEXT_BYTES // len(encoded)) + b'"}]}'


def unknown(piece: bytes) -> bytes:
    """Return a body without a message, with a long text in another field."""
    return HEAD + b'],"unknown":"' + piece * (15 * MIB // len(piece)) + b'"}'


def names(count: int) -> bytes:
    return b"{" + b",".join(b'"%d":1' % number for number in range(count)) + b"}"


REFUSED: dict[str, Callable[[], bytes]] = {
    "numbers": lambda: messages(b"1", VALUES),
    "lists": lambda: messages(b"[]", VALUES // 2),
    "texts": lambda: messages(b'""', VALUES // 2),
    "objects": lambda: messages(b'{"a":{}}', VALUES // 5),
    "bad messages": lambda: messages(b'{"role":"robot","typo":1}', MESSAGES),
    "good messages": lambda: messages(USER + b'"hi"}', MESSAGES),
    "parts": lambda: messages(USER + b"[" + b",".join([PART] * MESSAGES) + b"]}", 1),
    "past": lambda: field(b"edgelm", b'{"past":' + b"[" + b",".join([USER + b'"hi"}'] * MESSAGES) + b"]}"),
    "stops": lambda: field(b"stop", b"[" + b",".join([b"1"] * VALUES) + b"]"),
    "biases": lambda: field(b"logit_bias", names(VALUES // 8)),
    "unknown fields": lambda: HEAD + b"]," + names(VALUES // 8)[1:],
    "unknown fields below the limit": lambda: HEAD + b"]," + names(45_000)[1:],
    "unknown options below the limit": lambda: field(b"stream_options", names(45_000)),
    "parts below the limit": lambda: messages(USER + b"[" + b",".join([PART] * 1000) + b"]}", 16),
    "a deep nest": lambda: b'{"a":' * (VALUES // 3),
    "escapes": lambda: text("\\n"),
    "quotes": lambda: text('\\"'),
    "digits": lambda: unknown(b"9" * 199 + b" "),
    "exponents": lambda: unknown(b"1e99 "),
    "halves": lambda: unknown(rb"\ud800"),
    "half a character at the end": lambda: unknown(rb"\n")[:-2] + rb'\ud800"}',
    "no JSON": lambda: b"x" * (15 * MIB),
    "long stops": lambda: field(b"stop", json.dumps(["ab" * 100_000] * 64).encode()),
    "values in a text": lambda: field(b"guided_json", b'"[' + b"[]," * (15 * MIB // 3) + b'1]"'),
    "wide characters": lambda: text("[,\N{GRINNING FACE}"),
}


@pytest.fixture(scope="module")
def starter(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """A front whose starter model is loaded."""
    with serving(environment, log=tmp_path_factory.mktemp("log") / "front.log") as front:
        assert front.chat("starter", max_tokens=1).status_code == 200
        yield front


def post(front: Front, content: bytes) -> tuple[int, str]:
    """Send a body; return the status and the error's code."""
    address = urlsplit(front.address)
    assert address.hostname
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=LIMIT_S)
    headers = {"content-type": "application/json", "prefer": "wait"}
    try:
        connection.request("POST", "/v1/chat/completions", content, headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read()).get("error", {}).get("code", "")
    finally:
        connection.close()


def peak_rss_bytes(front: Front) -> int:
    if sys.platform != "linux":
        return 0
    status = Path(f"/proc/{front.process.pid}/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


@pytest.mark.timeout(Count(test=300, soak=3600))
@pytest.mark.parametrize("name", REFUSED)
def test_one_body_stops_nothing(starter: Front, name: str) -> None:
    content = REFUSED[name]()
    with Watch(starter) as watch:
        begin = time.monotonic()
        status, code = post(starter, content)
        took_s = time.monotonic() - begin
    rss = peak_rss_bytes(starter)
    figures = f"{len(content) / MIB:.1f} MiB, {took_s:.2f} s, /health {watch.slowest_s * 1e3:.0f} ms"
    print(f"{name}: {figures}, front's peak {rss / MIB:.0f} MiB: {status} {code}")
    assert status in (400, 413)
    watch.check(MAX_HEALTH_S)
    assert rss < MAX_RSS_BYTES


@pytest.mark.timeout(Count(test=300, soak=3600))
def test_many_such_bodies_at_once(starter: Front) -> None:
    contents = [make() for make in REFUSED.values()]
    with Watch(starter) as watch, ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(lambda number: post(starter, contents[number % len(contents)]), range(4 * AT_ONCE)))
        assert starter.chat("starter", max_tokens=1).status_code == 200
    rss = peak_rss_bytes(starter)
    print(f"/health {watch.slowest_s * 1e3:.0f} ms, front's peak {rss / MIB:.0f} MiB")
    assert {status for status, _ in answers} <= {400, 413, 429}
    watch.check(MAX_HEALTH_S)
    assert rss < MAX_RSS_BYTES


def test_a_body_in_chunks_of_one_byte(starter: Front) -> None:
    address = urlsplit(starter.address)
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with Watch(starter) as watch, socket.create_connection((address.hostname, address.port or 0), LIMIT_S) as sock:
        sock.sendall(head.encode() + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\n[\r\n" * CHUNKS + b"0\r\n\r\n")
        assert sock.recv(1000).startswith(b"HTTP/1.1 4")
    print(f"/health {watch.slowest_s * 1e3:.0f} ms")
    watch.check(MAX_HEALTH_S)


def test_one_long_text_reaches_the_model(starter: Front) -> None:
    """The engine counts its tokens; a text of this size is longer than any context."""
    content = json.dumps(body("starter", '{"a": [1, "b"]}, ' * (10 * MIB // 18))).encode()
    assert len(content) > 10 * MIB
    assert post(starter, content) == (400, "context_length_exceeded")
