"""The memory that is predicted for an engine before it is loaded is what the engine then plans for itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgelm.backends.build import build, predict
from edgelm.base.config import Settings
from edgelm.base.errors import ModelError
from edgelm.base.machine.memory import USABLE
from edgelm.base.workers.messages import EngineJob
from tests.tiny import write_tiny

SETTINGS = Settings(threads=1, engine="llama")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("models") / "model.gguf", context=4096)


def test_the_engine_plans_the_same(model: Path) -> None:
    predicted = predict(model, SETTINGS)
    loaded = build(EngineJob(model=model, settings=SETTINGS))
    loaded.engine.close()
    assert loaded.footprint is not None
    assert (loaded.footprint.context, loaded.footprint.kv) == (predicted.context, predicted.kv) == (4096, "f16")
    assert loaded.footprint.total_bytes == predicted.total_bytes
    assert predicted.is_preferred


def test_a_draft_model_counts(model: Path) -> None:
    alone, both = predict(model, SETTINGS), predict(model, SETTINGS, draft=model)
    assert both.draft_bytes > 0
    assert both.total_bytes == alone.total_bytes + both.draft_bytes
    off = Settings(threads=1, engine="llama", spec="off")
    assert predict(model, off, draft=model).draft_bytes == 0


def test_an_engine_keeps_to_the_memory_that_it_was_given(model: Path) -> None:
    whole = predict(model, SETTINGS).total_bytes
    less = predict(model, SETTINGS, usable_bytes=int(0.98 * whole), limited=True)
    assert less.total_bytes <= 0.98 * whole
    assert not less.is_preferred
    loaded = build(EngineJob(model=model, settings=SETTINGS, memory_bytes=int(0.98 * whole)))
    loaded.engine.close()
    assert loaded.footprint is not None
    assert loaded.footprint.promise_bytes <= 0.98 * whole


@pytest.mark.parametrize(("limited", "words"), [(False, "are free"), (True, "are left of --max-memory")])
def test_what_can_never_fit(model: Path, limited: bool, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        predict(model, SETTINGS, usable_bytes=int(USABLE * 2**20), limited=limited)
