"""The models on this machine, their names, and how a typed name is resolved."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from edgelm.base.errors import ModelError
from edgelm.library import scan as scan_module
from edgelm.library.hub_cache import all_unfinished
from edgelm.library.local import find_local, require_gguf
from edgelm.library.scan import LocalModel, forget_use, installed, last_use, note_use, scan
from tests.library.hub_folders import FIRST, SECOND, put, put_part

MANY = 1000
QWEN = "Qwen/Qwen3-4B-GGUF"


@pytest.fixture(autouse=True)
def no_starter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan_module, "_starter", lambda: None)


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    return tmp_path / "hub"


def names(hub: Path | None, *folders: Path) -> dict[str, LocalModel]:
    return {model.name: model for model in scan(hub, folders=folders).models}


def test_files_have_catalogue_names_or_those_of_their_repository(hub: Path) -> None:
    put(hub, QWEN, {"Qwen3-4B-Q4_K_M.gguf": b"a", "Qwen3-4B-Q8_0.gguf": b"b"})
    put(hub, "own/model-GGUF", {"model.Q4_K_M.gguf": b"c", "model-f16.gguf": b"d", "x y.gguf": b"e"})
    put(hub, "own/two", {"a-Q8_0.gguf": b"f", "b-Q8_0.gguf": b"g"})
    models = names(hub)
    assert set(models) == {
        *("qwen3:4b", "qwen3:4b:Q8_0", "own/model-GGUF:Q4_K_M", "own/model-GGUF:F16", "own/model-GGUF:x%20y.gguf"),
        *("own/two:a-Q8_0.gguf", "own/two:b-Q8_0.gguf"),
    }
    for name, model in models.items():
        assert find_local(name, hub) == model
        assert model.hub_name is not None
        assert find_local(model.hub_name, hub) == model
        assert model.path.is_symlink(), "parts of a split lie beside the link, not beside the blob"


def test_shards_are_one_model_and_projectors_none(hub: Path) -> None:
    parts = {f"Q4_K_M/big-Q4_K_M-{i:05d}-of-00003.gguf": bytes([i]) for i in (1, 2, 3)}
    snapshot = put(hub, "own/big", parts | {"mmproj-F16.gguf": b"m", "big.mmproj-f16.gguf": b"n", "imatrix.gguf": b"o"})
    (model,) = scan(hub).models
    assert model.name == "own/big:Q4_K_M"
    assert model.files == tuple(snapshot / name for name in parts)
    assert model.path == model.files[0]


def test_folders_of_safetensors(hub: Path, tmp_path: Path) -> None:
    files = {"config.json": b"{}", "model.safetensors": b"w", "tokenizer.json": b"{}"}
    snapshot = put(hub, "Qwen/Qwen3-4B", files | {"onnx/config.json": b"{}"})
    mine = tmp_path / "mine" / "deep" / "tiny"
    mine.mkdir(parents=True)
    for name in files:
        (mine / name).write_bytes(b"x")
    (mine / "x.gguf").write_bytes(b"in a model's folder: a part of it")
    models = names(hub, tmp_path / "mine")
    assert {name: model.path for name, model in models.items()} == {"Qwen/Qwen3-4B": snapshot, "tiny": mine}
    assert find_local("qwen/qwen3-4b", hub).path == snapshot
    assert find_local(str(mine)).format == "safetensors"
    with pytest.raises(ModelError, match="edgelm pull qwen3:4b"):
        require_gguf(models["Qwen/Qwen3-4B"])


def test_the_newest_revision_has_the_plain_name(hub: Path) -> None:
    old = put(hub, "own/m", {"m-Q8_0.gguf": b"old", "m-Q4_0.gguf": b"same"}, revision=FIRST, ref="v1", at=2e9)
    new = put(hub, "own/m", {"m-Q8_0.gguf": b"new", "m-Q4_0.gguf": b"same"}, revision=SECOND, ref="main", at=1e9)
    models = names(hub)
    assert set(models) == {"own/m:Q8_0", "own/m:Q4_0", f"own/m:Q8_0@{FIRST[:12]}"}, "the same bytes are one model"
    assert models["own/m:Q8_0"].path == new / "m-Q8_0.gguf", "main is what pull fetched, whatever the times say"
    for revision in ("v1", FIRST, FIRST[:7], FIRST[:12]):
        assert find_local(f"own/m:Q8_0@{revision}", hub).path == old / "m-Q8_0.gguf"
    assert find_local(f"own/m:Q8_0@{SECOND}", hub).path == new / "m-Q8_0.gguf"
    assert [model.name for model in installed(hub)] == ["own/m:Q4_0", "own/m:Q8_0"]
    with pytest.raises(ModelError, match="edgelm pull own/m:Q8_0@v9"):
        find_local("own/m:Q8_0@v9", hub)


def test_a_repository_alone_is_what_pull_would_choose(hub: Path) -> None:
    put(hub, "own/m", {"m-Q8_0.gguf": b"a", "m-Q4_K_M.gguf": b"b", "m-Q2_K.gguf": b"c"})
    assert find_local("https://huggingface.co/own/m", hub).path.name == "m-Q4_K_M.gguf"
    assert find_local("hf.co/own/m:q2_k", hub).path.name == "m-Q2_K.gguf"
    assert find_local("OWN/M:m-Q8_0.gguf", hub).path.name == "m-Q8_0.gguf"
    assert find_local("https://huggingface.co/own/m/blob/main/m-Q8_0.gguf", hub).path.name == "m-Q8_0.gguf"


def test_a_missing_model_says_how_to_get_it(hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    put(hub, QWEN, {"Qwen3-4B-Q8_0.gguf": b"b"})
    for name, expected in {
        "qwen3:4b": "edgelm pull qwen3:4b, or use qwen3:4b:Q8_0, which is here",
        "qwen3": "edgelm pull qwen3:4b, or use",
        "qwen3:8b": "edgelm pull qwen3:8b",
        "own/m:Q8_0": "edgelm pull own/m:Q8_0",
        f"hf.co/{QWEN}:Q6_K": f"edgelm pull {QWEN}:Q6_K, or use qwen3:4b:Q8_0",
        "quen3:4b": "did you mean qwen3:4b",
        "quen3": "did you mean qwen3:4b:Q8_0?",
        "./none.gguf": "does not exist",
        "none.gguf": "does not exist",
        str(tmp_path): "is a folder",
        "starter": "no starter model",
    }.items():
        with pytest.raises(ModelError) as caught:
            find_local(name, hub)
        assert expected in str(caught.value), name


def test_a_folder_without_a_model_names_the_files_in_it(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    with pytest.raises(ModelError, match=r"give the \.gguf file in it: m\.gguf"):
        find_local(str(tmp_path))


def test_one_file_of_a_folder_says_which_folder_to_give(tmp_path: Path) -> None:
    for name in ("model-00001-of-00002.safetensors", "model.safetensors.index.json"):
        (tmp_path / name).touch()
        with pytest.raises(ModelError, match=r"config\.json is missing beside it; download all files"):
            find_local(str(tmp_path / name))
    (tmp_path / "config.json").touch()
    for name in ("model-00001-of-00002.safetensors", "model.safetensors.index.json"):
        with pytest.raises(ModelError) as caught:
            find_local(str(tmp_path / name))
        assert str(caught.value) == f"{name} is one file of a model; give its folder: {tmp_path}"
    assert find_local(str(tmp_path)).format == "safetensors"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ((), "is a folder without config.json and safetensors; give a .gguf file"),
        (("config.json", "pytorch_model.bin"), "holds pickled PyTorch files, which can run code and are not read; use"),
        (("consolidated.00.pth",), "holds pickled PyTorch files, which can run code and are not read; use"),
        (("model.safetensors", "pytorch_model.bin"), "holds safetensors without config.json; download all files"),
        (("adapter_config.json", "adapter_model.safetensors"), "holds an adapter (LoRA)"),
    ],
)
def test_a_folder_without_a_model_says_why(tmp_path: Path, files: tuple[str, ...], expected: str) -> None:
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(ModelError) as caught:
        find_local(str(tmp_path))
    assert expected in str(caught.value)


def test_a_folder_path_keeps_its_whole_name(tmp_path: Path) -> None:
    folder = tmp_path / "Tiny2.5-0.5B"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).touch()
    (model,) = scan(None, [folder]).models
    assert (model.name, model.format) == ("Tiny2.5-0.5B", "safetensors")
    assert [file.name for file in model.files] == ["config.json", "model.safetensors"]


def test_own_folders(hub: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    put(hub, QWEN, {"Qwen3-4B-Q4_K_M.gguf": b"a"})
    for name in (
        "m-Q8_0.gguf",
        "deep/er/m-Q8_0.gguf",
        ".hidden/h.gguf",
        "s-00001-of-00002.gguf",
        "s-00002-of-00002.gguf",
    ):
        (mine / name).parent.mkdir(parents=True, exist_ok=True)
        (mine / name).write_bytes(name.encode())
    (mine / "link.gguf").symlink_to(next(hub.glob("models--*/snapshots/*/*.gguf")))
    (mine / "circle").symlink_to(mine)
    (mine / "broken.gguf").symlink_to(mine / "gone")
    models = names(hub, mine, mine / "deep", tmp_path / "absent")
    assert set(models) == {"qwen3:4b", "m-Q8_0", "deep/er/m-Q8_0", "s"}, "each once, also what a link leads to"
    assert len(models["s"].files) == 2
    assert find_local(str(mine / "s-00002-of-00002.gguf")).path == mine / "s-00001-of-00002.gguf"
    assert find_local("M-q8_0", hub, [mine]).path == mine / "m-Q8_0.gguf"
    (problem,) = scan(hub, folders=[mine, tmp_path / "absent"]).problems
    assert "absent" in problem
    with pytest.raises(ModelError, match="did you mean m-Q8_0"):
        find_local("m-q8_1", hub, [mine])


def test_paths_into_the_library_keep_their_library_names(hub: Path, tmp_path: Path) -> None:
    snapshot = put(hub, QWEN, {"Qwen3-4B-Q4_K_M.gguf": b"a", "Qwen3-4B-Q8_0.gguf": b"b"})
    other = tmp_path / "other.gguf"
    other.touch()
    models = scan(hub, [other, snapshot / "Qwen3-4B-Q8_0.gguf"]).models
    assert [model.name for model in models] == ["other", "qwen3:4b:Q8_0", "qwen3:4b"]


def test_a_cache_in_any_state(hub: Path, tmp_path: Path) -> None:
    """Other tools, full disks and people leave all of this behind; complete models are found."""
    snapshot = put(hub, "own/good", {"good-Q8_0.gguf": b"a"})
    (snapshot / "broken-Q4_0.gguf").symlink_to("../../blobs/gone")
    (snapshot / "circle-Q2_K.gguf").symlink_to("circle-Q2_K.gguf")
    (hub / "models--own--empty").mkdir()
    (hub / "models--own--file").write_bytes(b"")
    (hub / "models--").mkdir()
    (hub / "models--gpt2" / "snapshots" / FIRST).mkdir(parents=True)
    (hub / "models--gpt2" / "snapshots" / FIRST / "gpt2.gguf").write_bytes(b"x")
    (hub / "models--own--odd" / "snapshots").mkdir(parents=True)
    (hub / "models--own--odd" / "snapshots" / "a file").write_bytes(b"")
    (hub / "models--own--odd" / "refs").write_bytes(b"")
    (hub / "datasets--own--x" / "snapshots" / FIRST).mkdir(parents=True)
    (hub / "datasets--own--x" / "snapshots" / FIRST / "x.gguf").write_bytes(b"x")
    (hub / "models--own--names" / "snapshots" / FIRST).mkdir(parents=True)
    for name in (b"new\nline.gguf", b"\x1b[2J.gguf", b"caf\xe9.gguf", "日本.gguf".encode(), b".gguf", b" .gguf"):
        (hub / "models--own--names" / "snapshots" / FIRST / os.fsdecode(name)).write_bytes(name)
    library = scan(hub)
    assert {"own/good:Q8_0", "gpt2:gpt2"} <= {model.name for model in library.models}
    assert len([model for model in library.models if model.repository == "own/names"]) == 6
    for model in library.models:
        assert model.name.isprintable()
        assert model.name.encode()
        assert find_local(model.name, hub) == model


def leave_macos_files(folder: Path) -> None:
    """Leave what macOS leaves in a folder and those below it, on a disk such as exFAT."""
    for parent, _, names in [*os.walk(folder)]:
        Path(parent, ".DS_Store").write_bytes(b"Bud1")
        for name in names:
            Path(parent, f"._{name}").write_bytes(b"\0\5\x16\7")


def test_what_macos_leaves_beside_models_hides_none(hub: Path, tmp_path: Path) -> None:
    put(hub, "Qwen/Qwen3-4B-GGUF", {"Qwen3-4B-Q4_K_M.gguf": b"a", "mmproj-F16.gguf": b"p"}, links=False)
    put(hub, "own/folder", {"config.json": b"{}", "model.safetensors": b"w"}, links=False)
    put_part(hub, "own/part", b"half")
    mine = tmp_path / "mine"
    mine.mkdir()
    for name in ("a-Q4_0.gguf", "mmproj-a.gguf"):
        (mine / name).write_bytes(name.encode())
    before, parts = scan(hub, folders=[mine]), all_unfinished(hub)
    projectors = [model.projector for model in before.models]
    leave_macos_files(hub)
    leave_macos_files(mine)
    (mine / "._mmproj-a-F16.gguf").write_bytes(b"")
    after = scan(hub, folders=[mine])
    assert after == before
    assert [model.projector for model in after.models] == projectors
    assert find_local("qwen3:4b", hub).name == "qwen3:4b"
    assert all_unfinished(hub) == parts


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_without_permission_is_a_problem(hub: Path) -> None:
    put(hub, "own/good", {"good-Q8_0.gguf": b"a"})
    put(hub, "own/shut", {"shut-Q8_0.gguf": b"a"}).parent.chmod(0)
    try:
        library = scan(hub)
        assert [model.name for model in library.models] == ["own/good:Q8_0"]
        assert any("models--own--shut" in problem for problem in library.problems)
    finally:
        (hub / "models--own--shut" / "snapshots").chmod(0o700)


def test_an_unreadable_folder_is_a_problem(hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, when the tests run as root."""
    put(hub, "own/good", {"good-Q8_0.gguf": b"a"})
    (tmp_path / "mine" / "shut").mkdir(parents=True)
    real = os.listdir

    def listdir(path: object) -> list[str]:
        if str(path).endswith("shut"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(os, "listdir", listdir)
    library = scan(hub, folders=[tmp_path / "mine"])
    assert [model.name for model in library.models] == ["own/good:Q8_0"]
    assert library.problems == [f"{tmp_path / 'mine' / 'shut'} cannot be read: Permission denied"]


def test_thousands_of_files_are_scanned_quickly(hub: Path, tmp_path: Path) -> None:
    for i in range(MANY // 100):
        put(hub, f"own/m{i}", {f"f{j}-Q8_0.gguf": f"{i} {j}".encode() for j in range(100)})
    mine = tmp_path / "mine"
    mine.mkdir()
    for i in range(MANY):
        (mine / f"m{i}.gguf").touch()
    start = time.monotonic()
    assert len(scan(hub, folders=[mine]).models) == 2 * MANY
    assert time.monotonic() - start < 60, "a hang, not a measurement"


def test_the_last_use_is_of_the_bytes_and_not_of_their_names(hub: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    first = put(hub, "own/m", {"m.gguf": b"same"}) / "m.gguf"
    second = put(hub, "own/m", {"m.gguf": b"same"}, revision=SECOND) / "m.gguf"
    assert last_use(data, first) is None
    before = time.time()
    note_use(data, first)
    assert before - 2 < (last_use(data, second) or 0) < time.time() + 2
    forget_use(data, second)
    assert last_use(data, first) is None
    (tmp_path / "file").touch()
    note_use(tmp_path / "file", first)  # an impossible folder: only the note is lost


def test_names_that_differ_only_in_case_are_two_models(hub: Path) -> None:
    snapshot = put(hub, "own/two", {"Foo-Q8_0.gguf": b"a", "foo-q8_0.gguf": b"b"})
    if len(list(snapshot.iterdir())) == 2:  # some file systems ignore case
        for file in ("Foo-Q8_0.gguf", "foo-q8_0.gguf"):
            assert find_local(f"own/two:{file}", hub).path == snapshot / file
        assert len({model.path for model in scan(hub).models}) == 2
