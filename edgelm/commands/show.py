"""`edgelm show`: all that the files of one model say of it, and what it will take on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from rich.table import Table

from edgelm.commands.choice import any_model
from edgelm.commands.job import reader_may_leave
from edgelm.commands.list import age_text, last_used_at, parameters_text, place_of, plain_console, size_on_disk
from edgelm.config import Config, load_config
from edgelm.errors import ModelError
from edgelm.library.catalog import Entry, entry_of
from edgelm.library.local import LocalModel
from edgelm.library.names import shown
from edgelm.library.readers import read_each
from edgelm.library.units import size_text

READER = "edgelm.commands.details_child"
TEMPLATE_LINES = 6
MAX_LINE = 100


def show_model(name: str, flags: Mapping[str, object], *, template: bool, as_json: bool) -> None:
    """Print what a model is; with `template` its chat template alone. Raises EdgeLMError, also where it is damaged."""
    config = load_config(flags)
    model = any_model(name, config)
    job = {"path": str(model.path), "settings": asdict(config.settings)}
    (details,) = read_each(READER, [job])
    if "error" in details:
        raise ModelError(f"{shown(model.name)} cannot be read: {details['error']}")
    entry = entry_of(model.repository) if model.repository else None
    document = _document(model, details, entry, config)
    with reader_may_leave():
        if template:
            _print_template(model, details["template"], as_json)
        elif as_json:
            print(json.dumps(document))
        else:
            _print(document)


def _document(model: LocalModel, details: dict[str, Any], entry: Entry | None, config: Config) -> dict[str, Any]:
    known = {key: value for key, value in details.items() if key != "licence"}
    return {
        "name": model.name,
        "path": str(model.path),
        "place": model.place,
        "repository": model.repository,
        "revision": model.revision,
        "files": len(model.files),
        **known,
        "bytes": size_on_disk(model.files) or details["bytes"],
        "licence": details["licence"] or (entry.licence if entry else None),
        "good_at": entry.good_at if entry else None,
        "last_used": last_used_at(model, config),
    }


def _print_template(model: LocalModel, template: str | None, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"name": model.name, "template": template}))
    elif template is None:
        raise ModelError(f"{shown(model.name)} has no chat template", "a generic one is used in chats")
    else:
        print(_safe(template))


def _print(document: dict[str, Any]) -> None:
    console = plain_console()
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for title, text in _lines(document):
        table.add_row(title, _safe(text))
    console.print(table)
    types = Table(box=None, pad_edge=False)
    for title in ("TENSORS", "COUNT", "PARAMS", "SIZE"):
        types.add_column(title, justify="left" if title == "TENSORS" else "right")
    for each in document["tensor_types"]:
        types.add_row(
            each["type"], f"{each['tensors']:,}", parameters_text(each["parameters"]), size_text(each["bytes"])
        )
    console.print()
    console.print(types)


def _lines(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    model = LocalModel(document["name"], document["path"], document["place"])
    yield "model", document["name"]
    if document["title"] and document["title"] != document["name"]:
        yield "title", document["title"]
    if document["good_at"]:
        yield "good at", document["good_at"]
    yield "architecture", f"{document['architecture']}, {document['layers']} layers of width {document['width']:,}"
    yield "parameters", parameters_text(document["parameters"])
    yield "quantization", document["quantization"]
    yield "context", f"{document['context']:,} tokens" if document["context"] else "not said"
    yield "tokenizer", _tokenizer_text(document["tokenizer"])
    if special := document["tokenizer"]["special"]:
        yield "special tokens", ", ".join(f"{name} {text}" for name, text in special.items())
    yield "licence", document["licence"] or "not said: look at where it comes from"
    yield (
        "size",
        f"{size_text(document['bytes'])} in {document['files'] or 1} file{'s' if document['files'] > 1 else ''}",
    )
    yield "memory", _memory_text(document)
    if document["problem"]:
        yield "cannot be run", document["problem"]
    yield "last used", document["last_used"] or age_text(None)
    yield "where", f"{document['path']} ({place_of(model)})" if document["place"] != "given" else document["path"]
    yield "chat template", _template_text(document["template"])


def _tokenizer_text(tokenizer: dict[str, Any]) -> str:
    kind = tokenizer["kind"] or "of unknown kind"
    return f"{kind}, {tokenizer['tokens']:,} tokens" if tokenizer["tokens"] else kind


def _memory_text(document: dict[str, Any]) -> str:
    memory = document["memory"]
    if memory is None:
        return f"{size_text(document['bytes'])} for the weights"
    if "error" in memory:
        return str(memory["error"])
    return (
        f"about {size_text(memory['total_bytes'])} with {memory['context']:,} tokens of context ({memory['kv']}), "
        f"{size_text(memory['free_bytes'])} are free; `edgelm plan` shows more"
    )


def _template_text(template: str | None) -> str:
    if template is None:
        return "none: a generic one is used in chats"
    lines = template.splitlines()
    head = [shown(line, MAX_LINE) if line else "" for line in lines[:TEMPLATE_LINES]]
    more = len(lines) - len(head)
    return "\n".join([*head, *([f"... {more} more lines: --template"] if more > 0 else [])])


def _safe(text: str) -> str:
    """Return a text of a file without what moves a terminal's cursor."""
    return "".join(each if each.isprintable() or each in "\n\t" else "\ufffd" for each in text)
