r"""LaTeX in Markdown, kept as it is written: `\(…\)`, `\[…\]`, `$…$`, `$$…$$`, and commands such as `\{` between words.

Owns two rules for markdown-it, without which backslashes are lost and underscores become emphasis. Draws no formula.
"""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.rules_block import StateBlock
    from markdown_it.rules_inline import StateInline

_FORMULA = re.compile(
    # None has its own opener inside: many that are not closed take linear time.
    r"\\\((?:[^\\]++|\\[^()])++\\\)|\\\[(?:[^\\]++|\\[^\[\]])++\\\]|\$\$.+?\$\$"
    # As Pandoc has it: prices such as $5 and $6 are none. Nor are two shell variables around `code` or **bold** words.
    r"|\$(?![\s$])(?:\\.|[^$\\\n`*]|\*(?!\*))*?(?<!\s)\$(?![\d$])"
    r"|\\[(\[{},;:%]",  # not closed yet, or a command that means nothing in Markdown
    re.DOTALL,
)
_CLOSING = {"\\[": "\\]", "$$": "$$"}


def keep_formulas(parser: MarkdownIt, kind: str = "text_special") -> MarkdownIt:
    """Let a parser keep formulas verbatim, in tokens of this type; return it."""
    parser.inline.ruler.before("escape", "formula", partial(_inline, kind))
    parser.block.ruler.before("fence", "formula", _block, {"alt": ["paragraph", "reference", "blockquote", "list"]})
    return parser


def _inline(kind: str, state: StateInline, silent: bool) -> bool:
    if state.src[state.pos] not in "\\$":
        return False
    formula = _FORMULA.match(state.src, state.pos, state.posMax)
    if formula is None:
        return False
    if not silent:
        token = state.push(kind, "", 0)
        token.content = token.markup = formula[0]
        token.info = "formula"
    state.pos = formula.end()
    return True


def _block(state: StateBlock, start: int, end: int, silent: bool) -> bool:
    """Take the lines of a formula as one paragraph: `- b` in it is no list. It ends at an empty line at the latest."""
    at = state.bMarks[start] + state.tShift[start]
    closing = _CLOSING.get(state.src[at : at + 2])
    if closing is None or state.is_code_block(start) or closing in state.src[at + 2 : state.eMarks[start]]:
        return False
    line = start + 1
    while line < end and not state.isEmpty(line) and state.sCount[line] >= state.blkIndent:
        line += 1
        if closing in state.src[state.bMarks[line - 1] : state.eMarks[line - 1]]:
            break
    if not silent:
        state.line = line
        state.push("paragraph_open", "p", 1).map = [start, line]
        inline = state.push("inline", "", 0)
        inline.content = state.getLines(start, line, state.blkIndent, False).strip()
        inline.map, inline.children = [start, line], []
        state.push("paragraph_close", "p", -1)
    return True
