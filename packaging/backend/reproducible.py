"""setuptools' build backend, with the same bytes from the same files: one time, one owner, permissions, sorted names.

The time is SOURCE_DATE_EPOCH, or a fixed one.
"""

from __future__ import annotations

import gzip
import io
import os
import tarfile
import zipfile
from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403 - the other functions that pip calls

EPOCH = 1_767_225_600  # 2026-01-01: zip knows no time before 1980


def _epoch() -> int:
    return int(os.environ.setdefault("SOURCE_DATE_EPOCH", str(EPOCH)))  # setuptools reads it for wheels


def build_wheel(wheel_directory: str, config_settings: object = None, metadata_directory: str | None = None) -> str:
    """Build the wheel, and write it again: setuptools takes permissions from the umask."""
    _epoch()
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


def build_sdist(sdist_directory: str, config_settings: object = None) -> str:
    """Build the sdist, and write it again: setuptools takes times and owners from the file system."""
    epoch = _epoch()
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
