"""`edgelm embed`: print the vectors of texts, or how similar they are."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgelm.base.config import load_config
from edgelm.base.errors import EdgeLMError, RequestError, UsageError
from edgelm.base.workers.messages import Result
from edgelm.commands.flags import Flags, Model, SettingsOf, Verbose
from edgelm.commands.job import reader_may_leave, run_job
from edgelm.commands.running import model_or_served
from edgelm.jobs.embed_request import EmbedJob, Format, Vector
from edgelm.library.names import shown

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_INPUT_BYTES = 256 * 2**20
SHOWN_NUMBERS = 4  # of a vector, in a table
SHOWN_TEXT = 48  # characters


def embed_texts(
    model: Model,
    text: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TEXT]…", help="Texts; - is standard input, a text in each line.", show_default=False),
    ] = None,
    *,
    flags: Annotated[Flags, SettingsOf("embed")],
    file: Annotated[
        str | None, typer.Option(help="A file with a text in each line.", metavar="FILE", show_default=False)
    ] = None,
    form: Annotated[
        Format | None,
        typer.Option("--format", help="A table, lines of JSON, or a matrix for numpy.", show_default=False),
    ] = None,
    dimensions: Annotated[
        int | None, typer.Option(metavar="N", help="Keep the first N numbers.", show_default=False)
    ] = None,
    truncate: Annotated[bool, typer.Option("--truncate", help="Cut texts that are too long.")] = False,
    similarity: Annotated[
        bool, typer.Option("--similarity", help="Print how similar the texts are to the first one.")
    ] = False,
    verbose: Verbose = False,
) -> None:
    """Print a vector for each text, and for each line of `file` or of standard input (-). Raises EdgeLMError.

    `form` is by default a table on a terminal, and lines of JSON elsewhere.
    """
    form = form or ("table" if sys.stdout.isatty() or similarity else "json")
    if form == "npy" and sys.stdout.isatty():
        raise UsageError("--format npy is not for a terminal", "redirect the output into a file")
    if form == "npy" and similarity:
        raise UsageError("--similarity and --format npy cannot be used together", "omit one")
    if dimensions is not None and dimensions < 1:
        raise UsageError(f"--dimensions is {dimensions}", "give at least 1")
    texts = list(_all_texts(text or [], file))
    if not texts:
        raise RequestError("there is no text", "give texts as arguments, - for standard input, or --file")
    if similarity and len(texts) < 2:
        raise RequestError("--similarity needs two texts or more", "give another text")
    config = load_config(flags)
    running: AbstractContextManager[Iterator[Any]]
    if remote := config.remote_model(model):
        from edgelm.commands.run_remote import remote_vectors  # most vectors come from this machine

        running = remote_vectors(texts, remote.name, dimensions, config, truncate=truncate)
    else:
        job = EmbedJob(
            model=model_or_served(model, config).path,
            settings=config.settings,
            texts=tuple(texts),
            dimensions=dimensions,
            truncate=truncate,
        )
        running = run_job(job, config.places, verbose)
    vectors: list[Vector] = []
    with reader_may_leave(), running as replies:
        for reply in replies:
            if isinstance(reply, Vector):
                if form == "json" and not similarity:
                    print(json.dumps(_line(reply, texts), ensure_ascii=False))
                else:
                    vectors.append(reply)
            elif isinstance(reply, Result):
                _finish(vectors, texts, form, similarity)
                if verbose:
                    print(f"{reply.document['texts']} texts, {reply.document['tokens']:,} tokens", file=sys.stderr)


def _all_texts(texts: list[str], file: str | None) -> Iterator[str]:
    """Yield the arguments, with the lines of standard input for -, then the lines of a file. Raises EdgeLMError."""
    for text in texts:
        if text == "-":
            yield from _lines(sys.stdin.buffer.read(MAX_INPUT_BYTES + 1), "standard input")
        else:
            yield text
    if not texts and file is None and not sys.stdin.isatty():
        yield from _lines(sys.stdin.buffer.read(MAX_INPUT_BYTES + 1), "standard input")
    if file is not None:
        try:
            with Path(file).open("rb") as opened:
                raw = opened.read(MAX_INPUT_BYTES + 1)
        except OSError as error:
            raise EdgeLMError(f"{shown(file)} cannot be read: {error.strerror}", "check its name") from None
        yield from _lines(raw, shown(file))


def _lines(raw: bytes, name: str) -> Iterator[str]:
    """Yield the lines that are not empty."""
    if len(raw) > MAX_INPUT_BYTES:
        raise RequestError(f"{name} is longer than {MAX_INPUT_BYTES // 2**20} MiB", "split it")
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"{name} is not valid UTF-8 (at byte {error.start})", "convert it first") from None
    lines = (line.removesuffix("\r") for line in text.split("\n"))
    yield from (line for line in lines if line.strip())


def _line(vector: Vector, texts: list[str]) -> dict[str, Any]:
    """Return the line of JSON for one text."""
    return {
        "index": vector.index,
        "text": texts[vector.index],
        "tokens": vector.num_tokens,
        "embedding": _numbers(vector).tolist(),
    }


def _finish(vectors: list[Vector], texts: list[str], form: Format, similarity: bool) -> None:
    """Print what needs all vectors."""
    if not vectors:
        return
    import numpy as np  # the lines of JSON need it too, but not before the worker has started

    matrix = np.stack([_numbers(vector) for vector in vectors])
    if similarity:
        _print_similarity(matrix, texts, form)
    elif form == "npy":
        np.save(sys.stdout.buffer, matrix)
    else:
        _print_table(matrix, vectors, texts)


def _print_similarity(matrix: NDArray[np.float32], texts: list[str], form: Format) -> None:
    """Print the cosine of the first text with each of the others, the most similar first; as JSON, of all pairs."""
    if form == "json":
        print(json.dumps({"texts": texts, "similarity": (matrix @ matrix.T).tolist()}, ensure_ascii=False))
        return
    from rich.table import Table

    from edgelm.commands.list import plain_console

    cosines = matrix[1:] @ matrix[0]
    table = Table(box=None, pad_edge=False)
    table.add_column("COSINE", justify="right")
    table.add_column(f"WITH: {shown(texts[0], SHOWN_TEXT)}")
    for index in sorted(range(len(cosines)), key=lambda index: -cosines[index]):
        table.add_row(f"{cosines[index]:.4f}", shown(texts[index + 1], SHOWN_TEXT))
    plain_console().print(table)


def _print_table(matrix: NDArray[np.float32], vectors: list[Vector], texts: list[str]) -> None:
    from rich.table import Table

    from edgelm.commands.list import plain_console

    table = Table(box=None, pad_edge=False)
    for title in ("TOKENS", "TEXT", f"VECTOR OF {matrix.shape[1]:,}"):
        table.add_column(title, justify="right" if title == "TOKENS" else "left")
    for vector, row in zip(vectors, matrix, strict=True):
        numbers = " ".join(f"{number:7.4f}" for number in row[:SHOWN_NUMBERS])
        more = " …" if len(row) > SHOWN_NUMBERS else ""
        tokens = "-" if vector.num_tokens is None else str(vector.num_tokens)
        table.add_row(tokens, shown(texts[vector.index], SHOWN_TEXT), numbers + more)
    plain_console().print(table)


def _numbers(vector: Vector) -> NDArray[np.float32]:
    import numpy as np

    numbers: NDArray[np.float32] = np.frombuffer(base64.b64decode(vector.data), "<f4")
    return numbers
