"""Agents that a user has pointed at Ollama or llama.cpp: Cline, and Continue's command line, each in a home of its own.

The model calls one tool and then writes a sentence. Runs in the folder of `make clients`, where the programs are.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

from checks import ADDRESS, MODEL, check, main

MODULES = Path(os.environ.get("CLIENT_MODULES", "node/node_modules")).resolve()
LIMIT_S = 120
ATTEMPTS = 5


def run(name: str, *command: str, **variables: str) -> str:
    """Run a program to its end in a project of its own; return its output."""
    home = Path(os.environ["HOME"]) / f"agents-{name}"
    (home / "project").mkdir(parents=True, exist_ok=True)
    (home / "project" / "README.md").write_text("hello\n")
    environment = {"PATH": os.environ["PATH"], "TERM": "dumb", "LANG": "C.UTF-8", "NO_COLOR": "1", "HOME": str(home)}
    environment |= {"CLINE_DIR": str(home / "cline"), "CONTINUE_GLOBAL_DIR": str(home / "continue")} | variables
    done = subprocess.run(
        [str(MODULES / ".bin" / command[0]), *command[1:]], cwd=home / "project", env=environment, text=True,
        stdin=subprocess.DEVNULL, capture_output=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stdout[-1000:]} {done.stderr[-1000:]}"
    return done.stdout


def ask_cline(provider: str, address: str) -> dict[str, Any]:
    """Return Cline's account of a run; only its settings file has the address of this provider."""
    file = Path(os.environ["HOME"]) / f"agents-{provider}" / "cline" / "data" / "settings" / "providers.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    settings = {"provider": provider, "model": MODEL, "apiKey": "any", "baseUrl": address}
    entry = {"settings": settings, "updatedAt": "2026-01-01T00:00:00.000Z", "tokenSource": "manual"}
    file.write_text(json.dumps({"version": 1, "lastUsedProvider": provider, "providers": {provider: entry}}))
    shown = run(provider, "cline", "--json", "--timeout", str(LIMIT_S - 20), "Say hello")
    (result,) = [event for line in shown.splitlines() if (event := json.loads(line))["type"] == "run_result"]
    return dict(result)


def ask_continue(provider: str, address: str) -> list[dict[str, Any]]:
    """Return the turns of Continue's session.

    Some of its tools end it at once, with or without exit code 1, and a model that knows nothing may call one of them:
    then ask again.
    """
    for attempt in range(ATTEMPTS):
        name = f"continue-{provider}-{attempt}"
        home = Path(os.environ["HOME"]) / f"agents-{name}"
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir()
        model = {
            "name": "local", "provider": provider, "model": MODEL, "apiBase": address,
            "roles": ["chat", "edit", "apply"], "capabilities": ["tool_use"],
        }  # fmt: skip
        config = home / "config.yaml"
        config.write_text(json.dumps({"name": "local", "version": "0.0.1", "schema": "v1", "models": [model]}))
        with suppress(AssertionError):
            run(name, "cn", "-p", "--auto", "--config", str(config), "Say hello", CONTINUE_TELEMETRY_ENABLED="0")
        sessions = [path for path in home.glob("continue/sessions/*.json") if path.name != "sessions.json"]
        if sessions:
            turns: list[dict[str, Any]] = [turn["message"] for turn in json.loads(sessions[0].read_text())["history"]]
            return turns
    raise AssertionError(f"no session in {ATTEMPTS} attempts")


@check
def cline_by_its_provider_for_ollama() -> None:
    result = ask_cline("ollama", ADDRESS)
    assert result["finishReason"] == "completed", result
    assert result["iterations"] > 1, "a tool was called, and its result was sent back"


@check
def continue_by_its_provider_for_ollama() -> None:
    turns = ask_continue("ollama", ADDRESS)
    assert any(turn.get("toolCalls") for turn in turns), turns
    assert turns[-1]["role"] == "assistant"


@check
def continue_by_its_provider_for_llama_cpp() -> None:
    turns = ask_continue("llama.cpp", f"{ADDRESS}/")
    assert any(turn.get("toolCalls") for turn in turns), turns
    assert turns[-1]["role"] == "assistant"


if __name__ == "__main__":
    packages = {
        name: json.loads((MODULES / name / "package.json").read_text()) for name in ("cline", "@continuedev/cli")
    }
    main(number=", ".join(str(package["version"]) for package in packages.values()))
