"""Snapshots in RAM and in files come back unchanged and within bounds, whatever happened to the folder."""

from __future__ import annotations

import logging
import os
import random
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from edgelm.backends import snapshot_files, snapshots
from edgelm.backends.snapshot_files import Bounds, SnapshotFolder
from edgelm.backends.snapshots import SnapshotStore
from edgelm.base.errors import SnapshotError
from edgelm.engine.core import Store
from tests.counts import Count

MODEL, OTHER = b"m" * 16, b"o" * 16
ROOMY = Bounds(2**30, 1e6)


def tokens_of(seed: int, length: int = 300) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, length, np.int32)


def state_of(seed: int, size: int = 5_000) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def folder(root: Path, identity: bytes = MODEL, bounds: Bounds = ROOMY) -> SnapshotFolder:
    return SnapshotFolder(root / "prefixes", identity, bounds)


def paths(root: Path) -> list[Path]:
    return sorted((root / "prefixes").rglob("*.kv"))


def set_age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


@pytest.mark.skipif(sys.platform != "linux", reason="reads memory in /proc")
def test_states_that_come_and_go_leave_no_gaps() -> None:
    """Memory of the process is what the states hold, however often states of other sizes take their place."""
    limit = 64 * 2**20
    rng, store, keys, beside = random.Random(1), SnapshotStore(limit), [], []
    before, peak = resident_bytes(), 0
    for key in range(400):
        size = 23_040 * rng.choice([rng.randrange(10, 60), rng.randrange(10, 60), rng.randrange(50, 400)])
        while store.num_bytes + size > limit:
            store.drop(keys.pop(0 if rng.random() < 0.7 else rng.randrange(len(keys))))
        state = store.new_state(size)
        assert state is not None
        state[::4096] = 1
        store.put(key, state)
        keys.append(key)
        beside = [*beside[-300:], bytearray(rng.randrange(100, 20_000))]  # as requests leave in other caches
        peak = max(peak, resident_bytes() - before)
    assert peak < 1.2 * limit
    del state
    store.close()
    assert resident_bytes() - before < 0.2 * limit


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# -- files -------------------------------------------------------------------------------------------------------------


def test_another_process_reads_what_one_wrote(tmp_path: Path) -> None:
    folder(tmp_path).write(tokens_of(1), "ann", state_of(1))
    reader = folder(tmp_path)
    (stored,) = reader.files()
    assert (stored.tokens.tolist(), stored.cache_namespace) == (tokens_of(1).tolist(), "ann")
    np.testing.assert_array_equal(reader.read(stored.name), state_of(1))


def test_only_the_user_can_read_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "prefixes").mkdir(mode=0o755)
    folder(tmp_path).write(tokens_of(1), "", state_of(1))
    (path,) = paths(tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert path.parent.parent.stat().st_mode & 0o777 == 0o700


def test_a_model_sees_its_own_files_only(tmp_path: Path) -> None:
    folder(tmp_path).write(tokens_of(1), "", state_of(1))
    assert folder(tmp_path, OTHER).files() == ()


def test_what_another_process_writes_and_deletes_is_seen_at_once(tmp_path: Path) -> None:
    one, two = folder(tmp_path), folder(tmp_path)
    for seed in range(3):
        one.write(tokens_of(seed), "", state_of(seed))
        assert len(two.files()) == seed + 1
    two.remove([two.files()[0].name])
    assert len(one.files()) == 2
    assert one.files() is not None


def test_the_same_files_are_the_same_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_files, "SETTLED_S", 0.0)
    one = folder(tmp_path)
    one.write(tokens_of(1), "", state_of(1))
    assert one.files() is one.files()


def test_shared_prefixes_are_deleted_last(tmp_path: Path) -> None:
    one = folder(tmp_path, bounds=Bounds(30_000, 1e6))
    assert one.write(tokens_of(0), "ann", state_of(0), shared=True)
    for seed in range(1, 12):
        one.write(tokens_of(seed), "", state_of(seed))
    stored = one.files()
    assert 2 <= len(stored) <= 5
    (shared,) = [file for file in stored if file.shared]
    assert shared.cache_namespace == "ann"
    np.testing.assert_array_equal(folder(tmp_path).read(shared.name), state_of(0))


def test_the_shared_prefixes_of_one_key_cannot_fill_the_disk(tmp_path: Path) -> None:
    one = folder(tmp_path, bounds=Bounds(30_000, 1e6))
    one.write(tokens_of(0), "ann", state_of(0), shared=True)
    for seed in range(1, 12):
        one.write(tokens_of(seed), "bob", state_of(seed), shared=True)
    assert sum(file.cache_namespace == "ann" for file in one.files()) == 1


def test_a_shared_prefix_that_is_too_old_is_deleted_too(tmp_path: Path) -> None:
    one = folder(tmp_path, bounds=Bounds(10**6, 100))
    one.write(tokens_of(0), "ann", state_of(0), shared=True)
    set_age(paths(tmp_path)[0], 200)
    one.write(tokens_of(1), "ann", state_of(1))
    assert [file.shared for file in one.files()] == [False]


def test_a_file_of_another_model_under_this_ones_name_is_deleted(tmp_path: Path) -> None:
    folder(tmp_path, OTHER).write(tokens_of(1), "", state_of(1))
    (path,) = paths(tmp_path)
    path.parent.rename(path.parent.parent / MODEL.hex())
    assert folder(tmp_path).files() == ()
    assert not paths(tmp_path)


def test_whatever_is_damaged_is_never_given_and_is_deleted(tmp_path: Path) -> None:
    """One byte changed anywhere, or the end cut off anywhere: before the folder is read, or between that and use."""
    rng = random.Random(seed := random.SystemRandom().randrange(2**32))
    print("seed", seed)
    for _ in range(Count(test=300, soak=20_000)):
        writer = folder(tmp_path)
        writer.write(tokens_of(1, rng.randint(32, 400)), "ann", state_of(1, rng.randint(1, 3_000)))
        (path,) = paths(tmp_path)
        data = bytearray(path.read_bytes())
        reader = folder(tmp_path)
        late = rng.random() < 0.5
        names = [file.name for file in reader.files()] if late else []
        if rng.random() < 0.5:
            data[at := rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        else:
            del data[(at := rng.randrange(len(data))) :]
        path.write_bytes(data)
        names = names or [file.name for file in reader.files()]
        states = [reader.read(name) for name in names]
        for state in states:
            if state is not None:  # the head was read before it was damaged: the state is as it was
                assert late, at
                np.testing.assert_array_equal(state, state_of(1, len(state)))
                path.unlink()
        assert not paths(tmp_path), at
        assert reader.files() == ()


def test_a_length_that_was_damaged_after_the_folder_was_read_takes_no_memory(tmp_path: Path) -> None:
    folder(tmp_path).write(tokens_of(1), "", state_of(1))
    (path,) = paths(tmp_path)
    reader = folder(tmp_path)
    (file,) = reader.files()
    data = bytearray(path.read_bytes())
    data[44] ^= 128  # half a terabyte more
    path.write_bytes(data)
    with patch("mmap.mmap", side_effect=MemoryError):
        assert reader.read(file.name) is None
    assert not paths(tmp_path)


def test_a_file_that_cannot_be_deleted_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = folder(tmp_path)
    writer.write(tokens_of(1), "", state_of(1))
    (path,) = paths(tmp_path)
    path.write_bytes(path.read_bytes()[:-1])
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: (_ for _ in ()).throw(PermissionError()))
    reader = folder(tmp_path)
    assert reader.files() == ()
    monkeypatch.undo()
    assert path.exists()
    assert reader.files() == ()


def test_the_least_recently_used_files_of_all_models_go_first(tmp_path: Path) -> None:
    bounds = Bounds(4 * 6_300, 1e6)
    one, two = folder(tmp_path, MODEL, bounds), folder(tmp_path, OTHER, bounds)
    for seed in range(3):
        one.write(tokens_of(seed), "", state_of(seed))
        set_age(max(paths(tmp_path), key=lambda path: path.stat().st_mtime), 100 - seed)
    oldest = min(paths(tmp_path), key=lambda path: path.stat().st_mtime)
    assert one.read(oldest.name) is not None, "it is used now"
    two.write(tokens_of(7), "", state_of(7))
    two.write(tokens_of(8), "", state_of(8))
    assert len(two.files()) == 2
    assert len(one.files()) == 2
    assert oldest.exists()
    assert sum(path.stat().st_size for path in paths(tmp_path)) <= bounds.max_bytes


def test_a_file_above_the_bound_is_not_written_and_costs_no_other(tmp_path: Path) -> None:
    one = folder(tmp_path, bounds=Bounds(10_000, 1e6))
    one.write(tokens_of(1), "", state_of(1))
    assert not one.write(tokens_of(2), "", state_of(2, 20_000))
    assert len(one.files()) == 1


def test_old_files_are_deleted(tmp_path: Path) -> None:
    one = folder(tmp_path, bounds=Bounds(2**30, 3600))
    one.write(tokens_of(1), "", state_of(1))
    one.write(tokens_of(2), "", state_of(2))
    set_age(paths(tmp_path)[0], 4000)
    one.prune()
    assert len(paths(tmp_path)) == 1


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    one = folder(tmp_path, bounds=Bounds(0, 0))
    (tmp_path / "prefixes" / "x").mkdir(parents=True)
    (tmp_path / "prefixes" / "x" / "letter.txt").write_text("dear")
    one.prune()
    assert (tmp_path / "prefixes" / "x" / "letter.txt").exists()


def test_a_full_disk_costs_a_line_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with caplog.at_level(logging.WARNING):
        assert not folder(tmp_path).write(tokens_of(1), "", state_of(1))
    assert "No space left on device" in caplog.text
    assert not [path for path in tmp_path.rglob("*") if path.is_file()], "nothing half-written stays"


def test_what_a_killed_process_left_half_written_goes_away(tmp_path: Path) -> None:
    one = folder(tmp_path)
    one.write(tokens_of(1), "", state_of(1))
    partial = paths(tmp_path)[0].with_name(".abc.123")
    partial.write_bytes(b"x")
    folder(tmp_path).files()
    assert partial.exists(), "its writer may be at work"
    set_age(partial, 3600)
    folder(tmp_path).files()
    assert not partial.exists()


def test_two_processes_that_write_read_and_prune_do_not_disturb_each_other(tmp_path: Path) -> None:
    bounds = Bounds(10 * 6_300, 1e6)
    errors: list[BaseException] = []

    def work(number: int) -> None:
        rng = random.Random(number)
        mine = folder(tmp_path, bounds=bounds)
        try:
            for _ in range(60):
                seed = rng.randrange(30)
                mine.write(tokens_of(seed), "", state_of(seed))
                for file in mine.files():
                    state = mine.read(file.name)
                    seed = next(s for s in range(30) if np.array_equal(tokens_of(s), file.tokens))
                    assert state is None or np.array_equal(state, state_of(seed))
        except Exception as error:  # noqa: BLE001 - the main thread fails with it
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert sum(path.stat().st_size for path in paths(tmp_path)) <= bounds.max_bytes


# -- the store ---------------------------------------------------------------------------------------------------------


def test_snapshots_take_what_they_take_and_no_more_than_the_limit() -> None:
    store = SnapshotStore(12_000)
    store.put(1, state_of(1))
    store.put(2, state_of(2))
    assert store.new_state(5_000) is None
    assert (store.nbytes(1), store.nbytes(3), store.num_bytes) == (5_000, None, 10_000)
    store.drop(1)
    store.drop(1)
    assert store.num_bytes == 5_000
    np.testing.assert_array_equal(store.get(2), state_of(2))
    with pytest.raises(SnapshotError):
        store.get(1)


def test_a_dropped_snapshot_is_written_all_the_same_and_can_be_fetched(tmp_path: Path) -> None:
    store = SnapshotStore(10_000, folder(tmp_path))
    store.put(1, state_of(1))
    store.store(Store(1, tokens_of(1), "ann"))
    store.drop(1)
    store.flush()
    (stored,) = store.files()
    assert store.fetch(stored.name, 2)
    np.testing.assert_array_equal(store.get(2), state_of(1))
    assert store.num_bytes == 0, "what was read is loaded and dropped in the same step"
    store.drop(2)
    assert store.num_bytes == 0
    store.close()


def test_a_longer_conversation_takes_the_place_of_its_beginning(tmp_path: Path) -> None:
    store = SnapshotStore(10**6, folder(tmp_path))
    for key, length, cache_namespace in ((1, 100, "ann"), (2, 100, "bob"), (3, 300, "ann")):
        store.put(key, state_of(key))
        store.store(Store(key, tokens_of(1)[:length], cache_namespace))
        store.flush()
    assert sorted((len(file.tokens), file.cache_namespace) for file in store.files()) == [(100, "bob"), (300, "ann")]
    store.close()


def sizes_in(files: SnapshotFolder) -> list[tuple[int, int]]:
    """Return the first token and the number of tokens of each file."""
    return sorted((int(file.tokens[0]), len(file.tokens)) for file in files.files())


def write_turn(store: SnapshotStore, key: int, tokens: list[int], size: int) -> None:
    state = store.new_state(size)
    assert state is not None
    store.put(key, state)
    store.store(Store(key, np.array(tokens, np.int32), ""))
    store.flush()
    store.drop(key)


def test_a_new_turn_costs_no_other_conversation_if_both_fit(tmp_path: Path) -> None:
    """The old turn of the long one is about to be replaced, so it takes no room."""
    files = folder(tmp_path, bounds=Bounds(100_000, 1e6))
    store = SnapshotStore(10**6, files)
    write_turn(store, 1, [1] * 300, 30_000)
    write_turn(store, 2, [2] * 600, 55_000)
    write_turn(store, 3, [2] * 620, 56_000)
    assert sizes_in(files) == [(1, 300), (2, 620)]
    store.close()


@pytest.mark.parametrize("free", [2**40, 0])
def test_a_turn_that_cannot_be_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    files = folder(tmp_path, bounds=Bounds(100_000, 1e6))
    store = SnapshotStore(10**6, files)
    write_turn(store, 1, [1] * 300, 30_000)
    write_turn(store, 2, [2] * 600, 55_000)

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(snapshot_files, "atomic_write", fail)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    write_turn(store, 3, [2] * 630, 60_000)
    assert sizes_in(files) == [(1, 300), (2, 600)]
    store.close()


def test_a_disk_that_cannot_hold_both_turns_gets_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = folder(tmp_path)
    store = SnapshotStore(10**6, files)
    write_turn(store, 1, [1] * 600, 55_000)
    there: list[int] = []
    write = snapshot_files.atomic_write

    def noting(path: Path, *parts: bytes | memoryview, **options: Any) -> None:
        there.append(len(paths(tmp_path)))
        write(path, *parts, **options)

    monkeypatch.setattr(snapshot_files, "atomic_write", noting)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=20_000))
    write_turn(store, 2, [1] * 620, 56_000)
    assert there == [0]
    assert sizes_in(files) == [(1, 620)]
    store.close()


def test_a_longer_conversation_does_not_replace_a_shared_prefix(tmp_path: Path) -> None:
    store = SnapshotStore(10**6, folder(tmp_path))
    for key, length, shared in ((1, 260, True), (2, 280, False), (3, 300, False)):
        store.put(key, state_of(key))
        store.store(Store(key, tokens_of(1)[:length], "", shared))
        store.flush()
    assert sorted((len(file.tokens), file.shared) for file in store.files()) == [(260, True), (300, False)]
    store.close()


def test_of_states_that_serve_whole_only_dispensable_ones_make_way(tmp_path: Path) -> None:
    store = SnapshotStore(100_000, folder(tmp_path))
    store.divisible = False
    long = tokens_of(1, 1000)
    for key, length in enumerate((300, 970, 980, 990, 1000)):
        store.put(key, state_of(key))
        store.store(Store(key, long[:length], ""))
        store.flush()
    assert sorted(len(file.tokens) for file in store.files()) == [300, 970, 990, 1000]
    store.close()


def test_what_was_dropped_and_waits_for_the_disk_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = threading.Event()
    write = SnapshotFolder.write
    monkeypatch.setattr(SnapshotFolder, "write", lambda *args: slow.wait(60) and write(*args))
    store = SnapshotStore(20_000, folder(tmp_path))
    for key in range(20):
        store.put(key, state_of(key))
        store.store(Store(key, tokens_of(key), ""))
        store.drop(key)
    slow.set()
    store.flush()
    assert len(store.files()) == 5, "a quarter more than the limit"
    store.close()


def test_all_that_memory_holds_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = threading.Event()
    write = SnapshotFolder.write
    monkeypatch.setattr(SnapshotFolder, "write", lambda *args: slow.wait(60) and write(*args))
    store = SnapshotStore(40_000, folder(tmp_path))
    for key in range(8):
        store.put(key, state_of(key))
        store.store(Store(key, tokens_of(key), ""))
    slow.set()
    store.flush()
    assert len(store.files()) == 8
    store.close()


def until_read(store: SnapshotStore, name: str) -> None:
    deadline = time.monotonic() + 30
    while not store.prefetch(name):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_file_is_read_on_another_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = folder(tmp_path)
    for seed in (1, 2):
        files.write(tokens_of(seed), "", state_of(seed))
    store, may_read, load = SnapshotStore(10**6, files), threading.Event(), files._load

    def slow(name: str) -> np.ndarray:
        assert threading.current_thread() is not threading.main_thread()
        assert may_read.wait(30)
        return load(name)

    monkeypatch.setattr(files, "_load", slow)
    (one,) = (file.name for file in files.files() if file.tokens[0] == tokens_of(1)[0])
    assert not store.prefetch(one)
    assert not store.prefetch(one)
    may_read.set()
    until_read(store, one)
    assert store.fetch(one, 7)
    np.testing.assert_array_equal(store.get(7), state_of(1))
    store.close()


def test_what_nobody_fetches_makes_way_for_another_file(tmp_path: Path) -> None:
    files = folder(tmp_path)
    for seed in (1, 2):
        files.write(tokens_of(seed), "", state_of(seed))
    store = SnapshotStore(10**6, files)
    names = {int(file.tokens[0]): file.name for file in files.files()}
    one, two = (names[int(tokens_of(seed)[0])] for seed in (1, 2))
    until_read(store, one)
    assert store.fetch(two, 1), "it is read at once beside the other"
    until_read(store, two)
    store.drop_prefetched()
    until_read(store, one)
    assert store.fetch(one, 2)
    np.testing.assert_array_equal(store.get(1), state_of(2))
    np.testing.assert_array_equal(store.get(2), state_of(1))
    store.close()


@pytest.mark.parametrize("damage", ["damaged", "missing"])
def test_a_bad_file_that_another_thread_read_is_known_as_one(tmp_path: Path, damage: str) -> None:
    files = folder(tmp_path)
    files.write(tokens_of(1), "", state_of(1))
    store, (path,) = SnapshotStore(10**6, files), paths(tmp_path)
    assert len(files.files()) == 1
    if damage == "damaged":
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    else:
        path.unlink()
    until_read(store, path.name)
    assert not store.fetch(path.name, 1)
    assert files.files() == ()
    assert not path.exists()
    store.close()


def test_a_snapshot_that_cannot_be_loaded_takes_its_file_with_it(tmp_path: Path) -> None:
    folder(tmp_path).write(tokens_of(1), "", state_of(1))
    store = SnapshotStore(10_000, folder(tmp_path))
    assert store.fetch(store.files()[0].name, 1)
    store.refuse(1)
    assert not paths(tmp_path)
    assert store.files() == ()


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that takes a thousand bytes in 0.02 s."""
    monkeypatch.setattr(snapshot_files, "PIECE", 1_000)
    write = snapshot_files.atomic_write

    def slowly(path: Path, *parts: bytes, on_part: Callable[[], None]) -> None:
        def wait() -> None:
            time.sleep(0.02)
            on_part()

        write(path, *parts, on_part=wait)

    monkeypatch.setattr(snapshot_files, "atomic_write", slowly)


def store_of(root: Path, num_states: int, size: int) -> SnapshotStore:
    store = SnapshotStore(10**6, folder(root))
    for key in range(num_states):
        store.put(key, state_of(key, size))
        store.store(Store(key, tokens_of(key), ""))
    return store


@pytest.mark.usefixtures("slow_disk")
def test_the_end_waits_for_a_slow_disk_as_long_as_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "STALLED_S", 0.8)
    store = store_of(tmp_path, 3, 20_000)
    reports: list[int] = []
    store.flush(reports.append)  # it takes 1.2 s
    assert len(store.files()) == 3
    assert reports == sorted(reports, reverse=True)
    assert {1, 2, 3} <= set(reports), "it tells how many are left while it writes them"
    store.close()


@pytest.mark.usefixtures("slow_disk")
def test_the_end_waits_for_a_disk_that_writes_no_longer_than_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "FLUSH_S", 0.7)
    store = store_of(tmp_path, 60, 15_000)
    store.flush()
    store.close()
    assert 1 <= len(store.files()) < 60
    assert len(folder(tmp_path).files()) == len(store.files()), "whole files only"


@pytest.mark.parametrize("limit", ["STALLED_S", "FLUSH_S"])
def test_the_end_does_not_wait_for_a_disk_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(snapshots, limit, 0.05)
    stuck = threading.Event()
    monkeypatch.setattr(SnapshotFolder, "write", lambda *_: stuck.wait(60))
    store = store_of(tmp_path, 2, 5_000)
    reports: list[int] = []
    store.flush(reports.append)
    assert not reports
    store.close()
    stuck.set()
