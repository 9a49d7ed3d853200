"""`edgelm show`: what the files of one model say about it, and the memory that it takes on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from edgelm.base.config import Config, load_config
from edgelm.base.errors import ModelError
from edgelm.base.sampling import DEFAULT_SAMPLING
from edgelm.commands.flags import Flags, Json, Model, SettingsOf
from edgelm.commands.job import reader_may_leave
from edgelm.commands.kept_results import result_lines, results_document, speeds_document
from edgelm.commands.list import age_text, last_used_at, parameters_text, place_of, plain_console, size_on_disk
from edgelm.commands.running import model_or_served
from edgelm.evaluation.kept import KeptResults
from edgelm.library.catalog import Entry, entry_of
from edgelm.library.local import installed_model, model_config
from edgelm.library.names import shown
from edgelm.library.progress import size_text
from edgelm.library.readers import Detail, read_each
from edgelm.library.scan import LocalModel
from edgelm.text.template_file import read_template_file

KIND_TEXTS = {"embedding": "embeddings; it writes no text", "rerank": "ranks documents; it writes no text"}
TEMPLATE_LINES = 6
MAX_LINE = 100


def show_model(
    model: Model,
    flags: Annotated[Flags, SettingsOf("show")],
    *,
    template: Annotated[bool, typer.Option("--template", help="Print the chat template alone.")] = False,
    as_json: Json = False,
) -> None:
    """Print a model's details, or with `template` its chat template only. Raises EdgeLMError, also if it is damaged."""
    config = load_config(flags)
    local = model_or_served(model, config, installed_model)
    config = model_config(local, config)
    (details,) = read_each([Detail(local.path, config.settings.without_keys)])
    if "error" in details:
        raise ModelError(f"{shown(local.name)} cannot be read: {details['error']}")
    if config.settings.template is not None:
        details["template"] = read_template_file(config.settings.template)
    entry = entry_of(local.repository) if local.repository else None
    kept = KeptResults(config.places.data).of(details.pop("identity"))
    document = _document(local, details, entry, config) | {
        "evaluations": results_document(kept),
        "speeds": speeds_document(kept),
    }
    with reader_may_leave():
        if template:
            _print_template(local, details["template"], as_json)
        elif as_json:
            print(json.dumps(document))
        else:
            _print(document, list(result_lines(kept)))


def _document(model: LocalModel, details: dict[str, Any], entry: Entry | None, config: Config) -> dict[str, Any]:
    return {
        "name": model.name,
        "path": str(model.path),
        "place": model.place,
        "repository": model.repository,
        "revision": model.revision,
        "files": len(model.all_files),
        **{key: value for key, value in details.items() if key != "licence"},
        "bytes": size_on_disk(model.all_files) or details["bytes"],
        "licence": details["licence"] or (entry.licence if entry else None),
        "good_at": entry.good_at if entry else None,
        "last_used": last_used_at(model, config),
        "sampling": _sampling(details["sampling"], config) if details["kind"] == "text" else {},
    }


def _sampling(recommended: dict[str, float], config: Config) -> dict[str, dict[str, Any]]:
    """Return the values that an answer is sampled with where its request gives none, and where each comes from."""
    settings = config.settings.as_params()
    sampling: dict[str, dict[str, Any]] = {}
    for name, value in {**DEFAULT_SAMPLING, **recommended}.items():
        source = "the file" if name in recommended else "default"
        if name in settings:
            value, source = settings[name], config.sources[name]
        sampling[name] = {"value": value, "source": source}
    return sampling


def _print_template(model: LocalModel, template: str | None, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"name": model.name, "template": template}))
    elif template is None:
        raise ModelError(f"{shown(model.name)} has no chat template", "chats use a generic one")
    else:
        print(_safe(template))


def _print(document: dict[str, Any], measured: list[str]) -> None:
    console = plain_console()
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for title, text in _lines(document):
        if title == "last used" and measured:
            table.add_row("measured", _safe("\n".join(measured)))
        table.add_row(title, _safe(text))
    console.print(table)
    types = Table(box=None, pad_edge=False)
    for title in ("TENSORS", "COUNT", "PARAMS", "SIZE"):
        types.add_column(title, justify="left" if title == "TENSORS" else "right")
    for row in document["tensor_types"]:
        types.add_row(row["type"], f"{row['tensors']:,}", parameters_text(row["parameters"]), size_text(row["bytes"]))
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
    if document["kind"] != "text":
        yield "use", KIND_TEXTS[document["kind"]]
    if projector := document["projector"]:
        yield "pictures", _projector_text(projector)
    yield "context", f"{document['context']:,} tokens" if document["context"] else "unknown"
    if document["mtp_heads"]:
        yield "drafts", "by a layer of its own that predicts the token after the next one (--draft mtp)"
    elif heads := document["heads"]:
        yield "drafts", _heads_text(heads)
    yield "tokenizer", _tokenizer_text(document["tokenizer"])
    if special := document["tokenizer"]["special"]:
        yield "special tokens", ", ".join(f"{name} {text}" for name, text in special.items())
    if document["sampling"]:
        yield "sampling", _sampling_text(document["sampling"])
    yield "licence", document["licence"] or "unknown: see the page of the model"
    count = document["files"] or 1
    yield "size", f"{size_text(document['bytes'])} in {count} file{'s' if count > 1 else ''}"
    yield "memory", _memory_text(document)
    if document["problem"]:
        yield "cannot be run", document["problem"]
    yield "last used", document["last_used"] or age_text(None)
    yield "where", f"{document['path']} ({place_of(model)})" if document["place"] != "given" else document["path"]
    yield "chat template", _template_text(document["template"])


def _projector_text(projector: dict[str, Any]) -> str:
    if reason := projector.get("error"):
        return f"not read: {reason}"
    size = size_text(projector["bytes"])
    return f"read by {Path(projector['path']).name}: {projector['kind']}, {projector['quantization']}, {size}"


def _heads_text(heads: dict[str, Any]) -> str:
    if reason := heads.get("error"):
        return f"not by the file beside it: {reason}"
    size = size_text(heads["bytes"])
    return f"by {Path(heads['path']).name}: a layer that predicts the token after the next one, {size} (--draft mtp)"


def _tokenizer_text(tokenizer: dict[str, Any]) -> str:
    kind = tokenizer["kind"] or "of unknown kind"
    return f"{kind}, {tokenizer['tokens']:,} tokens" if tokenizer["tokens"] else kind


def _sampling_text(sampling: dict[str, dict[str, Any]]) -> str:
    return ", ".join(f"{name} {row['value']:g} ({row['source']})" for name, row in sampling.items())


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
        return "none: chats use a generic one"
    lines = template.splitlines()
    head = [shown(line, MAX_LINE) if line else "" for line in lines[:TEMPLATE_LINES]]
    more = len(lines) - len(head)
    return "\n".join([*head, *([f"... {more} more lines: --template"] if more > 0 else [])])


def _safe(text: str) -> str:
    """Replace characters of a file's text that could move a terminal's cursor."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in text)
