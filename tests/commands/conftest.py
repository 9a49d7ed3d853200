"""The program, and an environment with its own folders."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.commands.test_run import Edgelm


@pytest.fixture
def server_environment(measured_cache: Path, tmp_path: Path) -> dict[str, str]:
    """The environment of one test, without a model hub."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("EDGELM_", "HF_"))}
    places = {f"EDGELM_{kind}_DIR": str(tmp_path / kind.lower()) for kind in ("CONFIG", "DATA", "RUNTIME", "CACHE")}
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "machine").symlink_to(measured_cache / "machine")
    return clean | places | {"HF_HOME": str(tmp_path / "hf")}


@pytest.fixture
def edgelm(server_environment: dict[str, str]) -> Edgelm:
    """The program in that environment."""
    return Edgelm(server_environment)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that has all places of commands that run in this process."""
    for kind in ("CONFIG", "DATA", "CACHE", "RUNTIME"):
        monkeypatch.setenv(f"EDGELM_{kind}_DIR", str(tmp_path / kind.lower()))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("EDGELM_MODEL_DIRS", raising=False)
    monkeypatch.delenv("EDGELM_API_KEY", raising=False)
    return tmp_path
