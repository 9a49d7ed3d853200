"""The table of what was emulated: docs/results/emulated-DATE.txt.

    python -m tests.kernels.emulated.run > cases.jsonl
    python -m tests.kernels.emulated.models > models.jsonl
    python -m tests.kernels.emulated.mutations > mutations.jsonl
    python -m tests.kernels.emulated.table cases.jsonl models.jsonl mutations.jsonl

Owns the layout of the table. A case that was emulated twice counts as it was the last time; lines of other kernels than
the present ones do not count.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from tests.kernels.emulated.case import CAPABILITIES, all_cases
from tests.kernels.emulated.models import ARCHITECTURES
from tests.kernels.emulated.models import cases as model_cases
from tests.kernels.emulated.mutations import EQUIVALENT
from tests.kernels.emulated.records import ROOT, digest_of_kernels

FEW = 16  # rows of a step that decodes or verifies one sequence
Line = dict[str, Any]


class Lines(NamedTuple):
    """The lines of the present kernels, and the number of others."""

    cases: list[Line]
    models: list[Line]
    mutations: list[Line]
    num_others: int


def read(paths: Iterable[str]) -> Lines:
    """Return the lines of the cases, the models and the mutations."""
    cases: dict[tuple[str, int], Line] = {}
    models: dict[tuple[str, int], Line] = {}
    mutations: dict[str, Line] = {}
    present, num_others = digest_of_kernels(), 0
    for path in paths:
        for text in Path(path).read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            if line["of"] != present:
                num_others += 1
            elif "title" in line:
                mutations[line["title"]] = line
            elif "case" in line:
                models[line["case"], line["capability"]] = line
            else:
                cases[line["name"], line["capability"]] = line
    return Lines(list(cases.values()), list(models.values()), list(mutations.values()), num_others)


def taken_over(line: Line) -> bool:
    """Return whether all launches of a case were equal to launches on an earlier architecture."""
    return bool(line["launches"]) and line["replayed"] == line["launches"]


def group(line: Line) -> tuple[str, str, str, str]:
    """Return the row of the table that a case belongs to."""
    rows = "few" if line["rows"] <= FEW else "prompt" if line["rows"] > 64 or line["op"] == "attention" else "17 to 64"
    if line["op"] in ("dequantize", "bandwidth"):
        rows = "-"  # these are no rows of a step
    return line["op"], line["format"], line["kv"] or "-", rows


def case_rows(lines: Sequence[Line]) -> Iterator[str]:
    """Yield a row for each op, format, KV format and number of rows, with a column for each architecture."""
    yield "Largest difference from the reference, relative to its largest value, by architecture (0: every bit is"
    yield "equal; -: not run; ': every case is taken over). bound: the largest that the tests allow at any element,"
    yield "relative as well. of it: the largest difference in bounds of its own element, at most 1. cases: how many"
    yield "on all architectures."
    yield ""
    heads = "".join(f"{f'sm_{capability}':>9}" for capability in CAPABILITIES)
    yield f"{'op':<13}{'format':<16}{'KV':<6}{'rows':<9}{heads}{'bound':>9}{'of it':>9}{'cases':>7}"
    groups: dict[tuple[str, str, str, str], list[Line]] = defaultdict(list)
    for line in lines:
        groups[group(line)].append(line)
    for (op, kind, kv, rows), members in sorted(groups.items()):
        columns = ""
        for capability in CAPABILITIES:
            here = [line for line in members if line["capability"] == capability]
            number = _number(max(line["difference"] for line in here)) if here else "-"
            mark = "'" if here and all(map(taken_over, here)) else " "
            columns += f"{number:>8}{mark}"
        bound, share = (max(line[name] for line in members) for name in ("bound", "share"))
        yield f"{op:<13}{kind:<16}{kv:<6}{rows:<9}{columns}{_number(bound):>9}{share:>9.3f}{len(members):>7}"


def kernel_rows(lines: Sequence[Line]) -> Iterator[str]:
    """Yield how many cases launched each kernel, for each architecture."""
    counts: Counter[tuple[str, int]] = Counter()
    for line in lines:
        counts.update((kernel, line["capability"]) for kernel in line["kernels"])
    yield f"{'kernel: cases that launch it':<30}" + "".join(f"{f'sm_{capability}':>8}" for capability in CAPABILITIES)
    for kernel in sorted({kernel for kernel, _ in counts}):
        yield f"{kernel:<30}" + "".join(f"{counts[kernel, capability]:>8}" for capability in CAPABILITIES)


def model_rows(lines: Sequence[Line]) -> Iterator[str]:
    """Yield a row for each model."""
    yield "Whole models: two sequences, prompts in chunks, decoding, drafts, sampling. error: root mean square of all"
    yield "logits' errors, relative to the logits, with the limit; product: that of the output matrix, with its bound;"
    yield "known: launches of them that were equal to earlier ones of the model and did not run again."
    yield ""
    heads = "".join(f"{head:>9}" for head in ("error", "allowed", "product", "bound", "launches", "known", "seconds"))
    yield f"{'model':<16}{'':<7}{'tokens':<14}{heads}"
    for line in lines:
        tokens = line["fault"][:13] or f"{sum(map(len, line['tokens']))} equal"
        numbers = (line["errors"][0], line["bounds"][0], line["product"], line["product_bound"])
        columns = "".join(f"{_number(number):>9}" for number in numbers)
        name = f"sm_{line['capability']}"
        counts = "".join(f"{line[count]:>9.0f}" for count in ("launches", "replayed", "seconds"))
        yield f"{line['case']:<16}{name:<7}{tokens:<14}{columns}{counts}"


def mutation_rows(lines: Sequence[Line]) -> Iterator[str]:
    """Yield how many mutations of each kind were found, and by what; then the others, with the reason."""
    equivalent = [line for line in lines if line["title"] in EQUIVALENT]
    found = [line for line in lines if line["found"]]
    yield f"Mutations: {len(lines)} tried, {len(found)} found; {len(equivalent)} change no result, for these reasons."
    yield ""
    yield f"{'mutation':<42}{'tried':>6}{'found':>6}  by"
    kinds: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        kinds[line["kind"]].append(line)
    for kind, members in kinds.items():
        ways = Counter(line["found"] for line in members if line["found"])
        by = ", ".join(f"{way} {count}" for way, count in ways.most_common())
        yield f"{kind:<42}{len(members):>6}{sum(ways.values()):>6}  {by}"
    yield ""
    kernels = Counter(line["kernel"] for line in lines)
    yield "by kernel: " + ", ".join(f"{kernel} {count}" for kernel, count in kernels.items())
    for line in lines:
        if not line["found"]:
            reason = EQUIVALENT.get(line["title"], "NOT FOUND")
            yield f"  {line['title']}, {line['source']}: {reason}"


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"


def coverage_rows(cases: Sequence[Line]) -> Iterator[str]:
    """Yield how many of its cases an op has run on each architecture, and how many of them are taken over."""
    yield "Cases run of all, by architecture; (n): of these, n are taken over. Such a case was compiled for its"
    yield "architecture, and all of its launches were equal to launches of the same case on an architecture before it:"
    yield "the same PTX but for its version, its target and what is for debuggers, the same grid, the same arguments,"
    yield "the same bytes in all tensors. The emulator did not run again. ptxas, which makes different code of equal"
    yield "PTX for different architectures, is not covered on any of them."
    yield ""
    wanted = Counter(case.op for case in all_cases())
    done = Counter((line["op"], line["capability"]) for line in cases)
    over = Counter((line["op"], line["capability"]) for line in cases if taken_over(line))
    yield f"{'op':<14}{'cases':>5}" + "".join(f"{f'sm_{capability}':>12}" for capability in CAPABILITIES)
    for op in sorted(wanted):
        cells = (f"{done[op, capability]} ({over[op, capability]})" for capability in CAPABILITIES)
        yield f"{op:<14}{wanted[op]:>5}" + "".join(f"{cell:>12}" for cell in cells)
    sums = ""
    for capability in CAPABILITIES:
        number, part = (sum(of[op, capability] for op in wanted) for of in (done, over))
        sums += f"{f'{number} ({part})':>12}"
    yield f"{'all':<14}{wanted.total():>5}{sums}"


def missing_rows(cases: Sequence[Line], models: Sequence[Line]) -> Iterator[str]:
    """Yield what has not run."""
    done = {(line["case"], line["capability"]) for line in models}
    missing = [f"{case.name} sm_{at}" for case in model_cases() for at in ARCHITECTURES if (case.name, at) not in done]
    if missing:
        yield "Models that have not run: " + ", ".join(missing)
    ran = {(line["name"], line["capability"]) for line in cases}
    partly, never = Counter[str](), []
    for case in all_cases():
        left = [capability for capability in CAPABILITIES if (case.name, capability) not in ran]
        if len(left) == len(CAPABILITIES):
            never.append(case.name)
        else:
            partly.update([case.name] * bool(left))
    if partly:
        yield "Cases that have run on some architectures only: " + "; ".join(partly)
    if never:
        yield f"Cases that have not run on any architecture, {len(never)}:"
        yield from (f"  {name}" for name in never)


def _commit() -> str:
    """Return the commit of the working tree, and whether its kernels or their tests have changed since."""
    git = partial(subprocess.run, cwd=ROOT, capture_output=True, text=True, check=False)
    head = git(["git", "rev-parse", "--short", "HEAD"]).stdout.strip() or "unknown"
    changed = git(["git", "status", "--porcelain", "--", "kernels", "models", "tests/kernels"]).stdout
    return head + (" and changes" if changed else "")


def report(paths: Sequence[str]) -> Iterator[str]:
    """Yield the lines of the whole report."""
    cases, models, mutations, num_others = read(paths)
    command = "python -m tests.kernels.emulated.table " + " ".join(Path(path).name for path in paths)
    yield f"Compiled kernels in the PTX emulator (tests/kernels/ptx), on the CPU: {command}"
    yield f"commit {_commit()}, Triton {version('triton')}, torch {version('torch')}, {os.cpu_count()} cores"
    faults = [line for line in [*cases, *models] if line["fault"]]
    instructions, seconds = (sum(line[name] for line in [*cases, *models]) for name in ("instructions", "seconds"))
    num_cases = len(all_cases()) * len(CAPABILITIES)
    num_models = len(model_cases()) * len(ARCHITECTURES)
    yield f"{len(cases)} of {num_cases} cases, {len(models)} of {num_models} models; {len(faults)} wrong"
    yield f"{instructions:,} instructions in {seconds:,.0f} s, compiling and references included"
    if num_others:
        yield f"{num_others} lines of other kernels are left out"
    for line in faults:
        yield f"WRONG: {line.get('name') or line['case']} sm_{line['capability']}: {line['fault'][:300]}"
    parts = (coverage_rows(cases), case_rows(cases), kernel_rows(cases), model_rows(models), mutation_rows(mutations))
    for part in (*parts, missing_rows(cases, models)):
        yield ""
        yield from part


def main() -> int:
    for line in report(sys.argv[1:]):
        print(line.rstrip())
    return 0


if __name__ == "__main__":
    sys.exit(main())
