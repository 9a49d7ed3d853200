"""Outlier columns in 16 bits, and pruning, on small trained models, beside the same bytes spent on more bits.

    python -m tests.bench.bench_outliers_pruning MODELS [--work FOLDER] [--only NAME] [--rows REGEX]
                                                 [--points FILE] [--task]

MODELS is the folder with BabyLlama-tok361-f32.gguf and stories260K-v3-f32.gguf; the starter is edgelm's. Each form of
tests/bench/weight_forms.py is put on all matrices of the blocks; the embedding, which is also the head, stays as the
file has it. Inputs are observed on one text, and KL(source || changed) of the answers is measured on another: every
other section of the guide in the starter's prompts; the two halves of what the story models write (bench_eval.py). In
rows of two widths the matrices where that helps most on the first text have more bits. "plain" beside a trial is the
least KL of a row without a trial in no more bytes. `--task` also asks the starter some questions of
packaging/starter_test. Deterministic: the load of the machine does not matter.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from edgelm.backends.llama.model import LlamaModel
from edgelm.guide import question_groups, sections
from edgelm.knowledge.passages import Passage
from edgelm.knowledge.starter import larger_model, starter_answers
from edgelm.library.local import find_local
from edgelm.models.loading.quantize import GROUP, quantize_rows
from edgelm.text.tokenizer import LlamaTokenizer
from tests.bench.bench_eval import SEED, stories, write
from tests.bench.plain_llama import PlainLlama, Seen
from tests.bench.starter_task import LARGER, Task, prompt_of
from tests.bench.weight_forms import SCALE_BITS, Form, Stored, codes, ggml, half, outliers, pruned, two_of_four

WINDOW = 256  # tokens of a story
MOST_TOKENS = 12_000  # that are measured, and as many observed
SHORT_TOKENS = 2_500  # on which the mixed rows choose
MIXED_SHARES = 0.05, 0.1, 0.2, 0.4, 0.7  # of the weights, that have more bits
TASK_ROWS = (
    "16 bits", "Q4_K, importance", "Q3_K, importance", "int4 g64", "int5 g64", "int3 g64",
    "int4 g64, 8 columns by effect", "2:4 by activation, int4 g64", "50% by activation, 16 bits",
    "30% by activation, int4 g64",
)  # fmt: skip
PER_CENT = 100


@dataclass(frozen=True)
class Text:
    """Token sequences; of each, the predictions from `start` on belong to an answer."""

    tokens: list[list[int]]
    starts: list[int]


@dataclass
class Row:
    """One line of the table."""

    name: str
    trial: bool  # outliers or pruning; else a form that edgelm or llama.cpp could run today
    bits: float  # a weight of the blocks' matrices
    nbytes: float  # of the whole file's tensors
    kl: float  # of answers
    whole_kl: float  # of all tokens; the starter's prompts are not what it was trained to predict
    same_top: float  # of answers
    plain_kl: float | None = None
    right: int | None = None  # answers of the task
    declined: int | None = None


def main() -> None:
    """Measure, print, and write the points of a plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "edgelm-bench-eval")
    parser.add_argument("--only", default="", help="models whose name begins so")
    parser.add_argument("--points", type=Path)
    parser.add_argument("--rows", default="", help="a regular expression for the names of the rows")
    parser.add_argument("--task", action="store_true")
    args = parser.parse_args()
    args.work.mkdir(exist_ok=True)
    torch.manual_seed(0)
    points = {}
    for name, path, first, second in cases(args.models, args.work, args.only):
        trial = Trial(PlainLlama(path), first, second)
        print(f"\n## {name}: {trial.counts()}\n", flush=True)
        rows = list(trial.rows(args.rows))
        if args.task and name == "starter":
            task = Task(path, trial.model, args.work)
            for row in rows:
                if row.name in trial.made:
                    row.right, row.declined = task.counts(trial.made[row.name])
                    print(f"{row.right} right, {row.declined} declined: {row.name}", flush=True)
        print_table(rows)
        points[name] = [asdict(row) for row in rows]
    if args.points:
        args.points.write_text(json.dumps(points, indent=1), encoding="utf-8")


def cases(models: Path, work: Path, only: str) -> Iterator[tuple[str, Path, Text, Text]]:
    """Yield names, files, and the texts to observe and to measure."""
    starter = find_local("starter").path
    if "starter".startswith(only):
        with closing(LlamaModel(starter)) as native:
            tokenizer = LlamaTokenizer.of_model(native.native, native)
            yield "starter", starter, conversations(tokenizer, 0), conversations(tokenizer, 1)
    for name, file, most in (
        ("BabyLlama", "BabyLlama-tok361-f32.gguf", 250),
        ("stories260K", "stories260K-v3-f32.gguf", 500),
    ):
        if not name.startswith(only):
            continue
        path = models / file
        text = write(work / f"{name.lower()}.txt", stories, path, most)
        with closing(LlamaModel(path)) as native:
            tokens = LlamaTokenizer.of_model(native.native, native).encode(
                text.read_text(encoding="utf-8"), special=False, bos=False
            )
        bos = 1
        windows = [[bos, *tokens[at : at + WINDOW - 1]] for at in range(0, len(tokens) - WINDOW, WINDOW - 1)]
        middle, count = len(windows) // 2, MOST_TOKENS // WINDOW
        first, second = (Text(part, [0] * count) for part in (windows[:count], windows[middle:][:count]))
        assert count <= middle
        yield name, path, first, second


def conversations(tokenizer: LlamaTokenizer, parity: int) -> Text:
    """Return a question about every other section of the guide, as the chat asks it, with the right quotation."""
    tokens, starts, total = [], [], 0
    chosen = list(sections()[parity::2])
    random.Random(SEED).shuffle(chosen)
    for section in chosen:
        texts = next(group.questions for group in question_groups(section.topic) if group.title == section.title)
        passages = [Passage(section.topic, section.title, section.text), larger_model(LARGER)]
        prompt = prompt_of(tokenizer, passages, texts[len(texts) // 2])
        quotation = next(answer for answer in starter_answers(passages) if answer.startswith(section.text[:20]))
        own = tokenizer.encode(f"{quotation}<|end|>", special=True, bos=False)
        if total + len(prompt) + len(own) > MOST_TOKENS:
            break
        tokens.append(prompt + own)
        starts.append(len(prompt) - 1)
        total += len(tokens[-1])
    return Text(tokens, starts)


@dataclass(frozen=True)
class Mix:
    """Two widths: a share of the weights has `more` bits, the others `few` and perhaps columns in 16 bits."""

    few: int
    more: int
    share: float
    columns: int = 0

    @property
    def name(self) -> str:
        name = f"int{self.few} g64, {self.share:.1%} int{self.more}"
        return f"{name}, {self.columns} columns by largest" if self.columns else name


def mixes() -> list[Mix]:
    """Return the mixtures, and those of 4 and 6 bits also with a column in 16 bits."""
    shares = {(2, 3): MIXED_SHARES, (3, 4): MIXED_SHARES, (4, 6): (0.015, 0.02, 0.03, *MIXED_SHARES)}
    plain = [Mix(few, more, share) for few, more in shares for share in shares[few, more]]
    return plain + [replace(mix, columns=1) for mix in plain if mix.few == 4]


class Trial:
    """One model, what its matrices are multiplied with, and its own predictions."""

    def __init__(self, model: PlainLlama, first: Text, second: Text) -> None:
        self.model = model
        self._first, self._second = first, second
        model.seen = {}
        for tokens in first.tokens:
            model.log_probs(tokens)
        self._seen, model.seen = model.seen, None
        self._source = [model.log_probs(tokens) for tokens in second.tokens]
        self._weights = sum(model.weights[name].numel() for name in model.matrices())
        rest = set(model.stored_bytes) - set(model.matrices())
        self._rest_bytes = sum(model.stored_bytes[name] for name in rest)
        self._k_blocks = all(model.weights[name].shape[1] % 256 == 0 for name in model.matrices())
        self._rankings: dict[int, list[str]] = {}
        self.made: dict[str, dict[str, Tensor]] = {}

    def counts(self) -> str:
        """Return the numbers of weights, bytes and tokens, as a line."""
        observed, measured = (sum(map(len, text.tokens)) for text in (self._first, self._second))
        return (
            f"{self._weights:,} weights in the blocks, {self._rest_bytes:,} bytes for the rest; "
            f"{observed:,} tokens observed, {measured:,} measured"
        )

    def rows(self, pattern: str) -> Iterator[Row]:
        """Yield the rows whose names match; trials with the least KL of a plain form of no more bytes."""
        plain = [
            self.row(name, form, trial=False) for name, form in self.plain_forms().items() if re.search(pattern, name)
        ]
        mixed = [mix for mix in mixes() if re.search(pattern, mix.name)]
        plain += [self._measure(mix.name, self.mixture(mix), trial=False) for mix in mixed if not mix.columns]
        yield from sorted(plain, key=lambda row: row.bits)
        trials = [self._measure(mix.name, self.mixture(mix), trial=True) for mix in mixed if mix.columns]
        trials += [
            self.row(name, form, trial=True) for name, form in self.trial_forms().items() if re.search(pattern, name)
        ]
        for row in trials:
            row.plain_kl = min((it.kl for it in plain if it.bits <= row.bits + 1e-9), default=None)
            yield row

    def plain_forms(self) -> dict[str, Form]:
        """Return forms for which kernels exist, or would be a width more."""
        kinds = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
        if self._k_blocks:
            kinds += ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
        forms: dict[str, Form] = {"16 bits": half}
        forms |= {kind: partial(ggml, kind) for kind in kinds}
        forms |= {f"{kind}, importance": partial(ggml, kind, weighed=True) for kind in kinds if kind != "Q8_0"}
        forms[f"int4 g{GROUP} without calibration"] = uncalibrated
        groups = {2: (64,), 3: (32, 64), 4: (32, 64, 128), 5: (32, 64), 6: (32, 64), 8: (64,)}
        forms |= {f"int{bits} g{group}": partial(codes, bits, group) for bits in groups for group in groups[bits]}
        return forms

    def trial_forms(self) -> dict[str, Form]:
        """Return the forms that are tried."""
        bases: dict[str, Form] = {f"int4 g{group}": partial(codes, 4, group) for group in (32, 64, 128)}
        bases["Q4_0"] = partial(ggml, "Q4_0", weighed=True)
        if self._k_blocks:
            bases["Q4_K"] = partial(ggml, "Q4_K", weighed=True)
        forms: dict[str, Form] = {
            f"{base}, {count} columns by {by}": partial(outliers, count, by, rest)
            for base, rest in bases.items()
            for by in ("largest", "effect")
            for count in (1, 4, 8)
        }
        for bits in (None, 4, 8):
            width = f"int{bits} g64" if bits else "16 bits"
            for by in ("magnitude", "activation"):
                forms[f"2:4 by {by}, {width}"] = partial(two_of_four, by, bits, 64)
                for share in (0.3, 0.5):
                    forms[f"{share:.0%} by {by}, {width}"] = partial(pruned, share, by, bits, 64)
        return forms

    def row(self, name: str, form: Form, *, trial: bool) -> Row:
        """Put one form on all matrices and measure it."""
        stored = {matrix: form(self.model.weights[matrix], self._seen[matrix]) for matrix in self.model.matrices()}
        return self._measure(name, stored, trial=trial)

    def mixture(self, mix: Mix) -> dict[str, Stored]:
        """Store codes with groups of 64; the matrices that gain most for their bytes have more bits."""
        matrices, weights = self.model.matrices(), self.model.weights
        low: Form = partial(codes, mix.few, 64)
        rest = partial(outliers, mix.columns, "largest", low) if mix.columns else low
        chosen: set[str] = set()
        room = mix.share * self._weights
        for matrix in self._ranked(mix.few):
            if weights[matrix].numel() <= room:
                chosen.add(matrix)
                room -= weights[matrix].numel()
        high = partial(codes, mix.more, 64)
        return {
            matrix: (high if matrix in chosen else rest)(weights[matrix], self._seen[matrix]) for matrix in matrices
        }

    def _ranked(self, bits: int) -> list[str]:
        """Return the matrices by the KL that they cause alone as codes of so many bits, for a weight of theirs."""
        if bits not in self._rankings:
            weights = self.model.weights
            short = list(first_sequences(self._first.tokens, SHORT_TOKENS))
            source = [self.model.log_probs(tokens) for tokens in short]
            gains = {}
            for matrix in self.model.matrices():
                changed = {matrix: codes(bits, 64, weights[matrix], self._seen[matrix]).values}
                own = [self.model.log_probs(tokens, changed) for tokens in short]
                kls = [divergence(*pair) for pair in zip(source, own, strict=True)]
                gains[matrix] = torch.cat(kls).mean().item() / weights[matrix].numel()
            self._rankings[bits] = sorted(gains, key=gains.__getitem__, reverse=True)
        return self._rankings[bits]

    def _measure(self, name: str, stored: dict[str, Stored], *, trial: bool) -> Row:
        changed = {matrix: form.values for matrix, form in stored.items()}
        kls, whole_kls, same = [], [], []
        for tokens, start, source in zip(self._second.tokens, self._second.starts, self._source, strict=True):
            own = self.model.log_probs(tokens, changed)
            kl = divergence(source, own)
            kls.append(kl[start:])
            whole_kls.append(kl)
            same.append((source.argmax(-1) == own.argmax(-1)).float()[start:])
        bits = sum(form.bits for form in stored.values())
        mean_kl, whole_kl, top = (torch.cat(part).mean().item() for part in (kls, whole_kls, same))
        if is_asked(name):
            self.made[name] = changed
        row = Row(name, trial, bits / self._weights, bits / 8 + self._rest_bytes, mean_kl, whole_kl, top)
        print(f"{row.bits:7.3f} {row.kl:9.5f} {name}", flush=True)
        return row


def uncalibrated(weight: Tensor, seen: Seen) -> Stored:
    """Store what edgelm's torch backend makes of a model in 16 bits while it loads."""
    parts = quantize_rows(weight)
    assert parts.offsets is not None
    scales, minimums = (
        part.float().repeat_interleave(GROUP, -1)[:, : weight.shape[1]] for part in (parts.scales, parts.offsets)
    )
    return Stored(parts.codes.float() * scales + minimums, 4.0 * weight.numel() + SCALE_BITS * parts.scales.numel())


def divergence(source: Tensor, own: Tensor) -> Tensor:
    """Return KL(source || own) of each row of log-probabilities, in nats."""
    return torch.nn.functional.kl_div(own, source, reduction="none", log_target=True).sum(-1).clamp_min(0)


def is_asked(name: str) -> bool:
    """Tell whether the starter's task is done with a row; it takes longer than all else."""
    return name in TASK_ROWS


def first_sequences(sequences: list[list[int]], most: int) -> Iterator[list[int]]:
    """Yield the first sequences, until they have `most` tokens."""
    for tokens in sequences:
        yield tokens
        most -= len(tokens)
        if most <= 0:
            return


def print_table(rows: list[Row]) -> None:
    """Print the rows in Markdown."""
    print(
        "\n| | bits a weight | bytes | KL | KL of all tokens | same top token | plain, same bytes | right, declined |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        plain = "" if row.plain_kl is None else f"{row.plain_kl:.5f} ({row.kl / max(row.plain_kl, 1e-9):.2f} times)"
        task = "" if row.right is None else f"{row.right}, {row.declined}"
        print(
            f"| {row.name} | {row.bits:.3f} | {row.nbytes:,.0f} | {row.kl:.5f} | {row.whole_kl:.5f} | "
            f"{PER_CENT * row.same_top:.2f} % | {plain} | {task} |"
        )


if __name__ == "__main__":
    main()
