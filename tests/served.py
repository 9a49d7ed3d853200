"""Real models behind the routes of an engine process, in this process, for OpenAI's client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
import openai

from edgelm.backends.llama.executor import LlamaExecutor, LlamaOptions
from edgelm.backends.llama.model import LlamaModel
from edgelm.backends.llama.tokenizer import LlamaTokenizer
from edgelm.backends.model import LoadedModel
from edgelm.base.config import Settings
from edgelm.engine.clock import Measured, StepClock, StepCosts
from edgelm.engine.core import Drafter
from edgelm.engine.engine import Engine
from edgelm.engine.kv_slots import SlotKV
from edgelm.engine.sampling.grammar import GrammarCompiler
from edgelm.engine.scheduler import Scheduler
from edgelm.jobs.answer import Answerer
from edgelm.server.engine_process.app import EngineParts, engine_app
from edgelm.text.prompt_token_cache import PromptTokenCache
from edgelm.text.template_runner import TemplateRunner
from tests.real_data import template
from tests.tiny import write_tiny

LIMIT_S = 120.0


@contextmanager
def loaded_model(path: Path, drafter: Drafter | None = None, *, context: int = 4096) -> Iterator[LoadedModel]:
    """Run a model with arithmetic that is equal with drafts and without: flash attention and int8 KV."""
    model = LlamaModel(path)
    tokenizer = LlamaTokenizer.of_model(model.native, model)
    executor = LlamaExecutor(model, LlamaOptions(context=context, kv="int8", threads=1))
    clock = StepClock(
        StepCosts([Measured(rows, 0, 1 + rows / 64) for rows in (1, 2, 4, 8, 16, 32)])
    )  # rows cost little
    engine = Engine(executor, Scheduler(executor.info, SlotKV(executor.info, 2**26), clock, drafter), clock).start()
    try:
        yield LoadedModel(path.stem, engine, tokenizer, PromptTokenCache())
    finally:
        engine.close()


@contextmanager
def models_of_templates(
    folder: Path, names: Iterable[str], drafter: Callable[[], Drafter | None] = lambda: None
) -> Iterator[dict[str, LoadedModel]]:
    """Run a tiny model for each of these real templates."""
    with ExitStack() as stack:
        loaded = {}
        for name in names:
            path = write_tiny(folder / f"{name}.gguf", chat_template=template(name), context=4096, quant="q8_0")
            loaded[name] = stack.enter_context(loaded_model(path, drafter()))
        yield loaded


@dataclass(frozen=True)
class Served:
    """A model that answers."""

    loaded: LoadedModel
    answerer: Answerer
    client: openai.AsyncOpenAI


@asynccontextmanager
async def served(loaded: LoadedModel, settings: Settings | None = None) -> AsyncIterator[Served]:
    """Answer in this event loop."""
    templates = TemplateRunner(loaded.tokenizer, loaded.prompt_tokens)
    grammars = GrammarCompiler(loaded.tokenizer, loaded.engine.info.num_vocab)
    answerer = Answerer(loaded, templates, grammars, settings or Settings())
    app = engine_app(EngineParts(loaded, answerer), "key")
    transport = httpx2.ASGITransport(app=app)
    http = httpx2.AsyncClient(transport=transport, timeout=LIMIT_S)
    try:
        async with openai.AsyncOpenAI(
            base_url="http://edgelm/v1", api_key="key", http_client=http, max_retries=0
        ) as client:
            yield Served(loaded, answerer, client)
    finally:
        await templates.close()
        await grammars.close()
