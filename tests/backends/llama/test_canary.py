"""The canary tries every kernel family on the real llama.cpp, and detects wrong numbers."""

from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

from edgelm.backends.llama import canary
from edgelm.backends.llama.canary import BATCHES, MODES, Mode
from edgelm.backends.llama.random_gguf import ALL_QUANTS, NUM_TOKENS
from edgelm.base.errors import EngineError
from edgelm.base.machine import facts as machine
from edgelm.base.machine.facts import CanaryRunner


@pytest.mark.parametrize("repack", [True, False])
def test_the_installed_llama_cpp_decodes_every_type(tmp_path: Path, repack: bool) -> None:
    assert CanaryRunner(tmp_path, 2).check(repack=repack) is None
    model = GGUFReader(tmp_path / "check.gguf")
    assert {tensor.tensor_type for tensor in model.tensors if len(tensor.shape) == 2} == set(ALL_QUANTS)


def test_first_use_end_to_end(tmp_path: Path) -> None:
    notes: list[str] = []
    found = machine.facts(tmp_path, notify=notes.append)
    found.require_working()
    assert found.canary in ("ok", "no_amx", "no_repack")
    assert machine.facts(tmp_path, notify=notes.append) == found
    assert notes[0] == "checking llama.cpp on this machine, once"
    assert len(notes) == (1 if found.canary == "ok" else 2)


def test_a_refused_model_is_an_error_with_llama_cpps_reason(tmp_path: Path) -> None:
    (tmp_path / "check.gguf").write_bytes(b"not a model")
    with pytest.raises(EngineError, match=r"could not be tried: llama\.cpp refuses the canary's model"):
        CanaryRunner(tmp_path, 1).check(repack=True)


def test_every_row_of_every_batch_is_compared(tmp_path: Path) -> None:
    assert canary.check(tmp_path, threads=1, repack=False) == ""  # writes the model
    logits = canary._all_logits(tmp_path / "check.gguf", 1, True, MODES[0])
    assert logits.shape == (sum(BATCHES), NUM_TOKENS)
    assert len(np.unique(logits[:, 0])) == len(logits)  # each row has logits of its own


def test_one_wrong_row_among_many_is_found() -> None:
    right = np.random.default_rng(0).normal(size=(66, NUM_TOKENS)).astype(np.float32)
    wrong = right.copy()
    wrong[0] = wrong[0, ::-1]
    assert canary._correlation(right, right) > 0.999
    assert canary._correlation(wrong, right) < canary.LEAST_CORRELATION


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
    assert reason in result if reason else result == ""
    decoder.calls.clear()
    assert canary.check(tmp_path, threads=1, repack=False) == ""
    assert decoder.calls == [(False, mode) for mode in MODES]
