r"""Formulas as Unicode: `\frac{a+b}{2}` becomes (a+b)/2, `x_i^2` xᵢ², a matrix some lines with brackets around them.

Owns which LaTeX can be written so. A formula with anything else stays as it is: half of it would be wrong. No library
does this: `unicodeit` leaves fractions and roots, and `pylatexenc` sub- and superscripts.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from functools import cache
from itertools import groupby, zip_longest

from rich.cells import cell_len

MAX_CHARS = 4000  # a longer formula stays as it is
MAX_DEPTH = 40
WIDE = "\u2003"  # a wide space

_FORMULA = re.compile(r"\$\$(.*)\$\$|\$(.*)\$|\\\((.*)\\\)|\\\[(.*)\\\]", re.DOTALL)
_TOKEN = re.compile(r"\\[A-Za-z]+\*?|\\.|\s+|.", re.DOTALL)

_SYMBOLS = {
    "times": "×", "cdot": "·", "div": "÷", "pm": "±", "mp": "∓", "ast": "∗", "star": "⋆", "circ": "∘", "bullet": "•",
    "oplus": "⊕", "otimes": "⊗", "leq": "≤", "le": "≤", "geq": "≥", "ge": "≥", "neq": "≠", "ne": "≠", "ll": "≪",
    "gg": "≫", "approx": "≈", "equiv": "≡", "cong": "≅", "sim": "∼", "simeq": "≃", "propto": "∝", "to": "→",
    "gets": "←", "rightarrow": "→", "leftarrow": "←", "leftrightarrow": "↔", "Rightarrow": "⇒", "Leftarrow": "⇐",
    "mapsto": "↦", "Leftrightarrow": "⇔", "implies": "⇒", "iff": "⇔", "longrightarrow": "⟶", "uparrow": "↑",
    "downarrow": "↓", "in": "∈", "notin": "∉", "ni": "∋", "subset": "⊂", "subseteq": "⊆", "supset": "⊃",
    "supseteq": "⊇", "cup": "∪", "cap": "∩", "setminus": "∖", "emptyset": "∅", "varnothing": "∅", "forall": "∀",
    "exists": "∃", "nexists": "∄", "neg": "¬", "lnot": "¬", "land": "∧", "wedge": "∧", "lor": "∨", "vee": "∨",
    "therefore": "∴", "because": "∵", "sum": "∑", "prod": "∏", "int": "∫", "iint": "∬", "iiint": "∭", "oint": "∮",
    "partial": "∂", "nabla": "∇", "infty": "∞", "angle": "∠", "perp": "⊥", "parallel": "∥", "mid": "∣", "degree": "°",
    "prime": "′", "ell": "ℓ", "hbar": "ℏ", "Re": "ℜ", "Im": "ℑ", "aleph": "ℵ", "ldots": "…", "dots": "…",
    "cdots": "⋯", "vdots": "⋮", "ddots": "⋱", "langle": "⟨", "rangle": "⟩", "lfloor": "⌊", "rfloor": "⌋",
    "lceil": "⌈", "rceil": "⌉", "lvert": "|", "rvert": "|", "lVert": "‖", "rVert": "‖", "vert": "|", "Vert": "‖",
    "lbrace": "{", "rbrace": "}", "colon": ":", "checkmark": "✓", "square": "□", "blacksquare": "■", "triangle": "△",
    "top": "⊤", "bot": "⊥", "vdash": "⊢", "models": "⊨", "dagger": "†", "varepsilon": "ε", "vartheta": "ϑ",
    "varphi": "φ", "varrho": "ϱ", "varsigma": "ς", "phi": "ϕ", "lambda": "λ", "Lambda": "Λ", "omicron": "ο",
    "quad": "\u2003", "qquad": "\u2003\u2003", "{": "{", "}": "}", "%": "%", "$": "$", "&": "&", "#": "#", "_": "_",
    "|": "‖",
    "!": "", ",": " ", ";": " ", ":": " ", " ": " ", "displaystyle": "", "textstyle": "", "limits": "",
    "nolimits": "", "nonumber": "",
}  # fmt: skip
_FUNCTIONS = frozenset(
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp lim limsup liminf max min sup inf det "
    "dim ker gcd deg arg Pr bmod".split()
)
_NAMES = frozenset("text textrm textbf textit mathrm mathbf mathit mathsf mathtt boldsymbol operatorname mbox".split())
_ACCENTS = {
    "hat": "\u0302", "widehat": "\u0302", "bar": "\u0304", "overline": "\u0305", "vec": "\u20d7", "tilde": "\u0303",
    "widetilde": "\u0303", "dot": "\u0307", "ddot": "\u0308",
}  # fmt: skip
_SIZES = frozenset("left right middle big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl Biggr".split())
_ROOTS = {"": "√", "2": "√", "3": "∛", "4": "∜"}
_HALVES = {"1/2": "½", "1/3": "⅓", "2/3": "⅔", "1/4": "¼", "3/4": "¾", "1/5": "⅕", "1/6": "⅙", "1/8": "⅛"}
_HIGH = dict(
    zip(
        "0123456789+-−=()abcdefghijklmnoprstuvwxyzABDEGHIJKLMNOPRTUVWβγδθϕφχ′∘*∗⊤†,.",
        "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁻⁼⁽⁾ᵃᵇᶜᵈᵉᶠᵍʰⁱʲᵏˡᵐⁿᵒᵖʳˢᵗᵘᵛʷˣʸᶻᴬᴮᴰᴱᴳᴴᴵᴶᴷᴸᴹᴺᴼᴾᴿᵀᵁⱽᵂᵝᵞᵟᶿᵠᵠᵡ′°**ᵀ†ʼ·",
        strict=True,
    )
)
_LOW = dict(zip("0123456789+-−=()aehijklmnoprstuvxβγρϕφχ", "₀₁₂₃₄₅₆₇₈₉₊₋₋₌₍₎ₐₑₕᵢⱼₖₗₘₙₒₚᵣₛₜᵤᵥₓᵦᵧᵨᵩᵩᵪ", strict=True))
_BRACKETS = {"matrix": "  ", "array": "  ", "smallmatrix": "  ", "pmatrix": "()", "bmatrix": "[]", "Bmatrix": "{}",
             "vmatrix": "||", "Vmatrix": "‖‖", "cases": "{ "}  # fmt: skip
_PARTS = {"(": "⎛⎜⎝", ")": "⎞⎟⎠", "[": "⎡⎢⎣", "]": "⎤⎥⎦"}
_LINES = frozenset("aligned align align* split gather gather* gathered equation equation*".split())


class _UnknownError(Exception):
    """The formula has something that is not known here."""


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A block of rows, between two brackets."""

    rows: tuple[tuple[str, ...], ...]
    brackets: str

    @property
    def inline(self) -> str:
        rows = "; ".join(" ".join(row) for row in self.rows)
        return f"{self.brackets[0]}{rows}{self.brackets[1]}".strip()

    @property
    def lines(self) -> list[str]:
        widths = [max(map(cell_len, column)) for column in zip_longest(*self.rows, fillvalue="")]
        lines = []
        for place, row in enumerate(self.rows):
            cells = [cell + " " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=False)]
            left, right = (self._bracket(bracket, place) for bracket in self.brackets)
            lines.append(f"{left}{'  '.join(cells)}{right}")
        return lines

    def _bracket(self, bracket: str, place: int) -> str:
        last = len(self.rows) - 1
        if bracket in "{}" and last > 0:
            middle = "⎨⎬"["{}".index(bracket)] if place == (last + 1) // 2 and last > 1 else "⎪"
            return "⎧⎫"["{}".index(bracket)] if place == 0 else "⎩⎭"["{}".index(bracket)] if place == last else middle
        if bracket not in _PARTS or last == 0:
            return bracket
        return _PARTS[bracket][0 if place == 0 else 2 if place == last else 1]


_Piece = str | _Matrix


@cache
def _greek(name: str) -> str:
    """Return a Greek letter by its name in LaTeX; empty if there is none."""
    kind = "CAPITAL" if name[0].isupper() else "SMALL"
    try:
        return unicodedata.lookup(f"GREEK {kind} LETTER {name.upper()}") if len(name) > 1 else ""
    except KeyError:
        return ""


class _Reader:
    """Reads the tokens of a formula."""

    def __init__(self, source: str) -> None:
        self._tokens = _TOKEN.findall(source)
        self._at = 0
        self._depth = 0

    def peek(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def take(self) -> str:
        part = self.peek()
        if not part:
            raise _UnknownError
        self._at += 1
        return part

    def skip_space(self) -> None:
        while self.peek().isspace():
            self._at += 1

    def pieces(self, *ends: str) -> list[_Piece]:
        """Read up to one of these tokens, which stays."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _UnknownError
        pieces: list[_Piece] = []
        while (part := self.peek()) not in ends:
            if not part:
                raise _UnknownError
            pieces.append(self._piece())
        self._depth -= 1
        return pieces

    def text(self, *ends: str) -> str:
        """Read up to one of these tokens, on one line."""
        return _inline(self.pieces(*ends))

    def argument(self) -> str:
        """Read a group, or one part."""
        self.skip_space()
        if self.peek() != "{":
            return _inline([self._piece()])
        self.take()
        text = self.text("}")
        self.take()
        return text.strip()

    def _verbatim(self) -> str:
        """Read a group as it is written."""
        self.skip_space()
        if self.take() != "{":
            raise _UnknownError
        words = ""
        while (part := self.take()) != "}":
            if part in ("{", "^", "_", "$") or (part.startswith("\\") and part[1:] not in _SYMBOLS):
                raise _UnknownError
            words += _SYMBOLS[part[1:]] if part.startswith("\\") else part
        return words

    def _piece(self) -> _Piece:
        part = self.take()
        if part.startswith("\\"):
            return self._command(part[1:])
        if part == "{":
            text = self.text("}")
            self.take()
            return text
        if part in "^_":
            return _script(self.argument(), high=part == "^")
        if part in "}&#%$":
            raise _UnknownError
        return {"-": "−", "'": "′", "~": " "}.get(part, " " if part.isspace() else part)

    def _command(self, name: str) -> _Piece:
        if not name:  # a backslash at the end
            raise _UnknownError
        if letter := _SYMBOLS.get(name) or (_greek(name) if name not in _SYMBOLS else ""):
            return self._letter(letter) if letter.isalpha() or letter in "∂∇" else letter
        if name in _FUNCTIONS:
            return name if self.peek() in ("", "(", "^", "_", "{", "\\left", " ", "}") else f"{name} "
        if name in _SIZES:
            self.skip_space()
            return "" if self.peek() == "." and self.take() else _inline([self._piece()])
        if name in _NAMES:
            return self._verbatim()
        if name in _ACCENTS:
            return "".join(character + _ACCENTS[name] for character in self.argument())
        return self._built(name)

    def _built(self, name: str) -> _Piece:
        """Read what is built from arguments."""
        match name:
            case "frac" | "dfrac" | "tfrac":
                over, under = self.argument(), self.argument()
                return _HALVES.get(f"{over}/{under}") or f"{_over(over)}/{_under(under)}"
            case "sqrt":
                return self._root()
            case "mathbb" | "mathcal":
                return "".join(_styled(name, letter) for letter in self._verbatim())
            case "boxed":
                return f"[ {self.argument()} ]"
            case "pmod":
                return f"(mod {self.argument()})"
            case "begin":
                return self._environment(self._verbatim())
            case "\\":
                return "\n"
            case _ if name in _SYMBOLS:  # it shows nothing
                return ""
            case _:
                raise _UnknownError

    def _letter(self, letter: str) -> str:
        """Return a letter; the space that ends its command is none of the formula's before another letter."""
        at = self._at
        self.skip_space()
        if not self.peek()[:1].isalnum() and not self.peek().startswith("\\math"):
            self._at = at
        return letter

    def _root(self) -> str:
        degree = ""
        self.skip_space()
        if self.peek() == "[":
            self.take()
            degree = self.text("]").strip()
            self.take()
        inside = self.argument()
        sign = _ROOTS.get(degree) or _script(degree, high=True) + "√"
        return f"{sign}{inside}" if len(inside) == 1 or inside.isdecimal() else f"{sign}({inside})"

    def _environment(self, name: str) -> _Piece:
        if name == "array":
            self._verbatim()  # the columns
        if name not in _BRACKETS and name not in _LINES:
            raise _UnknownError
        rows: list[tuple[str, ...]] = []
        cells: list[str] = []
        while True:
            cells.append(self.text("&", "\\\\", "\\end").strip())
            end = self.take()
            if end == "&":
                continue
            if any(cells):
                rows.append(tuple(cells))
            cells = []
            if end == "\\end":
                break
        if self._verbatim() != name or not rows:
            raise _UnknownError
        if name in _LINES:
            return "\n".join(" ".join(filter(None, row)) for row in rows)
        return _Matrix(tuple(rows), _BRACKETS[name])


def _inline(pieces: list[_Piece]) -> str:
    return "".join(piece if isinstance(piece, str) else piece.inline for piece in pieces)


def _script(text: str, *, high: bool) -> str:
    """Return a text as a superscript or subscript; in brackets where Unicode has not each character."""
    scripts = _HIGH if high else _LOW
    text = text.strip()
    tight = text.replace(" ", "")
    if tight and all(character in scripts for character in tight):
        return "".join(scripts[character] for character in tight)
    mark = "^" if high else "_"
    return f"{mark}{text}" if len(text) == 1 else f"{mark}({text})"


def _over(text: str) -> str:
    """Return the upper side of a fraction, in brackets where a sum or another fraction is in it."""
    outside = text
    while "(" in outside and (shorter := re.sub(r"\([^()]*\)", "", outside)) != outside:
        outside = shorter
    return f"({text})" if re.search(r"[\s+−±=/,]", outside) else text


def _under(text: str) -> str:
    """Return the lower side of a fraction, in brackets unless it is one number, letter or difference (dx)."""
    is_one = len(text) == 1 or text.isdecimal() or re.fullmatch(r"[d∂Δ]?\w[²³ᵢⱼₙ₀-₉]*|\([^()]*\)", text)
    return text if is_one else f"({text})"


def _styled(name: str, letter: str) -> str:
    kind = {"mathbb": "DOUBLE-STRUCK", "mathcal": "SCRIPT"}[name]
    for prefix in ("", "MATHEMATICAL "):
        try:
            return unicodedata.lookup(f"{prefix}{kind} CAPITAL {letter.upper()}")
        except KeyError:
            pass
    raise _UnknownError


def _joined(pieces: list[_Piece]) -> list[_Piece]:
    """Return pieces with the texts between two matrices as one."""
    joined: list[_Piece] = []
    for is_text, group in groupby(pieces, lambda piece: isinstance(piece, str)):
        run = list(group)
        joined += [re.sub(" {2,}", " ", _inline(run)).replace(WIDE, "  ")] if is_text else run
    return joined


def _stacked(pieces: list[_Piece]) -> str:
    """Return pieces on as many lines as the highest matrix has, with all else beside its middle."""
    height = max((len(piece.rows) for piece in pieces if isinstance(piece, _Matrix)), default=1)
    middle = (height - 1) // 2
    lines = [""] * height
    for piece in _joined(pieces):
        own = piece.lines if isinstance(piece, _Matrix) else [piece]
        top = max(0, middle - (len(own) - 1) // 2)
        width = max(map(cell_len, own), default=0)
        for place in range(height):
            line = own[place - top] if 0 <= place - top < len(own) else ""
            lines[place] += line + " " * (width - cell_len(line))
    return "\n".join(line.rstrip() for line in lines)


def formula_text(source: str) -> str | None:
    """Return a formula, with the marks around it, as Unicode; None where that cannot be done."""
    match = _FORMULA.fullmatch(source.strip())
    if match is None or len(source) > MAX_CHARS:
        return None
    body = next(group for group in match.groups() if group is not None).strip()
    is_display = match[1] is not None or match[4] is not None
    try:
        pieces = _Reader(body).pieces("")
    except (_UnknownError, RecursionError):
        return None
    if is_display and not any("\n" in piece for piece in pieces if isinstance(piece, str)):
        return _stacked(pieces)
    lines = _inline(pieces).split("\n")
    return ("\n" if is_display else "; ").join(_spaced(line) for line in lines)


def _spaced(line: str) -> str:
    """Return a line with one space where there are more, and two for a wide one."""
    return re.sub(" {2,}", " ", line).strip().replace(WIDE, "  ")
