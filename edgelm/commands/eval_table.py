"""`edgelm eval` with several models: one after the other beside the same reference, and then their speeds.

Owns the choice of the reference, the order of the work, and what an interrupted command need not do again. Only two
models are in memory at a time: a reference that stays loaded beside all of them may not fit, and its exact logits take
more on a disk than the model does; computing them again for each model is what resuming needs anyway.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgelm.base.config import Config, Settings, load_config
from edgelm.base.errors import EdgeLMError, ModelError, RequestError
from edgelm.base.workers.messages import EvalSide
from edgelm.commands.eval import (
    Against,
    Task,
    evaluate_side,
    file_stamps,
    identified,
    keep_result,
    library_versions,
    parse_against,
    side_of,
)
from edgelm.commands.eval_models import find_models
from edgelm.commands.eval_output import Form, Judgement, print_judgement
from edgelm.commands.eval_speed import Timed, measure_speeds, speed_key
from edgelm.commands.job import reader_may_leave
from edgelm.evaluation.comparison import Row, by_size, short_labels
from edgelm.evaluation.kept import KeptResult, KeptResults, KeptSpeed
from edgelm.library.local import model_config
from edgelm.library.readers import Contents, read_each
from edgelm.library.scan import LocalModel

SPEED_AGE_S = 3600
COMPARED = (  # the figures of a comparison, which a model alone does not have
    "mean_kl", "mean_kl_stderr", "p99_kl", "max_kl", "top1_agreement", "top1_stderr", "log_perplexity_difference",
    "log_perplexity_difference_stderr", "distinguishable",
)  # fmt: skip


def eval_models(
    names: Sequence[str], task: Task, flags: Mapping[str, object], against: Sequence[str], *, speed: bool, form: Form
) -> int:
    """Print a table of models; return the exit code, 1 if one of them could not be evaluated. Raises EdgeLMError."""
    config = load_config(flags)
    form.check()
    chosen = parse_against(against, config)
    models = find_models(names, config)
    if chosen.model and not any(model.is_at(chosen.model.path) for model in models):
        models.append(chosen.model)
    judge = _Judge(_opened(models, config), chosen, task, config)
    judge.evaluate()
    if speed:
        judge.measure_speeds()
    judgement = judge.judgement()
    with reader_may_leave():
        print_judgement(judgement, form)
    return 1 if any(row.problem for row in judgement.rows) else 0


@dataclass(slots=True)
class _Model:
    """A model of the comparison, and what is known of it so far."""

    local: LocalModel
    settings: Settings
    side: EvalSide
    content: dict[str, Any]  # the reader's answer
    stamps: list[tuple[str, int, int]]  # of the files when that was read
    label: str
    result: KeptResult | None = None
    speed: KeptSpeed | None = None
    problem: str = ""

    def require_unchanged(self) -> None:
        """Raise ModelError if the files are no longer those whose content was read."""
        if file_stamps(self.local.path) != self.stamps:
            raise ModelError(f"{self.local.name} was changed in the meantime", "run the command again")

    @property
    def nbytes(self) -> int:
        return int(self.content.get("bytes", 0))


def _opened(models: Sequence[LocalModel], config: Config) -> list[_Model]:
    """Read the header of each model; one that cannot be read has a problem."""
    stamps = [_stamps(model.path) for model in models]
    contents = read_each(Contents(model.path) for model in models)
    labels = _labels(models)[1]
    opened = []
    for model, stamp, content, label in zip(models, stamps, contents, labels, strict=True):
        settings = model_config(model, config).settings
        side, problem = side_of(model, settings), content.get("error", "")
        opened.append(_Model(model, settings, side, content, stamp, label, problem=problem))
    return opened


def _stamps(path: Path) -> list[tuple[str, int, int]]:
    try:
        return file_stamps(path)
    except ModelError:  # the reader says why
        return []


def _labels(models: Sequence[LocalModel]) -> tuple[str, list[str]]:
    names = [model.name for model in models]
    if len(set(names)) < len(names):  # the same file name in several folders
        names = [f"{model.path.parent.name}/{model.name}" for model in models]
    if len(set(names)) < len(names):
        names = [str(model.path) for model in models]
    return short_labels(names)


class _Judge:
    """The comparison: evaluates what is not known yet."""

    def __init__(self, models: list[_Model], against: Against, task: Task, config: Config) -> None:
        self._models = models
        self._task = task
        self._config = config
        self._kept = KeptResults(config.places.data)
        self._against = against
        self._reference = self._find_reference()
        self._num_known = 0

    def _find_reference(self) -> _Model | None:
        """Return the model that --against names, or else the largest; None: each is compared with itself."""
        if self._against.model is not None:
            model = next(model for model in self._models if model.local.is_at(self._against.model.path))
            if model.problem:
                raise RequestError(f"the reference {model.local.name} cannot be used: {model.problem}")
            return model
        if self._against != Against():
            return None
        readable = [model for model in self._models if not model.problem]
        if not readable:
            return None
        largest = max(readable, key=lambda model: model.nbytes)
        if len(readable) > 1:
            print(f"note: the reference is {largest.local.name}, the largest; --against names another", file=sys.stderr)
        return largest if len(self._models) > 1 else None

    def evaluate(self) -> None:
        """Evaluate each model beside the reference; a failure is the problem of its row."""
        others = [model for model in self._models if model is not self._reference and not model.problem]
        for number, model in enumerate(others, 1):
            self._evaluate(model, self._reference_of(model), f"{number} of {len(others)}")
        reference = self._reference
        if reference:
            self._conclude(reference, [model for model in others if model.result])
        if self._num_known:
            print(f"note: {self._num_known} evaluated before; --restart evaluates again", file=sys.stderr)

    def _conclude(self, reference: _Model, others: Sequence[_Model]) -> None:
        """Take the reference's own figures from a comparison with it, of its own format if there is one."""
        others = sorted(others, key=lambda other: other.local.format != reference.local.format)
        result = others[0].result if others else None
        if result is None:
            self._evaluate(reference, None, "the reference")
            return
        figures = {**result.figures, **result.figures["against"], "against": None, **dict.fromkeys(COMPARED)}
        side = EvalSide(reference.side.model, figures["kv"])
        key = self._task.content_key(reference.settings, [side], [reference.content["identity"]])
        model = identified(reference.local, reference.content)
        reference.result = keep_result(model, key, self._task.text.name, figures, self._config, result.at)

    def _reference_of(self, model: _Model) -> EvalSide | None:
        if self._reference is None:
            return self._against.reference_of(model.side)
        named = replace(self._against, model=self._reference.local)
        return named.reference_of(model.side)

    def _evaluate(self, model: _Model, reference: EvalSide | None, place: str) -> None:
        task, config = self._task, self._config
        sides = [model.side, *([reference] if reference else [])]
        opened = {one.local.path: one for one in self._models}
        identities = [opened[side.model].content["identity"] for side in sides]
        key = task.content_key(model.settings, sides, identities)
        kept = self._kept.of(model.content["identity"])
        if kept and not task.restart and (result := kept.result(key)):
            model.result = result
            self._num_known += 1
            return
        try:
            figures = evaluate_side(model.side, reference, model.settings, task, config)
            for side in sides:
                opened[side.model].require_unchanged()
        except EdgeLMError as error:
            model.problem = str(error)
            print(f"{place}: {model.label}: {error}", file=sys.stderr)
            return
        model.result = keep_result(identified(model.local, model.content), key, task.text.name, figures, config)
        print(f"{place}: {model.label}: {_in_words(figures)}", file=sys.stderr)

    def measure_speeds(self) -> None:
        """Measure the speed of each model that was evaluated, unless that was done within the last hour.

        The speeds of a table are compared with each other, and a machine is not the same the next day.
        """
        timed: dict[str, _Model] = {}
        for model in self._models:
            if model.problem:
                continue
            identity, key = model.content["identity"], speed_key(model.settings, library_versions())
            kept = self._kept.of(identity)
            speed = None if kept is None or self._task.restart else kept.speed(key)
            model.speed = speed if speed and time.time() - speed.measured_at < SPEED_AGE_S else None
            if model.speed is None:
                timed[model.local.identity] = model

        def keep(measured: Timed, speed: KeptSpeed) -> None:
            model = timed[measured.local.identity]
            model.speed = speed
            self._kept.keep(replace(identified(model.local, model.content), speeds=(speed,)))

        jobs = [Timed(m.local, m.settings, speed_key(m.settings, library_versions())) for m in timed.values()]
        measure_speeds(jobs, self._config, verbose=self._task.verbose, on_done=keep)

    def judgement(self) -> Judgement:
        """Return the table, the largest model first."""
        rows = by_size(self._row(model) for model in self._models)
        prefix, _ = _labels([model.local for model in self._models])
        reference = self._reference.label if self._reference else self._against_text()
        return Judgement(rows=rows, family=prefix.rstrip("-_.:/ "), reference=reference, text=self._task.text.name)

    def _against_text(self) -> str:
        kv, engine = self._against.kv, self._against.engine
        return "itself" + (f" with {kv} KV" if kv else "") + (f" on {engine}" if engine else "")

    def _row(self, model: _Model) -> Row:
        return Row(
            name=model.local.name,
            label=model.label,
            nbytes=model.nbytes,
            parameters=model.content.get("parameters", 0),
            types=model.content.get("types"),
            figures=model.result.figures if model.result else None,
            prompt_speed=model.speed.prompt if model.speed else None,
            decode_speed=model.speed.decode if model.speed else None,
            decode_runs=model.speed.decodes if model.speed else (),
            is_reference=model is self._reference,
            problem=model.problem,
        )


def _in_words(figures: Mapping[str, Any]) -> str:
    if figures["mean_kl"] is None:
        return f"perplexity {figures['perplexity']:.4f}"
    return f"{figures['top1_agreement']:.1%} same next token, KL {figures['mean_kl']:.2g}".replace("%", " %")
