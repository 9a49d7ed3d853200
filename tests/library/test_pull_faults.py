"""A pull from a server that drops, stalls, refuses and lies, and onto a disk that fills up."""

from __future__ import annotations

import errno
import os
import random
from itertools import pairwise
from pathlib import Path

import pytest

from edgelm.errors import EdgeLMError
from edgelm.library.events import Retrying, Wrong
from edgelm.library.source import READ_BYTES
from tests.counts import Count
from tests.library.conftest import Puller
from tests.library.hub_server import Fault, HubHandler, HubServer

SIZE = 2_000_000
NAME = "o/m-GGUF"
FILE = "m-Q4_K_M.gguf"
OTHER = "m-Q4_K_M-00002-of-00002.gguf"
RESETS = Count(test=8, soak=50)
# What one break may cost: what was on its way, or in a read that was not finished.
CHUNK = READ_BYTES


@pytest.fixture
def content(server: HubServer) -> bytes:
    data = random.Random(1).randbytes(SIZE)
    server.add(NAME, {FILE: data})
    return data


def one_line(error: pytest.ExceptionInfo[EdgeLMError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    assert "Traceback" not in text
    return text


def fetched_twice(server: HubServer, path: str = FILE) -> list[int]:
    """Return, for each answer but the first, how many bytes of the one before it came again."""
    sent = [each for each in server.sent if each.path == path]
    return [max(0, before.end - after.start) for before, after in pairwise(sent)]


def test_resets_cost_no_more_than_what_was_on_its_way(server: HubServer, puller: Puller) -> None:
    size = RESETS * 400_000
    data = random.Random(2).randbytes(size)
    server.add(NAME, {FILE: data})
    server.send_buffer, server.rate = 2**16, 40e6  # a reset drops what the receiver has not read yet
    points = random.Random().choices(range(1, size // RESETS), k=RESETS)
    server.order(FILE, *(Fault("reset", point) for point in points))
    assert puller.pull(NAME).read_bytes() == data
    again = fetched_twice(server)
    print(
        f"{len(again)} resets of {size / 1e6:.0f} MB: {sum(again):,} bytes fetched twice, at most {max(again):,} at one"
    )
    assert len(again) == RESETS
    assert max(again) <= CHUNK
    assert not puller.told(Wrong)


@pytest.mark.parametrize("kind", ["close", "stall"])
def test_it_goes_on_where_it_was(server: HubServer, puller: Puller, content: bytes, kind: str) -> None:
    server.order(FILE, Fault(kind, 700_000))
    assert puller.pull(NAME).read_bytes() == content
    first, second = server.sent
    assert second.range == f"bytes={second.start}-{SIZE - 1}"
    assert second.if_range == f'"cdn-{server.repos[NAME].files[FILE].blob[:8]}"'
    assert second.start == first.end
    assert puller.told(Retrying)


def test_a_later_run_goes_on_too(server: HubServer, puller: Puller, content: bytes) -> None:
    server.order(FILE, Fault("close", 700_000), Fault("status", status=503, times=4))
    with pytest.raises(EdgeLMError) as error:
        puller.pull(NAME)
    assert "HTTP 503; what came is kept: run it again to continue" in one_line(error)
    assert [path.name[-5:] for path in puller.parts()] == [".part", ".etag", ".path"]
    assert puller.pull(NAME).read_bytes() == content
    assert server.sent[-1].start == 700_000
    assert server.sent[-1].if_range is not None
    assert server.sent_bytes() == SIZE
    assert puller.parts() == []


def test_wrong_bytes_are_caught_and_that_file_alone_is_fetched_again(server: HubServer, puller: Puller) -> None:
    data = [random.Random(seed).randbytes(SIZE) for seed in (1, 2)]
    first = "m-Q4_K_M-00001-of-00002.gguf"
    server.add(NAME, {first: data[0], OTHER: data[1]})
    server.order(OTHER, Fault("flip", 1_234_567))
    path = puller.pull(NAME)
    assert path.read_bytes() == data[0]
    assert path.with_name(OTHER).read_bytes() == data[1]
    assert puller.told(Wrong) == [Wrong(OTHER)]
    assert server.sent_bytes(first) == SIZE
    assert server.sent_bytes(OTHER) == 2 * SIZE


def test_wrong_bytes_before_a_break_are_caught_after_it(server: HubServer, puller: Puller, content: bytes) -> None:
    server.order(FILE, Fault("close", 700_000))
    server.order(FILE, Fault("status", status=500, times=4))
    with pytest.raises(EdgeLMError):
        puller.pull(NAME)
    part = puller.parts()[0]
    with part.open("r+b") as file:  # the disk, or a hand, changed what had come
        file.seek(1000)
        file.write(b"\0\0\0\0")
    assert puller.pull(NAME).read_bytes() == content
    assert puller.told(Wrong) == [Wrong(FILE)]


def test_a_server_whose_bytes_stay_wrong_is_named(server: HubServer, puller: Puller, content: bytes) -> None:
    server.order(FILE, Fault("flip", 5, times=9))
    with pytest.raises(EdgeLMError) as error:
        puller.pull(NAME)
    assert f"sends as {FILE} is not what it lists (its hash differs)" in one_line(error)
    assert puller.parts() == []
    assert not list(puller.cache.glob("*/snapshots/*/*"))


def test_a_server_without_ranges_loses_nothing(server: HubServer, puller: Puller, content: bytes) -> None:
    """The whole file comes instead: what is here is compared, and stays."""
    server.order(FILE, Fault("close", 700_000), Fault("whole"), Fault("whole"))
    assert puller.pull(NAME).read_bytes() == content
    assert not puller.told(Wrong)


def test_wrong_bytes_are_found_by_comparing_where_the_whole_file_comes_again(
    server: HubServer, puller: Puller, content: bytes
) -> None:
    server.order(FILE, Fault("close", 700_000), Fault("status", status=500, times=4), Fault("whole"), Fault("whole"))
    with pytest.raises(EdgeLMError):
        puller.pull(NAME)
    with puller.parts()[0].open("r+b") as file:
        file.seek(300_000)
        file.write(b"\0\0\0\0")
    assert puller.pull(NAME).read_bytes() == content
    assert not puller.told(Wrong)


def test_a_break_of_a_server_without_ranges_loses_nothing(server: HubServer, puller: Puller, content: bytes) -> None:
    server.cdn_etag = 'W/"weak"'
    server.order(FILE, Fault("close", 700_000), Fault("whole"))
    server.order(FILE, Fault("status", status=500, times=4))
    assert puller.pull(NAME).read_bytes() == content
    assert server.sent[1].if_range is None  # a weak tag is no promise


def test_another_etag_of_the_same_bytes_costs_nothing(server: HubServer, puller: Puller, content: bytes) -> None:
    """The hub moved the file to other storage: its bytes are still those of its hash."""
    server.order(FILE, Fault("close", 700_000), Fault("status", status=500, times=4))
    with pytest.raises(EdgeLMError):
        puller.pull(NAME)
    server.cdn_etag = '"moved"'
    assert puller.pull(NAME).read_bytes() == content
    kept = [sent for sent in server.sent if sent.start]
    assert [(sent.start, sent.if_range) for sent in kept] == [(700_000, None)]
    assert server.sent_bytes() < SIZE + 3 * 2**20


def test_another_version_in_the_middle_is_noticed(server: HubServer, puller: Puller, content: bytes) -> None:
    server.order(FILE, Fault("close", 700_000))
    file = server.repos[NAME].files[FILE]
    puller.pull(NAME)
    server.add("o/n", {FILE: content})
    file = server.repos["o/n"].files[FILE]
    file.blob = "f" * 64  # what the listing says no longer fits what comes
    with pytest.raises(EdgeLMError, match="is not what it lists"):
        puller.pull("o/n")


def test_the_hub_that_names_another_version_is_not_believed(
    server: HubServer, puller: Puller, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.library.hub_server import HubHandler

    plain = HubHandler._resolve

    def resolve(self: HubHandler, name: str, revision: str, path: str) -> None:
        self.hub.repos[name].files[path].blob = "e" * 64
        plain(self, name, revision, path)

    monkeypatch.setattr(HubHandler, "_resolve", resolve)
    with pytest.raises(EdgeLMError, match="the hub names another version of the file than before"):
        puller.pull(NAME)
    assert server.sent == []


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (Fault("status", status=500, times=9), "HTTP 500"),
        (Fault("status", status=429, times=9), "HTTP 429"),
        (Fault("status", status=429, headers={"Retry-After": "3600"}), "HTTP 429, and asks to wait 3600 s"),
        (Fault("status", status=416, times=9), "HTTP 416"),
        (Fault("status", status=403, times=9), "HTTP 403"),  # of the other host: a link that expired
        (Fault("stall", 0, times=9), "nothing came for a while|no answer in time"),
        (Fault("drip", times=9), "almost nothing comes"),
        (Fault("length", by=5, times=9), "the server offers 2000005 bytes where 2,000,000 belong"),
        (Fault("length", by=-5, times=9), "the server offers 1999995 bytes where 2,000,000 belong"),
        (Fault("gzip", times=9), "the server compresses what must come as it is"),
        (Fault("close", 0, times=9), "closed|without"),
    ],
    ids=lambda value: value.kind + str(value.status) if isinstance(value, Fault) else "",
)
def test_a_server_that_keeps_failing_gives_one_line(
    server: HubServer, puller: Puller, content: bytes, fault: Fault, said: str
) -> None:
    server.order(FILE, fault)
    with pytest.raises(EdgeLMError, match=said) as error:
        puller.pull(NAME)
    assert one_line(error).startswith(f"{FILE} does not come from 127.0.0.1")
    server.faults.clear()
    assert puller.pull(NAME).read_bytes() == content


@pytest.mark.parametrize(
    "asked", ["\xb2", "9" * 5000, "soon", "Mon, 01 Jan 2020 00:00:00 +99999999999999999"], ids=range(4)
)
def test_a_wish_that_is_no_time_is_not_heard(server: HubServer, puller: Puller, content: bytes, asked: str) -> None:
    refused = Fault("status", status=503, headers={"Retry-After": asked}, times=9)
    server.api_faults = [refused] * 9
    with pytest.raises(EdgeLMError, match=r"fails \(HTTP 503\)"):
        puller.pull(NAME)
    server.api_faults = []
    server.order(FILE, refused)
    with pytest.raises(EdgeLMError, match=r"does not come from .* HTTP 503"):
        puller.pull(NAME)


@pytest.mark.parametrize(
    "answer",
    [b"[" * 200_000, b"<html>", b"[]", b'{"id": "o/m-GGUF", "sha": "' + b"c" * 40 + b'", "siblings": [1]}'],
    ids=["deep", "page", "list", "number"],
)
def test_an_answer_that_is_no_listing_gives_one_line(
    server: HubServer, puller: Puller, monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    monkeypatch.setattr(HubHandler, "_api", lambda self, *_: self.reply(200, answer))
    with pytest.raises(EdgeLMError, match="does not answer as a hub does") as error:
        puller.pull(NAME)
    one_line(error)


@pytest.mark.parametrize("size", [-1, 2**63, "5", None])
def test_a_size_that_is_none_gives_one_line(server: HubServer, puller: Puller, content: bytes, size: int) -> None:
    server.repos[NAME].files[FILE].size = size
    with pytest.raises(EdgeLMError, match=f"{FILE} has no size and hash"):
        puller.pull(NAME)


def test_what_the_hub_says_moves_no_terminal(server: HubServer, puller: Puller, content: bytes) -> None:
    said = "a\x9b31m" + "long " * 1000
    server.api_faults = [Fault("status", status=400, headers={"X-Error-Message": said})]
    with pytest.raises(EdgeLMError, match="answers HTTP 400") as error:
        puller.pull(NAME)
    assert one_line(error).isprintable()
    assert len(one_line(error)) < 500


@pytest.mark.parametrize("kind", ["range", "size"])
def test_a_wrong_range_is_not_taken(server: HubServer, puller: Puller, content: bytes, kind: str) -> None:
    server.order(FILE, Fault("close", 700_000), Fault(kind, by=1))
    assert puller.pull(NAME).read_bytes() == content
    assert not puller.told(Wrong)


def test_it_waits_as_long_as_it_is_asked_to(server: HubServer, puller: Puller, content: bytes) -> None:
    server.order(FILE, Fault("status", status=429, headers={"Retry-After": "1"}))
    assert puller.pull(NAME).read_bytes() == content
    (told,) = puller.told(Retrying)
    assert isinstance(told, Retrying)
    assert told.wait_s == 1.0


@pytest.mark.parametrize(
    ("status", "headers", "said"),
    [
        (401, {"X-Error-Message": "Invalid credentials in Authorization header"}, "does not accept your token; log in"),
        (401, {}, "shows no o/m-GGUF .*; check the name; if it is private or gated, log in with `hf auth login`"),
        (403, {}, "forbids access to o/m-GGUF .*; accept its licence at .*/o/m-GGUF"),
        (
            403,
            {"X-Error-Code": "GatedRepo"},
            "o/m-GGUF is gated; accept its licence at http://.*/o/m-GGUF, then log in",
        ),
        (404, {}, "shows no o/m-GGUF"),
        (404, {"X-Error-Code": "RevisionNotFound"}, "has no revision"),
        (416, {}, "HTTP 416"),
        (429, {}, "asks to slow down"),
        (500, {}, r"fails \(HTTP 500\); run it again later"),
    ],
)
def test_the_hub_that_refuses_the_listing_gives_one_line(
    server: HubServer, puller: Puller, content: bytes, status: int, headers: dict[str, str], said: str
) -> None:
    server.api_faults = [Fault("status", status=status, headers=headers) for _ in range(9)]
    with pytest.raises(EdgeLMError, match=said) as error:
        puller.pull(NAME)
    one_line(error)
    assert not puller.cache.exists()


@pytest.mark.parametrize(("status", "tries"), [(404, 1), (401, 1), (500, 4)])
def test_only_what_may_pass_is_asked_again(
    server: HubServer, puller: Puller, content: bytes, status: int, tries: int
) -> None:
    server.api_faults = [Fault("status", status=status) for _ in range(9)]
    with pytest.raises(EdgeLMError):
        puller.pull(NAME)
    assert server.metadata_requests() == tries


def test_a_gated_file_says_how_to_get_it(server: HubServer, puller: Puller, content: bytes) -> None:
    server.repos[NAME].gated = True
    with pytest.raises(EdgeLMError) as error:
        puller.pull(NAME)
    hint = f"accept its licence at {server.url}/{NAME}, then log in with `hf auth login`, or set HF_TOKEN"
    assert one_line(error) == f"{NAME} is gated; {hint}"
    assert len(server.requests) == 2
    assert puller.parts() == []


def test_nobody_at_the_address_gives_one_line(server: HubServer, puller: Puller) -> None:
    server.__exit__(None, None, None)
    with pytest.raises(EdgeLMError, match=r"cannot be reached: .*; check the network and the proxy"):
        puller.pull(NAME)


def test_a_disk_that_fills_up_in_the_middle_loses_nothing(
    server: HubServer, puller: Puller, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = 1_300_000
    plain = os.pwrite

    def pwrite(descriptor: int, data: bytes | memoryview, offset: int) -> int:
        left = room - offset
        if left <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return plain(descriptor, data[:left], offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(EdgeLMError) as error:
        puller.pull(NAME)
    said = f"1.30 MB of 2.00 MB of {FILE} are kept: free some space and run it again"
    assert one_line(error) == f"the disk of {puller.parts()[0].parent} is full; {said}"
    monkeypatch.undo()
    assert puller.parts()[0].stat().st_size == room
    assert puller.pull(NAME).read_bytes() == content
    assert server.sent[-1].start == room


def test_a_cache_that_cannot_be_written_gives_one_line(server: HubServer, puller: Puller, content: bytes) -> None:
    puller.cache.write_text("a file where the folder should be")
    with pytest.raises(EdgeLMError, match=r"cannot be written: .*; make it writable, or set HF_HUB_CACHE"):
        puller.pull(NAME)


def test_a_part_longer_than_the_file_is_thrown_away(server: HubServer, puller: Puller, content: bytes) -> None:
    blobs = puller.cache / "models--o--m-GGUF" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{server.repos[NAME].files[FILE].blob}.part").write_bytes(content + b"more")
    assert puller.pull(NAME).read_bytes() == content


def test_a_blob_that_a_power_cut_left_short_is_fetched_again(server: HubServer, puller: Puller, content: bytes) -> None:
    path = puller.pull(NAME)
    os.truncate(path.resolve(), SIZE // 2)
    assert puller.pull(NAME).read_bytes() == content


def test_links_that_the_file_system_refuses_are_done_without(
    server: HubServer, puller: Puller, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, target: str) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(Path, "symlink_to", refuse)
    path = puller.pull(NAME)
    assert not path.is_symlink()
    assert path.read_bytes() == content
    puller.pull(NAME)
    assert server.sent_bytes() == SIZE
