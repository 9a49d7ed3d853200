"""Models in Ollama's own store: found by their names, used in place, and never removed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from edgelm.base.errors import ModelError
from edgelm.base.places import Places
from edgelm.library.local import find_local
from edgelm.library.removal import plan_removal
from edgelm.library.scan import scan
from tests.tiny import write_tiny

MODEL = "application/vnd.ollama.image.model"


def store_model(root: Path, name: str, layers: Any = None, *, host: str = "registry.ollama.ai/library") -> Path:
    """Put a tiny model into a store under MODEL:TAG, as `ollama pull` does; return its blob."""
    blobs = root / "blobs"
    blobs.mkdir(parents=True, exist_ok=True)
    file = write_tiny(root / "new.gguf", seed=len(name))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    blob = file.rename(blobs / f"sha256-{digest}")
    model, tag = name.split(":")
    manifest = root / "manifests" / host / model / tag
    manifest.parent.mkdir(parents=True, exist_ok=True)
    whole = {"schemaVersion": 2, "config": {}, "layers": layers or [{"mediaType": MODEL, "digest": f"sha256:{digest}"}]}
    manifest.write_text(json.dumps(whole))
    return blob


def test_models_of_the_store_have_names_with_and_without_their_origin(tmp_path: Path) -> None:
    blob = store_model(tmp_path, "llama3.2:3b")
    latest = store_model(tmp_path, "tiny-one:latest")
    other = store_model(tmp_path, "own-model:q4", host="registry.ollama.ai/somebody")
    hub = store_model(tmp_path, "Some-GGUF:Q4_K_M", host="hf.co/owner")
    library = scan(folders=[tmp_path])
    assert not library.problems
    found = {model.name: model.path for model in library.models if model.place == "ollama"}
    assert found == {
        "ollama:llama3.2:3b": blob,
        "ollama:tiny-one:latest": latest,
        "ollama:somebody/own-model:q4": other,
        "ollama:hf.co/owner/Some-GGUF:Q4_K_M": hub,
    }
    for name, path in {
        "ollama:llama3.2:3b": blob,
        "llama3.2:3b": blob,
        "tiny-one": latest,
        "tiny-one:latest": latest,
        "ollama:tiny-one": latest,
        "somebody/own-model:q4": other,
        "ollama:hf.co/owner/Some-GGUF:Q4_K_M": hub,
    }.items():
        assert find_local(name, folders=[tmp_path]).path == path, name


def test_a_copy_is_the_same_model_by_another_name(tmp_path: Path) -> None:
    blob = store_model(tmp_path, "copy-b:1b")
    assert store_model(tmp_path, "copy-a:1b") == blob, "the same bytes"
    (model,) = [model for model in scan(folders=[tmp_path]).models if model.place == "ollama"]
    assert model.name == "ollama:copy-a:1b"
    for name in ("copy-a:1b", "copy-b:1b", "ollama:copy-b:1b"):
        assert find_local(name, folders=[tmp_path]).path == blob


@pytest.mark.parametrize(
    ("manifest", "reason"),
    [
        (b"{", "not JSON"),
        (b"[" * 5000, "not JSON"),
        (b"[]", "no list of layers"),
        (b'{"layers": [1]}', "no list of layers"),
        (b'{"layers": [{"mediaType": "%s", "digest": "sha256:../../../etc"}]}' % MODEL.encode(), "not SHA-256"),
        (b'{"layers": [{"mediaType": "%s", "digest": "sha256:%s"}]}' % (MODEL.encode(), b"0" * 64), "is missing"),
    ],
)
def test_a_manifest_that_is_damaged_gives_one_line(tmp_path: Path, manifest: bytes, reason: str) -> None:
    blob = store_model(tmp_path, "good:1b")
    damaged = tmp_path / "manifests" / "registry.ollama.ai" / "library" / "bad" / "1b"
    damaged.parent.mkdir()
    damaged.write_bytes(manifest)
    library = scan(folders=[tmp_path])
    assert [model.path for model in library.models if model.place == "ollama"] == [blob]
    (problem,) = library.problems
    assert "bad:1b of Ollama cannot be used" in problem
    assert reason in problem


def test_a_model_of_the_cloud_has_no_file_and_is_no_problem(tmp_path: Path) -> None:
    store_model(tmp_path, "big:cloud", [{"mediaType": "application/vnd.ollama.image.license", "digest": "x"}])
    library = scan(folders=[tmp_path])
    assert not library.problems
    assert not [model for model in library.models if model.place == "ollama"]


def test_a_model_of_the_store_is_not_removed(tmp_path: Path) -> None:
    blob = store_model(tmp_path, "llama3.2:3b")
    model = find_local("llama3.2:3b", folders=[tmp_path])
    with pytest.raises(ModelError, match=r"belongs to Ollama; remove it with `ollama rm llama3\.2:3b`"):
        plan_removal([model], tmp_path / "hub")
    assert blob.exists()


def test_the_store_is_where_ollamas_variable_says(tmp_path: Path) -> None:
    assert Places({"OLLAMA_MODELS": str(tmp_path)}).ollama == [], "there is none"
    store_model(tmp_path, "llama3.2:3b")
    assert Places({"OLLAMA_MODELS": str(tmp_path)}).ollama == [tmp_path]
