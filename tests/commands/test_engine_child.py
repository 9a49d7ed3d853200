"""The parent's side of the engine child, with children that behave badly."""

from __future__ import annotations

import signal
import sys

import pytest

from edgelm.commands import engine_child
from edgelm.commands.engine_child import EngineChild
from edgelm.errors import EdgeLMError


def child(monkeypatch: pytest.MonkeyPatch, program: str) -> EngineChild:
    """Start a Python program in place of the engine child."""
    start = engine_child.subprocess.Popen
    command = [sys.executable, "-c", "import os, sys, signal\nsys.stdin.readline()\n" + program]
    monkeypatch.setattr(engine_child.subprocess, "Popen", lambda _, **options: start(command, **options))
    return EngineChild({"job": "run", "model": "absent.gguf"}, {}, verbose=False)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("print('{\"event\": \"tex', end='', flush=True)\nos.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
        ("print('what it says', file=sys.stderr)\nsys.exit(3)", "code 3 (what it says)"),
        ("os.abort()", "SIGABRT"),
        ('print(\'{"event": "error", "message": "it is so", "hint": "do this"}\')', "it is so; do this"),
    ],
)
def test_a_death_is_one_line(monkeypatch: pytest.MonkeyPatch, program: str, words: str) -> None:
    with child(monkeypatch, program) as engine, pytest.raises(EdgeLMError) as caught:
        list(engine.events())
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_child_that_does_not_listen_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_child, "GRACE_S", 0.2)
    deaf = child(monkeypatch, "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nsignal.pause()")
    deaf.close()
    assert deaf._process.returncode == -signal.SIGKILL
