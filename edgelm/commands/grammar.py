"""The flags of `edgelm run` that give the answer a form.

Owns which of them may stand together, and the check of a file before a model is loaded. A worker compiles the grammar.
"""

from __future__ import annotations

import json
from pathlib import Path

from edgelm.base.errors import RequestError, UsageError
from edgelm.base.workers.grammars import GrammarSpec
from edgelm.engine.sampling.schema import MAX_SOURCE, parse_schema, refuse_oversized

MAX_FILE_BYTES = 4 * MAX_SOURCE  # characters of UTF-8


def chosen_grammar(
    *,
    schema: str | None = None,
    json_object: bool = False,
    regex: str | None = None,
    choices: list[str] | None = None,
    grammar: str | None = None,
) -> GrammarSpec | None:
    """Return the grammar that the flags ask for; `schema` and `grammar` are names of files.

    Raises UsageError for two flags at once, and RequestError for a file or a text that cannot be a grammar.
    """
    is_given = {
        "--schema": schema is not None,
        "--json-object": json_object,
        "--regex": regex is not None,
        "--choice": bool(choices),
        "--grammar": grammar is not None,
    }
    given = [flag for flag in is_given if is_given[flag]]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} cannot be used together", "give one of them")
    if schema is not None:
        spec = _schema(schema)
    elif json_object:
        spec = GrammarSpec("json_object")
    elif regex is not None:
        spec = GrammarSpec("regex", regex)
    elif choices:
        spec = GrammarSpec("choice", json.dumps(choices, ensure_ascii=False))
    elif grammar is not None:
        spec = _grammar(grammar)
    else:
        return None
    refuse_oversized(spec)
    try:
        spec.source.encode()
    except UnicodeEncodeError:
        raise RequestError(f"the text of {given[0]} is not valid UTF-8", "convert it first") from None
    return spec


def _schema(file: str) -> GrammarSpec:
    source = _read(file)
    try:
        parse_schema(source)
    except RequestError as error:
        raise RequestError(f"{file}: {error.message}", "correct the file") from None
    return GrammarSpec("json_schema", source)


def _grammar(file: str) -> GrammarSpec:
    source = _read(file)
    return GrammarSpec("gbnf" if file.endswith(".gbnf") or "::=" in source else "lark", source)


def _read(file: str) -> str:
    """Return the text of a file. Raises RequestError if it cannot be read or is too long."""
    try:
        with Path(file).open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise RequestError(f"{file} cannot be read: {error.strerror}", "give the path of a text file") from None
    if len(data) > MAX_FILE_BYTES:
        raise RequestError(f"{file} is longer than {MAX_SOURCE:,} characters", "shorten it")
    try:
        return data.decode("utf-8-sig")  # some editors begin a file with a byte order mark
    except UnicodeDecodeError as error:
        raise RequestError(f"{file} is not valid UTF-8 at byte {error.start:,}", "convert it first") from None
