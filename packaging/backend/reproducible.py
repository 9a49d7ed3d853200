"""setuptools' build backend, with the same bytes from the same files: one time, one owner and sorted names.

The time is SOURCE_DATE_EPOCH, or a fixed one.
"""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403 - the other functions that pip calls

EPOCH = 1_767_225_600  # 2026-01-01: zip knows no time before 1980


def _epoch() -> int:
    return int(os.environ.setdefault("SOURCE_DATE_EPOCH", str(EPOCH)))  # setuptools reads it for wheels


def build_wheel(wheel_directory: str, config_settings: object = None, metadata_directory: str | None = None) -> str:
    """Build the wheel."""
    _epoch()
    name: str = build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)
    return name


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
