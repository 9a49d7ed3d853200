"""The way of a warp through the machine code, and what each of its memory instructions asks for.

Owns the match of machine code and PTX: by source line and kind of access. The emulator counts how often the PTX
executes; a loop of the machine code runs as often as its accesses must for the same count, whatever ptxas unrolled.
Bytes are kept: what a line's PTX reads, all machine instructions of that line read together.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tests.kernels.performance.code import Code, Instruction, Line, Loop
from tests.kernels.performance.traffic import Accesses, Traffic
from tests.kernels.ptx.parse import Program

LIMIT = 4_000_000  # instructions of one warp: a walk that is longer is cut off
KINDS = {
    "LDG": "global read", "LD": "global read", "LDGSTS": "global read", "STG": "global write", "ST": "global write",
    "RED": "global write", "REDG": "global write", "ATOMG": "global write", "ATOM": "global write",
    "LDS": "shared read", "LDSM": "shared read", "STS": "shared write", "STSM": "shared write",
    "ATOMS": "shared write", "HMMA": "product", "IMMA": "product", "QMMA": "product", "SHFL": "shuffle",
    "BAR": "barrier", "HGMMA": "wgmma", "IGMMA": "wgmma", "QGMMA": "wgmma",
}  # fmt: skip
Key = tuple[str, int, str]  # file, line, kind


class Request(NamedTuple):
    """The average request of a memory instruction, for one execution by a warp."""

    sectors: float  # of 32 bytes, from the L1 cache or beyond
    misses: float  # of these, the sectors that no instruction of the CTA had touched before
    dram: float  # of the misses, the part that is not in the L2 cache
    pending: float  # of all sectors, those that are still on their way
    common: float  # of the misses, the part that every CTA touches: the first ones of a multiprocessor bring it
    wavefronts: float  # passes through shared memory
    tensor: str
    writes: bool = False


@dataclass(slots=True)
class Path:
    """One kind of CTA: the instructions of a warp in order, by index, and what memory instructions ask for."""

    steps: list[int]
    requests: dict[int, Request]
    share: float  # of the CTAs of the grid
    unmatched: list[str] = field(default_factory=list)  # accesses of the PTX that no machine instruction has


def paths_of(code: Code, traffic: Traffic, num_warps: int, warm: frozenset[str], most: int = 3) -> list[Path]:
    """Return the kinds of CTAs, `most` at most, by what they execute and how much."""
    total = traffic.executed.sum(1)
    blocks = [row.tobytes() for row in traffic.executed > 0]
    groups: list[list[int]] = []
    for at in sorted(range(len(total)), key=lambda at: (total[at], blocks[at])):
        last = groups[-1][0] if groups else -1
        if groups and blocks[at] == blocks[last] and total[at] <= 1.15 * total[last] + 8:
            groups[-1].append(at)
        else:
            groups.append([at])
    while len(groups) > most:
        pairs = list(pairwise(groups))
        near = min(range(len(pairs)), key=lambda n: _apart(pairs[n], blocks))
        groups[near : near + 2] = [groups[near] + groups[near + 1]]
    of_walk: dict[tuple[int, ...], int] = defaultdict(int)  # groups with one way are one kind
    for group in groups:
        of_walk[tuple(_steps(code, traffic, group, num_warps))] += len(group)
    walks = [list(walk) for walk in of_walk]
    shares = [number / len(traffic.ctas) for number in of_walk.values()]
    executed = sum(
        share * np.bincount(steps, minlength=len(code.instructions)) for share, steps in zip(shares, walks, strict=True)
    )
    requests, unmatched = _requests(code, traffic, np.asarray(executed), num_warps, warm)
    return [Path(steps, requests, share, unmatched) for steps, share in zip(walks, shares, strict=True)]


def _apart(pair: tuple[list[int], list[int]], blocks: Sequence[bytes]) -> tuple[bool, int]:
    """Return how much is lost where two groups of CTAs become one: those that execute the same go first, then small."""
    first, second = pair
    return blocks[first[0]] != blocks[second[0]], len(first) + len(second)


def _steps(code: Code, traffic: Traffic, ctas: list[int], num_warps: int) -> list[int]:
    counts = _block_counts(traffic.program, traffic.executed[ctas].mean(0) / num_warps)
    wanted = _counts_by_key(traffic.program, counts)
    lines = _counts_by_line(traffic.program, counts)
    return _walk(code, _loop_times(code, wanted, lines), wanted, lines)


def kind_of_ptx(opcode: str) -> str:
    """Return the kind of access of a PTX instruction; empty: none."""
    name, *parts = opcode.replace("::", ".").split(".")
    if name in ("mma", "wgmma"):
        return {"mma": "product", "wgmma": "wgmma" if "mma_async" in parts else ""}[name]
    if name == "shfl":
        return "shuffle"
    if name in ("bar", "barrier") and "warp" not in parts:
        return "barrier"
    if name in ("ldmatrix", "stmatrix"):
        return f"shared {'read' if name == 'ldmatrix' else 'write'}"
    if name == "cp" and "shared" in parts:
        return "global read"
    if name in ("ld", "st", "atom", "red") and "param" not in parts:
        space = "shared" if "shared" in parts else "global"
        return f"{space} {'read' if name == 'ld' else 'write'}"
    return ""


def _ptx_line(source: str) -> Line:
    match = re.match(r"([^:@\s]+):(\d+)", source)
    return Line(match[1], int(match[2])) if match else Line("", 0)


def _block_counts(program: Program, executed: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return how often a warp comes past each PTX instruction: the most of its block, since guards skip some."""
    starts = {0, *program.labels.values()}
    for instruction in program.instructions:
        if instruction.parts[0] in ("bra", "ret", "exit"):
            starts.add(instruction.index + 1)
    out = executed.copy()
    borders = [*sorted(start for start in starts if start < len(executed)), len(executed)]
    for first, end in pairwise(borders):
        out[first:end] = executed[first:end].max(initial=0.0)
    return out


def _counts_by_key(program: Program, counts: NDArray[np.float64]) -> dict[Key, float]:
    wanted: dict[Key, float] = defaultdict(float)
    for instruction in program.instructions:
        if kind := kind_of_ptx(instruction.opcode):
            wanted[(*_ptx_line(instruction.source), kind)] += float(counts[instruction.index])
    return wanted


def _counts_by_line(program: Program, counts: NDArray[np.float64]) -> dict[Line, float]:
    lines: dict[Line, float] = {}
    for instruction in program.instructions:
        line = _ptx_line(instruction.source)
        lines[line] = max(lines.get(line, 0.0), float(counts[instruction.index]))
    return lines


def key_of(instruction: Instruction) -> Key | None:
    """Return the key of a machine instruction's access."""
    kind = KINDS.get(instruction.name)
    return (*instruction.line, kind) if kind else None


def _copies(code: Code) -> dict[Key, list[int]]:
    copies: dict[Key, list[int]] = defaultdict(list)
    for instruction in code.instructions:
        if key := key_of(instruction):
            copies[key].append(instruction.index)
    return copies


def _loop_times(code: Code, wanted: dict[Key, float], lines: dict[Line, float]) -> dict[Loop, float]:
    """Return how often a warp runs the body of each loop, in all."""
    of_loop: dict[Loop, dict[Key, int]] = {loop: defaultdict(int) for loop in code.loops}
    outside: dict[Key, int] = defaultdict(int)
    for instruction in code.instructions:
        if key := key_of(instruction):
            loop = code.innermost(instruction.index)
            if loop is None:
                outside[key] += 1
            else:
                of_loop[loop][key] += 1
    left = {key: max(0.0, wanted.get(key, 0.0) - outside.get(key, 0)) for key in wanted}
    times: dict[Loop, float] = {}
    for loop in sorted(code.loops, key=lambda loop: -sum(of_loop[loop].values())):
        votes: list[float] = []
        for key, copies in of_loop[loop].items():
            shared = sum(key in of_loop[other] for other in code.loops if other != loop and other not in times)
            if key in left:
                exact = left[key] / copies
                votes += [float(int(exact + 1e-6)) if shared else exact] * copies
        if not votes:
            body = [code.instructions[at].line for at in range(loop.start, loop.end + 1)]
            votes = [lines[line] for line in body if line in lines]
        times[loop] = float(np.median(votes)) if votes else 1.0
        for key, copies in of_loop[loop].items():
            if key in left:
                left[key] = max(0.0, left[key] - copies * times[loop])
    return times


def _walk(code: Code, times: dict[Loop, float], wanted: dict[Key, float], lines: dict[Line, float]) -> list[int]:
    """Return the instructions that a warp executes."""
    starts = {loop.start: loop for loop in code.loops}
    done: dict[Loop, float] = dict.fromkeys(code.loops, 0.0)
    entered: dict[Loop, float] = dict.fromkeys(code.loops, 0.0)
    parents = {loop: next((o for o in code.loops if o != loop and o.start <= loop.start and loop.end <= o.end), None)
               for loop in code.loops}  # fmt: skip
    places = _places(code)
    steps: list[int] = []
    at, came_from = 0, -1
    while at < len(code.instructions) and len(steps) < LIMIT:
        instruction = code.instructions[at]
        loop = starts.get(at)
        if loop is not None:
            if not loop.holds(came_from):
                entered[loop] += 1
            done[loop] += 1
        steps.append(at)
        came_from = at
        if instruction.name == "EXIT":
            if not instruction.guard or not _lives(code, at + 1, len(code.instructions), wanted, lines, times, places):
                break
        elif instruction.target is not None and ".DIV" not in instruction.opcode:
            target = instruction.target
            if target <= at:
                back = starts[target]
                parent = parents[back]
                entries = max(1.0, times[parent] if parent else 1.0)
                if done[back] + 0.5 < times[back] * entered[back] / entries:
                    at = target
                    continue
            elif not _guarded(instruction) or not _lives(code, at + 1, target, wanted, lines, times, places):
                at = target
                continue
        at += 1
    return steps


def _guarded(instruction: Instruction) -> bool:
    """Return whether a branch has a condition: before it, or as its first operand."""
    return bool(instruction.guard) or bool(re.match(r"!?U?P\d", instruction.operands))


def _lives(
    code: Code, first: int, end: int, wanted: dict[Key, float], lines: dict[Line, float], times: dict[Loop, float],
    places: dict[Key | Line, tuple[int, int]],
) -> bool:  # fmt: skip
    """Return whether a stretch of code is executed: the PTX of its lines is, and it is not the way around a loop."""
    last = code.instructions[end - 1]
    instead = None  # where the other way ends, of which one is taken
    if first < end and last.name == "BRA" and not _guarded(last) and last.target is not None:
        instead = last.target
        around = [loop for loop in code.loops if end <= loop.start and loop.end < instead]
        if any(times[loop] >= 0.5 for loop in around):
            return False
    inside = [loop for loop in code.loops if first <= loop.start and loop.end < end]
    if any(times[loop] >= 0.5 for loop in inside):
        return True
    if 2 * len({at for loop in inside for at in range(loop.start, loop.end + 1)}) > end - first:
        return False
    runs = _runs(code, first, end, wanted, lines, places)
    if runs is None and instead is not None and _runs(code, end, instead, wanted, lines, places):
        return False
    if runs is not None:
        return runs
    body = [code.instructions[at] for at in range(first, end) if not any(loop.holds(at) for loop in inside)]
    keys = [key for instruction in body if (key := key_of(instruction))]
    if keys:
        return any(wanted.get(key, 0.0) > 0 for key in keys)
    if inside:  # only the way into loops that do not run
        return False
    known = [lines[instruction.line] for instruction in body if instruction.line in lines]
    return not known or sum(count > 0 for count in known) * 2 >= len(known)


def _runs(
    code: Code, first: int, end: int, wanted: dict[Key, float], lines: dict[Line, float],
    places: dict[Key | Line, tuple[int, int]],
) -> bool | None:  # fmt: skip
    """Return whether the first block of a stretch runs, by accesses, or else lines, that are nowhere else.

    All of a block runs, or nothing; but a few of its instructions may have the line of another. None: unknown.
    """

    def here(name: Key | Line) -> bool:
        return first <= places[name][0] and places[name][1] < end

    block = [code.instructions[at] for at in _block(code, first, end)]
    keys = [key for one in block if (key := key_of(one))]
    counts = [wanted[key] for key in keys if key in wanted and here(key)]
    counts = counts or [lines[one.line] for one in block if one.line in lines and here(one.line)]
    return sum(count > 0 for count in counts) * 2 >= len(counts) if counts else None


def _places(code: Code) -> dict[Key | Line, tuple[int, int]]:
    """Return the first and the last instruction of each line and of each access's key."""
    places: dict[Key | Line, tuple[int, int]] = {}
    for instruction in code.instructions:
        for name in (instruction.line, key_of(instruction)):
            if name is not None:
                places[name] = (places.get(name, (instruction.index, 0))[0], instruction.index)
    return places


def _block(code: Code, first: int, end: int) -> range:
    """Return the instructions from `first` on that run one after the other, before any branch and any label."""
    for at in range(first, end):
        instruction = code.instructions[at]
        if (at > first and at in code.targets) or instruction.target is not None or instruction.name == "EXIT":
            return range(first, at)
    return range(first, end)


def _requests(
    code: Code, traffic: Traffic, executed: NDArray[np.float64], num_warps: int, warm: frozenset[str]
) -> tuple[dict[int, Request], list[str]]:
    """Spread what the PTX of each line asks for over the machine instructions of that line."""
    copies = _copies(code)
    of_key: dict[Key, list[int]] = defaultdict(list)
    for index, access in traffic.accesses.items():
        space = "shared" if access.shared else "global"
        key = (*_ptx_line(access.instruction.source), f"{space} {'write' if access.writes else 'read'}")
        of_key[key].append(index)
    warps = len(traffic.ctas) * num_warps
    requests: dict[int, Request] = {}
    unmatched = []
    for key, indices in of_key.items():
        accesses = [traffic.accesses[index] for index in indices]
        runs = sum(float(executed[at]) for at in copies.get(key, []))
        if runs <= 0:
            unmatched.append(f"{key[0]}:{key[1]} {key[2]} of {accesses[0].tensor or 'shared memory'}")
            continue
        misses = sum(access.misses for access in accesses) / warps
        dram = sum(access.misses * traffic.dram_share(access, warm) for access in accesses) / warps
        request = Request(
            sum(access.sectors for access in accesses) / warps / runs,
            misses / runs,
            dram / misses if misses else 0.0,
            sum(access.pending for access in accesses) / warps / runs,
            _common(accesses, len(traffic.ctas)),
            sum(access.wavefronts for access in accesses) / warps / runs,
            accesses[0].tensor,
            accesses[0].writes,
        )
        for at in copies[key]:
            requests[at] = request
    return requests, unmatched


def _common(accesses: list[Accesses], num_ctas: int) -> float:
    """Return the part of the misses that CTAs have in common; of all that ran, the first one repeats nothing."""
    misses, repeats = sum(access.misses for access in accesses), sum(access.repeats for access in accesses)
    if not misses or num_ctas < 2:
        return 0.0
    return min(1.0, repeats / misses * num_ctas / (num_ctas - 1))
