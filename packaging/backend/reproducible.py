"""setuptools' build backend, with the same bytes from the same files: one time, one owner, permissions, sorted names.

Owns that, and which llama.cpp edgelm requires. pyproject.toml has llama-cpp-python, which every index has as source, so
that a checkout installs by itself. A release is built with `-C llama=ready-made` and requires our wheel edgelm-llama,
in wheel and sdist. The time is SOURCE_DATE_EPOCH, or a fixed one.
"""

from __future__ import annotations

import gzip
import io
import os
import re
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import backend as llama  # packaging/llama/backend.py
from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403 - the other functions that pip calls

EPOCH = 1_767_225_600  # 2026-01-01: zip knows no time before 1980


PYPROJECT = Path("pyproject.toml")  # a frontend calls in the folder that it builds
SWITCH, RELEASE = "llama", "ready-made"


def released(pyproject: str) -> str:
    """Return pyproject.toml with the requirements of a release; that of a release stays as it is."""
    if '"edgelm-llama>' in pyproject:
        return pyproject
    # Not an older build of the same llama.cpp, which pip would leave in place: 0.3.36.1, of 0.5, reads no pictures.
    least = llama.project()["version"]
    text, main = re.subn(r'"llama-cpp-python>=[\d.]+(,<[\d.]+)"', rf'"edgelm-llama>={least}\1"', pyproject)
    pin = text.partition('"edgelm-llama')[2].partition('"')[0]
    counts = [main]
    for extra, backend in (("llama-cuda", "cuda"), ("vulkan", "vulkan")):
        ours = f"{extra} = [\"edgelm-llama-{backend}{pin}; sys_platform == 'linux'\"]"
        text, count = re.subn(rf"^{extra} = \[\]", ours, text, flags=re.MULTILINE)
        counts.append(count)
    assert counts == [1, 1, 1], "pyproject.toml has other requirements of llama.cpp than this switch knows"
    return text


@contextmanager
def _requirements(settings: Mapping[str, object] | None) -> Iterator[None]:
    """Let setuptools read what this build requires."""
    chosen = (settings or {}).get(SWITCH)
    if chosen not in (None, RELEASE):
        raise SystemExit(f"error: {SWITCH}={chosen} is not known; omit it, or: {SWITCH}={RELEASE}")
    before = PYPROJECT.read_text(encoding="utf-8")
    try:
        if chosen:
            PYPROJECT.write_text(released(before), encoding="utf-8")
        yield
    finally:
        if chosen:
            PYPROJECT.write_text(before, encoding="utf-8")


def _tell_of_the_compiler() -> None:
    """Say that llama.cpp may be compiled. Raises SystemExit where it would have to be, without a compiler."""
    if '"llama-cpp-python>' in PYPROJECT.read_text(encoding="utf-8"):
        llama.tell_of_the_compiler(sys.prefix)


def _epoch() -> int:
    return int(os.environ.setdefault("SOURCE_DATE_EPOCH", str(EPOCH)))  # setuptools reads it for wheels


def prepare_metadata_for_build_wheel(
    metadata_directory: str, config_settings: Mapping[str, object] | None = None
) -> str:
    """Write the metadata. pip asks for them first, before it fetches anything."""
    with _requirements(config_settings):
        _tell_of_the_compiler()
        name: str = build_meta.prepare_metadata_for_build_wheel(metadata_directory, config_settings)
    return name


def prepare_metadata_for_build_editable(
    metadata_directory: str, config_settings: Mapping[str, object] | None = None
) -> str:
    """Write the metadata for `pip install -e`."""
    with _requirements(config_settings):
        _tell_of_the_compiler()
        name: str = build_meta.prepare_metadata_for_build_editable(metadata_directory, config_settings)
    return name


def build_wheel(
    wheel_directory: str, config_settings: Mapping[str, object] | None = None, metadata_directory: str | None = None
) -> str:
    """Build the wheel, and write it again: setuptools takes permissions from the umask."""
    _epoch()
    with _requirements(config_settings):
        name: str = build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)
    set_permissions(Path(wheel_directory, name))
    return name


def set_permissions(wheel: Path) -> None:
    """Give all files of a wheel the same permissions, but for the bit that makes a program."""
    packed = io.BytesIO()
    with zipfile.ZipFile(wheel) as given, zipfile.ZipFile(packed, "w") as archive:
        for old in given.infolist():
            entry = zipfile.ZipInfo(old.filename, old.date_time)
            entry.external_attr = (0o100755 if old.external_attr >> 16 & 0o100 else 0o100644) << 16
            archive.writestr(entry, given.read(old), zipfile.ZIP_DEFLATED, 9)
    wheel.write_bytes(packed.getvalue())


def build_sdist(sdist_directory: str, config_settings: Mapping[str, object] | None = None) -> str:
    """Build the sdist, and write it again: setuptools takes times and owners from the file system."""
    epoch = _epoch()
    with _requirements(config_settings):
        name: str = build_meta.build_sdist(sdist_directory, config_settings)
    path, packed = Path(sdist_directory, name), io.BytesIO()
    with tarfile.open(path) as given, tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for entry in sorted(given.getmembers(), key=lambda member: member.name):
            entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname = epoch, 0, 0, "", ""
            entry.mode = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644
            entry.pax_headers = {}
            archive.addfile(entry, given.extractfile(entry) if entry.isfile() else None)
    path.write_bytes(gzip.compress(packed.getvalue(), 9, mtime=epoch))
    return name
