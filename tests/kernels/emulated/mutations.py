"""Deliberate mutations of compiled kernels: each changes one place of the PTX, and its emulation must fail.

    python -m tests.kernels.emulated.mutations [--main] [WORD...]

A mutation is found by a result beyond its bound, or by an access outside of its tensor, a race or a deadlock. A line of
JSON for each says by what. The exit code is 1 if a mutation survives that is not listed as equivalent, or if one that
is listed is found.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.kernels.emulated.case import OUTSIDE_OF_STEPS, EmulatedCase, all_cases, emulate
from tests.kernels.emulated.memory import collecting_by_hand

if TYPE_CHECKING:
    from tests.kernels.ptx.replay import Launches

SEED = 27
READ = r"\bld\.global|\bcp\.async\.c[ag]"
SOURCE = re.compile(r"//\s*(\S+?:\d+):\d+\s*$")


class Kind(NamedTuple):
    """A change of one instruction: those that match, and what it becomes ("": nothing), or where it moves."""

    name: str
    pattern: str
    replacement: str = ""
    behind: str = ""  # the next line that matches comes before it

    def places(self, ptx: str) -> list[int]:
        """Return the numbers of the lines that it can change."""
        return [at for at, line in enumerate(ptx.splitlines()) if re.search(self.pattern, line)]

    def apply(self, ptx: str, place: int) -> str:
        lines = ptx.splitlines(keepends=True)
        if self.behind:
            to = next(at for at in range(place, len(lines)) if re.search(self.behind, lines[at]))
            lines.insert(to, lines.pop(place))
            return "".join(lines)
        lines[place] = re.sub(self.pattern, partial(_expand, self.replacement), lines[place], count=1)
        return "".join(lines)


def _expand(replacement: str, match: re.Match[str]) -> str:
    """Fill in the groups of a match; <1+16> stands for group 1 as a number, plus 16. Half of 1 is 2: never the same."""
    filled = re.sub(r"<(\d)([+/])(\d+)>", lambda part: str(_number(match, part)), replacement)
    return match.expand(filled)


def _number(match: re.Match[str], part: re.Match[str]) -> int:
    number, other = int(match[int(part[1])] or 0), int(part[3])
    return number + other if part[2] == "+" else number // other or other


BARRIER = Kind("barrier removed", r"\bbar\.sync\s+0;", "")
COPY_WAIT = Kind("wait for copies removed", r"cp\.async\.wait_group\s+\d+;", "")
COPY_EARLY = Kind("wait leaves a group of copies more", r"cp\.async\.wait_group\s+(\d+);", "cp.async.wait_group <1+1>;")
COMMIT = Kind("commit of copies removed", r"cp\.async\.commit_group;", "")
PROXY_FENCE = Kind("fence of the async proxy removed", r"fence\.proxy\.async[\w.:]*;", "")
WGMMA_FENCE = Kind("wgmma fence removed", r"wgmma\.fence\.sync\.aligned;", "")
WGMMA_WAIT = Kind("wgmma wait removed", r"wgmma\.wait_group\.sync\.aligned\s+\d+;", "")
WGMMA_EARLY = Kind(
    "wgmma wait leaves a group more",
    r"wgmma\.wait_group\.sync\.aligned\s+(\d+);",
    "wgmma.wait_group.sync.aligned <1+1>;",
)
LOAD = Kind("load off by 16 bytes", r"(ld\.global\S* .*\+) 0 \]", r"\1 16 ]")
STORE = Kind("store off by 16 bytes", r"(st\.global\S* .*?\+) 0 \]", r"\1 16 ]")
SCALE = Kind("scale of the next row", r"(ld\.global\S*\.b16 .*\+) 0 \]", r"\1 2 ]")
COPY = Kind("copy from 16 bytes further", r"(cp\.async\.c[ag]\S* .*\[ %rd\d+ \+) 0 \]", r"\1 16 ]")
INTO = Kind("copy to 16 bytes further", r"(cp\.async\.c[ag]\S* \[ %r\d+ \+) 0 \]", r"\1 16 ]")
SHARED_LOAD = Kind("load of shared memory off by 16 bytes", r"(ld\.shared\S*\s.*\[%r\d+)(?:\+(\d+))?\]", r"\1+<2+16>]")
SHARED_STORE = Kind("store to shared memory off by 16 bytes", r"(st\.shared\S*\s+\[%r\d+)(?:\+(\d+))?\]", r"\1+<2+16>]")
STRIDE = Kind("stride 4 too large", r"(mad\.wide\.[us]32\s+\S+ \S+) (\d+),", r"\1 <2+4>,")
UNMASKED_LOAD = Kind("mask of a load dropped", r"@%p\d+ (ld\.global)", r"\1")
UNMASKED_STORE = Kind("mask of a store dropped", r"@%p\d+ (st\.global)", r"\1")
INVERTED_LOAD = Kind("mask of a load inverted", r"@(%p\d+) (ld\.global)", r"@!\1 \2")
INVERTED_STORE = Kind("mask of a store inverted", r"@(%p\d+) (st\.global)", r"@!\1 \2")
SHUFFLE = Kind("shuffle of another lane", r"(shfl\.sync\.bfly\.b32\s+\S+ \S+) (\d+),", r"\1 <2/2>,")
LIMIT = Kind("limit one too large", r"(setp\.lt\.[us]32\s+\S+ \S+) (\d+);", r"\1 <2+1>;")

NO_DEPENDENCE = Kind("wait for earlier kernels removed", r"griddepcontrol\.wait\b[^;]*;")
LATE_DEPENDENCE = Kind("wait for earlier kernels behind a read", NO_DEPENDENCE.pattern, behind=READ)
DEPENDENCE = (NO_DEPENDENCE, LATE_DEPENDENCE)

ASYNC = (COPY_WAIT, COPY_EARLY, COMMIT, COPY, INTO)
WGMMA = (PROXY_FENCE, WGMMA_FENCE, WGMMA_WAIT, WGMMA_EARLY)
SHARED = (BARRIER, SHARED_LOAD, SHARED_STORE)
GLOBAL = (LOAD, STORE, STRIDE, INVERTED_LOAD, INVERTED_STORE)


class Subject(NamedTuple):
    """A kernel that is mutated, in one case on one architecture."""

    case: str  # the start of its name
    capability: int
    kernel: str
    kinds: tuple[Kind, ...]
    other: str = ""  # a case that launches the same kernel and is run if the first does not find a mutation


SAMPLED, ONE = "sampling logits rows=5", "sampling logits rows=36 one number"
DELTA = "delta bfloat16 rows=19 wide heads"
SUBJECTS = (
    Subject("dequant_gemm q4_k rows=130", 90, "dequant_gemm_kernel", (*ASYNC, *WGMMA, *SHARED, SCALE, UNMASKED_STORE)),
    Subject(
        "dequant_gemm q4_0 rows=17 q4_0-20x330", 80, "dequant_gemm_kernel", (*ASYNC, *SHARED, SCALE, INVERTED_STORE)
    ),
    Subject("attention bfloat16 kv=int8 rows=20 int8 d=64", 90, "attend_tiles", (*WGMMA, BARRIER, SHUFFLE, *GLOBAL)),
    Subject(
        "attention bfloat16 kv=k8v4 rows=20 k8v4 d=64", 86, "attend_tiles", (*SHARED, SHUFFLE, LOAD, UNMASKED_LOAD)
    ),
    Subject("attention bfloat16 kv=k6v4 rows=3 k6v4 d=64", 80, "attend_chunks", (*SHARED, SHUFFLE, LOAD)),
    Subject("attention float32 kv=k6v4 rows=2 k6v4 d=64 2x1 1@1", 80, "attend_chunks", (LIMIT,)),
    Subject("attention bfloat16 kv=int8 rows=2 int8 d=64 2x1 2@600", 120, "combine_chunks", (SHUFFLE, *GLOBAL)),
    Subject("matmul q4_k rows=3 float16", 80, "decode_kernel", (*SHARED, SHUFFLE, SCALE, *GLOBAL)),
    Subject("matmul q6_k rows=3 float16", 86, "decode_kernel", (BARRIER, SHUFFLE, LOAD, LIMIT)),
    Subject("matmul q4_1 rows=5 lengths bias silu residual splits=2", 90, "combine_kernel", GLOBAL),
    Subject("write_kv float16 kv=k6v4 rows=5", 80, "write_kv_kernel", (SHUFFLE, *GLOBAL)),
    Subject("write_kv float16 kv=fp8 rows=5 fp8 d=64", 89, "write_kv_kernel", (SHUFFLE, *GLOBAL)),
    Subject("grouped mxfp4 rows=3", 89, "few_pairs_kernel", (*SHARED, SHUFFLE, *GLOBAL)),
    Subject("grouped q4_k rows=70", 90, "plan_kernel", (BARRIER, SHUFFLE, *GLOBAL)),
    Subject("grouped q4_k rows=70", 90, "weighted_sum_kernel", GLOBAL),
    Subject("norm bfloat16 rows=2 width=8193", 80, "add_rms_norm_kernel", (*SHARED, SHUFFLE, *GLOBAL)),
    Subject("dequantize q5_k rows=33", 86, "dequantize_kernel", (SCALE, *SHARED, *GLOBAL)),
    Subject("embedding q4_k rows=9 q4_k-37x80", 120, "packed_kernel", (SCALE, LOAD, STORE, INVERTED_STORE)),
    Subject("route bfloat16 rows=4 softmax 4x60", 89, "route_kernel", (*SHARED, SHUFFLE, *GLOBAL)),
    Subject("activation bfloat16 rows=1 gelu_tanh", 120, "gated_kernel", GLOBAL),
    Subject("activation float32 rows=2 softcap 30", 89, "softcap_kernel", GLOBAL),
    Subject("norm bfloat16 rows=2 width=8193", 90, "rms_norm_kernel", (*SHARED, SHUFFLE, *GLOBAL)),
    Subject("embedding bfloat16 rows=9", 86, "dense_kernel", (*GLOBAL, UNMASKED_STORE)),
    Subject("head_gate bfloat16 rows=3 norm", 80, "gate_heads_kernel", (SHUFFLE, *GLOBAL)),
    Subject(DELTA, 86, "step_kernel", (*SHARED, SHUFFLE, *GLOBAL)),
    Subject(DELTA, 90, "prompt_kernel", (*WGMMA, *SHARED, SHUFFLE, *GLOBAL)),
    Subject(DELTA, 120, "keep_kernel", GLOBAL),
    Subject("trial float16", 80, "trial_kernel", (*ASYNC, *SHARED, LOAD, STORE)),
    Subject("trial int32", 90, "link_kernel", (LOAD, STORE, BARRIER)),
    Subject("bandwidth int32", 90, "read_kernel", (*SHARED, SHUFFLE, *GLOBAL)),
    Subject(ONE, 80, "prepare_kernel", (*SHARED, SHUFFLE, *GLOBAL), SAMPLED),
    Subject(ONE, 86, "bias_kernel", GLOBAL, SAMPLED),
    Subject(ONE, 89, "penalize_kernel", GLOBAL, SAMPLED),
    Subject(ONE, 90, "limit_kernel", (*SHARED, SHUFFLE, *GLOBAL), SAMPLED),
    Subject(SAMPLED, 120, "weigh_kernel", (*SHARED, SHUFFLE, LOAD, STORE, INVERTED_LOAD, INVERTED_STORE), ONE),
    Subject(SAMPLED, 80, "collect_kernel", (*SHARED, SHUFFLE, *GLOBAL), ONE),
    Subject(SAMPLED, 90, "draw_kernel", (*SHARED, SHUFFLE, *GLOBAL), ONE),
)
# each kernel of a step again, where the kernel before it may still run
SUBJECTS += tuple(
    subject._replace(capability=(90, 120)[number % 2], kinds=DEPENDENCE, other="")
    for number, subject in enumerate({subject.kernel: subject for subject in SUBJECTS}.values())
    if subject.kernel not in OUTSIDE_OF_STEPS
)
MAIN = (COPY_WAIT, COPY_EARLY, INTO, BARRIER, SCALE, *DEPENDENCE)
MAIN_SUBJECTS = [SUBJECTS[1], *(subject for subject in SUBJECTS if subject[2:4] == ("route_kernel", DEPENDENCE))]
Q4_K, Q4_0 = "dequant_gemm q4_k rows=130", "dequant_gemm q4_0 rows=17 q4_0-20x330"
INT8, K8V4 = "attention bfloat16 kv=int8 rows=20 int8 d=64", "attention bfloat16 kv=k8v4 rows=20 k8v4 d=64"
ROUTED = "route bfloat16 rows=4 softmax 4x60"
LAST_COPIES = "the last copies go to a part of the shared memory that is not used after the loop"
JOINED = "the copies join the next group, which is waited for at the same time"
UNUSED_ROWS = "it is of rows of the tile that no query has"
SAME_VALUES = "other threads hold the same values, and store them instead"
LOW_BITS = "the lower half of a float64 that is the sum of two squares of float16 numbers: 0 in all lanes"
LOW_WORD = "it is of the lower word of a composite, the token's id; only the value in the upper word is used"
WHOLE_ROW = "the row's list stays empty, so that draw_kernel reads the whole row, which has the same result"
BEYOND_COLUMNS = "no thread executes that load: its columns of x are behind the last one"
BEHIND_INPUT = "no thread executes that access: it is of numbers behind the last one of an input"
LOWER_BOUND = "a bisection begins at rubbish below the least composite, and finds the same threshold"
# by the title of a mutation: why it changes no result
EQUIVALENT = {
    f"sm_90 dequant_gemm_kernel commit of copies removed 0 ({Q4_K})": JOINED,
    f"sm_90 dequant_gemm_kernel fence of the async proxy removed 1 ({Q4_K})": (
        "nothing writes the tile between the two products, and there is a fence before the first"
    ),
    f"sm_80 dequant_gemm_kernel wait leaves a group of copies more 1 ({Q4_0})": LAST_COPIES,
    f"sm_80 dequant_gemm_kernel commit of copies removed 0 ({Q4_0})": JOINED,
    f"sm_80 dequant_gemm_kernel barrier removed 0 ({Q4_0})": "it stands between the first copies to two buffers",
    f"sm_80 dequant_gemm_kernel scale of the next row 7 ({Q4_0})": "it is of rows 24 to 31 of a weight that has 20",
    f"sm_90 attend_tiles store off by 16 bytes 7 ({INT8})": UNUSED_ROWS,
    f"sm_86 attend_tiles load of shared memory off by 16 bytes 45 ({K8V4})": UNUSED_ROWS,
    f"sm_86 attend_tiles mask of a load dropped 35 ({K8V4})": "threads behind the mask load what others load as well",
    "sm_80 write_kv_kernel shuffle of another lane 0 (write_kv float16 kv=k6v4 rows=5)": LOW_BITS,
    "sm_89 write_kv_kernel shuffle of another lane 0 (write_kv float16 kv=fp8 rows=5 fp8 d=64)": LOW_BITS,
    "sm_90 weighted_sum_kernel mask of a store inverted 0 (grouped q4_k rows=70)": SAME_VALUES,
    "sm_86 dequantize_kernel store off by 16 bytes 7 (dequantize q5_k rows=33)": "it is of columns behind the last one",
    f"sm_89 route_kernel shuffle of another lane 0 ({ROUTED})": (
        "a softmax subtracts the largest logit; the largest of half of the experts serves as well"
    ),
    f"sm_89 route_kernel mask of a store inverted 0 ({ROUTED})": SAME_VALUES,
    f"sm_89 route_kernel mask of a store inverted 1 ({ROUTED})": SAME_VALUES,
    f"sm_80 prepare_kernel mask of a store inverted 17 ({ONE})": SAME_VALUES,
    f"sm_90 limit_kernel mask of a store inverted 16 ({ONE})": SAME_VALUES,
    f"sm_120 weigh_kernel mask of a store inverted 0 ({SAMPLED})": SAME_VALUES,
    f"sm_120 weigh_kernel mask of a store inverted 2 ({SAMPLED})": SAME_VALUES,
    f"sm_120 weigh_kernel shuffle of another lane 0 ({SAMPLED})": LOW_WORD,
    f"sm_80 collect_kernel shuffle of another lane 0 ({SAMPLED})": LOW_WORD,
    f"sm_80 collect_kernel load of shared memory off by 16 bytes 0 ({SAMPLED})": WHOLE_ROW,
    f"sm_80 collect_kernel load off by 16 bytes 0 ({SAMPLED})": WHOLE_ROW,
    f"sm_80 collect_kernel mask of a load inverted 0 ({SAMPLED})": WHOLE_ROW,
    f"sm_90 draw_kernel barrier removed 0 ({SAMPLED})": (
        "the barriers of the second sum stand between a turn's reads and the next turn's stores"
    ),
    f"sm_90 draw_kernel store to shared memory off by 16 bytes 0 ({SAMPLED})": LOWER_BOUND,
    f"sm_90 draw_kernel mask of a store inverted 0 ({SAMPLED})": SAME_VALUES,
    f"sm_90 draw_kernel mask of a store inverted 4 ({SAMPLED})": SAME_VALUES,
    "sm_80 decode_kernel scale of the next row 67 (matmul q4_k rows=3 float16)": BEYOND_COLUMNS,
    "sm_80 decode_kernel load off by 16 bytes 82 (matmul q4_k rows=3 float16)": BEYOND_COLUMNS,
    "sm_86 decode_kernel load off by 16 bytes 77 (matmul q6_k rows=3 float16)": BEYOND_COLUMNS,
    f"sm_86 step_kernel mask of a store inverted 0 ({DELTA})": SAME_VALUES,
    f"sm_86 step_kernel mask of a store inverted 3 ({DELTA})": SAME_VALUES,
    f"sm_90 prompt_kernel stride 4 too large 28 ({DELTA})": "it is of a kept input, and the step itself has that one",
    f"sm_120 keep_kernel load off by 16 bytes 9 ({DELTA})": BEHIND_INPUT,
    f"sm_120 keep_kernel store off by 16 bytes 1 ({DELTA})": BEHIND_INPUT,
    f"sm_120 keep_kernel stride 4 too large 2 ({DELTA})": BEHIND_INPUT,
    "sm_90 read_kernel mask of a store inverted 0 (bandwidth int32)": SAME_VALUES,
    "sm_90 read_kernel shuffle of another lane 5 (bandwidth int32)": (
        "it is of the upper half of a sum of int32, which wraps: only the lower half counts"
    ),
}


class Mutation(NamedTuple):
    """A change at one place of a kernel."""

    subject: Subject
    cases: tuple[EmulatedCase, ...]
    kind: Kind
    text: str  # the kernel
    place: int  # the number of the line
    number: int  # of the places of this kind
    source: str  # "kernel.py:68"

    @property
    def title(self) -> str:
        subject = self.subject
        return f"sm_{subject.capability} {subject.kernel} {self.kind.name} {self.number} ({subject.case})"

    def change(self, kernel: str, ptx: str) -> str:
        return self.kind.apply(ptx, self.place) if (kernel, ptx) == (self.subject.kernel, self.text) else ptx


class Verdict(NamedTuple):
    """How a mutation was found; `found` is empty if it was not."""

    mutation: Mutation
    found: str  # "wrong result", "RaceError", ...
    detail: str
    seconds: float


def mutations(subject: Subject) -> Iterator[Mutation]:
    """Run a subject's case as it is, and yield the mutations of its kernel: the first and the last of each kind."""
    names = (subject.case, subject.other) if subject.other else (subject.case,)
    cases = tuple(next(case for case in all_cases() if case.name.startswith(name)) for name in names)
    texts: list[str] = []

    def seen(kernel: str, ptx: str) -> str:
        if kernel == subject.kernel and ptx not in texts:
            texts.append(ptx)
        return ptx

    for case in cases:
        num_texts = len(texts)
        result = emulate(case, subject.capability, SEED, races=True, change=seen)
        assert not result.outcome.fault, f"{case.name} sm_{subject.capability}: {result.outcome.fault}"
        assert texts, f"{case.name} does not launch {subject.kernel}"
        assert case is cases[0] or len(texts) == num_texts, f"{case.name} launches another {subject.kernel}"
    text = texts[0]  # of several variants, which a case may launch, only the first is mutated
    lines = text.splitlines()
    for kind in subject.kinds:
        places = kind.places(text)
        for number in dict.fromkeys([0, len(places) - 1] if places else []):
            yield Mutation(subject, cases, kind, text, places[number], number, _source(lines, places[number]))


def _source(lines: Sequence[str], place: int) -> str:
    """Return the line of the kernel's source that a line of PTX stands for."""
    for line in reversed(lines[:place]):
        if ".loc" in line and (match := SOURCE.search(line)):
            return match[1]
    return ""


def judge(mutation: Mutation, known: Launches) -> Verdict:
    """Emulate a mutation: at first with the search for races, then with one warp far ahead."""
    began = time.perf_counter()
    ways: tuple[dict[str, Any], ...] = ({"races": True}, {"races": False, "order": "ahead"})
    for case, options in itertools.product(mutation.cases, ways):
        capability = mutation.subject.capability
        result = emulate(case, capability, SEED, change=mutation.change, known=known, **options)
        if fault := result.outcome.fault:
            name, _, rest = fault.partition(": ")
            error = name.endswith("Error") and " " not in name
            return Verdict(
                mutation, name if error else "wrong result", rest if error else fault, time.perf_counter() - began
            )
    return Verdict(mutation, "", "", time.perf_counter() - began)


def chosen(words: Sequence[str], main: bool) -> Iterator[Mutation]:
    """Yield the mutations of kernels or cases with one of the words in their names, or all."""
    from tests.kernels.ptx.launch import forget

    for subject in SUBJECTS:
        if main and subject not in MAIN_SUBJECTS:
            continue
        if words and not any(word in f"{subject.kernel} {subject.case}" for word in words):
            continue
        for mutation in mutations(subject):
            if not main or (mutation.kind in MAIN and mutation.number == 0):
                yield mutation
            forget()  # each mutation has machines of its own


def fields(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict as JSON has it."""
    mutation = verdict.mutation
    return {
        "title": mutation.title,
        "kernel": mutation.subject.kernel,
        "kind": mutation.kind.name,
        "capability": mutation.subject.capability,
        "source": mutation.source,
        "found": verdict.found,
        "detail": verdict.detail[:300],
        "equivalent": EQUIVALENT.get(mutation.title, ""),
        "seconds": round(verdict.seconds, 2),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    assert "TRITON_INTERPRET" not in os.environ, "kernels that are interpreted are not compiled"
    from tests.kernels.ptx.replay import Launches

    parser = argparse.ArgumentParser(prog="python -m tests.kernels.emulated.mutations")
    parser.add_argument("words", nargs="*")
    parser.add_argument("--main", action="store_true", help="only the mutations of every test run")
    options = parser.parse_args(arguments)
    wrong = 0
    subject, known = None, Launches()
    for mutation in chosen(options.words, options.main):
        if mutation.subject is not subject:
            subject, known = mutation.subject, Launches()
        verdict = judge(mutation, known)
        wrong += bool(verdict.found) == (mutation.title in EQUIVALENT)
        print(json.dumps(fields(verdict)), flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    with collecting_by_hand():
        status = main()
    sys.exit(status)
