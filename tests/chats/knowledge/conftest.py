"""A folder of files, and an index of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edgelm.chats.knowledge.index import Knowledge

Write = Callable[[str, str | bytes], Path]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "notes").mkdir()
    return tmp_path / "notes"


@pytest.fixture
def write(folder: Path) -> Write:
    def write_file(name: str, content: str | bytes) -> Path:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write_file


@pytest.fixture
def knowledge(tmp_path: Path) -> Iterator[Knowledge]:
    opened = Knowledge(tmp_path / "cache" / "knowledge.db")
    yield opened
    opened.close()
