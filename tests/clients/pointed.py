"""Agents that a user has pointed at Ollama or llama.cpp by their own settings, each at the scripted model.

Owns those settings. launched.py runs the same programs by `edgelm launch`, and owns their scripts.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgelm.commands.launch.agents import find_agent
from tests.clients.agents import Outcome
from tests.clients.launched import MODEL, SCRIPTS, TASK, Stage, search_path, stage, user_environment, version_of
from tests.clients.programs import LIMIT_S, run_program
from tests.clients.scripted import ANSWER


@dataclass(frozen=True, slots=True)
class Pointed:
    """An agent with one of its providers."""

    agent: str
    provider: str  # as the agent calls it
    path: str  # that it asks
    command: Callable[[Pointed, Stage], list[str | Path]]  # writes the settings


def _cline(pointed: Pointed, place: Stage) -> list[str | Path]:
    """Write the file that Cline keeps its providers in; no flag has the address of this one."""
    file = place.home / ".cline" / "data" / "settings" / "providers.json"
    file.parent.mkdir(parents=True)
    settings = {"provider": pointed.provider, "model": MODEL, "apiKey": "any", "baseUrl": place.record.address}
    entry = {"settings": settings, "updatedAt": "2026-01-01T00:00:00.000Z", "tokenSource": "manual"}
    known = {"version": 1, "lastUsedProvider": pointed.provider, "providers": {pointed.provider: entry}}
    file.write_text(json.dumps(known))
    return ["cline", "--timeout", f"{LIMIT_S:.0f}", TASK]


def _continue(pointed: Pointed, place: Stage) -> list[str | Path]:
    model = {
        "name": "local", "provider": pointed.provider, "model": MODEL, "apiBase": f"{place.record.address}/",
        "roles": ["chat", "edit", "apply"], "capabilities": ["tool_use"],
    }  # fmt: skip
    config = place.home / "config.yaml"
    config.write_text(json.dumps({"name": "local", "version": "0.0.1", "schema": "v1", "models": [model]}))
    return ["cn", "-p", TASK, "--auto", "--config", config]


POINTED = {
    "cline-ollama": Pointed("cline", "ollama", "/api/chat", _cline),
    "continue-ollama": Pointed("continue", "ollama", "/v1/chat/completions", _continue),
    "continue-llama.cpp": Pointed("continue", "llama.cpp", "/chat/completions", _continue),
}


def checked(name: str, programs: Sequence[Path]) -> Iterator[Outcome | str]:
    """Run an agent with its provider; yield its version, and the outcome of each check."""
    pointed = POINTED[name]
    path = search_path(programs)
    if shutil.which(find_agent(pointed.agent).command, path=path) is None:
        yield Outcome("all", "skipped", "not installed here")
        return
    with stage(SCRIPTS[pointed.agent], {}) as place:
        environment = user_environment(place.home, path) | {"CONTINUE_TELEMETRY_ENABLED": "0"}
        yield version_of(pointed.agent, environment)
        done = run_program(pointed.command(pointed, place), place.project, environment, one_output=True)
        seen = place.record.take()
        asked = [exchange for exchange in seen if exchange.tools]
        checks = {
            "the task ends well": done.returncode == 0,
            "the answer arrives": ANSWER in " ".join(done.stdout.split()),
            "every request is accepted": all(exchange.status == 200 for exchange in seen),
            "two tools are called": len(asked) >= 3,
            f"it asks {pointed.path}": {exchange.path for exchange in asked} == {pointed.path},
        }
        if not all(checks.values()):
            print(done.stdout[-3000:])
            print(place.log())
    shape = "; ".join(exchange.line() for exchange in seen)
    for check, passed in checks.items():
        yield Outcome(check, "passed") if passed else Outcome(check, "failed", f"code {done.returncode}; {shape}"[:400])
