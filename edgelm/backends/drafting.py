"""Composes drafting for any engine: a clock that knows the cost of rows, the n-gram drafter, and throttling.

Owns where the data of drafting is kept on disk, and which models may draft. Knows nothing of requests, and of how a
draft model is loaded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from edgelm.base.config import Settings
from edgelm.base.errors import ModelError
from edgelm.base.machine.cpu import usable_cores
from edgelm.base.machine.facts import machine_key
from edgelm.base.places import Places
from edgelm.checkpoints.files import file_identity, shown
from edgelm.engine.clock import Measured, StepClock, StepCosts
from edgelm.engine.core import Drafter, Executor
from edgelm.engine.speculation.acceptance import Acceptance
from edgelm.engine.speculation.model_drafter import ModelDrafter
from edgelm.engine.speculation.ngram_drafter import NgramDrafter
from edgelm.engine.speculation.past_answers import AnswersFile, PastAnswers, path_for
from edgelm.engine.speculation.throttle import ChainDrafter, ThrottledDrafter
from edgelm.engine.step_times import DEPTH, StepTimes
from edgelm.text.tokenizer import Tokenizer

MEASURE_S = 2.0  # time limit of the benchmark at each start; the next start measures the rest
REPEAT_S = 0.3  # time for repeated measurements at later starts
SAMPLE_LEN = 1000  # tokens
NO_HEADS = "nothing is drafted: this model has no heads for --draft mtp here; --draft auto drafts from texts"
MAX_PADDING = 256  # ids that a vocabulary may have beyond those of another: padding, without text


def measured_clock(
    executor: Executor, settings: Settings, places: Places, identity: bytes, deep_row_s: float = 0.0
) -> StepClock:
    """Return a clock that knows the cost of rows from a short benchmark, whose results are kept.

    `identity` stands for the weights, the build and the KV mode. The executor must be idle meanwhile. `deep_row_s` is
    what DEPTH positions add to the time of a row, where the benchmark cannot measure it: it fills a cache by copies.
    """
    cores = usable_cores()
    machine = machine_key(cores), settings.threads or cores.physical  # machines may share a home folder
    limit = [f"drafts of {executor.info.max_draft}"] if executor.info.max_draft else []
    times = StepTimes(places.cache / "step-times", [identity.hex(), executor.info, machine, *limit])
    times.measure(executor, MEASURE_S, REPEAT_S)
    points = [Measured(*point) for point in times.surface()]
    if not executor.info.can_copy and deep_row_s:
        points += [Measured(rows, DEPTH, seconds + rows * deep_row_s) for rows, _, seconds in points]
    return StepClock(StepCosts(points))


def throttled(drafters: Mapping[str, Drafter], clock: StepClock, settings: Settings, heads_proof: Path) -> Drafter:
    """Combine drafters, by their names, into one: the first one with a draft proposes it.

    Each has its own throttle, so that a drafter that loses does not stop the others. Heads that nobody asked for begin
    with a trial: unlike texts, they know nothing of whether they will be right. `heads_proof` keeps that they gained.
    """
    proofs = {} if settings.draft == "mtp" else {"mtp": heads_proof}
    throttles = []
    for name, drafter in drafters.items():
        reading = {"read_s": drafter.read_s} if isinstance(drafter, ModelDrafter) else {}
        throttles.append(ThrottledDrafter(drafter, clock, settings.max_draft, name, proofs.get(name), **reading))
    return throttles[0] if len(throttles) == 1 else ChainDrafter(throttles)


def heads_proof(places: Places, identity: bytes, heads: Path | None) -> Path:
    """Return the file that keeps that heads gain time, with a model on this machine; `heads`: a file of their own.

    Raises ModelError where that cannot be read any more.
    """
    digest = hashlib.blake2b(identity + machine_key(usable_cores()).encode(), digest_size=16)
    try:
        for part in file_identity([heads] if heads else []):
            digest.update(part)
    except OSError as error:
        raise ModelError(f"{shown(str(heads))} cannot be read any more: {error.strerror}", "try again") from None
    return places.cache / "acceptance" / f"{digest.hexdigest()}.heads"


def ngram_drafter(tokenizer: Tokenizer, settings: Settings, places: Places, identity: bytes) -> NgramDrafter:
    """Return a drafter with the data of earlier processes: the model's acceptance rates, and past answers."""
    path = places.cache / "acceptance" / f"{identity.hex()}.json"
    memory = PastAnswers(AnswersFile(path_for(places.data, vocabulary_sample(tokenizer)))) if settings.memory else None
    return NgramDrafter(memory, Acceptance.load(path), lambda acceptance: acceptance.save(path))


def require_same_vocabulary(large: Tokenizer, small: Tokenizer, name: str) -> None:
    """Raise ModelError unless each token has the same text in both models; only padding at the end may differ."""
    num_shared = min(large.num_tokens, small.num_tokens)
    differ = abs(large.num_tokens - small.num_tokens) > MAX_PADDING
    if differ or not all(_is_same_token(large, small, token) for token in range(num_shared)):
        raise ModelError(
            f"{name} cannot draft for this model: it has another vocabulary",
            "take a smaller model of the same family, or omit --draft",
        )


def _is_same_token(large: Tokenizer, small: Tokenizer, token: int) -> bool:
    piece = large.piece(token)
    if piece != small.piece(token):
        return False
    # A control token adds no text: of those that end an answer, the names must be equal.
    return bool(piece) or token not in large.stop_ids or large.text_of(token) == small.text_of(token)


def vocabulary_sample(tokenizer: Tokenizer) -> Iterator[bytes]:
    """Yield the size of a vocabulary and a sample of its tokens, to identify it: to read all would take up to 0.3 s."""
    count = tokenizer.num_tokens
    yield str(count).encode()
    for token in range(0, count, max(count // SAMPLE_LEN, 1)):
        yield tokenizer.text_of(token).encode()
