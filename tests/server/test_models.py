"""Names of models: what is found on this machine, what a client may ask for, and what the list says of each."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter

from edgelm.base.errors import ModelError
from edgelm.base.model_tables import ModelTable
from edgelm.library import local, scan
from edgelm.library.local import find_local
from edgelm.library.readers import Describe, read_each
from edgelm.library.scan import installed
from edgelm.server import documents
from edgelm.server import models as module
from edgelm.server.api.errors import ApiError
from edgelm.server.models import ModelNames
from tests.checkpoints.safetensors_bytes import CONFIG, folder_files, write_folder
from tests.library.hub_folders import put
from tests.library.projector_file import write_projector
from tests.tiny import write_tiny

OLD, NEW = "1" * 40, "2" * 40
LIMIT_S = 60


@pytest.fixture(autouse=True)
def no_starter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "_starter", lambda: None)


def touch(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """A cache as huggingface_hub writes it, with what is no model of its own beside the models."""
    hub = tmp_path / "hub"
    for revision, when in ((NEW, 2_000_000_000), (OLD, 1_000_000_000)):
        folder = hub / "models--Own--Some-4B-GGUF" / "snapshots" / revision
        for name in ("Some-4B-Q4_K_M.gguf", "mmproj-F16.gguf", "README.md", "big/Some-4B-BF16-00001-of-00002.gguf"):
            touch(folder / name)
        touch(folder / "big/Some-4B-BF16-00002-of-00002.gguf")
        os.utime(folder, (when, when))
    touch(hub / "models--Own--Some-4B-GGUF" / "snapshots" / OLD / "Some-4B-UD-IQ2_XXS.gguf")
    os.utime(hub / "models--Own--Some-4B-GGUF" / "snapshots" / OLD, (1_000_000_000, 1_000_000_000))
    touch(hub / "models--Two--a--b" / "snapshots" / NEW / "plain.gguf")
    (hub / "models--Two--a--b" / "snapshots" / NEW / "broken-Q8_0.gguf").symlink_to(tmp_path / "absent")
    touch(hub / "datasets--Own--x" / "snapshots" / NEW / "x.gguf")
    return hub


def test_models_of_the_hubs_cache(hub: Path) -> None:
    found = {model.name: model.path for model in installed(hub)}
    assert found.keys() == {
        "Own/Some-4B-GGUF:Q4_K_M",
        "Own/Some-4B-GGUF:BF16",
        "Own/Some-4B-GGUF:UD-IQ2_XXS",
        "Two/a--b:plain",
    }
    assert NEW in str(found["Own/Some-4B-GGUF:Q4_K_M"]), "the newest revision that has it"
    assert OLD in str(found["Own/Some-4B-GGUF:UD-IQ2_XXS"])
    assert find_local("own/some-4b-gguf:q4_k_m", hub).path == found["Own/Some-4B-GGUF:Q4_K_M"]


def test_given_files_have_their_stems_as_names(tmp_path: Path) -> None:
    one, two = touch(tmp_path / "a" / "same.gguf"), touch(tmp_path / "b" / "same.gguf")
    assert [model.name for model in installed(None, [one, two, one])] == ["same", str(two)]
    assert installed(tmp_path / "no such folder") == []


@pytest.mark.parametrize("name", ["absent", "x" * 5000, "a\0b", "", "~nobody-of-that-name/x.gguf"])
def test_what_is_not_there(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError):
        find_local(name, tmp_path)


def test_the_starter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starter = touch(tmp_path / "starter.gguf")
    monkeypatch.setattr(scan, "_starter", lambda: starter)
    assert find_local("starter").path == starter
    assert [model.name for model in installed()] == ["starter"]


async def test_what_a_client_may_call_a_model(tmp_path: Path, hub: Path) -> None:
    given, other = touch(tmp_path / "given.gguf"), touch(tmp_path / "other.gguf")
    names = ModelNames(hub, [given])
    for name in ("given", "given.gguf", str(given)):
        assert (await names.find(name)).path == given
    assert (await names.find("two/A--B:plain")).name == "Two/a--b:plain"
    assert (await names.find(str(other), paths=True)).name == "other"
    folder = touch(touch(tmp_path / "own" / "Tiny2.5-1B" / "config.json").with_name("model.safetensors")).parent
    for names_it, paths in ((names, True), (ModelNames(hub, [folder]), False)):
        assert (await names_it.find(str(folder), paths=paths)).path == folder
        assert (await names_it.find(str(folder), paths=paths)).name == "Tiny2.5-1B"
    for name, paths in (
        (str(other), False),
        (str(folder), False),
        ("other", True),
        (str(tmp_path), True),
        ("/etc/passwd", True),
        ("", True),
    ):
        with pytest.raises(ApiError) as caught:
            await names.find(name, paths=paths)
        assert caught.value.status == 404
        assert caught.value.body["error"]["code"] == "model_not_found"


@pytest.fixture
def read_folders(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return the list of folders of one's own that are read."""
    folders: list[Path] = []
    real = scan.names_in

    def names_in(folder: Path, problems: list[str]) -> list[str]:
        folders.append(folder)
        return real(folder, problems)

    monkeypatch.setattr(scan, "names_in", names_in)
    return folders


@pytest.mark.parametrize("is_given", [False, True])
async def test_a_name_is_looked_up_in_no_folder_behind_the_first_that_has_it(
    tmp_path: Path, hub: Path, read_folders: list[Path], is_given: bool
) -> None:
    """The disk of a later one may be a network drive that sleeps."""
    local, remote = touch(tmp_path / "local" / "mine.gguf"), touch(tmp_path / "remote" / "mine.gguf")
    plain = next((hub / "models--Two--a--b").glob("snapshots/*/plain.gguf"))
    names = ModelNames(hub, [plain] if is_given else [], folders=[local.parent, remote.parent])
    assert (await names.find("Two/a--b:plain")).path == plain
    assert read_folders == []
    assert await names.only() is None
    assert (await names.first_given() is None) == (not is_given)
    read_folders.clear()
    assert (await names.find("mine")).path == local
    assert read_folders == [local.parent]
    assert (await names.find("mine:latest")).path == local
    assert (await names.find(str(remote))).path == remote, "the later one of a name has its path as its name"


async def test_a_given_model_that_was_pulled_again_is_known_by_its_name_in_the_library(tmp_path: Path) -> None:
    name = "m-Q4_0.gguf"
    old = put(tmp_path, "o/m", {name: b"old"}, revision=OLD) / name
    names = ModelNames(tmp_path, [old])
    new = put(tmp_path, "o/m", {name: b"new"}, revision=NEW) / name
    async with asyncio.timeout(LIMIT_S):
        assert (await names.find("o/m:Q4_0")).path == new
        with pytest.raises(ApiError, match="GET /v1/models lists the models that are here"):
            await names.find("m-Q4_0")
        assert await names.first_given() is None


@pytest.mark.parametrize("form", ["..", "link", "folder", "hard", "relative", "root"])
async def test_every_spelling_of_a_path_is_the_same_model(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, other = touch(tmp_path / "a" / "given.gguf"), touch(tmp_path / "a" / "other.gguf")
    names = ModelNames(None, [given])
    of_given, of_other = (spelled(file, form, monkeypatch) for file in (given, other))
    first = await names.find(str(other), paths=True)
    assert await names.find(of_other, paths=True) is first
    assert (await names.find(of_given, paths=True)).path == given, "a path to a listed model"


def spelled(file: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return another path of a file."""
    twin = file.parents[1] / f"{form}-{file.name}"
    match form:
        case "..":
            return f"{file.parent}/../{file.parent.name}/{file.name}"
        case "link":
            twin.symlink_to(file)
        case "hard":
            twin.hardlink_to(file)
        case "folder":
            twin.symlink_to(file.parent)
            return str(twin / file.name)
        case "relative":
            monkeypatch.chdir(file.parent)
            return file.name
        case "root":
            if sys.platform != "linux":
                pytest.skip("there is no /proc")
            return f"/proc/self/root{file}"
    return str(twin)


async def test_an_error_tells_nothing_of_the_files_of_the_machine(tmp_path: Path) -> None:
    """A client that may not name paths learns from no answer which files and folders exist."""
    names, there = ModelNames(None, []), touch(tmp_path / "there.gguf")
    folder = touch(touch(tmp_path / "own" / "config.json").with_name("model.safetensors")).parent
    told = set()
    for path in (there, folder, tmp_path, tmp_path / "absent.gguf", tmp_path / "absent", Path("/etc/shadow")):
        with pytest.raises(ApiError) as caught:
            await names.find(str(path))
        told.add(re.sub("no model .*;", "no model PATH;", str(caught.value)))
    assert told == {"there is no model PATH; GET /v1/models lists the models that are here"}


async def test_a_file_of_the_catalogue_has_its_name_and_answers_to_others(tmp_path: Path) -> None:
    snapshot = put(tmp_path / "hub", "Qwen/Qwen3-4B-GGUF", {"Qwen3-4B-Q4_K_M.gguf": b"x"})
    mine = touch(tmp_path / "mine" / "own.gguf")
    for given in ([], [snapshot / "Qwen3-4B-Q4_K_M.gguf"]):
        names = ModelNames(tmp_path / "hub", given, folders=[mine.parent])
        listed = [model.name for model in await names.list()]
        assert sorted(listed) == ["own", "qwen3:4b"]
        for name in ("qwen3:4b", "qwen3", "QWEN3:4B:q4_k_m", "Qwen/Qwen3-4B-GGUF", "hf.co/qwen/qwen3-4b-gguf:Q4_K_M"):
            assert (await names.find(name)).path == snapshot / "Qwen3-4B-Q4_K_M.gguf"
        with pytest.raises(ApiError) as caught:
            await names.find("qwen3:8b")
        assert "edgelm pull qwen3:8b" in caught.value.body["error"]["message"]


async def test_one_model_is_described_by_every_name_that_finds_it(tmp_path: Path) -> None:
    given, other = write_tiny(tmp_path / "Given.gguf", context=256), write_tiny(tmp_path / "other.gguf", context=128)
    names = ModelNames(None, [given])
    async with asyncio.timeout(LIMIT_S):
        for name in ("Given", "GIVEN", "Given.gguf", str(given)):
            found = await names.describe(name)
            assert (found.name, found.path, found.known["context"]) == ("Given", given, 256)
        assert (await names.describe(str(other), paths=True)).known["context"] == 128
        with pytest.raises(ApiError) as caught:
            await names.describe("other")
        assert caught.value.status == 404
        given.unlink()
        with pytest.raises(ApiError) as caught:
            await names.describe("Given")
        assert caught.value.status == 404


async def test_a_name_of_the_catalogue_is_suggested_with_the_command_that_pulls_it(tmp_path: Path) -> None:
    mine = touch(tmp_path / "mine" / "qwem3.gguf")

    async def message(names: ModelNames, name: str) -> str:
        with pytest.raises(ApiError) as caught:
            await names.find(name)
        text = caught.value.body["error"]["message"]
        assert isinstance(text, str)
        return text

    nothing = await message(ModelNames(None, []), "qwem3:0.6b")
    assert "did you mean qwen3:0.6b" in nothing
    assert "not on this machine: edgelm pull qwen3:0.6b" in nothing
    own = await message(ModelNames(None, [], folders=[mine.parent]), "qwem33")
    assert "did you mean qwem3?" in own
    assert "pull" not in own


async def test_the_list_says_what_each_is_and_asks_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = write_tiny(tmp_path / "good.gguf", context=256)
    bad = touch(tmp_path / "bad.gguf")
    names = ModelNames(None, [good, bad])
    asked: list[list[Path]] = []

    def read(requests: Iterable[Describe]) -> Iterator[dict[str, Any]]:
        requests = list(requests)
        asked.append([request.path for request in requests])
        return read_each(requests)

    monkeypatch.setattr(module, "read_each", read)
    async with asyncio.timeout(LIMIT_S):
        found = {model.name: model.known for model in await names.list()}
        assert found["good"].items() >= {"context": 256, "architecture": "llama", "quantization": "F32"}.items()
        assert "empty" in found["bad"]["error"]
        await names.list()
        assert asked == [[good, bad]]
        write_tiny(bad, context=128)
        assert {model.name: model.known for model in await names.list()}["bad"]["context"] == 128
        assert asked == [[good, bad], [bad]]
        good.unlink()
        assert [model.name for model in await names.list()] == ["bad"]


async def test_a_reader_that_died_hides_a_model_for_a_while_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ModelNames(None, [write_tiny(tmp_path / "m.gguf", context=256)])
    model = await names.find("m")
    async with asyncio.timeout(LIMIT_S):
        with monkeypatch.context() as patch:
            patch.setattr(module, "read_each", partial(read_each, module="no.such.module"))
            patch.setattr(documents, "RETRY_S", 0.0)
            assert "failed" in (await names.list())[0].known["error"]
            assert "failed" in (await names.card(model))["error"]
            await names.require_engine(model)
        assert (await names.list())[0].known["context"] == 256
        assert (await names.card(model))["context"] == 256


async def test_what_no_engine_can_run_is_not_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "find_spec", lambda _: object())  # as where torch is installed
    good, other = (
        write_folder(tmp_path / "good", folder_files(CONFIG | {"head_dim": 8})),
        write_t5_folder(tmp_path / "t5"),
    )
    vision = write_gguf(tmp_path / "vision.gguf", "clip")
    names = ModelNames(None, [good, other, vision])
    async with asyncio.timeout(LIMIT_S):
        assert [model.name for model in await names.list()] == ["good"]
        assert "'t5'" in (await names.describe("t5")).known["problem"], "by its name it tells why"
        await names.require_engine(await names.find("good"))
        for name, reason in (("t5", "does not support the architecture 't5'"), ("vision", "images or sound")):
            with pytest.raises(ApiError, match=reason) as caught:
                await names.require_engine(await names.find(name))
            assert (caught.value.status, caught.value.code) == (400, "model_not_supported")


def write_t5_folder(folder: Path) -> Path:
    config = CONFIG | {"architectures": ["T5Model"], "model_type": "t5"}
    return write_folder(folder, folder_files(config))


def write_gguf(path: Path, architecture: str) -> Path:
    """Write the beginning of a file with one tensor."""
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_embedding_length(8)
    writer.add_head_count(1)
    writer.add_tensor("v.patch_embd.weight", np.zeros((8, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.skipif(sys.platform != "linux", reason="other systems may deliver another signal")
async def test_a_file_that_is_cut_while_it_is_described_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setattr(module, "read_each", partial(read_each, module="tests.cutting_reader"))
    paths = [write_tiny(tmp_path / f"{name}.gguf", context=256) for name in ("first", "cut", "last")]
    names = ModelNames(None, paths)
    async with asyncio.timeout(LIMIT_S):
        known = {model.name: model.known for model in await names.list()}
        assert known["first"]["context"] == known["last"]["context"] == 256
        assert "was changed while it was read" in known["cut"]["error"]
        monkeypatch.undo()
        assert "empty" in {model.name: model.known for model in await names.list()}["cut"]["error"]


def test_aliases_with_and_without_ollamas_tag(tmp_path: Path) -> None:
    tables = [
        ModelTable("tiny", "file", aliases=("small", "tiny", "second")),
        ModelTable("gone:latest", "file", aliases=("gone",)),
    ]
    files = [write_tiny(tmp_path / f"{name}.gguf") for name in ("tiny", "second")]
    names = ModelNames(None, files, tables=tables)
    for name in ("small", "SMALL:latest", "tiny", "tiny:latest", "second"):
        assert asyncio.run(names.find(name)).name == "tiny", name
    for name in ("gone", "gone:latest"):
        with pytest.raises(ApiError, match="gone"):
            asyncio.run(names.find(name))
    listed = asyncio.run(names.list())
    assert sorted(model.name for model in listed) == ["second", "small", "tiny"], "no name twice"
    assert {model.path for model in listed} == {files[0]}, "an alias beats a file of that name, as in requests"


async def test_the_list_tells_which_models_read_pictures(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "m.gguf")
    names = ModelNames(None, [model])
    (before,) = await names.list()
    assert "pictures" not in before.known
    write_projector(tmp_path / "mmproj-m.gguf")  # it may come later: the model itself is not read again
    (after,) = await names.list()
    assert after.known["pictures"]
