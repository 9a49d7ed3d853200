"""The models in Ollama's own store, used in place: manifests name the blob of a model, which is a GGUF.

    ROOT/manifests/HOST/NAMESPACE/MODEL/TAG      JSON: the layers of a model, by digest
    ROOT/blobs/sha256-DIGEST                     their bytes

Owns that layout. Writes nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgelm.library.hub_cache import names_in
from edgelm.library.names import shown

MANIFESTS, BLOBS = "manifests", "blobs"
ORIGIN = "ollama:"  # before a name, so that it is another one than the catalogue's
LATEST = ":latest"
MODEL = "application/vnd.ollama.image.model"
ADAPTER = "application/vnd.ollama.image.adapter"
PROJECTOR = "application/vnd.ollama.image.projector"  # the part that reads pictures
DEFAULT_HOST, DEFAULT_NAMESPACE = "registry.ollama.ai", "library"
MAX_MANIFEST_BYTES = 2**20
DEPTH = 4  # folders of a manifest below the root
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model of the store."""

    name: str  # ollama:llama3.2:3b
    other_names: tuple[str, ...]  # llama3.2:3b, and those without :latest
    blob: Path


def is_store(folder: Path) -> bool:
    """Return whether a folder is a store of Ollama."""
    return (folder / MANIFESTS).is_dir() and (folder / BLOBS).is_dir()


def stored_models(root: Path, problems: list[str]) -> list[StoredModel]:
    """Return the models of a store, and add a line for each manifest that cannot be used."""
    models: dict[Path, StoredModel] = {}
    for file in sorted(_manifests(root / MANIFESTS, DEPTH, problems)):
        name = _name(*file.relative_to(root / MANIFESTS).parts)
        if not name.isprintable():
            continue
        try:
            blob = _blob(root, file)
        except ValueError as error:
            problems.append(f"{shown(name)} of Ollama cannot be used: {error}")
            continue
        if blob is None:
            continue
        short = name.removesuffix(LATEST)
        names = dict.fromkeys((ORIGIN + name, ORIGIN + short, name, short))
        if blob in models:  # a copy under another name
            names = dict.fromkeys((models[blob].name, *models[blob].other_names, *names))
        first, *others = names
        models[blob] = StoredModel(first, tuple(others), blob)
    return list(models.values())


def _name(host: str, namespace: str, model: str, tag: str) -> str:
    """Return a name as Ollama shows it."""
    if host != DEFAULT_HOST:
        return f"{host}/{namespace}/{model}:{tag}"
    return f"{model}:{tag}" if namespace == DEFAULT_NAMESPACE else f"{namespace}/{model}:{tag}"


def _manifests(folder: Path, depth: int, problems: list[str]) -> Iterator[Path]:
    for name in names_in(folder, problems):
        path = folder / name
        if name.startswith("."):
            continue
        if depth == 1:
            if path.is_file():
                yield path
        elif path.is_dir():
            yield from _manifests(path, depth - 1, problems)


def projector_blob(root: Path, model: Path) -> Path | None:
    """Return the projector of the model with this blob; None: no manifest of it has one here."""
    for file in sorted(_manifests(root / MANIFESTS, DEPTH, [])):
        try:
            layers = _layers(file)
            if _blob_of(root, layers, MODEL) == model and (blob := _blob_of(root, layers, PROJECTOR)) is not None:
                return blob
        except ValueError:
            continue
    return None


def name_of_blob(path: Path) -> str | None:
    """Return Ollama's name of the model at a path, without `latest`; None: it is in no store."""
    root = path.parent.parent
    if path.parent.name != BLOBS or not is_store(root):
        return None
    stored = next((model for model in stored_models(root, []) if model.blob == path), None)
    return stored.name.removeprefix(ORIGIN).removesuffix(LATEST) if stored else None


def _blob(root: Path, manifest: Path) -> Path | None:
    """Return the GGUF of a manifest; None: it has no model on this disk. Raises ValueError with the reason."""
    layers = _layers(manifest)
    kinds = [layer.get("mediaType") for layer in layers]
    if ADAPTER in kinds and MODEL in kinds:
        raise ValueError("it is a model with an adapter (LoRA), and adapters are not supported")
    return _blob_of(root, layers, MODEL)  # None for a model of the cloud, or one in another format


def _layers(manifest: Path) -> list[dict[str, Any]]:
    """Return the layers of a manifest. Raises ValueError with the reason why there are none."""
    try:
        with manifest.open("rb") as file:
            data = json.loads(file.read(MAX_MANIFEST_BYTES))
    except OSError as error:
        raise ValueError(f"its manifest cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise ValueError("its manifest is not JSON") from None
    layers: Any = data.get("layers") if isinstance(data, dict) else None
    if not isinstance(layers, list) or not all(isinstance(layer, dict) for layer in layers):
        raise ValueError("its manifest has no list of layers")
    return layers


def _blob_of(root: Path, layers: list[dict[str, Any]], kind: str) -> Path | None:
    """Return the one blob of a kind; None: there is none. Raises ValueError with the reason."""
    digests = [str(layer.get("digest")) for layer in layers if layer.get("mediaType") == kind]
    if not digests:
        return None
    if len(digests) > 1:
        raise ValueError("it has several files")
    digest = _DIGEST.fullmatch(digests[0])
    if digest is None:
        raise ValueError("the digest of its file is not SHA-256")
    blob = root / BLOBS / f"sha256-{digest[1]}"
    if not blob.is_file():
        raise ValueError(f"its file {blob.name[:19]}… is missing")
    return blob
