"""Markdown as lines of the screen, with highlighted code.

Owns the look of each element, and how little of a growing block of code is lexed again. Knows nothing of messages,
streaming and widgets.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import pairwise, zip_longest
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.style import Style
from rich.text import Text

from edgelm.chats.formulas import keep_formulas
from edgelm.tui.lines import ACT, HELD_SPACE, LINK, Line, clean, indent, wrap_cells, wrap_words
from edgelm.tui.palette import Palette
from edgelm.tui.transcript.drafted import Tint
from edgelm.tui.transcript.maths import formula_text

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.token import Token
    from pygments.lexer import Lexer

MIN_COLUMN = 4  # width of a table's column
PROSE = 20  # cells; a column with more is narrowed to them before a narrower one is
MAX_WORD = 32  # cells of a word that no column of a table breaks
CHUNK_LINES = 40  # a growing block of code is lexed from a multiple of this
MAX_LEXED_CHARS = 40_000  # pygments takes about 100 ms for it


_ADDRESS = re.compile(r"\w+:|www\.|\S+\.\w{2,}(?:/|$)")  # a label that looks like an address
MAX_HELD = 24  # characters of a formula that is not broken over two lines
FORMULA = "formula"  # the type of a token


@cache
def parser() -> MarkdownIt:
    """Return the parser. Its import takes 0.1 s, so it is delayed until the first text."""
    from markdown_it import MarkdownIt

    return keep_formulas(MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"]), FORMULA)


def code_blocks(source: str) -> list[str]:
    """Return the contents of the blocks of code in a text."""
    return [token.content for token in parser().parse(source) if token.type in ("fence", "code_block")]


def addresses(source: str) -> list[str]:
    """Return the addresses of the links in a text, each once."""
    tokens = (child for token in parser().parse(source) for child in token.children or ())
    return list(dict.fromkeys(str(token.attrs["href"]) for token in tokens if token.attrs.get("href")))


class Renderer:
    """Renders the tokens of one top-level block as lines."""

    def __init__(
        self,
        palette: Palette,
        highlighter: Highlighter,
        *,
        growing: bool,
        tint: Tint | None = None,
        first_line: int = 0,
        num_codes: int = 0,
    ) -> None:
        """`num_codes`: blocks of code above these."""
        self._palette = palette
        self._highlighter = highlighter
        self._growing = growing
        self._tint = tint
        self._first_line = first_line
        self._num_codes = num_codes

    def render(self, tokens: Sequence[Token], width: int) -> list[Line]:
        """Return the lines of a run of blocks, with an empty line between two of them."""
        lines: list[Line] = []
        for i, block in enumerate(_split_blocks(tokens)):
            tight = block[0].type == "paragraph_open" and block[0].hidden
            if i and not tight and not (block[0].type.endswith("list_open") and _is_tight(block)):
                lines.append(Line(Text()))
            lines += self._block(block, max(width, MIN_COLUMN))
        return lines

    def _block(self, tokens: Sequence[Token], width: int) -> list[Line]:
        head, inside = tokens[0], tokens[1:-1]
        palette = self._palette
        match head.type:
            case "paragraph_open":
                return wrap_words(self._inline(inside[0]), width)
            case "heading_open":
                style = palette.heading if head.tag in ("h1", "h2") else palette.heading + palette.emphasis
                if head.tag == "h1":
                    style += Style(underline=True)
                return wrap_words(self._inline(inside[0], style), width)
            case "bullet_list_open" | "ordered_list_open":
                return self._list(head, inside, width)
            case "blockquote_open":
                bar = Text("│ ", palette.muted)
                return indent(self.render(inside, width - 2), bar, bar)
            case "fence" | "code_block":
                return self._code(head, width)
            case "table_open":
                return self._table(inside, width)
            case "hr":
                rule = Text("─" * width, palette.muted)
                return [Line(rule, prefix=width)]
            case _:  # no enabled rule of the parser makes another kind
                return wrap_words(Text(clean(head.content), palette.text), width)

    def _list(self, head: Token, inside: Sequence[Token], width: int) -> list[Line]:
        items = _split_blocks(inside)
        start = int(head.attrs.get("start", 1)) if head.type == "ordered_list_open" else None
        tight = _is_tight([head, *inside])
        marks = ["• " if start is None else f"{start + i}. " for i in range(len(items))]
        mark_width = max(map(len, marks))
        lines: list[Line] = []
        for i, (item, mark) in enumerate(zip(items, marks, strict=True)):
            if i and not tight:
                lines.append(Line(Text()))
            content = self.render(item[1:-1], width - mark_width) or [Line(Text())]
            first = Text(mark.rjust(mark_width), self._palette.bullet)
            start_line = len(lines)
            lines += indent(content, first, Text(" " * mark_width))
            lines[start_line].prefix -= mark_width  # the mark of an item is copied
        return lines

    def _code(self, token: Token, width: int) -> list[Line]:
        palette = self._palette
        language = token.info.split()[0] if token.info.strip() else ""
        code = token.content.removesuffix("\n")
        bar = Text("▎", palette.muted)
        lines: list[Line] = []
        if self._tint is not None and token.map is not None:
            self._tint.begin(token.map[0] - self._first_line + (token.type == "fence"))
        self._num_codes += 1
        if language or "\n" in code:
            head = self._code_head(clean(language), width - 1)
            lines.append(Line(Text.assemble(bar, head), prefix=1 + len(head)))
        texts = self._highlighter.lines(code, language, palette, growing=self._growing)
        if self._tint is not None:
            for text, source in zip(texts, code.split("\n"), strict=False):
                self._tint.paint(text, 0, source)
        for text in texts:
            lines += indent(wrap_cells(text, width - 2) if palette.wraps_code else [Line(text)], bar, bar)
        widest = max((line.text.cell_len for line in lines), default=0)
        for line in lines:
            line.fill, line.fill_to, line.hidden = palette.block, width, max(0, widest - width)
        return lines

    def _code_head(self, language: str, width: int) -> Text:
        """Return the language of a block, and its number: a click there copies it."""
        number, muted = self._num_codes, self._palette.muted
        act = Text(style=muted)
        act.append(f"{number} · ")
        act.append("copy", Style(meta={ACT: f"code {number}"}))
        act.append(" · ")
        act.append("save", Style(meta={ACT: f"code {number} save"}))
        gap = width - cell_len(language) - act.cell_len - 1
        return Text.assemble((language + " " * gap, muted), act) if gap > 0 else Text(language, muted)

    def _table(self, inside: Sequence[Token], width: int) -> list[Line]:
        rows: list[list[Text]] = []
        aligns: list[str] = []
        for token, content in pairwise(inside):
            if token.type == "tr_open":
                rows.append([])
            elif token.type in ("th_open", "td_open"):
                head = token.type == "th_open"
                if head:
                    aligns.append(str(token.attrs.get("style", "")).removeprefix("text-align:") or "left")
                rows[-1].append(self._inline(content, self._palette.strong if head else None))
        widths = _column_widths(rows, width)
        body = [
            [[line.text for line in wrap_words(cell, cells)] for cell, cells in zip(row, widths, strict=False)]
            for row in rows
        ]
        rule = "─┼─".join("─" * column_width for column_width in widths)
        hidden = max(0, len(rule) - width)
        is_ruled = any(len(cell) > 1 for row in body[1:] for cell in row)
        lines: list[Line] = []
        for i, row_lines in enumerate(body):
            if i == 1 or (i > 1 and is_ruled):
                lines.append(Line(Text(rule, self._palette.muted), prefix=len(rule), hidden=hidden))
            for parts in zip_longest(*row_lines):
                line = Text()
                for column, (part, column_width) in enumerate(zip(parts, widths, strict=False)):
                    if column:
                        line.append(" │ ", self._palette.muted)
                    align = aligns[column] if column < len(aligns) else "left"
                    line.append_text(_pad(part or Text(), column_width, align))
                line.rstrip()
                lines.append(Line(line, hidden=hidden))
        return lines

    def _inline(self, token: Token, base: Style | None = None) -> Text:
        palette = self._palette
        text = Text(style=palette.text)
        styles: list[Style] = [base or Style()]
        href = ""
        label_at = 0
        if self._tint is not None and token.map is not None:
            self._tint.begin(token.map[0] - self._first_line, token.content)
        for child in token.children or []:
            match child.type:
                case "strong_open" | "em_open" | "s_open":
                    opened = {"strong_open": palette.strong, "em_open": palette.emphasis, "s_open": palette.strike}
                    styles.append(styles[-1] + opened[child.type])
                case "link_open":
                    href, label_at = str(child.attrs.get("href", "")), len(text)
                    styles.append(styles[-1] + palette.link)
                case "strong_close" | "em_close" | "s_close":
                    styles.pop()
                case "link_close":
                    styles.pop()
                    self._end_link(text, href, label_at)
                case "code_inline":
                    self._append(text, child.content, styles[-1] + palette.code)
                case "softbreak" | "hardbreak":
                    text.append("\n")
                case "image":
                    text.append(f"[{clean(child.content) or 'image'}]", palette.link)
                    text.append(f" ({clean(str(child.attrs.get('src', '')))})", palette.muted)
                case "formula":
                    self._append_formula(text, child.content, styles[-1])
                case _:
                    self._append(text, child.content, styles[-1])
        return text

    def _append(self, text: Text, content: str, style: Style) -> None:
        """Append a piece of the source, with its tint."""
        at = len(text)
        text.append(clean(content), style)
        if self._tint is not None and content:
            self._tint.paint(text, at, content)

    def _append_formula(self, text: Text, source: str, style: Style) -> None:
        """Append a formula as Unicode; as it is written where that cannot be done."""
        if (shown := formula_text(source)) is None:
            self._append(text, source, style + self._palette.muted)
            return
        shown = clean(shown)
        text.append(shown.replace(" ", HELD_SPACE) if len(shown) <= MAX_HELD else shown, style)
        if self._tint is not None:
            self._tint.skip(source)

    def _end_link(self, text: Text, href: str, at: int) -> None:
        """End a link: its address is shown on demand, and at once where the label is another one."""
        label, href = text.plain[at:], clean(href)
        if not href or not label.strip() or (href != label and _ADDRESS.match(label.strip())):
            text.append(f" ({href})" if href else "", self._palette.muted)
        text.stylize(Style(meta={LINK: href}), at)
        if self._tint is not None:
            self._tint.skip(href)


def _split_blocks(tokens: Sequence[Token]) -> list[Sequence[Token]]:
    """Split a run of tokens into its outermost blocks."""
    blocks: list[Sequence[Token]] = []
    depth = start = 0
    for i, token in enumerate(tokens):
        depth += token.nesting
        if depth == 0:
            blocks.append(tokens[start : i + 1])
            start = i + 1
    return blocks


def _is_tight(tokens: Sequence[Token]) -> bool:
    """Tell whether a list has no empty lines between its items: markdown-it hides their paragraphs."""
    paragraph = next((token for token in tokens if token.type == "paragraph_open"), None)
    return paragraph is None or paragraph.hidden


def _column_widths(rows: list[list[Text]], width: int) -> list[int]:
    """Return the widths of a table's columns; the widest are narrowed, first those with prose.

    No column becomes narrower than its longest word: a table with many long words is wider than its room.
    """
    columns = [[row[i].plain for row in rows if i < len(row)] for i in range(max(map(len, rows), default=0))]
    widths = [_longest(cells, "\n") for cells in columns]
    words = [min(max(_longest(cells, None), MIN_COLUMN), MAX_WORD, max(width, MIN_COLUMN)) for cells in columns]
    room = width - 3 * (len(columns) - 1)
    for least in ([max(word, min(PROSE, cells)) for word, cells in zip(words, widths, strict=True)], words):
        while sum(widths) > room:
            wide = [i for i in range(len(widths)) if widths[i] > least[i]]
            if not wide:
                break
            widths[max(wide, key=widths.__getitem__)] -= 1
    return widths


def _longest(cells: Sequence[str], separator: str | None) -> int:
    return max((cell_len(part) for cell in cells for part in cell.split(separator)), default=1) or 1


def _pad(text: Text, width: int, align: str) -> Text:
    gap = max(0, width - cell_len(text.plain))
    left = {"left": 0, "right": gap, "center": gap // 2}.get(align, 0)
    return Text.assemble(" " * left, text, " " * (gap - left))


class Highlighter:
    """The highlighted lines of one block of code, kept between calls while the code grows at its end."""

    def __init__(self) -> None:
        self._key: tuple[str, str] | None = None
        self._code = ""
        self._lines: list[Text] = []

    def lines(self, code: str, language: str, palette: Palette, *, growing: bool) -> list[Text]:
        """Return the code's lines. While it grows, text that spans two chunks (a long string) may look plain."""
        key = (language, palette.name)
        if not growing:
            self._key = None
            return highlight(code, language, palette)
        if self._key != key or not code.startswith(self._code):
            self._key, self._code, self._lines = key, "", []
        rest = code[len(self._code) :].split("\n")
        while len(rest) > CHUNK_LINES:
            chunk, rest = "\n".join(rest[:CHUNK_LINES]), rest[CHUNK_LINES:]
            self._code += chunk + "\n"
            self._lines += highlight(chunk, language, palette)
        return [line.copy() for line in self._lines] + highlight("\n".join(rest), language, palette)


def highlight(code: str, language: str, palette: Palette) -> list[Text]:
    """Return the highlighted lines of a text; plain where the language is unknown or the text is huge."""
    lexer = _lexer(language.lower()) if len(code) <= MAX_LEXED_CHARS else None
    if lexer is None:
        return [Text(clean(line), palette.text) for line in code.split("\n")]
    line, lines = Text(style=palette.text), []
    for token, value in lexer.get_tokens(code):
        style = _token_style(str(token), palette)
        for i, part in enumerate(value.split("\n")):
            if i:
                lines.append(line)
                line = Text(style=palette.text)
            if part:
                line.append(clean(part), style)
    return [*lines, line]


@lru_cache(64)
def _lexer(language: str) -> Lexer | None:
    from pygments.lexers import get_lexer_by_name
    from pygments.util import ClassNotFound

    try:
        return get_lexer_by_name(language, stripnl=False, ensurenl=False) if language else None
    except ClassNotFound:
        return None


def _token_style(token: str, palette: Palette) -> Style | None:
    """Return the most specific style of a token type, such as Token.Literal.String.Doc."""
    names = token.removeprefix("Token.").removeprefix("Literal.").split(".")
    for end in range(len(names), 0, -1):
        style = palette.syntax.get(".".join(names[:end]))
        if style is not None:
            return style
    return None
