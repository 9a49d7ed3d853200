"""Drafting: what an engine needs to draft well, from its settings and from what was measured and learnt before.

Owns the composition of costs, drafters and guard, and the check that a draft model speaks the same vocabulary. Knows
nothing of requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from edgelm.config import Places, Settings
from edgelm.core import Drafter, Executor
from edgelm.engine.acceptance import Acceptance
from edgelm.engine.answers import AnswersFile, path_for
from edgelm.engine.chain import ChainDrafter
from edgelm.engine.clock import StepClock
from edgelm.engine.costs import Measured, StepCosts
from edgelm.engine.drafter import NgramDrafter
from edgelm.engine.guard import GuardedDrafter
from edgelm.engine.memory import Memory
from edgelm.engine.model_drafter import ModelDrafter
from edgelm.errors import EdgeLMError, ModelError
from edgelm.executors.cores import usable_cores
from edgelm.executors.llama import LlamaExecutor, LlamaOptions
from edgelm.executors.llama_model import LlamaModel
from edgelm.executors.machine import machine_key
from edgelm.executors.step_times import StepTimes
from edgelm.library.local import find_local, require_gguf
from edgelm.text.tokenizer import LlamaTokenizer, Tokenizer

MEASURE_S = 2.0  # at most, of each start; what is missing then is measured at the next
REPEAT_S = 0.3  # of the next starts, for measuring again
SAMPLES = 1000  # tokens
MAX_PADDING = 256  # ids that one vocabulary may have more than another: they stand for nothing


def measured_clock(executor: Executor, settings: Settings, places: Places, identity: bytes) -> StepClock:
    """Return a clock that knows what rows cost, from a short benchmark that is kept.

    `identity` stands for the weights, the build and the KV mode. The executor must run nothing else meanwhile.
    """
    cores = usable_cores()
    machine = machine_key(cores), settings.threads or cores.physical  # a home folder may be shared by several
    times = StepTimes(places.cache / "step-times", [identity.hex(), executor.info, machine])
    times.measure(executor, MEASURE_S, REPEAT_S)
    return StepClock(StepCosts(Measured(*point) for point in times.surface()))


def guarded(drafters: Sequence[Drafter], clock: StepClock, settings: Settings) -> Drafter:
    """Return one drafter of several, each bounded and guarded for itself: one that loses does not stop another."""
    most = None if settings.spec == "auto" else int(settings.spec)
    each = [GuardedDrafter(drafter, clock, most) for drafter in drafters]
    return each[0] if len(each) == 1 else ChainDrafter(each)


def find_draft_model(settings: Settings, places: Places) -> Path | None:
    """Return the file of the draft model. Raises ModelError where it is not here."""
    if settings.draft is None or settings.spec == "off":
        return None
    folders = [Path(each) for each in settings.model_dirs]
    return require_gguf(find_local(settings.draft, places.hub, folders)).path


def load_draft_model(
    path: Path, options: LlamaOptions, repack: bool, tokenizer: Tokenizer, clock: StepClock
) -> ModelDrafter:
    """Load a draft model beside a model, whose tokenizer and options are given.

    Raises ModelError for a file that cannot be loaded, or whose vocabulary is another.
    """
    model = LlamaModel(path, repack=repack)
    try:
        require_same_vocabulary(tokenizer, LlamaTokenizer.of_model(model.native, model), path.name)
        context = min(options.context, model.train_context or options.context)
        executor = LlamaExecutor(model, replace(options, context=context, kv="f16", max_rows=options.max_sequences))
    except EdgeLMError:
        model.close()
        raise
    return ModelDrafter(executor, clock.plain_s)


def require_same_vocabulary(large: Tokenizer, small: Tokenizer, name: str) -> None:
    """Raise ModelError unless both models mean the same by each token; only padding at the end may differ."""
    shared = min(large.num_tokens, small.num_tokens)
    differing = abs(large.num_tokens - small.num_tokens) > MAX_PADDING
    if not differing:
        differing = any(large.piece(token) != small.piece(token) for token in range(shared))
    if differing or large.stop_ids - {token for token in large.stop_ids if token >= shared} != small.stop_ids:
        raise ModelError(
            f"{name} cannot draft for this model: its vocabulary is another",
            "take a smaller model of the same family, or leave --draft away",
        )


def ngram_drafter(tokenizer: Tokenizer, settings: Settings, places: Places, model: bytes) -> NgramDrafter:
    """Return a drafter with what was learnt before: of the model that `model` stands for, of past answers."""
    learnt = places.cache / "acceptance" / f"{model.hex()}.json"
    memory = Memory(AnswersFile(path_for(places.data, vocabulary_sample(tokenizer)))) if settings.memory else None
    return NgramDrafter(memory, Acceptance.load(learnt), lambda acceptance: acceptance.save(learnt))


def vocabulary_sample(tokenizer: Tokenizer) -> Iterator[bytes]:
    """Yield what tells one vocabulary from another: its size and a sample. To read all of it takes up to 0.3 s."""
    count = tokenizer.num_tokens
    yield str(count).encode()
    for token in range(0, count, max(count // SAMPLES, 1)):
        yield tokenizer.text_of(token).encode()
