"""Real tokenizers, chat templates, schemas and a trained model, which tests read.

They lie in tests/data, whose README names origins and licences. Where `../shared/data` lies beside the checkout, its
files are read too: those whose licences ask more of who passes them on.
"""

from __future__ import annotations

import atexit
import lzma
import shutil
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path

OWN = Path(__file__).parent / "data"
SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


def data_file(name: str) -> Path:
    """Return the file `FOLDER/NAME`, decompressed if it lies compressed. Raises FileNotFoundError."""
    for path in (OWN / name, SHARED / name):
        if path.is_file():
            return path
    return _decompressed(name)


def data_files(folder: str, suffix: str) -> list[Path]:
    """Return all files of a folder with this suffix, sorted by their names."""
    paths = [path for place in (OWN, SHARED) for path in (place / folder).glob("*")]
    names = {path.name.removesuffix(".xz") for path in paths}
    return [data_file(f"{folder}/{name}") for name in sorted(names) if name.endswith(suffix)]


def vocabulary(name: str) -> Path:
    """Return the GGUF with a vocabulary. Beside it lie texts (.inp) and their tokens (.out), as llama.cpp has them."""
    return data_file(f"vocab/ggml-vocab-{name}.gguf")


def template(name: str) -> str:
    """Return the source of a chat template."""
    return data_file(f"templates/{name}.jinja").read_text(encoding="utf-8")


def with_vocabulary(names: Iterable[str]) -> list[str]:
    """Return the names whose vocabulary is here."""
    return [name for name in names if _is_here(f"vocab/ggml-vocab-{name}.gguf")]


def with_model(names: Iterable[str]) -> list[str]:
    """Return the names of GGUFs with trained weights that are here."""
    return [name for name in names if _is_here(f"models/{name}")]


def with_template(names: Iterable[str]) -> list[str]:
    """Return the names whose template is here."""
    return [name for name in names if _is_here(f"templates/{name}.jinja")]


def _is_here(name: str) -> bool:
    return any(path.is_file() for path in (OWN / name, OWN / f"{name}.xz", SHARED / name))


@cache
def _decompressed(name: str) -> Path:
    path = _scratch() / Path(name).name
    with lzma.open(OWN / f"{name}.xz") as source, path.open("wb") as target:
        shutil.copyfileobj(source, target)
    return path


@cache
def _scratch() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="edgelm-data-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
