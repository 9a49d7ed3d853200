"""Commands with files of real models: plan."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT_S = 300


def edgelm(environment: dict[str, str], *arguments: str | Path) -> str:
    command = [sys.executable, "-m", "edgelm", *map(str, arguments)]
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["smollm2", "gemma"])
def test_a_plan_names_a_context_that_fits(own: dict[str, str], name: str, request: pytest.FixtureRequest) -> None:
    plan = json.loads(edgelm(own, "plan", request.getfixturevalue(name), "--json"))
    assert plan
