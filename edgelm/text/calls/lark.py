"""Lark: the writer of a grammar in llguidance's dialect.

Owns the spelling of rules, texts and control tokens. Knows no format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from edgelm.text.calls.format import parts_of
from edgelm.text.patterns import any_of

_ANY = r"(.|\n)*"
_SPACE = r"/[ \t\r\n]{0,8}/"  # bounded: a model that is lost would write blanks for ever
# Templates write JSON so; it also leaves the model no choice, which saves steps.
_ESCAPES = {"\n": r"\n", "\t": r"\t", "\r": r"\r"}
_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def json_rule(schema: Mapping[str, Any] | bool, **options: object) -> str:
    """Return the expression of the JSON of a schema."""
    body = {**schema} if isinstance(schema, Mapping) else {"not": {}} if schema is False else {}
    own = body.get("x-guidance")
    style = {**_STYLE, **(own if isinstance(own, Mapping) else {}), **options}
    return "%json " + json.dumps({**body, "x-guidance": style})


def escaped(text: str) -> str:
    """Return the pattern of a text."""
    return re.sub(r"[\\.+*?()|\[\]{}^$/\n\t\r]", lambda match: _ESCAPES.get(match[0], "\\" + match[0]), text)


class Lark:
    """The rules of one grammar.

    `marks` are the control tokens: their ids by string. Those in `drops` may stand anywhere in free text.
    """

    def __init__(self, marks: Mapping[str, int], drops: Sequence[str] = ()) -> None:
        self.marks = marks
        self._drops = sorted({marks[text] for text in drops if text in marks})
        self._control = any_of(marks)
        self._rules: dict[str, str] = {"ws": _SPACE}
        self._more: list[str] = []
        self._names: dict[str, str] = {}  # of rules without a name, by their text

    def __contains__(self, name: str) -> bool:
        return name in self._rules

    def rule(self, name: str, body: str) -> str:
        self._rules[name] = body
        return name

    def more(self, rules: str) -> None:
        self._more.append(rules)

    def source(self) -> str:
        """Return the grammar."""
        return "\n".join([*(f"{name}: {body}" for name, body in self._rules.items()), *self._more]) + "\n"

    def anonymous(self, body: str, attributes: str = "") -> str:
        """Return the name of a rule with this body."""
        text = f"{attributes}: {body}"
        if text not in self._names:
            name = f"r{len(self._names)}"
            self._names[text] = name
            self._rules[name + attributes] = body
        return self._names[text]

    def parametric(self, body: str) -> str:
        """Return the name of a rule with a parameter, a number of 64 bits; in its body, SELF stands for its name."""
        text = f"::_: {body}"
        if text not in self._names:
            name = self._names[text] = f"r{len(self._names)}"
            self._rules[f"{name}::_"] = body.replace("SELF", name)
        return self._names[text]

    def terminal(self, body: str) -> str:
        """Return the name of a terminal with this body: only there, patterns can be combined."""
        if body not in self._names:
            self._names[body] = self.rule(f"T{len(self._names)}", body)
        return self._names[body]

    def text_of(self, text: str) -> str:
        """Return the expression of a text, control tokens included."""
        atoms: list[str] = []
        done = 0
        for match in self._control.finditer(text):
            atoms += _quoted(text[done : match.start()])
            atoms.append(f"<[{self.marks[match[0]]}]>")
            done = match.end()
        return " ".join(atoms + _quoted(text[done:]))

    def parts(self, parts: Sequence[str]) -> str:
        """Return the expression of parts with any white space before each one."""
        return " ".join(f"ws {self.text_of(part)}" for part in parts)

    def mark(self, mark: str) -> str:
        """Return the expression of a mark, with any white space before it and where `parts_of` cuts it.

        White space at its end stands for any, too.
        """
        return self.parts(parts_of(mark)) + (" ws" if mark[-1:].isspace() else "")

    def text(self, refused: str = "") -> str:
        """Return the rule of any text, but those that match a pattern."""
        if self._drops:
            assert not refused, "no format has both"
            marks = " | ".join(f"<[{token}]>" for token in self._drops)
            chunk = self.anonymous(r"/(.|\n)+/")
            return self.anonymous(f"({chunk} | {marks})*")
        if refused:
            return self.rule("FIRST_TEXT", f"/{_ANY}/ & ~/{refused}/")
        return self.anonymous(f"/{_ANY}/")

    def pattern(self, pattern: str) -> str:
        return self.anonymous(f"/{pattern}/")

    def up_to(self, text: str, refused: str = "") -> str:
        """Return the expression of any text up to the first place of a string, and that.

        The text must not match the pattern `refused`.
        """
        control = self._control.search(text)
        if refused and (control is None or control.start() == 0):
            if control:
                return f"{self.text(refused)} {self.text_of(text)}"
            only = f"~/{refused}/ & ~/{_ANY}{escaped(text)}(.|\\n)+/"
            return self.rule(f"HEAD{len(self._rules)}", f"/{_ANY}{escaped(text)}/ & {only}")
        if control is None:
            return self.anonymous(f"/{_ANY}{escaped(text)}/", "[lazy]")
        if control.start() == 0:
            return f"{self.text()} {self.text_of(text)}"
        return f"{self.up_to(text[: control.start()])} {self.text_of(text[control.start() :])}"

    def raw(self, end: str, pattern: str = _ANY) -> str:
        """Return the rule of a text with a pattern, up to the first place of a string, and that.

        A line break at the beginning of `end` is required, but the text ends at the rest of `end` without one too.
        """
        control = self._control.search(end)
        if control:
            before, rest = end[: control.start()], end[control.start() :]
            return f"{self.pattern(pattern + escaped(before))} {self.text_of(rest)}"
        if pattern == _ANY and not end.startswith("\n"):
            return self.anonymous(f"/{_ANY}/", f"[suffix={json.dumps(end, ensure_ascii=False)}]")
        only = f"~/{_ANY}{escaped(end.strip())}(.|\\n)+/"
        return self.rule(f"RAW{len(self._rules)}", f"/{pattern}{escaped(end)}/ & {only}")


def _quoted(text: str) -> list[str]:
    return [json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")] if text else []
