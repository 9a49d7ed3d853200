"""Perplexity and divergence on llama.cpp, against a plain loop over its functions that feeds one token at a time."""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from edgelm.backends.llama import evaluation as load_module
from edgelm.backends.llama.binding import L
from edgelm.backends.llama.evaluation import load_llama_evaluation
from edgelm.backends.llama.model import LlamaModel
from edgelm.base.errors import EdgeLMError, ModelError
from edgelm.base.workers.messages import EvalSide
from edgelm.engine.core import ExecutorInfo, Step, Trim
from edgelm.evaluation import evaluate as evaluate_module
from edgelm.evaluation.evaluate import evaluate, max_rows
from edgelm.evaluation.scores import Tally
from edgelm.evaluation.text import Cut, Window
from tests.bare import BareLoop, tokenize
from tests.real_data import data_file
from tests.tiny import write_tiny

TEXT = "Once upon a time there was a little girl. She said hello to the big dog and her friend. " * 12


def run(
    model: EvalSide, text: list[int], bos: list[int], cut: Cut, reference: EvalSide | None = None
) -> tuple[Tally, list[Window]]:
    """Evaluate tokens as the command does; return the figures and the windows."""
    windows = list(cut.windows(iter(text), bos))
    tally = Tally()
    with load_llama_evaluation(model, reference, window=cut.length, threads=2, repack=True) as evaluation:
        other = evaluation.reference.executor if evaluation.reference else None
        assert [state.windows for state in evaluate(evaluation.model.executor, other, windows, tally)][-1:] == [
            len(windows)
        ]
    return tally, windows


def plain_logits(path: Path, windows: list[Window], kv: str = "f16", *, flash: bool = False) -> list[np.ndarray]:
    """Return the logits that predict the scored tokens of each window, one token a step."""
    logits = []
    with closing(LlamaModel(path)) as model:
        loop = BareLoop(model.native, 512, kv=kv, flash=flash)
        for window in windows:
            loop.clear()
            rows = []
            for at, token in enumerate(window.tokens[:-1]):
                loop.fill([(token, at, 0, True)])
                assert L.llama_decode(loop.context, loop.batch) == 0
                rows.append(np.ctypeslib.as_array(L.llama_get_logits(loop.context), (loop.num_vocab,)).copy())
            logits.append(np.array(rows[window.first - 1 :], np.float64))
        loop.close()
    return logits


def plain_log_p(logits: np.ndarray) -> np.ndarray:
    return logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)


def tokens_of(path: Path) -> tuple[list[int], list[int]]:
    """Return the text's tokens without BOS, and BOS."""
    with closing(LlamaModel(path)) as model:
        tokens = tokenize(model.native, TEXT)
    return tokens[1:], tokens[:1]


@pytest.fixture(scope="module")
def f32(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("models") / "f32.gguf", context=256)


@pytest.fixture(scope="module")
def q8_0(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("models") / "q8_0.gguf", context=256, quant="q8_0")


@pytest.mark.parametrize("cut", [Cut(64), Cut(65), Cut(48, 20), Cut(30, 29)])
def test_perplexity_is_that_of_a_plain_loop(f32: Path, cut: Cut) -> None:
    text, bos = tokens_of(f32)
    tally, windows = run(EvalSide(f32, "f16"), text, bos, cut)
    surprises = [
        -plain_log_p(logits)[np.arange(len(logits)), window.tokens[window.first :]]
        for logits, window in zip(plain_logits(f32, windows), windows, strict=True)
    ]
    expected = np.concatenate(surprises)
    assert tally.surprise.count == len(expected) > 90
    assert tally.surprise.mean == pytest.approx(expected.mean(), abs=1e-3)
    assert tally.surprise.error == pytest.approx(expected.std(ddof=1) / math.sqrt(len(expected)), rel=1e-2)


@pytest.mark.parametrize("other", ["weights", "cache"])
def test_divergence_is_that_of_a_plain_loop(f32: Path, q8_0: Path, other: str) -> None:
    reference = EvalSide(f32, "f16")
    model = EvalSide(q8_0, "f16") if other == "weights" else EvalSide(f32, "int8")
    text, bos = tokens_of(f32)
    tally, windows = run(model, text, bos, Cut(64), reference)
    flash = other == "cache"  # on both sides: int8 needs it
    q = plain_log_p(np.concatenate(plain_logits(model.model, windows, model.kv, flash=flash)))
    p = plain_log_p(np.concatenate(plain_logits(f32, windows, flash=flash)))
    divergence = (np.exp(p) * (p - q)).sum(axis=1)
    assert divergence.mean() > 1e-5
    assert tally.divergence.count == len(divergence)
    assert tally.divergence.mean == pytest.approx(divergence.mean(), rel=0.05)
    assert tally.divergence_quantile(0.99) == pytest.approx(np.quantile(divergence, 0.99), rel=0.15)
    agreement = (q.argmax(axis=1) == p.argmax(axis=1)).mean()
    assert tally.same_top / tally.divergence.count == pytest.approx(agreement, abs=0.03)
    targets = np.concatenate([window.tokens[window.first :] for window in windows])
    rows = np.arange(len(targets))
    assert tally.difference.mean == pytest.approx((p - q)[rows, targets].mean(), abs=2e-3)


def test_a_trained_model_is_as_sure_as_a_plain_loop_finds_it() -> None:
    path = data_file("models/stories260K-v3-f32.gguf")
    text, bos = tokens_of(path)
    tally, windows = run(EvalSide(path, "f16"), text, bos, Cut(128))
    surprises = [
        -plain_log_p(logits)[np.arange(len(logits)), window.tokens[window.first :]]
        for logits, window in zip(plain_logits(path, windows), windows, strict=True)
    ]
    assert tally.surprise.mean == pytest.approx(np.concatenate(surprises).mean(), abs=1e-3)
    assert math.exp(tally.surprise.mean) < 8  # of 512 tokens


@pytest.mark.parametrize("rows", [1, 7, 100])
def test_few_rows_a_step_change_nothing_but_the_memory(f32: Path, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    text, bos = tokens_of(f32)
    whole, _ = run(EvalSide(f32, "f16"), text[:200], bos, Cut(64))
    monkeypatch.setattr(evaluate_module, "LOGITS_BYTES", rows * 4 * 512)
    assert max_rows(512, 64) == min(rows, 64)
    bounded, _ = run(EvalSide(f32, "f16"), text[:200], bos, Cut(64))
    assert bounded.surprise.count == whole.surprise.count
    assert bounded.surprise.mean == pytest.approx(whole.surprise.mean, abs=1e-4)


def test_a_model_is_as_far_from_itself_as_nothing(f32: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(f32.read_bytes())
    text, bos = tokens_of(f32)
    tally, _ = run(EvalSide(f32, "f16"), text, bos, Cut(64), EvalSide(copy, "f16"))
    assert tally.divergence.mean == 0
    assert tally.difference.mean == 0
    assert tally.same_top == tally.divergence.count


def test_one_model_with_two_caches_is_loaded_once(f32: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []

    class Counted(LlamaModel):
        def __init__(self, path: Path, **options: object) -> None:
            loaded.append(self)
            super().__init__(path, **options)

    freed = []
    for name in ("llama_free", "llama_model_free"):
        free = getattr(L, name)
        monkeypatch.setattr(L, name, lambda pointer, free=free, name=name: (freed.append(name), free(pointer)))
    monkeypatch.setattr(load_module, "LlamaModel", Counted)
    with load_llama_evaluation(
        EvalSide(f32, "int8"), EvalSide(f32, "f16"), window=None, threads=1, repack=True
    ) as evaluation:
        assert len(loaded) == 1
        assert evaluation.window == 256  # what the model has, below the 512 of the default
    assert freed == ["llama_free", "llama_free", "llama_model_free"]


def test_what_cannot_be_compared_is_refused_before_it_is_loaded(
    f32: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_module, "LlamaModel", lambda *_, **__: pytest.fail("it was loaded"))
    other = write_tiny(tmp_path / "other.gguf", seed=1)

    def load(reference: Path | None, window: int | None = None) -> None:
        against = EvalSide(reference, "f16") if reference else None
        load_llama_evaluation(EvalSide(f32, "f16"), against, window=window, threads=1, repack=True)

    with pytest.raises(ModelError, match=r"other\.gguf has another vocabulary than f32\.gguf"):
        load(other)
    for window in (-1, 0, 3, 257):
        with pytest.raises(EdgeLMError, match="give 4 to 256"):
            load(None, window)
    monkeypatch.setattr(load_module, "available_memory_bytes", lambda: 300 * 2**20)
    with pytest.raises(ModelError, match=r"GiB with a window of 256, 0\.3 GiB are free"):
        load(None)


class Recorder:
    """An executor that notes its steps; each row's logits say for which position they are."""

    info = ExecutorInfo(
        engine="llama", device="cpu", num_vocab=50, context=64, capacity=64, max_tokens=16, max_rows=5,
        max_sequences=1, kv_bytes_per_token=1,
    )  # fmt: skip

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def forward(self, step: Step) -> None:
        self.steps.append(step)

    def logits(self, step: Step) -> np.ndarray:
        (chunk,) = step.chunks
        rows = np.zeros((chunk.rows, 50), np.float32)
        for row, position in enumerate(range(chunk.end - chunk.rows, chunk.end)):
            rows[row, position + 1] = 20  # it is sure of the next number
        return rows


class Rounding(Recorder):
    """An executor that rounds otherwise where a step has one token; `error` is in logits."""

    def __init__(self, error: float = 0.0, offset: float = 0.0) -> None:
        super().__init__()
        self._error = error
        self._offset = offset

    def logits(self, step: Step) -> np.ndarray:
        (chunk,) = step.chunks
        rows = np.zeros((chunk.rows, 50), np.float32)
        rows[:, 0] = 1 + self._offset + (self._error if len(chunk.tokens) == 1 else 0)
        return rows


def divergence_of(one: float, other: float) -> float:
    p, q = (plain_log_p(np.array([[1 + offset, *[0] * 49]])) for offset in (one, other))
    return float((np.exp(p) * (p - q)).sum())


def test_the_noise_floor_of_each_side_is_its_divergence_from_itself_one_token_a_step() -> None:
    windows = [Window(list(range(40)), 21), Window(list(range(33)), 1)]
    noise = Tally(), Tally()
    model, reference = Rounding(offset=0.5), Rounding(error=0.25)
    plain = Tally()
    list(evaluate(Rounding(offset=0.5), Rounding(error=0.25), windows, plain))
    tally = Tally()
    list(evaluate(model, reference, windows, tally, noise=noise))
    assert tally == plain, "the floor is measured beside the figures"
    assert noise[0].divergence.mean == 0  # equal to the bit
    assert noise[1].divergence.mean == pytest.approx(divergence_of(0, 0.25))
    assert [floor.divergence.count for floor in noise] == [10, 10]  # the rows of one step of each window
    assert all(step.ops == (() if step.chunks[0].start else (Trim(0, 0),)) for step in reference.steps)


def test_the_noise_floor_is_of_the_first_windows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    windows, noise, executor = [Window(list(range(40)), 21)] * 6, (Tally(),), Rounding(error=0.25)
    monkeypatch.setattr(evaluate_module, "NOISE_TOKENS", 8)
    counts = [noise[0].windows for _ in evaluate(executor, None, windows, Tally(), noise=noise)]
    assert counts == [1, 2, 2, 2, 2, 2]  # of 5 tokens each: the rows of one step


@pytest.mark.parametrize(("kv", "flash"), [("k8v16", False), ("int8", True), ("k8v4", True)])
def test_both_sides_have_flash_attention_where_one_needs_it(f32: Path, kv: str, flash: bool) -> None:
    for one, other in ((kv, "f16"), ("f16", kv)):
        with load_llama_evaluation(
            EvalSide(f32, one), EvalSide(f32, other), window=64, threads=1, repack=True
        ) as evaluation:
            assert evaluation.reference
            assert (evaluation.model.flash, evaluation.reference.flash) == (flash, flash)
    with load_llama_evaluation(EvalSide(f32, "f16"), None, window=64, threads=1, repack=True) as evaluation:
        assert evaluation.model.flash is False  # as the engine serves it


def test_each_window_starts_from_an_empty_cache_and_each_row_meets_its_token() -> None:
    executor, tally = Recorder(), Tally()
    windows = [Window(list(range(40)), 21), Window(list(range(33)), 1)]
    assert len(list(evaluate(executor, executor, windows, tally))) == 2
    assert tally.surprise.mean < 1e-6
    starts = [step for step in executor.steps if step.chunks[0].start == 0]
    assert all(step.ops == (Trim(0, 0),) for step in starts)
    assert len(starts) == 4
    assert all(not step.ops for step in executor.steps if step not in starts)
    assert all(step.num_rows <= 5 and step.num_tokens <= 16 for step in executor.steps)
