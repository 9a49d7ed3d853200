"""A running model that sees, asked in this process; or the test is skipped where libmtmd is missing."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from edgelm.backends.build import build
from edgelm.backends.llama.binding import load_mtmd
from edgelm.backends.model import LoadedModel
from edgelm.base.config import Settings
from edgelm.base.errors import EngineError
from edgelm.base.places import Places
from edgelm.base.workers.messages import EngineJob
from edgelm.engine.core import Stats
from edgelm.jobs.answer import Answerer
from edgelm.jobs.request import AnswerRequest
from edgelm.text.message_forms import picture_part
from edgelm.text.template_runner import TemplateRunner
from tests.seeing import png

CONTEXT = 1024
NUM_TOKENS = 8


def require_libmtmd() -> None:
    """Skip the module that is being imported where llama.cpp was built without libmtmd."""
    try:
        load_mtmd()
    except EngineError as error:
        pytest.skip(f"{error.message}; the environment was built without it", allow_module_level=True)


def picture(width: int = 200, height: int = 120, seed: int = 0) -> dict[str, Any]:
    return picture_part("data:image/png;base64," + base64.b64encode(png(width, height, seed)).decode())


def asking(*parts: str | dict[str, Any]) -> dict[str, Any]:
    return {
        "role": "user",
        "content": [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts],
    }


@dataclass(frozen=True)
class Answer:
    text: str
    ids: list[int]
    logprobs: list[float]
    tops: list[dict[int, float]]
    stats: Stats


@dataclass(frozen=True)
class Seeing:
    """A running model with its projector."""

    loaded: LoadedModel
    answerer: Answerer

    async def ask(self, *messages: dict[str, Any], **sampling: Any) -> Answer:
        sampling = {"max_tokens": NUM_TOKENS, "temperature": 0.0, "num_logprobs": 5} | sampling
        prepared = await self.answerer.prepare(AnswerRequest(messages=messages, sampling=sampling))
        async with aclosing(self.answerer.answer(prepared)) as answer:
            deltas = [delta async for delta in answer]
        sampled = [sample for delta in deltas for sample in delta.sampled]
        stats = deltas[-1].stats
        assert stats is not None
        return Answer(
            "".join(delta.text for delta in deltas),
            [sample.id for sample in sampled],
            [sample.logprob or 0.0 for sample in sampled],
            [dict(sample.top) for sample in sampled],
            stats,
        )


@asynccontextmanager
async def seeing(
    model: Path, prefixes: Path | None = None, places: Places | None = None, **settings: Any
) -> AsyncIterator[Seeing]:
    """Run a model; with `places` it drafts, and keeps the drafters' data there."""
    own = Settings(ctx=CONTEXT, parallel=3, temperature=0.0, **settings)
    job = EngineJob(model=model, settings=own, prefixes=prefixes, drafts=places is not None)
    loaded = await asyncio.to_thread(build, job, places=places)
    templates = TemplateRunner(loaded.tokenizer, loaded.prompt_tokens)
    try:
        yield Seeing(loaded, Answerer(loaded, templates, None, own))
    finally:
        await templates.close()
        loaded.prompt_tokens.save()
        loaded.engine.close()
