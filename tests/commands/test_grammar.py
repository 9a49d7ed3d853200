"""The flags of `edgelm run` for grammars: which may stand together, and files that are refused before a model loads."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from edgelm.base.errors import RequestError, UsageError
from edgelm.base.workers.grammars import GrammarSpec
from edgelm.commands.grammar import chosen_grammar


def test_each_flag_gives_its_grammar(tmp_path: Path) -> None:
    def file(name: str, text: str) -> str:
        (tmp_path / name).write_bytes(text.encode())
        return str(tmp_path / name)

    schema = '{"type": "string"}'
    lark, gbnf = 'start: "a"', 'root ::= "a"'
    assert chosen_grammar() is None
    assert chosen_grammar(schema=file("s", schema)) == GrammarSpec("json_schema", schema)
    assert chosen_grammar(schema=file("bom", "\ufeff" + schema)) == GrammarSpec("json_schema", schema)
    assert chosen_grammar(json_object=True) == GrammarSpec("json_object")
    assert chosen_grammar(regex="é+") == GrammarSpec("regex", "é+")
    choice = chosen_grammar(choices=["é", 'a "b"'])
    assert choice is not None
    assert (choice.kind, json.loads(choice.source)) == ("choice", ["é", 'a "b"'])
    assert chosen_grammar(grammar=file("g", gbnf)) == GrammarSpec("gbnf", gbnf)
    assert chosen_grammar(grammar=file("g.lark", lark)) == GrammarSpec("lark", lark)
    assert chosen_grammar(grammar=file("g.gbnf", lark)) == GrammarSpec("gbnf", lark)  # its name says so


def test_two_flags_are_wrong_usage() -> None:
    with pytest.raises(UsageError, match="--regex and --choice cannot be used together"):
        chosen_grammar(regex="", choices=["b"])
    with pytest.raises(UsageError, match="--schema and --json-object and --grammar cannot"):
        chosen_grammar(schema="missing", json_object=True, grammar="missing")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b'{"type":\n', "no JSON: Expecting value: line 2 column 1"),
        (b"[1]", "file: the JSON schema is no JSON object"),
        (b'{"a":' * 99 + b"1" + b"}" * 99, "nested deeper than 64 levels"),
        (b'{"title": "\xe9"}', "file is not valid UTF-8 at byte 11"),
        (b'{"title": "%s"}' % (b"x" * 300_000), "300,013 characters"),
        (b"#" * 2_000_000, "file is longer than 262,144 characters"),
    ],
)
def test_a_bad_schema_is_refused_with_the_cause(tmp_path: Path, data: bytes, reason: str) -> None:
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(RequestError, match=reason):
        chosen_grammar(schema=str(tmp_path / "file"))


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="none cannot be read: No such file"):
        chosen_grammar(grammar=str(tmp_path / "none"))
    with pytest.raises(RequestError, match="cannot be read: Is a directory"):
        chosen_grammar(schema=str(tmp_path))
    with pytest.raises(RequestError, match="--regex is not valid UTF-8"):
        chosen_grammar(regex=os.fsdecode(b"\xff"))
    with pytest.raises(RequestError, match="--choice is not valid UTF-8"):
        chosen_grammar(choices=["a", os.fsdecode(b"\xff")])
