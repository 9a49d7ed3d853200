"""Bandwidth is measured once per number of threads; a damaged file costs one measurement."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgelm.base.machine import bandwidth as module
from edgelm.base.machine.bandwidth import measure_bandwidth, read_bandwidth


def test_it_is_measured_once_for_each_number_of_threads(tmp_path: Path) -> None:
    asked = []

    def measure(threads: int) -> float:
        asked.append(threads)
        return threads * 1e9

    path = tmp_path / "machine" / "bandwidth.json"
    assert [read_bandwidth(path, threads, measure).bytes_per_s for threads in (2, 4, 2, 4)] == [2e9, 4e9, 2e9, 4e9]
    assert asked == [2, 4]
    assert path.stat().st_mode & 0o077 == 0


def test_the_load_by_others_while_it_was_measured_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bandwidth.json"
    for threads, load in ((2, 0.75), (4, None)):
        monkeypatch.setattr(module.OtherLoad, "cores", lambda _, load=load: load)
        assert read_bandwidth(path, threads, lambda _: 5e9) == (5e9, load)
    monkeypatch.setattr(module.OtherLoad, "cores", lambda _: 9.0)
    assert [read_bandwidth(path, threads) for threads in (2, 4)] == [(5e9, 0.75), (5e9, None)]
    path.write_text('{"2": 6e9, "others": ["2"], "4": 7e9}')
    assert read_bandwidth(path, 2) == (6e9, None)


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"2": "fast"}', '{"2": -1}', '{"2": 1e300}', "1" * 5000])
def test_a_file_that_is_not_ours_is_measured_again(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bandwidth.json"
    path.write_text(text)
    assert read_bandwidth(path, 2, lambda _: 5e9).bytes_per_s == 5e9
    assert read_bandwidth(path, 2, lambda _: 7e9).bytes_per_s == 5e9


def test_a_folder_that_cannot_be_written_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert read_bandwidth(tmp_path / "file" / "bandwidth.json", 1, lambda _: 5e9).bytes_per_s == 5e9


def test_a_measured_speed_is_plausible() -> None:
    assert 1e8 < measure_bandwidth(2, 8 * 2**20) < 1e13
