"""A front that `edgelm launch` started ends when no agent is left and nothing is asked."""

from __future__ import annotations

import asyncio
import os
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgelm.base.runtime import agents_run, birth, find_fronts, note_agent
from edgelm.server.serving import wait_unused

SHORT_S = 0.05


def table(*idle_s: float) -> Any:
    return SimpleNamespace(slots={number: SimpleNamespace(idle_s=idle) for number, idle in enumerate(idle_s)})


async def test_a_front_without_agents_and_requests_is_unused() -> None:
    await asyncio.wait_for(wait_unused(table(), lambda: False, SHORT_S), 20)
    await asyncio.wait_for(wait_unused(table(100.0), lambda: False, SHORT_S), 20)


async def test_an_agent_keeps_it() -> None:
    runs = True
    waiting = asyncio.create_task(wait_unused(table(), lambda: runs, SHORT_S))
    await asyncio.sleep(6 * SHORT_S)
    assert not waiting.done()
    runs = False
    await asyncio.wait_for(waiting, 20)


async def test_a_request_keeps_it() -> None:
    busy = table(100.0, 0.0)
    waiting = asyncio.create_task(wait_unused(busy, lambda: False, SHORT_S))
    await asyncio.sleep(6 * SHORT_S)
    assert not waiting.done()
    busy.slots.clear()
    await asyncio.wait_for(waiting, 20)


def test_agents_are_found_while_they_live(tmp_path: Path) -> None:
    runtime = tmp_path / "runtime"
    assert not agents_run(runtime)
    note_agent(runtime)
    assert agents_run(runtime)
    assert (runtime / f"agent-{os.getpid()}").exists()
    assert find_fronts(runtime) == []
    assert not agents_run(runtime, besides=os.getpid())
    (runtime / f"agent-{os.getpid()}").unlink()
    another = runtime / f"agent-{os.getppid()}"  # that process has another's id by now
    another.write_text("an earlier start")
    assert not agents_run(runtime)
    assert not another.exists()
    ended = subprocess.Popen(["true"])
    ended.wait()
    (runtime / f"agent-{ended.pid}").touch()
    (runtime / "agent-x").touch()
    assert not agents_run(runtime)
    assert list(runtime.iterdir()) == []


def test_an_agent_of_an_earlier_version_on_macos_is_found_by_its_id(tmp_path: Path) -> None:
    """It noted no birth, and may still run after an update."""
    (tmp_path / f"agent-{os.getpid()}").touch()
    assert agents_run(tmp_path)


@pytest.mark.skipif(not Path("/bin/ps").exists(), reason="there is no ps")
def test_without_proc_a_process_is_told_from_a_later_one_with_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on macOS. The time is the same for all who ask, wherever they are."""
    times = []
    for zone in ("UTC", "Asia/Tokyo"):
        monkeypatch.setenv("TZ", zone)
        times.append(datetime.strptime(birth(os.getpid(), tmp_path), "%a %b %d %H:%M:%S %Y").replace(tzinfo=UTC))
    assert abs(times[1] - times[0]) < timedelta(minutes=1), "Linux' own ps rounds to one of two seconds"
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert birth(ended.pid, tmp_path) == ""
