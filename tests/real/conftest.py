"""Real models for the tests of this folder; each is skipped, with the reason, where pip's index cannot be reached."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.real_models import RealModelError, minilm, real_model
from tests.server.harness import Front, serving


def _or_skip(get: Callable[[], Path]) -> Path:
    try:
        return get()
    except RealModelError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return _or_skip(lambda: real_model("smollm2"))


@pytest.fixture(scope="session")
def gemma() -> Path:
    return _or_skip(lambda: real_model("gemma3-270m"))


@pytest.fixture(scope="session")
def minilm_folder() -> Path:
    return _or_skip(minilm)


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment with places of its own; its cache keeps what was measured of this machine."""
    home = tmp_path_factory.mktemp("home")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("EDGELM_", "HF_", "OMP_"))}
    places = {f"EDGELM_{kind}_DIR": str(home / kind.lower()) for kind in ("CONFIG", "DATA", "CACHE")}
    return clean | places | {"HF_HOME": str(home / "hf")}


@pytest.fixture
def own(environment: dict[str, str]) -> Iterator[dict[str, str]]:
    """The environment with a runtime folder for one test alone, whose path is short enough for sockets in it."""
    with tempfile.TemporaryDirectory(prefix="edgelm-test-", ignore_cleanup_errors=True) as folder:
        yield environment | {"EDGELM_RUNTIME_DIR": str(Path(folder, "run"))}


@pytest.fixture(scope="module")
def front(
    environment: dict[str, str], smollm2: Path, gemma: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Front]:
    """A front with both text models, by the names smollm2 and gemma."""
    folder = tmp_path_factory.mktemp("front")
    links = []
    for name, path in (("smollm2", smollm2), ("gemma", gemma)):
        (folder / f"{name}.gguf").symlink_to(path)
        links.append(folder / f"{name}.gguf")
    with tempfile.TemporaryDirectory(prefix="edgelm-test-", ignore_cleanup_errors=True) as runtime:
        places = environment | {"EDGELM_RUNTIME_DIR": str(Path(runtime, "run")), "EDGELM_CTX": "4096"}
        with serving(places, *links, log=folder / "log") as running:
            yield running
    said = (folder / "log").read_text()
    print(said)
    assert "Traceback" not in said
