"""The projector of a model: found by names and places, and its header checked before native code reads it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from edgelm.backends.llama import build
from edgelm.backends.projectors import fitting_projector
from edgelm.base.config import Settings
from edgelm.base.errors import EngineError, ModelError
from edgelm.base.machine.llama_build import INSTALL
from edgelm.checkpoints.gguf import open_gguf
from edgelm.checkpoints.projector import ANOTHER, read_projector, require_fit
from edgelm.checkpoints.summary import model_summary
from edgelm.library.projectors import find_projector, projector_of
from edgelm.library.scan import scan
from edgelm.library.selection import projector_among
from tests.library.projector_file import write_projector
from tests.tiny import write_tiny

# The models and projectors of a folder, and which projector each model gets.
FOLDERS: dict[str, tuple[dict[str, str | None], list[str]]] = {
    "one model": ({"gemma-3-4b-it-Q4_K_M.gguf": "mmproj-model-f16.gguf"}, []),
    "one model in two quantizations": (
        {"gemma-3-4b-it-Q4_K_M.gguf": "mmproj-F16.gguf", "gemma-3-4b-it-Q8_0.gguf": "mmproj-F16.gguf"},
        ["mmproj-BF16.gguf", "mmproj-F32.gguf"],
    ),
    "BF16 before Q8_0": ({"a-Q4_0.gguf": "mmproj-a-BF16.gguf"}, ["mmproj-a-Q8_0.gguf", "mmproj-a-F32.gguf"]),
    "only Q8_0": ({"a-Q4_0.gguf": "mmproj-a-Q8_0.gguf"}, []),
    "each its own": (
        {"SmolVLM-500M-Q8_0.gguf": "mmproj-SmolVLM-500M-f16.gguf", "gemma-4b-Q4_0.gguf": "gemma-4b.mmproj-Q8_0.gguf"},
        [],
    ),
    "a name of no model beside two": ({"a-Q4_0.gguf": None, "b-Q4_0.gguf": None}, ["mmproj-F16.gguf"]),
    "one has none": ({"a-Q4_0.gguf": "mmproj-a-f16.gguf", "b-Q4_0.gguf": None}, []),
    "shards": ({"a-Q8_0-00001-of-00002.gguf": "mmproj-F16.gguf"}, ["a-Q8_0-00002-of-00002.gguf"]),
    "no projector": ({"a-Q4_0.gguf": None}, ["imatrix-a.gguf", "mmprojection.gguf", "mmproj-a.bin"]),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_a_model_gets_the_projector_with_its_name(case: str, tmp_path: Path) -> None:
    models, others = FOLDERS[case]
    for name in {*models, *filter(None, models.values()), *others}:
        (tmp_path / name).touch()
    found = {name: projector_of(tmp_path / name) for name in models}
    assert found == {name: tmp_path / file if file else None for name, file in models.items()}


def test_in_a_repository_a_projector_without_a_name_is_for_all() -> None:
    names = ["Qwen3-VL-4B-Q4_K_M.gguf", "Qwen3-VL-4B-Thinking-Q4_K_M.gguf", "mmproj-F16.gguf"]
    assert projector_among(names, names[0], one_family=True) == "mmproj-F16.gguf"
    assert projector_among(names, names[0], one_family=False) is None
    assert projector_among([*names, "mmproj-Qwen3-VL-4B-Thinking-F16.gguf"], names[0], one_family=True) == names[2]


def test_in_the_hubs_cache_a_projector_may_lie_above_the_model(tmp_path: Path) -> None:
    revision = tmp_path / "models--o--m" / "snapshots" / "abc"
    (revision / "Q8_0").mkdir(parents=True)
    for name in ("Q8_0/m-Q8_0-00001-of-00001.gguf", "mmproj-F16.gguf"):
        (revision / name).touch()
    assert projector_of(revision / "Q8_0/m-Q8_0-00001-of-00001.gguf") == revision / "mmproj-F16.gguf"


def store(root: Path, name: str, **blobs: bytes) -> dict[str, Path]:
    """Put a model into a store of Ollama, with layers of these kinds; return their blobs."""
    (root / "blobs").mkdir(parents=True, exist_ok=True)
    layers, paths = [], {}
    for kind, data in blobs.items():
        digest = hashlib.sha256(data).hexdigest()
        paths[kind] = root / "blobs" / f"sha256-{digest}"
        paths[kind].write_bytes(data)
        layers.append({"mediaType": f"application/vnd.ollama.image.{kind}", "digest": f"sha256:{digest}"})
    manifest = root / "manifests/registry.ollama.ai/library" / name / "latest"
    manifest.parent.mkdir(parents=True)
    manifest.write_text(json.dumps({"layers": layers}))
    return paths


def test_a_model_of_ollama_has_the_projector_of_its_manifest(tmp_path: Path) -> None:
    text = store(tmp_path, "text", model=b"one")
    sees = store(tmp_path, "sees", model=b"two", projector=b"eyes", license=b"free")
    gone = store(tmp_path, "gone", model=b"three", projector=b"lost")
    gone["projector"].unlink()
    found = {model.name: model.projector for model in scan(folders=[tmp_path]).models if model.place == "ollama"}
    assert found == {"ollama:text:latest": None, "ollama:sees:latest": sees["projector"], "ollama:gone:latest": None}
    assert projector_of(text["model"]) is None


def test_the_setting_chooses(tmp_path: Path) -> None:
    model, beside = tmp_path / "m.gguf", tmp_path / "mmproj-m.gguf"
    other = tmp_path / "other" / "eyes.gguf"
    other.parent.mkdir()
    for path in (model, beside, other):
        path.touch()
    assert find_projector(Settings(), model) == beside
    assert find_projector(Settings(mmproj="off"), model) is None
    assert find_projector(Settings(mmproj=str(other)), model) == other
    with pytest.raises(ModelError, match=r"--mmproj .*none.gguf does not exist"):
        find_projector(Settings(mmproj=str(tmp_path / "none.gguf")), model)


# The header


def summary(path: Path, width: int = 64) -> Any:
    with open_gguf(write_tiny(path, width=width)) as gguf:
        return model_summary(gguf)


def test_a_projector_that_fits_is_read(tmp_path: Path) -> None:
    model = summary(tmp_path / "m.gguf")
    path = write_projector(tmp_path / "mmproj-m.gguf")
    projector = fitting_projector(Settings(), tmp_path / "m.gguf", model)
    assert projector is not None
    assert projector.document() == {
        "path": str(path), "kind": "gemma3", "quantization": "F16", "bytes": path.stat().st_size
    }  # fmt: skip
    assert projector.memory_bytes > projector.nbytes


def test_a_projector_of_another_model_is_refused_by_its_size(tmp_path: Path) -> None:
    model = summary(tmp_path / "m.gguf")
    path = write_projector(tmp_path / "mmproj-m.gguf", width=96)
    words = r"mmproj-m.gguf is the projector of another model: tiny llama f32 takes vectors of 64 numbers"
    with pytest.raises(ModelError, match=words):
        require_fit(read_projector(path), model)
    with pytest.raises(ModelError, match=words):
        fitting_projector(Settings(mmproj=str(path)), tmp_path / "m.gguf", model)
    problems: list[str] = []
    assert fitting_projector(Settings(), tmp_path / "m.gguf", model, problems.append) is None
    assert len(problems) == 1
    assert "another model" in problems[0]
    assert problems[0].endswith(f"; {ANOTHER}")


def test_where_libmtmd_is_missing_the_note_says_what_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load() -> None:
        raise EngineError("this build has no libmtmd, which encodes pictures", INSTALL)

    monkeypatch.setattr(build, "load_mtmd", load)
    notes: list[str] = []
    assert build._usable(tmp_path / "mmproj-m.gguf", Settings(), notes.append) is None
    assert notes == [f"no pictures are read: this build has no libmtmd, which encodes pictures; {INSTALL}"]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"architecture": "llama"}, "is not a projector"),
        ({"patch_size": 0}, "clip.vision.patch_size is 0"),
        ({"image_size": 0}, "clip.vision.image_size is 0"),
        ({"image_size": 10}, "clip.vision.patch_size is 14"),
        ({"image_size": 2**31}, "clip.vision.image_size is"),
        ({"embedding_length": None}, "clip.vision.embedding_length is missing"),
        ({"attention.head_count": 0}, "clip.vision.attention.head_count is 0"),
        ({"attention.head_count": 3}, "3 heads cannot share"),
        ({"spatial_merge_size": 0}, "clip.vision.spatial_merge_size is 0"),
    ],
)
def test_a_header_that_native_code_would_fail_on_is_refused(values: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = write_projector(tmp_path / "mmproj.gguf", **values)
    with pytest.raises(ModelError, match=words):
        read_projector(path)


def test_every_cut_of_a_projector_is_refused(tmp_path: Path) -> None:
    data = write_projector(tmp_path / "whole.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in range(0, len(data), 997):
        cut.write_bytes(data[:length])
        with pytest.raises(ModelError):
            read_projector(cut)
