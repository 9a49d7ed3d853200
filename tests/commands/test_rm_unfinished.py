"""`edgelm rm` on unfinished downloads: removed by name, but never while a pull is running."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from huggingface_hub.utils import WeakFileLock

from edgelm.base.errors import EdgeLMError
from edgelm.commands.rm import remove_models
from tests.library.hub_folders import put, put_part

QWEN = "Qwen/Qwen3-4B-GGUF"


@pytest.fixture
def hub(home: Path) -> Path:
    return home / "hub"


def rm(*names: str) -> None:
    assert remove_models(names, yes=True, as_json=False) == 0


def refusal(*names: str) -> str:
    with pytest.raises(EdgeLMError) as caught:
        remove_models(names, yes=True, as_json=False)
    return str(caught.value)


def blobs(hub: Path) -> set[bytes]:
    return {path.read_bytes() for path in hub.glob("models--*/blobs/*")}


@contextmanager
def fetching(hub: Path, part: Path) -> Iterator[None]:
    """Hold the lock of a part, as a pull does."""
    locks = hub / ".locks" / part.parents[1].name
    locks.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(locks / f"{part.stem}.lock", timeout=1):
        yield


def test_the_last_model_removes_unfinished_downloads(hub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(hub, "own/m", {"m-Q8_0.gguf": b"a", "m-Q2_K.gguf": b"b"})
    part = put_part(hub, "own/m", b"half", "m-Q4_0.gguf")
    rm("own/m:Q2_K")
    assert part.exists(), "it was not the last one"
    capsys.readouterr()
    rm("own/m:Q8_0")
    assert capsys.readouterr().out == "removed own/m:Q8_0: 5 B freed\n"
    assert not (hub / "models--own--m").exists()


def test_a_download_in_progress_is_kept_with_the_last_model(hub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(hub, "own/m", {"m-Q8_0.gguf": b"a"})
    part = put_part(hub, "own/m", b"half", "m-Q4_0.gguf")
    with fetching(hub, part):
        rm("own/m:Q8_0")
    assert "the unfinished download of own/m:Q4_0 is in progress: it is kept" in capsys.readouterr().err
    assert blobs(hub) == {b"half", b'"etag"', b"m-Q4_0.gguf"}


@pytest.mark.parametrize("name", [QWEN, "qwen3:4b", f"hf.co/{QWEN}:q4_k_m"])
def test_an_unfinished_download_is_removed_by_name(hub: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    put_part(hub, QWEN, b"x" * 3000, "Qwen3-4B-Q4_K_M.gguf")
    put_part(hub, "own/m", b"y", "m-Q8_0.gguf")
    rm(name)
    assert capsys.readouterr().out == "removed the unfinished download of qwen3:4b: 3.00 kB freed\n"
    assert [path.name for path in hub.glob("models--*")] == ["models--own--m"]


def test_a_quantization_removes_only_its_own_download(hub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(hub, "own/m", {"m-Q2_K.gguf": b"a"})
    put_part(hub, "own/m", b"eight", "m-Q8_0.gguf")
    put_part(hub, "own/m", b"four", "m-Q4_0.gguf")
    assert "edgelm pull own/m:Q5_0" in refusal("own/m:Q5_0")
    assert remove_models(["own/m:Q8_0"], yes=True, as_json=True) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == {
        "removed": [],
        "freed_bytes": 5,
        "unfinished": [{"repository": "own/m", "file": "m-Q8_0.gguf", "bytes": 5}],
    }
    assert blobs(hub) == {b"a", b"four", b'"etag"', b"m-Q4_0.gguf"}


def test_a_download_without_a_name_is_removed_with_its_repository(hub: Path) -> None:
    put_part(hub, "own/m", b"half")
    assert "edgelm pull" in refusal("own/m:m-Q8_0.gguf")
    rm("own/m")
    assert not (hub / "models--own--m").exists()


def test_rm_asks_before_a_download_is_lost(
    hub: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    part = put_part(hub, "own/m", b"half", "m-Q8_0.gguf")
    answer = io.StringIO("n\n")
    monkeypatch.setattr(answer, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", answer)
    assert remove_models(["own/m"], yes=False, as_json=False) == 1
    assert "Remove the unfinished download of own/m:Q8_0: frees 4 B" in capsys.readouterr().err
    assert part.exists()


def test_a_download_in_progress_is_kept(hub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held = put_part(hub, "own/m", b"held", "m-Q8_0.gguf")
    put_part(hub, "own/m", b"left", "m-Q4_0.gguf")
    with fetching(hub, held):
        assert refusal("own/m:Q8_0") == (
            "the unfinished download of own/m:Q8_0 is in progress; wait until it is done, or stop it"
        )
        rm("own/m")
    out = capsys.readouterr()
    assert out.out == "removed the unfinished download of own/m:Q4_0: 4 B freed\n"
    assert "note: the unfinished download of own/m:Q8_0 is in progress: it is kept" in out.err
    assert blobs(hub) == {b"held", b'"etag"', b"m-Q8_0.gguf"}
