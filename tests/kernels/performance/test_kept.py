"""Budgets that are kept: what was simulated is read back as it was, and made again only where something changed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.performance import kept, simulated
from tests.kernels.performance.budget import Budget, Row
from tests.kernels.performance.estimate import Counts, Estimate
from tests.kernels.performance.gpus import Gpu
from tests.kernels.performance.kept import Kept
from tests.kernels.performance.launch import Placement
from tests.kernels.performance.step import TINY

ROOT = Path(__file__).resolve().parents[3]
COUNTS = Counts(
    warp_instructions=1e6, loop=90, registers=64, shared=2048, sectors_per_request=3.5, conflicts=1.0,
    dram_bytes=2e6, l2_bytes=3e6, mix={"FFMA": 3.0},
)  # fmt: skip
ESTIMATE = Estimate(
    "decode_kernel", "H100", (8, 1, 1), 12.5, "latency", {"dram": 0.5}, Placement(4, "grid", 2, 8, 0.1, 2.0),
    COUNTS, 3000.0, 8000.0, [],
)  # fmt: skip
ROWS = [
    Row("layer", 16, "decode_kernel 64x64 4 bits", 12.5, ESTIMATE, early=True, key="key"),
    Row("output", 1, "torch to", 0.7, None),
]


def line_of(scene: str, digest: str, simulation: str, rows: list[Row] = ROWS) -> Kept:
    return Kept(scene, "H100", digest, simulation, rows)


def test_a_budget_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "kept.jsonl"
    assert kept.read(file) == []
    kept.append(file, line_of("decode", "a", "b"))
    (line,) = kept.read(file)
    without_mix = ESTIMATE._replace(counts=COUNTS._replace(mix={}))
    assert line == line_of("decode", "a", "b", [ROWS[0]._replace(estimate=without_mix), ROWS[1]])
    assert line.budget.kernels_ms == pytest.approx((16 * 12.5 + 0.7) / 1e3)


def test_of_a_budget_that_was_made_again_the_last_one_counts(tmp_path: Path) -> None:
    file = tmp_path / "kept.jsonl"
    for scene, digest in (("decode", "old"), ("verify", "old"), ("decode", "new")):
        kept.append(file, line_of(scene, digest, "b"))
    assert [(line.scene, line.digest) for line in kept.read(file)] == [("decode", "new"), ("verify", "old")]


def test_estimates_of_another_model_are_not_taken() -> None:
    now = kept.simulation_digest()
    lines = [line_of("decode", "any", now, [ROWS[0]._replace(key="good")]), line_of("verify", "any", "older model")]
    assert dict(kept.estimates(lines)) == {("good", "H100"): ESTIMATE}


def test_a_changed_source_changes_the_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "ROOT", tmp_path)
    (tmp_path / "kernels").mkdir()
    digests = []
    for name, text in (("one", "a = 1"), ("one", "a = 2"), ("test_one", "a = 1"), ("test_one", "a = 2")):
        (tmp_path / "kernels" / f"{name}.py").write_text(text)
        kept.digest_of.cache_clear()
        digests.append(kept.digest_of(("kernels",)))
    assert digests[0] != digests[1] == digests[2] == digests[3]  # tests change nothing


def test_a_budget_of_other_sources_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, gpus, made = tmp_path / "kept.jsonl", ["H100", "H200", "RTX 4090"], []
    recorded: list[int] = []
    rows = [ROWS[1]]

    def make(_parts: object, gpu: Gpu, _cache: object) -> Budget:
        made.append(gpu.name)
        return Budget(gpu, rows)

    monkeypatch.setattr(simulated, "record", lambda _scene, recorder: recorded.append(recorder.capability))
    monkeypatch.setattr(simulated, "budget", make)
    kept.append(file, line_of(TINY.name, "of other kernels", kept.simulation_digest()))

    def shown(*, as_kept: bool = False) -> dict[str, list[Row]]:
        return {one.gpu.name: one.rows for _, one in simulated.budgets([TINY], gpus, file, as_kept=as_kept)}

    assert list(shown(as_kept=True)) == ["H100"]
    assert made == []
    assert shown() == dict.fromkeys(gpus, rows)
    assert made == gpus
    assert recorded == [90, 89]  # H100 and H200 have the same launches
    assert shown() == dict.fromkeys(gpus, rows)
    assert made == gpus


def test_every_source_of_a_digest_exists() -> None:
    assert all((ROOT / path).exists() for path in (*kept.LAUNCHES, *kept.SIMULATION))


TWICE = """
from tests.kernels.performance.__main__ import main
main(["budget", "--tiny", "--gpus", "H100", "--kept", FILE])
print("again")
main(["budget", "--tiny", "--gpus", "H100", "--kept", FILE, "--as-kept"])
"""


def test_the_program_prints_a_budget_and_keeps_it(tmp_path: Path) -> None:
    """In a child: tests/conftest.py lets Triton interpret here."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", TWICE.replace("FILE", repr(str(tmp_path / "kept.jsonl")))],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = done.stdout.split("again")
    for name in ("packed_kernel 4 bits", "decode_kernel 512x256 4 bits", "write_kv_kernel", "attend_chunks"):
        assert name in first
    assert "counted: " in first
    assert "simulated: kernels" in first
    assert first.strip() == second.strip()
