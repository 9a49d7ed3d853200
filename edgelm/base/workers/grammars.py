"""The messages about grammars: what a request asks for, and what the check of it returns.

A front, an engine and the worker that checks grammars (engine/sampling/grammar_worker.py) exchange them. Knows no
grammar.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "lark", "gbnf"]


@dataclass(frozen=True, slots=True)
class SchemaRule:
    """A rule of a Lark grammar that is a JSON schema."""

    name: str  # of the rule: a lower-case identifier
    schema: str  # JSON
    strict: bool = False  # as in `GrammarSpec`


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A grammar that an answer has to follow."""

    kind: GrammarKind
    source: str = ""  # a JSON schema, a regex, a JSON list of strings, Lark or GBNF; a JSON object needs none
    strict: bool = True  # a schema that cannot be enforced in full is refused; False: it is relaxed and reported
    rules: tuple[SchemaRule, ...] = ()  # added to a Lark grammar
    unique: str = ""  # JSON: the lists in a Lark grammar whose items must differ (engine/sampling/unique_lists.py)


@dataclass(frozen=True, slots=True)
class CheckedGrammar:
    """A grammar that compiles within the limits."""

    grammar: str  # in llguidance's own form
    relaxed: tuple[str, ...] = ()  # keywords that are not enforced
    cpu_s: float = 0.0  # that the check took
    unique: str = ""  # JSON: the lists whose items must differ, which the grammar does not ensure
