"""A pull from a server that drops, stalls, refuses and lies, and onto a disk that fills up."""

from __future__ import annotations

import errno
import os
import random
import re
from itertools import pairwise
from pathlib import Path

import pytest

from edgelm.base.errors import EdgeLMError
from edgelm.library.http_range import READ_BYTES
from edgelm.library.progress import Retrying, Wrong
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
    """Return, for each answer but the first, how many bytes of the previous one it repeats."""
    sent = [answer for answer in server.sent if answer.path == path]
    return [max(0, before.end - after.start) for before, after in pairwise(sent)]


def test_a_reset_costs_only_the_bytes_in_flight(server: HubServer, puller: Puller) -> None:
    size = RESETS * 400_000
    data = random.Random(2).randbytes(size)
    server.add(NAME, {FILE: data})
    server.send_buffer, server.rate = 2**16, 40e6  # a reset drops the bytes that the receiver has not read
    points = random.Random().choices(range(1, size // RESETS), k=RESETS)
    server.order(FILE, *(Fault("reset", point) for point in points))
    assert puller.pull(NAME).read_bytes() == data
    again = fetched_twice(server)
    print(
        f"{len(again)} resets of {size / 1e6:.0f} MB: {sum(again):,} bytes fetched twice, at most {max(again):,} at one"
    )
    assert len(again) == RESETS
    assert max(again) <= CHUNK
    assert not puller.events_of(Wrong)


@pytest.mark.parametrize("kind", ["close", "stall"])
def test_it_resumes_after_a_fault(server: HubServer, puller: Puller, content: bytes, kind: str) -> None:
    server.order(FILE, Fault(kind, 700_000))
    assert puller.pull(NAME).read_bytes() == content
    first, second = server.sent
    assert second.range == f"bytes={second.start}-{SIZE - 1}"
    assert second.if_range == f'"cdn-{server.repos[NAME].files[FILE].blob[:8]}"'
    assert second.start == first.end
    assert puller.events_of(Retrying)


def test_a_later_run_resumes_too(server: HubServer, puller: Puller, content: bytes) -> None:
    server.order(FILE, Fault("close", 700_000), Fault("status", status=503, times=4))
    with pytest.raises(EdgeLMError) as error:
        puller.pull(NAME)
    assert "HTTP 503; the downloaded part is kept: run it again to resume" in one_line(error)
    assert [path.name[-5:] for path in puller.parts()] == [".part", ".etag", ".path"]
    assert puller.pull(NAME).read_bytes() == content
    assert server.sent[-1].start == 700_000
    assert server.sent[-1].if_range is not None
    assert server.sent_bytes() == SIZE
    assert puller.parts() == []


def test_wrong_bytes_are_caught_and_only_that_file_is_fetched_again(server: HubServer, puller: Puller) -> None:
    data = [random.Random(seed).randbytes(SIZE) for seed in (1, 2)]
    first = "m-Q4_K_M-00001-of-00002.gguf"
    server.add(NAME, {first: data[0], OTHER: data[1]})
    server.order(OTHER, Fault("flip", 1_234_567))
    path = puller.pull(NAME)
    assert path.read_bytes() == data[0]
    assert path.with_name(OTHER).read_bytes() == data[1]
    assert puller.events_of(Wrong) == [Wrong(OTHER)]
    assert server.sent_bytes(first) == SIZE
    assert server.sent_bytes(OTHER) == 2 * SIZE


def test_wrong_bytes_before_a_break_are_caught_after_it(server: HubServer, puller: Puller, content: bytes) -> None:
    server.order(FILE, Fault("close", 700_000))
    server.order(FILE, Fault("status", status=500, times=4))
    with pytest.raises(EdgeLMError):
        puller.pull(NAME)
    part = puller.parts()[0]
    with part.open("r+b") as file:  # the disk, or a user, changed the downloaded bytes
        file.seek(1000)
        file.write(b"\0\0\0\0")
    assert puller.pull(NAME).read_bytes() == content
    assert puller.events_of(Wrong) == [Wrong(FILE)]


def test_a_server_that_keeps_sending_wrong_bytes_is_named(server: HubServer, puller: Puller, content: bytes) -> None:
    server.order(FILE, Fault("flip", 5, times=9))
    with pytest.raises(EdgeLMError) as error:
        puller.pull(NAME)
    assert one_line(error).startswith(f"{FILE} from 127.0.0.1")
    assert "has the wrong checksum" in one_line(error)
    assert puller.parts() == []
    assert not list(puller.cache.glob("*/snapshots/*/*"))


def test_a_server_without_ranges_loses_nothing(server: HubServer, puller: Puller, content: bytes) -> None:
    """The server sends the whole file; the bytes on disk are compared and kept."""
    server.order(FILE, Fault("close", 700_000), Fault("whole"), Fault("whole"))
    assert puller.pull(NAME).read_bytes() == content
    assert not puller.events_of(Wrong)


def test_a_whole_answer_is_compared_with_the_bytes_on_disk(server: HubServer, puller: Puller, content: bytes) -> None:
    server.order(FILE, Fault("close", 700_000), Fault("status", status=500, times=4), Fault("whole"), Fault("whole"))
    with pytest.raises(EdgeLMError):
        puller.pull(NAME)
    with puller.parts()[0].open("r+b") as file:
        file.seek(300_000)
        file.write(b"\0\0\0\0")
    assert puller.pull(NAME).read_bytes() == content
    assert not puller.events_of(Wrong)


def test_a_break_of_a_server_without_ranges_loses_nothing(server: HubServer, puller: Puller, content: bytes) -> None:
    server.cdn_etag = 'W/"weak"'
    server.order(FILE, Fault("close", 700_000), Fault("whole"))
    server.order(FILE, Fault("status", status=500, times=4))
    assert puller.pull(NAME).read_bytes() == content
    assert server.sent[1].if_range is None  # a weak tag does not identify bytes


def test_another_etag_of_the_same_bytes_costs_nothing(server: HubServer, puller: Puller, content: bytes) -> None:
    """The hub moved the file to other storage; the bytes still match the hash."""
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
    file.blob = "f" * 64  # the listing no longer fits the bytes
    with pytest.raises(EdgeLMError, match="has the wrong checksum"):
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
    with pytest.raises(EdgeLMError, match="the hub now has another version of the file"):
        puller.pull(NAME)
    assert server.sent == []


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (Fault("status", status=500, times=9), "HTTP 500"),
        (Fault("status", status=429, times=9), "HTTP 429"),
        (Fault("status", status=429, headers={"Retry-After": "3600"}), "HTTP 429, and asks for a wait of 3600 s"),
        (Fault("status", status=416, times=9), "HTTP 416"),
        (Fault("status", status=403, times=9), "HTTP 403"),  # from the other host: an expired link
        (Fault("stall", 0, times=9), "the transfer stalled|the answer timed out"),
        (Fault("drip", times=9), "the transfer is too slow"),
        (Fault("length", by=5, times=9), "the server sends 2000005 bytes instead of 2,000,000"),
        (Fault("length", by=-5, times=9), "the server sends 1999995 bytes instead of 2,000,000"),
        (Fault("gzip", times=9), "the server compressed the file"),
        (Fault("close", 0, times=9), "closed|without"),
    ],
    ids=lambda value: value.kind + str(value.status) if isinstance(value, Fault) else "",
)
def test_a_server_that_keeps_failing_gives_one_line(
    server: HubServer, puller: Puller, content: bytes, fault: Fault, expected: str
) -> None:
    server.order(FILE, fault)
    with pytest.raises(EdgeLMError, match=expected) as error:
        puller.pull(NAME)
    assert one_line(error).startswith(f"{FILE} cannot be downloaded from 127.0.0.1")
    server.faults.clear()
    assert puller.pull(NAME).read_bytes() == content


@pytest.mark.parametrize(
    "retry_after", ["\xb2", "9" * 5000, "soon", "Mon, 01 Jan 2020 00:00:00 +99999999999999999"], ids=range(4)
)
def test_an_invalid_retry_after_is_ignored(server: HubServer, puller: Puller, content: bytes, retry_after: str) -> None:
    refused = Fault("status", status=503, headers={"Retry-After": retry_after}, times=9)
    server.api_faults = [refused] * 9
    with pytest.raises(EdgeLMError, match=r"failed \(HTTP 503\)"):
        puller.pull(NAME)
    server.api_faults = []
    server.order(FILE, refused)
    with pytest.raises(EdgeLMError, match=r"cannot be downloaded from .* HTTP 503"):
        puller.pull(NAME)


@pytest.mark.parametrize(
    "answer",
    [b"[" * 200_000, b"{", b"[]", b'{"id": "o/m-GGUF", "sha": "' + b"c" * 40 + b'", "siblings": [1]}'],
    ids=["deep", "cut", "list", "number"],
)
def test_an_invalid_listing_gives_one_line(
    server: HubServer, puller: Puller, monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    monkeypatch.setattr(HubHandler, "_api", lambda self, *_: self.reply(200, answer))
    with pytest.raises(EdgeLMError, match="does not answer like a hub") as error:
        puller.pull(NAME)
    one_line(error)


@pytest.mark.parametrize("size", [-1, 2**63, "5", None])
def test_an_invalid_size_gives_one_line(server: HubServer, puller: Puller, content: bytes, size: int) -> None:
    server.repos[NAME].files[FILE].size = size
    with pytest.raises(EdgeLMError, match=f"{FILE} has no size and hash"):
        puller.pull(NAME)


def test_a_message_of_the_hub_cannot_move_the_cursor(server: HubServer, puller: Puller, content: bytes) -> None:
    message = "a\x9b31m" + "long " * 1000
    server.api_faults = [Fault("status", status=400, headers={"X-Error-Message": message})]
    with pytest.raises(EdgeLMError, match="answers HTTP 400") as error:
        puller.pull(NAME)
    assert one_line(error).isprintable()
    assert len(one_line(error)) < 500


@pytest.mark.parametrize("kind", ["range", "size"])
def test_a_wrong_range_is_refused(server: HubServer, puller: Puller, content: bytes, kind: str) -> None:
    server.order(FILE, Fault("close", 700_000), Fault(kind, by=1))
    assert puller.pull(NAME).read_bytes() == content
    assert not puller.events_of(Wrong)


def test_it_waits_as_long_as_the_server_asks(server: HubServer, puller: Puller, content: bytes) -> None:
    server.order(FILE, Fault("status", status=429, headers={"Retry-After": "1"}))
    assert puller.pull(NAME).read_bytes() == content
    (event,) = puller.events_of(Retrying)
    assert isinstance(event, Retrying)
    assert event.wait_s == 1.0


@pytest.mark.parametrize(
    ("status", "headers", "expected"),
    [
        (401, {"X-Error-Message": "Invalid credentials in Authorization header"}, "does not accept your token; log in"),
        (401, {}, "does not show o/m-GGUF .*; check the name; if it is private or gated, log in with `hf auth login`"),
        (403, {}, "forbids access to o/m-GGUF .*; accept its licence at .*/o/m-GGUF"),
        (
            403,
            {"X-Error-Code": "GatedRepo"},
            "o/m-GGUF is gated; accept its licence at http://.*/o/m-GGUF, then log in",
        ),
        (404, {}, "does not show o/m-GGUF"),
        (404, {"X-Error-Code": "RevisionNotFound"}, "has no revision"),
        (416, {}, "HTTP 416"),
        (429, {}, "limits the request rate"),
        (500, {}, r"failed \(HTTP 500\); run it again later"),
    ],
)
def test_the_hub_that_refuses_the_listing_gives_one_line(
    server: HubServer, puller: Puller, content: bytes, status: int, headers: dict[str, str], expected: str
) -> None:
    server.api_faults = [Fault("status", status=status, headers=headers) for _ in range(9)]
    with pytest.raises(EdgeLMError, match=expected) as error:
        puller.pull(NAME)
    one_line(error)
    assert not puller.cache.exists()


@pytest.mark.parametrize(("status", "tries"), [(404, 1), (401, 1), (500, 4)])
def test_only_temporary_failures_are_retried(
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


@pytest.mark.parametrize(
    ("status", "headers", "expected"),
    [
        (
            401,
            {"X-Error-Code": "GatedRepo"},
            "m-GGUF is gated: {hub} redirects to {other}, which gets no login; accept its licence at {other}/o/m-GGUF",
        ),
        (403, {"X-Error-Code": "GatedRepo"}, "m-GGUF, then set HF_ENDPOINT={other} and log in with `hf auth login`"),
        (
            403,
            {"X-Error-Message": "Access is restricted"},
            "{other}, to which {hub} redirects, refuses o/m-GGUF (HTTP 403); if it is private or gated, set",
        ),
        (401, {}, "{other}, to which {hub} redirects, refuses o/m-GGUF (HTTP 401); run it again later, or set another"),
    ],
)
def test_a_mirror_that_redirects_to_a_hub_which_refuses(
    server: HubServer, puller: Puller, content: bytes, status: int, headers: dict[str, str], expected: str
) -> None:
    server.order(FILE, Fault("status", status=status, headers=headers, times=9))
    with pytest.raises(EdgeLMError) as error:
        puller.pull(NAME)
    hub = server.url.removeprefix("http://")
    assert expected.format(other=server.cdn, hub=hub) in one_line(error)
    assert [event for event in puller.events if isinstance(event, Retrying)] == []


def test_an_unreachable_address_gives_one_line(server: HubServer, puller: Puller) -> None:
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
    hint = f"1.30 MB of 2.00 MB of {FILE} are kept: free some space and run it again"
    assert one_line(error) == f"the disk of {puller.parts()[0].parent} is full; {hint}"
    monkeypatch.undo()
    assert puller.parts()[0].stat().st_size == room
    assert puller.pull(NAME).read_bytes() == content
    assert server.sent[-1].start == room


def test_a_file_system_without_large_files_gives_one_line(
    server: HubServer, puller: Puller, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As FAT has them of 4 GiB at most."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    for call in ("pwrite", "ftruncate", "truncate"):
        monkeypatch.setattr(os, call, refuse)
    with pytest.raises(EdgeLMError) as error:
        puller.pull(NAME)
    assert re.fullmatch(
        r"/.*/blobs takes no file of 2\.00 MB: the file system, or a limit \(ulimit -f\), does not allow files so "
        "large; choose another folder: set HF_HUB_CACHE",
        one_line(error),
    )


def test_a_cache_that_cannot_be_written_gives_one_line(server: HubServer, puller: Puller, content: bytes) -> None:
    puller.cache.write_text("a file where the folder should be")
    with pytest.raises(EdgeLMError, match=r"cannot be written: .*; make it writable, or set HF_HUB_CACHE"):
        puller.pull(NAME)


def test_a_part_longer_than_the_file_is_discarded(server: HubServer, puller: Puller, content: bytes) -> None:
    blobs = puller.cache / "models--o--m-GGUF" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{server.repos[NAME].files[FILE].blob}.part").write_bytes(content + b"more")
    assert puller.pull(NAME).read_bytes() == content


def test_a_blob_that_a_power_cut_left_short_is_fetched_again(server: HubServer, puller: Puller, content: bytes) -> None:
    path = puller.pull(NAME)
    os.truncate(path.resolve(), SIZE // 2)
    assert puller.pull(NAME).read_bytes() == content


def test_a_file_system_without_links_works(
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
