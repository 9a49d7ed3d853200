"""The machine code of a compiled kernel: instructions with their control bits and source lines, and its loops.

Owns the text of nvdisasm. Knows nothing of time, and of GPUs only which disassembler reads them.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from tests.kernels.performance.control import Control, decode

INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?(.*?)\s*;\s+/\* 0x([0-9a-f]{16}) \*/")
SECOND_HALF = re.compile(r"^\s+/\* 0x([0-9a-f]{16}) \*/")
LABEL = re.compile(r"^\s*(\.L_\w+):")
LINE = re.compile(r'//## File "([^"]*)", line (\d+)')
REGISTERS = re.compile(r"\bREG:(\d+)")
BITS = re.compile(r"\.(?:[US]?(8|16)|(64)|(128))\b")


class Line(NamedTuple):
    """A line of the source: the innermost one, where functions are inlined."""

    file: str  # without its folder
    number: int


@dataclass(frozen=True, slots=True)
class Instruction:
    """One machine instruction."""

    index: int
    guard: str  # "!P0", or empty
    opcode: str  # "LDG.E.128"
    operands: str
    control: Control
    line: Line
    target: int | None = None  # of a branch: the index of an instruction

    @property
    def name(self) -> str:
        return self.opcode.partition(".")[0]

    @property
    def num_bytes(self) -> int:
        """The bytes that a lane loads or stores."""
        match = BITS.search(self.opcode)
        return int(next(group for group in match.groups() if group)) // 8 if match else 4


class Loop(NamedTuple):
    """A loop: from its first instruction to the last branch back to it."""

    start: int
    end: int

    def holds(self, index: int) -> bool:
        return self.start <= index <= self.end


@dataclass
class Code:
    """A kernel's machine code. `loops` are the smallest first."""

    name: str
    instructions: list[Instruction]
    registers: int
    loops: list[Loop] = field(default_factory=list)

    @cached_property
    def targets(self) -> frozenset[int]:
        """The instructions that branches go to."""
        return frozenset(one.target for one in self.instructions if one.target is not None)

    def innermost(self, index: int) -> Loop | None:
        """Return the smallest loop around an instruction."""
        return next((loop for loop in self.loops if loop.holds(index)), None)


def code_of(compiled: Any) -> Code:
    """Return the machine code of Triton's CompiledKernel."""
    return read_cubin(compiled.asm["cubin"])


@lru_cache(maxsize=256)
def read_cubin(cubin: bytes) -> Code:
    """Disassemble a cubin that holds one kernel."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        usage = _tool("cuobjdump", "-res-usage", str(path))
        text = _tool("nvdisasm", "-hex", "-g", "-c", str(path))
    match = REGISTERS.search(usage)
    assert match, usage
    return parse(text, int(match[1]))


def parse(text: str, registers: int) -> Code:
    """Parse what nvdisasm -hex -g -c prints."""
    labels: dict[str, int] = {}
    found: list[tuple[str, str, str, Line]] = []
    controls: list[Control] = []
    line = Line("", 0)
    name = ""
    for row in text.splitlines():
        if match := LINE.search(row):
            line = Line(match[1].rpartition("/")[2], int(match[2]))
        elif match := LABEL.match(row):
            labels[match[1]] = len(found)
        elif match := INSTRUCTION.match(row):
            opcode, _, operands = match[3].partition(" ")
            found.append((match[2] or "", opcode, operands.strip(), line))
        elif match := SECOND_HALF.match(row):
            controls.append(decode(int(match[1], 16)))
        elif match := re.match(r"^\.text\.(\w+):", row):
            name = match[1]
    assert len(found) == len(controls), (len(found), len(controls))
    instructions = []
    for index, ((guard, opcode, operands, line), control) in enumerate(zip(found, controls, strict=True)):
        label = re.search(r"\.L_\w+", operands) if opcode.startswith("BRA") else None
        target = labels[label[0]] if label else None
        instructions.append(Instruction(index, guard, opcode, operands, control, line, target))
    while instructions and instructions[-1].name in ("NOP", "BRA"):  # padding, and the trap behind the end
        instructions.pop()
    return Code(name, instructions, registers, sorted(_loops(instructions), key=lambda loop: loop.end - loop.start))


def _loops(instructions: list[Instruction]) -> Iterator[Loop]:
    ends: dict[int, int] = {}
    for instruction in instructions:
        if instruction.target is not None and instruction.target <= instruction.index:
            ends[instruction.target] = instruction.index
    for start, end in ends.items():
        yield Loop(start, end)


def _tool(name: str, *arguments: str) -> str:
    """Run one of the disassemblers that come with Triton."""
    import triton

    path = getattr(triton.knobs.nvidia, name).path
    return subprocess.run([path, *arguments], check=True, capture_output=True, text=True).stdout
