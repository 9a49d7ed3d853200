"""Models, places and a running front for the server's tests."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.harness import Front, serving
from tests.tiny import write_tiny


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory, measured_cache: Path) -> Path:
    """A cache folder in which the machine's facts are found already."""
    folder = tmp_path_factory.mktemp("cache")
    shutil.copytree(measured_cache / "machine", folder / "machine")
    return folder


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> dict[str, str]:
    """An environment with places of its own; without drafts, which change the last bits, and answers are compared."""
    home = tmp_path_factory.mktemp("home")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("EDGELM_", "HF_"))}
    places = {f"EDGELM_{kind}_DIR": str(home / kind.lower()) for kind in ("CONFIG", "DATA", "RUNTIME")}
    return clean | places | {"EDGELM_CACHE_DIR": str(cache), "HF_HOME": str(home / "hf"), "EDGELM_SPEC": "off"}


@pytest.fixture
def own(environment: dict[str, str]) -> Iterator[dict[str, str]]:
    """The environment with a runtime folder for one test alone, whose path is short enough for sockets in it."""
    with tempfile.TemporaryDirectory(prefix="edgelm-test-", ignore_cleanup_errors=True) as folder:
        yield environment | {"EDGELM_RUNTIME_DIR": str(Path(folder, "run"))}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tiny.gguf, whose context is full soon, and long.gguf, which can write for seconds."""
    folder = tmp_path_factory.mktemp("models")
    write_tiny(folder / "tiny.gguf", context=512)
    write_tiny(folder / "long.gguf", context=32_768, seed=1)
    return folder


@pytest.fixture(scope="module")
def front(environment: dict[str, str], models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """A front for the tests of a module."""
    log = tmp_path_factory.mktemp("log") / "front.log"
    with serving(environment, models / "tiny.gguf", models / "long.gguf", log=log) as running:
        yield running
    said = log.read_text()
    print(said)
    assert "Traceback" not in said
