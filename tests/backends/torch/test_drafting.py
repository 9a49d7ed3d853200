"""A draft model in the torch engine: it drafts without changing an answer, and is refused where it cannot."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from edgelm.backends.build import build
from edgelm.backends.model import LoadedModel
from edgelm.backends.torch import build as build_module
from edgelm.base.config import Settings
from edgelm.base.errors import EdgeLMError, ModelError
from edgelm.base.places import Places
from edgelm.base.workers.messages import EngineJob
from edgelm.engine.clock import Measured, StepClock, StepCosts
from edgelm.engine.core import SamplingParams, Stats
from tests.tiny import write_tiny

PROMPT = [7, 300, 41, 260, 33, 9, 120]


@pytest.fixture
def places(tmp_path: Path) -> Places:
    names = ("CONFIG", "DATA", "CACHE", "RUNTIME")
    return Places({f"EDGELM_{name}_DIR": str(tmp_path / name.lower()) for name in names})


@pytest.fixture(autouse=True)
def cheap_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a row more cost a hundredth of a step, and a step of the draft model little, however busy this machine is."""
    costs = [Measured(1, 0, 0.010), Measured(64, 0, 0.0163)]
    monkeypatch.setattr(build_module, "measured_clock", lambda *_: StepClock(StepCosts(costs)))
    monkeypatch.setattr(StepClock, "observe", lambda *_: None)
    monkeypatch.setattr(StepClock, "token_s", lambda _: 1.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("models") / "m.gguf", endless=True)


def built(path: Path, places: Places | None, **settings: object) -> LoadedModel:
    fixed = {"threads": 1, "ctx": 512, "engine": "torch", "device": "cpu", "memory": False}
    chosen = Settings(**fixed | settings)  # type: ignore[arg-type]
    return build(EngineJob(model=path, settings=chosen, drafts=places is not None), places=places)


def ask(loaded: LoadedModel, count: int = 60) -> tuple[list[int], Stats]:
    async def answer() -> tuple[list[int], Stats]:
        ids, stats = [], None
        async for event in loaded.engine.submit(PROMPT, SamplingParams(temperature=0, max_tokens=count)):
            ids += [sample.id for sample in event.sampled]
            stats = event.stats
        assert stats
        return ids, stats

    try:
        return asyncio.run(answer())
    finally:
        loaded.engine.close()


def test_a_draft_model_drafts(model: Path, places: Places) -> None:
    plain, _ = ask(built(model, None))
    drafted, stats = ask(built(model, places, draft=str(model)))
    assert drafted == plain
    assert stats.accepted > 20


def test_a_worse_draft_model_changes_no_answer(model: Path, places: Places, tmp_path: Path) -> None:
    small = write_tiny(tmp_path / "small.gguf", layers=1, context=128)
    plain, _ = ask(built(model, None), count=200)
    drafted, _ = ask(built(model, places, draft=str(small)), count=200)  # longer than the small one's context
    assert drafted == plain


def test_a_draft_model_of_another_vocabulary_is_refused(model: Path, places: Places, tmp_path: Path) -> None:
    small = write_tiny(tmp_path / "small.gguf", vocab_size=1024)
    with pytest.raises(ModelError, match="cannot draft for this model: it has another vocabulary"):
        built(model, places, draft=str(small))


def test_the_draft_model_must_fit_beside_the_model(
    model: Path, places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = write_tiny(tmp_path / "large.gguf", layers=24, width=512, ffn=2048)
    monkeypatch.setattr(build_module, "available_memory_bytes", lambda: 600 * 2**20)
    built(model, places).engine.close()
    monkeypatch.setattr(build_module, "load_decoder", lambda *_, **__: pytest.fail("it was loaded"))
    with pytest.raises(ModelError, match="with the draft model"):
        built(model, places, draft=str(large))


def test_nothing_drafts_without_speculation(model: Path, places: Places, tmp_path: Path) -> None:
    _, stats = ask(built(model, places, draft=str(tmp_path / "none.gguf"), spec="off"))
    assert stats.drafted == 0
    with pytest.raises(EdgeLMError, match="does not exist"):
        built(model, places, draft=str(tmp_path / "none.gguf"))
