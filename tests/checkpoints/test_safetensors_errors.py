"""Error messages for bad safetensors files and folders."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from edgelm.base.errors import ModelError
from edgelm.checkpoints import json_scan, safetensors, safetensors_parse
from edgelm.checkpoints.json_scan import read_json
from edgelm.checkpoints.safetensors import open_safetensors
from tests.checkpoints.safetensors_bytes import SHAPES, Entry, entries, file_of, shard_name, sharded, write_folder

A: Entry = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
INDEX = "model.safetensors.index.json"
HUGE = 2**64 - 1


def message(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        open_safetensors(path)
    line = str(caught.value)
    assert line.isprintable()
    assert len(line) < 400
    return line


def refused(tmp_path: Path, data: bytes) -> str:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    line = message(path)
    assert line.startswith("model.safetensors")
    assert str(tmp_path) not in line
    return line


def header(text: str) -> bytes:
    return file_of(text, 24)


def one(**changes: Any) -> bytes:
    return file_of({"a": A | changes}, 24)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "is empty; download it again (edgelm pull --verify MODEL)"),
        (b"\x02\0\0", "is not a safetensors file: it begins with 02 00 00"),
        (b"GGUF\x03" + bytes(30), "is not a safetensors file: it is a GGUF file; name or download a .safetensors file"),
        (b"PK\x03\x04" + bytes(30), "it is a zip archive"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 3\n", "it is a git-lfs pointer"),
        (b"<!DOCTYPE html><html>", "it is a web page"),
        (bytes(4096), "it begins with zeros, so the download did not finish"),
        (file_of("{}", 0, HUGE), "is damaged: it claims a header of 18,446,744,073,709,551,615 bytes"),
        (file_of("{}", 0, 100_000_001), "is damaged: it claims a header of 100,000,001 bytes"),
        (file_of("{}", 0, 100_000_000), "is cut short: its header ends at byte 100,000,008 of 10"),
        (file_of(" {}", 0), "is not a safetensors file"),
        (file_of("[]", 0), "is not a safetensors file"),
        (file_of({"a": A}, 23), "is cut short or damaged: tensor a ends at byte"),
        (file_of({"a": A}, 25), "1 bytes after tensor a belong to no tensor"),
        (file_of("{}", 3), "3 bytes after the header belong to no tensor"),
        (one(data_offsets=[0, HUGE]), "tensor a has no start and end offset"),
        (one(data_offsets=[0, 2**62]), "tensor a ends at byte 4,611,686,018,427,387,"),
        (one(data_offsets=[24, 0]), "tensor a has no start and end offset"),
        (one(data_offsets=[-24, 0]), "tensor a has no start and end offset"),
        (one(data_offsets=[0, 24, 24]), "tensor a has no start and end offset"),
        (one(data_offsets=[0.0, 24.0]), "tensor a has no start and end offset"),
        (one(data_offsets=[False, 24]), "tensor a has no start and end offset"),
        (one(data_offsets=None), "tensor a has no start and end offset"),
        (one(shape=[2, 2]), "tensor a has 24 bytes, which is not 2 x 2 in F32"),
        (one(shape=[]), "tensor a has 24 bytes, which is not one number in F32"),
        (one(shape=[2.0, 3]), "tensor a has no shape"),
        (one(shape=[-2, -3]), "tensor a has no shape"),
        (one(shape=["2", 3]), "tensor a has no shape"),
        (one(shape=6), "tensor a has no shape"),
        (one(shape=[6] + [1] * 32), "tensor a has no shape of at most 32 sizes"),
        (one(shape=[2**40, 2**40]), "tensor a is larger than any memory"),
        (one(shape=[0, 2**40, 2**40], data_offsets=[0, 0]), "tensor a is larger than any memory"),
        (one(shape=[10**400]), "tensor a has no shape"),
        (one(dtype="F33"), "tensor a has the unsupported type F33; update edgelm"),
        (one(dtype="F4", shape=[47]), "tensor a has 24 bytes, which is not 47 in F4"),
        (one(dtype=None), "tensor a has no type"),
        (one(dtype=["F32"]), "tensor a has no type"),
        (file_of({"a": A, "b": A}), "tensor b overlaps tensor a"),
        (file_of({"a": A, "b": A | {"data_offsets": [25, 49]}}), "1 bytes between tensor a and tensor b belong to no"),
        (file_of({"a": A | {"data_offsets": [8, 32]}}), "8 bytes between the header and tensor a belong to no tensor"),
        (file_of({"": A}), "the name of tensor 1 is not printable text"),
        (file_of({"\x1b[2J": A}), "the name of tensor 1 is not printable text"),
        (file_of({"\ud800": A}), "is not valid JSON"),
        (file_of({"__metadata__": {"a": "\ud800"}}), "is not valid JSON"),
        (file_of({"x" * 600: A}), "is damaged: the string at byte 9 is 600 bytes long"),
        (file_of({"a": A | {"x": "y" * 5000}}), "is damaged: the value at byte 14 is 5,0"),
        (file_of({"__metadata__": {"a": 1}}), "is not valid JSON at byte"),
        (file_of({"__metadata__": []}), "is not valid JSON at byte"),
        (header('{"__metadata__":{"a":"1","a":"2"}}'), "__metadata__ has a twice"),
        (header('{"__metadata__":{},"__metadata__":{}}'), "__metadata__ is there twice"),
        (header(f'{{"a":{json.dumps(A)},"a":{json.dumps(A)}}}'), "tensor a is there twice"),
        (header('{"a":{"dtype":"F32","dtype":"F32","shape":[6],"data_offsets":[0,24]}}'), "is not valid JSON"),
        (header('{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,24]}}'), "is not valid JSON"),
        (header('{"a":{"dtype":"F32","shape":[1e999],"data_offsets":[0,24]}}'), "tensor a has no shape"),
        (header('{"a":{"dtype":"F32","shape":' + "[" * 1500 + "]" * 1500 + "}}"), "is not valid JSON"),
        (header('{"a":' * 2000), "is not valid JSON"),
        (header('{"a":' + json.dumps(A)), "is not valid JSON"),
        (header('{"a":' + json.dumps(A) + ",}"), "is not valid JSON"),
        (header('{"a"}'), "is not valid JSON"),
        (header("{}{}"), "is not valid JSON"),
        (header("{"), "is not valid JSON"),
        (header('{"a\\x":1}'), "is not valid JSON"),
        (file_of(b'{"\xff":1}', 0), "is not valid JSON"),
        (file_of(b'{"a":{"dtype":"\xff"}}', 0), "is not valid JSON"),
        (header("{}\0\0"), "is not valid JSON"),
    ],
    ids=lambda value: "" if not isinstance(value, str) else value[:40],
)
def test_a_damaged_header_is_described(tmp_path: Path, data: bytes, says: str) -> None:
    assert says in refused(tmp_path, data)


def test_every_cut_is_noticed(tmp_path: Path) -> None:
    data = file_of(entries({"a": (2, 3), "b": (4,)}))
    for length in range(len(data)):
        refused(tmp_path, data[:length])


def test_headers_beyond_the_limits_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_parse, "MAX_TENSORS", 2)
    assert "more than 2 tensors" in refused(tmp_path, file_of(entries({"a": (1,), "b": (1,), "c": (1,)})))
    monkeypatch.setattr(safetensors_parse, "MAX_METADATA_KEYS", 2)
    assert "__metadata__ is too large" in refused(tmp_path, file_of({"__metadata__": dict.fromkeys("abc", "")}))
    monkeypatch.setattr(safetensors_parse, "MAX_METADATA_BYTES", 20)
    assert "__metadata__ is too large" in refused(tmp_path, file_of({"__metadata__": {"a": "x" * 15}}))


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    assert message(tmp_path / "absent") == f"there is no file {tmp_path / 'absent'}"
    assert "cannot be opened" in message(tmp_path / ("x" * 5000))
    assert "cannot be opened" in message(tmp_path / "a\0b")
    loop = tmp_path / "loop.safetensors"
    loop.symlink_to(loop)
    assert "loop.safetensors cannot be opened" in message(loop)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert message(pipe) == "pipe is not a regular file; name a .safetensors file, or the folder of a model"


def test_folders_with_no_model_or_several(tmp_path: Path) -> None:
    assert f"the folder {tmp_path.name} holds no .safetensors file" in message(tmp_path)
    for name in ("one", "two"):
        (tmp_path / f"{name}.safetensors").write_bytes(file_of(entries({name: (1,)})))
    assert f"the folder {tmp_path.name} holds 2 models; name one .safetensors file" in message(tmp_path)
    with open_safetensors(tmp_path / "two.safetensors") as ours:
        assert list(ours.tensors) == ["two"]
    (tmp_path / "model.safetensors").write_bytes(file_of(entries({"model": (1,)})))
    with open_safetensors(tmp_path) as ours:
        assert list(ours.tensors) == ["model"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "m", sharded(SHAPES, 3))


def change_index(folder: Path, **changes: str | None) -> str:
    """Change the index, and return the message that results; `__` stands for a dot."""
    path = folder / INDEX
    index = json.loads(path.read_text())
    named = {name.replace("__", "."): value for name, value in changes.items()}
    merged = index["weight_map"] | named
    index["weight_map"] = {name: value for name, value in merged.items() if value is not None}
    path.write_text(json.dumps(index))
    return message(folder)


def test_a_missing_shard_is_named(folder: Path) -> None:
    (folder / shard_name(2, 3)).unlink()
    assert message(folder) == (
        "model-00002-of-00003.safetensors is missing, and the model has 3 such files; "
        "download all files of the model into one folder"
    )
    (folder / INDEX).unlink()
    assert "model-00002-of-00003.safetensors is missing" in message(folder)
    (folder / shard_name(2, 3)).symlink_to(shard_name(2, 3))
    assert "model-00002-of-00003.safetensors" in message(folder)


def test_an_index_that_is_not_true(folder: Path) -> None:
    broken = shutil.copytree(folder, folder.with_name("other"))
    line = change_index(broken, model__norm__weight=shard_name(1, 3))
    assert "has tensor model.norm.weight in model-00001-of-00003.safetensors, which does not hold it" in line
    broken = shutil.copytree(folder, folder.with_name("less"))
    assert "does not name tensor model.norm.weight, which a shard holds" in change_index(
        broken, model__norm__weight=None
    )
    assert "has tensor extra in" in change_index(folder, extra=shard_name(1, 3))


@pytest.mark.parametrize(
    "name",
    [
        *("../m/model-00001-of-00003.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "a\\b.safetensors"),
        *("x.bin", "c:x.safetensors", "\x1b.safetensors", "x" * 300 + ".safetensors", "\0.safetensors"),
    ],
)
def test_an_index_may_name_only_files_beside_it(folder: Path, name: str) -> None:
    line = change_index(folder, model__norm__weight=name)
    assert "is damaged" in line
    assert ".safetensors file beside it" in line or "bytes long" in line


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", f"{INDEX} is empty"),
        ("[]", "is not an index: it is JSON text"),
        ("<html>", "is not an index: it is a web page"),
        ("{}", "it names no tensors"),
        ('{"weight_map": {}}', "it names no tensors"),
        ('{"weight_map": []}', "not valid JSON"),
        ('{"weight_map": {"a": 1}}', "not valid JSON"),
        ('{"weight_map": {"a": "b.safetensors"}, "weight_map": {"a": "b.safetensors"}}', "weight_map is there twice"),
        ('{"metadata": ' + "[" * 100, "not valid JSON"),
        ('{"metadata": ' + "[" * 100 + "]" * 100 + "}", "not valid JSON"),
        ('{"metadata": ,}', "not valid JSON"),
        ('{"metadata": ]}', "not valid JSON"),
        ('{"metadata": {"a": "b}', "not valid JSON"),
        ('{"weight_map": {"a": "b.safetensors"}} x', "not valid JSON"),
    ],
    ids=lambda value: value[:30],
)
def test_files_that_are_not_an_index(folder: Path, text: str, says: str) -> None:
    (folder / INDEX).write_text(text)
    assert says in message(folder)


def test_an_index_with_a_tensor_twice(folder: Path) -> None:
    text = (folder / INDEX).read_text()
    line = '"model.norm.weight": "model-00003-of-00003.safetensors"'
    assert line in text
    (folder / INDEX).write_text(text.replace(line, f"{line}, {line}"))
    assert "tensor model.norm.weight is there twice" in message(folder)


def test_a_tensor_in_two_shards(folder: Path) -> None:
    shutil.copy(folder / shard_name(1, 3), folder / shard_name(2, 3))
    assert f"{shard_name(2, 3)}: tensor model.embed_tokens.weight is in another file too" in message(folder)


def test_a_shard_that_its_index_does_not_name(folder: Path) -> None:
    (folder / shard_name(4, 5)).write_bytes(file_of(entries({"x": (1,)})))
    line = message(folder / shard_name(4, 5))
    assert line.startswith(f"{INDEX} does not name {shard_name(4, 5)}; name the folder")


def test_too_many_shards(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors, "MAX_SHARDS", 2)
    assert f"{INDEX} names 3 files, but at most 2 can be opened" in message(folder)
    (folder / INDEX).unlink()
    assert "is numbered 1 of 3" in message(folder)
    monkeypatch.setattr(safetensors, "MAX_INDEX_BYTES", 10)
    (folder / INDEX).write_text("{" + " " * 10)
    assert "is 11 bytes long, but the limit is 10" in message(folder)


def test_small_files_are_read_whole_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    for text, says in (
        ("[1]", "config.json is damaged: it is not a JSON object"),
        ("{", "config.json is damaged: it is not valid JSON"),
        ("[" * 100_000, "config.json is damaged: it is not valid JSON"),
        ('{"a": ' + "9" * 5000 + "}", "config.json is damaged: it is not valid JSON"),
        ("[" + "0," * 2**18 + "0]", "config.json holds more than 262,144 values"),
        (" " * (6 * 2**20 + 1), "config.json is 6,291,457 bytes long, but the limit is 6,291,456"),
    ):
        path.write_text(text)
        with pytest.raises(ModelError, match=says):
            read_json(path)
    path.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ModelError, match="not valid JSON"):
        read_json(path)
    monkeypatch.setattr(json_scan, "MAX_VALUES", 10)
    path.write_text('{"time_step_limit": [0.0, Infinity]}')  # as transformers writes it
    assert read_json(path) == {"time_step_limit": [0.0, float("inf")]}
