"""The text of PTX as instructions: registers, parameters, labels, and the line of the source of each instruction.

Owns the syntax. Knows nothing of what an instruction does.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache

from tests.kernels.ptx.errors import EmulatorError

OPERANDS = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*")
STATEMENT = re.compile(r"(?:@(!?)([%$\w]+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
LABEL = re.compile(r"([%$\w]+):(?!:)")
ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\(")
PARAMETER = re.compile(r"\.param\s+\.(\w+)[^,)]*?([\w$]+_param_\d+)")
DECLARED = re.compile(r"\.reg\s+\.(\w+)\s+(.*)", re.DOTALL)
RANGE = re.compile(r"([%$\w]+)<(\d+)>")
SHARED = re.compile(r"\.shared\s+\.align\s+(\d+)\s+\.b8\s+([\w$]+)\[(\d*)\]")
NAME = re.compile(r"[%$A-Za-z_][\w$]*")
BITS = {"pred": "pred", "b8": "b16", "f16": "b16", "f16x2": "b32"}


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction. `guard` is the predicate that it runs under, or empty; `negated` where it must be false."""

    index: int
    guard: str
    negated: bool
    opcode: str
    operands: tuple[str, ...]
    source: str  # "kernel.py:68", or empty

    @property
    def parts(self) -> list[str]:
        return self.opcode.split(".")

    def __str__(self) -> str:
        guard = f"@{'!' * self.negated}{self.guard} " if self.guard else ""
        text = f"`{guard}{self.opcode} {', '.join(self.operands)}`"
        return f"instruction {self.index} {text}{f' ({self.source})' if self.source else ''}"


@dataclass(slots=True)
class Program:
    """A kernel. Registers have the kinds pred, b16, b32 and b64; a label is the index of the instruction after it."""

    name: str
    parameters: list[tuple[str, str]] = field(default_factory=list)  # name and type: ("kernel_param_0", "u64")
    registers: dict[str, str] = field(default_factory=dict)
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    shared: dict[str, int] = field(default_factory=dict)  # offset of each symbol in shared memory


@lru_cache(maxsize=64)
def parse(ptx: str) -> Program:
    """Parse the text of one kernel."""
    entry = ENTRY.search(ptx)
    if entry is None:
        raise EmulatorError("the PTX has no .entry")
    head_end = ptx.index(")", entry.end())
    program = Program(entry[1])
    program.parameters = [(name, kind) for kind, name in PARAMETER.findall(ptx[entry.end() : head_end])]
    _place_shared(ptx, program)
    body_start = ptx.index("{", head_end) + 1
    _Reader(program).read(ptx[body_start:])
    return program


def _place_shared(ptx: str, program: Program) -> None:
    """Give the symbols of shared memory their offsets: first those with a size, then the one that has the rest."""
    at = 0
    for align, name, size in sorted(SHARED.findall(ptx), key=lambda symbol: symbol[2] == ""):
        at = -(-at // int(align)) * int(align)
        program.shared[name] = at
        at += int(size or 0)


class _Reader:
    """Read the body, statement by statement. Names that a block in braces declares get the block's number."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.scopes: list[dict[str, str]] = []  # names of a block to names of the program
        self.num_scopes = 0
        self.source = ""
        self.rest = ""

    def read(self, body: str) -> None:
        for line in body.splitlines():
            code, _, comment = line.partition("//")
            stripped = code.strip()
            if stripped.startswith((".loc", ".file")):
                self.source = comment.strip().rpartition(":")[0]
                continue
            if stripped.startswith(".pragma"):
                continue
            self.rest += code + " "
            if not self._statements():
                return
        raise EmulatorError(f"{self.program.name} has no end")

    def _statements(self) -> bool:
        """Read all whole statements of `rest`. Returns False at the end of the body."""
        while True:
            self.rest = self.rest.lstrip()
            if not self.rest:
                return True
            if self.rest[0] == "{":
                self.scopes.append({})
                self.num_scopes += 1
                self.rest = self.rest[1:]
            elif self.rest[0] == "}":
                if not self.scopes:
                    return False
                self.scopes.pop()
                self.rest = self.rest[1:]
            elif label := LABEL.match(self.rest):
                self.program.labels[self._declared(label[1])] = len(self.program.instructions)
                self.rest = self.rest[label.end() :]
            elif ";" in self.rest:
                statement, _, self.rest = self.rest.partition(";")
                self._statement(statement.strip())
            else:
                return True

    def _statement(self, text: str) -> None:
        if not text:
            return
        if text.startswith(".reg"):
            self._registers(text)
            return
        if text.startswith(".shared"):
            return  # _place_shared has placed it
        match = STATEMENT.fullmatch(text)
        if match is None:
            raise EmulatorError(f"cannot parse `{text}`")
        negated, guard, opcode, operands = match.groups()
        parts = tuple(self._renamed(operand.strip()) for operand in OPERANDS.findall(operands))
        index = len(self.program.instructions)
        self.program.instructions.append(
            Instruction(index, self._renamed(guard or ""), bool(negated), opcode, parts, self.source)
        )

    def _registers(self, text: str) -> None:
        match = DECLARED.fullmatch(text)
        if match is None:
            raise EmulatorError(f"cannot parse `{text}`")
        bits = BITS.get(match[1], f"b{re.sub(r'[^0-9]', '', match[1])}")
        for name in match[2].split(","):
            if several := RANGE.fullmatch(name.strip()):
                self.program.registers |= {f"{several[1]}{at}": bits for at in range(int(several[2]))}
            else:
                self.program.registers[self._declared(name.strip())] = bits

    def _declared(self, name: str) -> str:
        if not self.scopes:
            return name
        self.scopes[-1][name] = f"{name}@{self.num_scopes}"
        return self.scopes[-1][name]

    def _renamed(self, text: str) -> str:
        """Replace the names of the blocks. A label of a block must stand before the branches to it."""
        if not any(self.scopes):
            return text
        names = {name: new for scope in self.scopes for name, new in scope.items()}
        return NAME.sub(lambda match: names.get(match[0], match[0]), text)
