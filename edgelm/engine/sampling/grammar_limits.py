"""The limits under which llguidance works, and its errors in one line.

The worker that tries a grammar and the engine that uses it must have the same limits.
"""

from __future__ import annotations

import re

from llguidance import LLParserLimits

_MAX_LINE = 200


def parser_limits() -> LLParserLimits:
    """Return limits under which the mask of a row takes at most some 30 ms: the first two bound its work."""
    return LLParserLimits(
        step_lexer_fuel=150_000,
        step_max_items=30_000,
        max_items_in_row=2_000,
        max_lexer_states=50_000,  # of 1 to 2 kB
        max_grammar_size=200_000,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )


def first_line(message: str) -> str:
    """Return an error of llguidance in one line, without its state and without the grammar's own text."""
    lines = [line.strip() for line in re.split("<state>|<non-verbose/>", message)[0].splitlines()] or [""]
    causes = [line for line in lines if line.startswith("error: ")]  # of a regex
    line = " ".join([*causes] if lines[0].startswith("regex parse error") else [lines[0], *causes])
    return re.sub(r"^at \d+\(\d+\): |\berror: ", "", line)[:_MAX_LINE]
