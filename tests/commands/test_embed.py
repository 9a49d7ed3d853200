"""`edgelm embed` as a user sees it: vectors as lines, as a table and as a matrix; one line for each error."""

from __future__ import annotations

import io
import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.commands.test_run import Edgelm
from tests.tiny_bert import tiny_bert, write_bert

TIMEOUT_S = 60


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_bert(tiny_bert(), folder / "bert.gguf")
    write_bert(tiny_bert(ranks=True), folder / "ranker.gguf", "rank")
    return folder


def edgelm(
    environment: dict[str, str], *arguments: str | Path, stdin: bytes = b""
) -> subprocess.CompletedProcess[bytes]:
    return Edgelm(environment)("embed", *arguments, stdin=stdin)


def test_lines_of_a_pipe_become_lines_of_json_and_a_matrix(
    server_environment: dict[str, str], models: Path, tmp_path: Path
) -> None:
    text = "the cat\r\n\na dog 日本\n"
    (tmp_path / "texts").write_text(text)
    lines = edgelm(server_environment, models / "bert.gguf", stdin=text.encode())
    assert lines.returncode == 0, lines.stderr
    rows = [json.loads(line) for line in lines.stdout.splitlines()]
    assert [(row["index"], row["text"]) for row in rows] == [(0, "the cat"), (1, "a dog 日本")]
    assert [len(row["embedding"]) for row in rows] == [64, 64]
    npy = edgelm(
        server_environment, models / "bert.gguf", "--file", tmp_path / "texts", "--format", "npy", "--dimensions", "8"
    )
    matrix = np.load(io.BytesIO(npy.stdout))
    first = np.array(rows[0]["embedding"][:8])
    assert matrix.shape == (2, 8)
    assert matrix[0] == pytest.approx(first / np.linalg.norm(first), abs=1e-5)


def test_a_table_of_vectors_and_one_of_cosines(server_environment: dict[str, str], models: Path) -> None:
    table = edgelm(server_environment, models / "bert.gguf", "--format", "table", "the cat", "a dog")
    assert b"VECTOR OF 64" in table.stdout
    assert b"a dog" in table.stdout
    cosines = edgelm(server_environment, models / "bert.gguf", "--similarity", "the cat", "a red house", "the cat")
    first, *_ = [line.rstrip().split(maxsplit=1) for line in cosines.stdout.decode().splitlines()[1:]]
    assert first == ["1.0000", "the cat"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ranker.gguf", "a"), "ranks documents and computes no embeddings"),
        (("bert.gguf",), "there is no text"),
        (("bert.gguf", "--file", "/no/such/file"), "cannot be read"),
    ],
)
def test_an_error_is_one_line(
    server_environment: dict[str, str], models: Path, arguments: tuple[str, ...], message: str
) -> None:
    result = edgelm(server_environment, models / arguments[0], *arguments[1:])
    assert result.returncode == 1
    assert not result.stdout
    (line,) = result.stderr.decode().splitlines()
    assert line.startswith("error: ")
    assert message in line
