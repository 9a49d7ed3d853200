"""The machine code of the kernels, read without a GPU: registers, spills, and the instructions of the main loop.

As a program it prints the table of all cases: python -m tests.kernels.sass [--modules MODULE...] [--targets SM...]
With another release of Triton: the same with PYTHONPATH=build/triton-VERSION-cp311, which `make triton` fills.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple

TARGETS = (80, 86, 89, 90, 120)
DOTS = "[HIQ]G?MMA"  # tensor-core instructions
REGISTERS = 65_536  # of a multiprocessor, on all architectures
MOST_LIMITED = 90  # this GPU has the fewest instructions for each byte that it reads: budgets hold here
OTHERS = tuple(target for target in TARGETS if target != MOST_LIMITED)
REPOSITORY = Path(__file__).resolve().parents[2]
Only = Literal["", "main", "differing"]  # which cases: all; a few of each op; those that releases compile differently


@dataclass(frozen=True)
class Figures:
    """Facts about the machine code of one kernel for one target."""

    case: str
    target: int
    registers: int
    stack: int  # bytes
    shared: int  # bytes
    spills: int  # instructions that store registers to the stack or load them from there
    instructions: int  # in the main loop; 0: there is no loop
    per_weight: float | None  # instructions of a thread for each element in the main loop
    unrolled: int  # iterations of the PTX loop in one iteration of the machine code's loop
    loads: dict[str, int]  # global loads in the main loop by width in bits: {"128": 2, "32": 1}
    shuffles: int  # in the main loop
    barriers: int  # in the main loop
    shared_stores: int  # in the main loop
    dots: int  # tensor-core instructions in the main loop
    steady_barriers: int  # in the loop that runs longest
    loop_weights: int
    num_warps: int
    budget: float | None
    wide_loads: bool
    own_warps: bool = False
    most_spills: int = 0
    loop_spills: int = 0  # in the main loop
    most_loop_spills: int | None = None
    problem: str = ""  # why the case did not compile

    @property
    def wide_share(self) -> float:
        """Return the fraction of the main loop's loaded bytes that comes in loads of 16 bytes."""
        total = sum(int(width) * count for width, count in self.loads.items())
        return self.loads.get("128", 0) * 128 / total if total else 0.0

    def faults(self) -> list[str]:
        """Return the faults of this code as text."""
        if self.problem:
            return [self.problem]
        faults = []
        if self.spills > self.most_spills:
            faults.append(f"{self.spills} instructions spill registers ({self.registers} registers)")
        if self.most_loop_spills is not None and self.loop_spills > self.most_loop_spills:
            faults.append(f"{self.loop_spills} instructions of the main loop spill registers")
        if self.registers * 32 * self.num_warps > REGISTERS:
            faults.append(f"{self.registers} registers for {self.num_warps} warps: it cannot be launched")
        if self.own_warps and self.steady_barriers:
            faults.append(f"{self.steady_barriers} barriers in a loop whose warps need nothing of each other")
        if self.loop_weights and not self.instructions:
            faults.append("no main loop")
        if self.loop_weights and self.instructions and self.wide_loads and self.wide_share < 0.5:
            faults.append(f"only {self.wide_share:.0%} of the bytes come in loads of 16 bytes: {self.loads}")
        if self.target == MOST_LIMITED and self.budget is not None and (self.per_weight or 0) > self.budget:
            faults.append(f"{self.per_weight:.2f} instructions an element, over {self.budget:.2f}")
        return faults


class Code(NamedTuple):
    """Instructions in order, and the positions of the labels among them."""

    instructions: list[str]
    labels: dict[str, int]


def sass_code(text: str) -> Code:
    """Parse the output of nvdisasm, without predicates such as @P0."""
    return _code(
        text, re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(.*?)\s*;"), re.compile(r"^\s*(\.L_\w+):")
    )


def ptx_code(text: str) -> Code:
    """Parse PTX."""
    return _code(text, re.compile(r"^\s+(?:@!?%\w+\s+)?([a-z][\w.:]*\s.*?);"), re.compile(r"^\s*(\$L_\w+):"))


def _code(text: str, instruction: re.Pattern[str], label: re.Pattern[str]) -> Code:
    instructions: list[str] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if match := label.match(line):
            labels[match[1]] = len(instructions)
        elif match := instruction.match(line):
            instructions.append(match[1])
    return Code(instructions, labels)


def main_loop(code: Code) -> list[str]:
    """Return the longest of the innermost loops."""
    return max(inner_loops(code), key=len, default=[])


def steady_barriers(code: Code) -> int:
    """Return the barriers of the loop that runs longest: of those with the most products, the one with the fewest.

    Of two loops with the same products, one is for the ends of a context, where some rows do not see all positions.
    """
    counted = [(-_count(loop, DOTS), _count(loop, "BAR")) for loop in inner_loops(code)]
    return min(counted, default=(0, 0))[1]


def inner_loops(code: Code) -> list[list[str]]:
    """Return the innermost loops: from a label to the last branch back to it."""
    loops: dict[int, int] = {}
    for at, instruction in enumerate(code.instructions):
        for label in re.findall(r"[.$]L_\w+", instruction):
            start = code.labels.get(label, at + 1)
            if start < at:
                loops[start] = at
    return [
        code.instructions[start : end + 1]
        for start, end in loops.items()
        if not any(other != (start, end) and start <= other[0] and other[1] <= end for other in loops.items())
    ]


def load_widths(loop: Iterable[str]) -> dict[str, int]:
    """Count the global loads in SASS by their width in bits."""
    widths: dict[str, int] = {}
    for instruction in loop:
        if re.match(r"LDG(STS)?\.", instruction):
            match = re.search(r"\.(?:[US](8|16)|(64)|(128))\b", instruction.split()[0])
            width = next(group for group in match.groups() if group) if match else "32"
            widths[width] = widths.get(width, 0) + 1
    return dict(sorted(widths.items(), key=lambda item: -int(item[0])))


def unrolled(ptx_loop: list[str], sass_loop: list[str]) -> int:
    """Return how many iterations of the PTX loop one iteration of the SASS loop holds, from their loads."""
    ptx = sum(bool(re.match(r"(ld\.global|cp\.async\.c)", instruction)) for instruction in ptx_loop)
    sass = sum(load_widths(sass_loop).values())
    return max(round(sass / ptx), 1) if ptx else 1


def figures(case: Any, target: int, folder: Path) -> Figures:
    """Compile a case and read its machine code."""
    from tests.kernels.compile_case import compile_for

    compiled = compile_for(case, target)
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    sass = sass_code(_tool("nvdisasm", "-c", str(cubin)))
    usage = _tool("cuobjdump", "-res-usage", str(cubin))
    loop = main_loop(sass)
    times = unrolled(main_loop(ptx_code(compiled.asm["ptx"])), loop)
    return Figures(
        case=case.name,
        target=target,
        registers=_usage(usage, "REG"),
        stack=_usage(usage, "STACK"),
        shared=compiled.metadata.shared,
        spills=_count(sass.instructions, "STL|LDL"),
        instructions=len(loop),
        per_weight=len(loop) / (case.loop_weights * times) if case.loop_weights and loop else None,
        unrolled=times,
        loads=load_widths(loop),
        shuffles=_count(loop, "SHFL"),
        barriers=_count(loop, "BAR"),
        shared_stores=_count(loop, "STS"),
        dots=_count(loop, DOTS),
        steady_barriers=steady_barriers(sass),
        loop_weights=case.loop_weights,
        num_warps=case.num_warps,
        budget=case.budget,
        wide_loads=case.wide_loads,
        own_warps=case.own_warps,
        most_spills=case.spills_on.get(target, case.spills),
        loop_spills=_count(loop, "STL|LDL"),
        most_loop_spills=case.loop_spills,
    )


def _count(instructions: Iterable[str], names: str) -> int:
    return sum(bool(re.match(rf"({names})(\.|\s|$)", instruction)) for instruction in instructions)


def _usage(text: str, name: str) -> int:
    match = re.search(rf"\b{name}:(\d+)", text)
    assert match, text
    return int(match[1])


def _tool(name: str, *arguments: str) -> str:
    """Run one of the disassemblers that come with Triton."""
    import triton

    path = getattr(triton.knobs.nvidia, name).path
    return subprocess.run([path, *arguments], check=True, capture_output=True, text=True).stdout


def _child(targets: Sequence[int], modules: list[str], only: Only) -> None:
    """Print the figures of cases for some targets, a line of JSON each."""
    cases = _cases_of(modules)
    with tempfile.TemporaryDirectory() as folder:
        for target in targets:
            for case in chosen(cases, target, only):
                sys.stdout.write(json.dumps(asdict(_figures_or_problem(case, target, Path(folder)))) + "\n")
                sys.stdout.flush()


def chosen(cases: Sequence[Any], target: int, only: Only) -> list[Any]:
    """Return the cases to compile for a target."""
    if only == "differing":
        return [case for case in cases if target in case.differs_on]
    return share(cases, target) if only == "main" else list(cases)


def share(cases: Sequence[Any], target: int) -> list[Any]:
    """Return the cases that every test run compiles for a target, out of each op's main cases.

    For sm_90 these are up to two cases with a budget. For one of the other targets, which depends on the op, it is one
    case with a budget. If an op has no case with a budget, any case counts, and sm_90 takes one.
    """
    chosen = []
    ops = groupby((case for case in cases if case.main), key=lambda case: case.name.split()[0])
    for turn, (_, of_op) in enumerate(ops):
        main = list(of_op)
        limited = [case for case in main if case.budget is not None]
        if target == MOST_LIMITED:
            chosen += limited[:2] or main[:1]
        elif OTHERS[turn % len(OTHERS)] == target:
            eligible = limited or main
            chosen.append(eligible[turn % len(eligible)])
    return chosen


def _figures_or_problem(case: Any, target: int, folder: Path) -> Figures:
    try:
        return figures(case, target, folder)
    except Exception as error:  # noqa: BLE001 - whatever the compiler raises, the other cases are still reported
        problem = f"{type(error).__name__}: {str(error).strip().splitlines()[-1] if str(error).strip() else ''}"
        names = "registers stack shared spills instructions shuffles barriers shared_stores dots steady_barriers"
        empty = dict.fromkeys(names.split(), 0)
        return Figures(
            case=case.name, target=target, per_weight=None, unrolled=1, loads={},
            loop_weights=case.loop_weights, num_warps=case.num_warps, budget=case.budget, wide_loads=case.wide_loads,
            problem=problem, **empty,
        )  # fmt: skip


def _cases_of(modules: list[str]) -> list[Any]:
    from importlib import import_module

    from tests.kernels.compile_case import compile_cases

    return [case for module in modules for case in import_module(module).compile_cases()] or compile_cases()


def all_figures(
    targets: Sequence[int], modules: Sequence[str] = (), *, only: Only = "", triton: Path | None = None
) -> list[Figures]:
    """Compile the cases of `modules`, or of all ops, in a child process without Triton's interpreter.

    `only`: those of `chosen`. `triton` is a folder with another release of it.
    """
    command = [sys.executable, "-m", "tests.kernels.sass", "--child", *map(str, targets), "--modules", *modules]
    command += [f"--{only}"] * bool(only)
    environment = compiling_environment(triton)
    done = subprocess.run(command, check=False, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [Figures(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith("{")]


def compiling_environment(triton: Path | None = None) -> dict[str, str]:
    """Return the environment of a child process that compiles kernels, by the Triton of a folder if there is one."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if triton:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(triton), environment.get("PYTHONPATH"))))
    return environment


def figures_of_targets(
    targets: Sequence[int], modules: Sequence[str] = (), *, only: Only = "", triton: Path | None = None
) -> list[Figures]:
    """Compile for several targets, in as many processes as there are CPUs."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [pool.submit(all_figures, [target], modules, only=only, triton=triton) for target in targets]
        return [row for job in jobs for row in job.result()]


def table(rows: Sequence[Figures]) -> str:
    """Return the figures as text, a line for each kernel with its faults at the end."""
    width = max((len(row.case) for row in rows), default=4)
    head = (
        f"{'case':<{width}}   sm regs stack shared spill  loop  i/el budget unroll  shfl  bar  sts dots  loads by bits"
    )
    lines = [head]
    for row in rows:
        rate = "-" if row.per_weight is None else f"{row.per_weight:.2f}"
        budget = "-" if row.budget is None else f"{row.budget:.2f}"
        loads = " ".join(f"{count}x{bits}" for bits, count in row.loads.items())
        lines.append(
            f"{row.case:<{width}} {row.target:4d} {row.registers:4d} {row.stack:5d} {row.shared:6d} {row.spills:5d} "
            f"{row.instructions:5d} {rate:>5} {budget:>6} {row.unrolled:6d} {row.shuffles:5d} {row.barriers:4d} "
            f"{row.shared_stores:4d} {row.dots:4d}  {loads}{''.join('  ! ' + fault for fault in row.faults())}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kernels.sass", description="Machine code of all kernels.")
    parser.add_argument("--modules", nargs="*", default=[], help="only these modules with compile_cases()")
    few = parser.add_mutually_exclusive_group()
    few.add_argument(
        "--main", dest="only", action="store_const", const="main", help="the cases that every test run compiles"
    )
    few.add_argument(
        "--differing",
        dest="only",
        action="store_const",
        const="differing",
        help="those that it compiles with other releases of Triton, too",
    )
    parser.add_argument("--targets", nargs="*", type=int, default=TARGETS)
    parser.add_argument("--child", nargs="+", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        _child(options.child, options.modules, options.only or "")
        return 0
    from edgelm.kernels.gpu_target import triton_version

    rows = figures_of_targets(options.targets, options.modules, only=options.only or "")
    order = {row.case: at for at, row in reversed(list(enumerate(rows)))}
    rows.sort(key=lambda row: (order[row.case], row.target))
    print(f"triton {triton_version()}; instructions of the longest innermost loop, per thread and element")
    print(table(rows))
    faults = sum(bool(row.faults()) for row in rows)
    print(f"{len(rows)} kernels, {faults} with faults")
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
