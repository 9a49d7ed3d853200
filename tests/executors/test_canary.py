"""The canary tries every kernel family on the real llama.cpp, and tells wrong numbers from right ones."""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

from edgelm.executors import canary, machine
from edgelm.executors.canary import MODES, Mode
from edgelm.executors.machine import CANARY_COMMAND, POLICIES, MachineFacts, child_environment
from edgelm.executors.random_gguf import ALL_QUANTS, NUM_TOKENS


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [*CANARY_COMMAND, *map(str, arguments)]
    environment = os.environ | child_environment(MachineFacts(canary="ok"))
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)


@pytest.mark.parametrize("options", [[], ["--no-repack"]])
def test_the_installed_llama_cpp_decodes_every_type(tmp_path: Path, options: list[str]) -> None:
    done = run("check", tmp_path, "--threads", "2", *options)
    assert (done.returncode, done.stdout, done.stderr) == (0, '{"ok": true}\n', "")
    model = GGUFReader(tmp_path / "check.gguf")
    assert {tensor.tensor_type for tensor in model.tensors if len(tensor.shape) == 2} == set(ALL_QUANTS)


def test_first_use_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "ALTERNATIONS", 1)
    notes: list[str] = []
    found = machine.facts(tmp_path, notify=notes.append)
    found.require_working()
    assert found.canary in ("ok", "no_repack")
    assert set(found.token_ms) in (set(POLICIES), set())  # empty: one core, or no OpenMP
    assert all(time > 0 for time in found.token_ms.values())
    assert machine.facts(tmp_path, notify=notes.append) == found
    assert notes[0] == "checking llama.cpp on this machine, once"
    assert len(notes) == (1 if found.repack else 2)


def test_a_refused_model_is_an_error_with_llama_cpps_reason(tmp_path: Path) -> None:
    (tmp_path / "check.gguf").write_bytes(b"not a model")
    done = run("check", tmp_path, "--threads", "1")
    assert done.returncode == 1
    assert done.stdout == ""
    assert "refuses" in done.stderr.splitlines()[-1]
    assert "magic" in done.stderr


class FakeDecoder:
    """Gives correct logits but for one mode of the repacked weights."""

    def __init__(self, bad: Mode, wrong: float) -> None:
        self.bad, self.wrong = bad, wrong
        self.right = np.random.default_rng(0).normal(size=(5, NUM_TOKENS)).astype(np.float32)
        self.calls: list[tuple[bool, Mode]] = []

    def __call__(self, path: Path, threads: int, repack: bool, mode: Mode) -> canary.Logits:
        self.calls.append((repack, mode))
        logits = self.right + np.float32(0.001 * repack)
        if repack and mode == self.bad:
            logits[3, 7] += np.float32(self.wrong)
        return logits


@pytest.mark.parametrize("bad", MODES)
@pytest.mark.parametrize(
    ("wrong", "reason"), [(np.nan, "are not numbers"), (np.inf, "are not numbers"), (50, "differ"), (0.01, None)]
)
def test_wrong_numbers_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: Mode, wrong: float, reason: str | None
) -> None:
    decoder = FakeDecoder(bad, wrong)
    monkeypatch.setattr(canary, "_all_logits", decoder)
    result = canary.check(tmp_path, threads=1, repack=True)
    assert result["ok"] is (reason is None)
    assert reason is None or reason in str(result["reason"])
    json.dumps(result)
    decoder.calls.clear()
    assert canary.check(tmp_path, threads=1, repack=False) == {"ok": True}
    assert decoder.calls == [(False, mode) for mode in MODES]
