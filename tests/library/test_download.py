"""The checksum of a file that is still being written equals that of the whole file."""

from __future__ import annotations

import hashlib
import os
import random
from pathlib import Path

import pytest

from edgelm.library.download import FileHasher, new_hash
from tests.counts import Count

ROUNDS = Count(test=30, soak=1000)


@pytest.mark.parametrize("seed", range(3))
def test_any_prefix_and_any_pieces_give_the_hash_of_the_whole(tmp_path: Path, seed: int) -> None:
    source = random.Random(seed)
    for _ in range(ROUNDS // 3):
        data = source.randbytes(source.randrange(1, 3_000_000))
        at = source.choice([0, source.randrange(len(data)), len(data)])  # from an earlier run, not hashed yet
        descriptor = os.open(tmp_path / "part", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        os.pwrite(descriptor, data[:at], 0)
        hasher = FileHasher(descriptor, "a" * 64, len(data), at)
        most = max(1, (len(data) - at) // source.choice([1, 3, 100]))
        while at < len(data):
            piece = data[at : at + source.randrange(1, most + 1)]
            os.pwrite(descriptor, piece, at)
            at += len(piece)
            hasher.advance(at)
        assert hasher.wait(30)
        assert hasher.hexdigest() == hashlib.sha256(data).hexdigest()
        hasher.stop()
        os.close(descriptor)


def test_a_small_file_has_gits_hash() -> None:
    hasher = new_hash("a" * 40, 5)
    hasher.update(b"hello")
    assert hasher.hexdigest() == "b6fc4c620b67d95f953a5c1c1230aaab5db5a1b0"  # git hash-object


def test_a_file_that_shrinks_while_it_is_hashed_is_an_error(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path / "part", os.O_RDWR | os.O_CREAT)
    hasher = FileHasher(descriptor, "a" * 64, 10, 10)
    with pytest.raises(OSError, match="shorter than what was written"):
        hasher.wait(30)
    os.close(descriptor)


def test_it_stops_in_the_middle(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path / "part", os.O_RDWR | os.O_CREAT)
    hasher = FileHasher(descriptor, "a" * 64, 10, 0)
    assert not hasher.wait(0.01)
    hasher.stop()
    os.close(descriptor)
