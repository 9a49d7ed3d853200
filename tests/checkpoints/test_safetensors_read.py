"""Files that the safetensors library writes read the same through edgelm and through that library."""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors as library
import safetensors.numpy as library_numpy
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgelm.checkpoints.safetensors import Safetensors, open_safetensors
from edgelm.checkpoints.safetensors_parse import DTYPES
from tests.checkpoints.safetensors_bytes import SHAPES, entries, file_of, shard_name, sharded, write_folder

NUMPY_TYPES = "f8 f4 f2 i8 i4 i2 i1 u8 u4 u2 u1 ? c8".split()
NAMES = st.text('abcdefgh.0123_é日\\"/', min_size=1, max_size=20)
SHAPE = st.lists(st.integers(0, 5), max_size=5).map(tuple)
ARRAYS = st.dictionaries(NAMES, st.tuples(SHAPE, st.sampled_from(NUMPY_TYPES)), min_size=1, max_size=8)
METADATA = st.none() | st.dictionaries(st.text(max_size=9), st.text(max_size=20), max_size=4)


def filled(spec: dict[str, tuple[tuple[int, ...], str]], seed: int) -> dict[str, NDArray[Any]]:
    """Return arrays of random bytes; the numbers among them may be NaN."""
    rng = np.random.default_rng(seed)
    made = {}
    for name, (shape, kind) in spec.items():
        size = int(np.prod(shape, dtype=np.int64))
        raw = rng.integers(0, 2 if kind == "?" else 256, size * np.dtype(kind).itemsize, dtype=np.uint8)
        made[name] = raw.view(kind).reshape(shape)
    return made


def assert_same(ours: Safetensors, theirs: dict[str, NDArray[Any]]) -> None:
    assert ours.tensors.keys() == theirs.keys()
    for name, expected in theirs.items():
        tensor = ours.tensors[name]
        array = ours.array(name)
        assert (array.dtype, array.shape, tensor.shape) == (expected.dtype, expected.shape, expected.shape)
        assert (tensor.num_elements, tensor.nbytes) == (expected.size, expected.nbytes)
        assert bytes(ours.tensor_bytes(name)) == array.tobytes() == expected.tobytes()
        assert tensor.path.read_bytes()[tensor.offset : tensor.offset + tensor.nbytes] == expected.tobytes()


@given(ARRAYS, METADATA, st.integers(0, 2**32 - 1))
def test_files_of_the_library_read_the_same(spec: dict[str, Any], metadata: dict[str, str] | None, seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        library_numpy.save_file(filled(spec, seed), path, metadata=metadata)
        for opened in (path, Path(folder)):
            with open_safetensors(opened) as ours:
                assert_same(ours, library_numpy.load_file(path))
                assert (ours.paths, ours.folder, ours.size) == ((path,), path.parent, path.stat().st_size)
                assert ours.metadata == (metadata or {})


@given(ARRAYS, st.integers(1, 4), st.booleans(), st.integers(0, 2**32 - 1))
def test_shards_read_as_one(spec: dict[str, Any], count: int, with_index: bool, seed: int) -> None:
    arrays = filled(spec, seed)
    rng = random.Random(seed)
    places = {name: rng.randrange(count) for name in arrays} | dict(zip(arrays, range(count), strict=False))
    count = max(places.values()) + 1
    paths = [shard_name(i + 1, count) for i in range(count)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for i, path in enumerate(paths):
            mine = {name: arrays[name] for name in arrays if places[name] == i}
            library_numpy.save_file(mine, folder / path, metadata={"format": "np", f"shard {i}": "yes"})
        if with_index:
            index = {"metadata": {}, "weight_map": {name: paths[i] for name, i in places.items()}}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        for opened in (folder, folder / paths[0], folder / paths[-1]):
            with open_safetensors(opened) as ours:
                assert_same(ours, {k: v for path in paths for k, v in library_numpy.load_file(folder / path).items()})
                assert ours.paths == tuple(folder / path for path in paths)
                assert ours.metadata == {"format": "np"} | {f"shard {i}": "yes" for i in range(count)}


def test_what_macos_leaves_in_a_folder_is_no_shard(tmp_path: Path) -> None:
    arrays = filled({"a": ((2,), "f4")}, 0)
    for number in (1, 2):
        path = tmp_path / shard_name(number, 2)
        library_numpy.save_file({f"{name}{number}": array for name, array in arrays.items()}, path)
        path.with_name(f"._{path.name}").write_bytes(b"\0\5\x16\7")
    with open_safetensors(tmp_path) as model:
        assert model.tensors.keys() == {"a1", "a2"}


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_every_type_of_the_format(tmp_path: Path, dtype: str) -> None:
    """Numpy writes only some of them; the library reads all."""
    path = tmp_path / "m.safetensors"
    path.write_bytes(file_of(entries({"empty": (0, 3), "a": (2, 4), "b": (8,)}, dtype)))
    theirs = dict(library.deserialize(path.read_bytes()))
    with open_safetensors(path) as ours:
        for name, each in theirs.items():
            tensor = ours.tensors[name]
            assert (tensor.dtype.name, list(tensor.shape)) == (each["dtype"], each["shape"])
            assert bytes(ours.tensor_bytes(name)) == bytes(each["data"])
            array = ours.array(name)
            if tensor.dtype.bits < 8:
                assert array.tobytes() == bytes(each["data"])
            else:
                assert array.shape == tensor.shape
                assert array.itemsize * 8 == tensor.dtype.bits


def test_bfloat16_is_the_upper_half_of_a_float32(tmp_path: Path) -> None:
    values = np.array([[1.0, -2.5, 0.0, 3e38]], np.float32)
    halves = (values.view(np.uint32) >> 16).astype(np.uint16)
    path = tmp_path / "m.safetensors"
    path.write_bytes(file_of(entries({"x": (1, 4)}), halves.tobytes()))
    with open_safetensors(path) as ours:
        assert np.array_equal(ours.array("x"), halves)
        back = (ours.array("x").astype(np.uint32) << 16).view(np.float32)
        assert np.allclose(back, values, rtol=2**-7)


def test_views_are_of_the_file_and_may_not_be_written(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", sharded(SHAPES, 2))
    with open_safetensors(folder) as ours:
        name = "model.norm.weight"
        array, view = ours.array(name), ours.tensor_bytes(name)
        assert not array.flags.writeable
        assert not array.flags.owndata
        assert view.readonly
        tensor = ours.tensors[name]
        with tensor.path.open("r+b") as file:
            file.seek(tensor.offset)
            file.write(b"zz")
        assert bytes(view[:2]) == array.tobytes()[:2] == b"zz"


def test_a_view_outlives_the_model(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(file_of(entries({"x": (4,)}, "U8"), b"abcd"))
    ours = open_safetensors(path)
    view, array = ours.tensor_bytes("x"), ours.array("x")
    ours.close()
    ours.close()
    assert bytes(view) == b"abcd"
    assert array.tolist() == [97, 98, 99, 100]
    with pytest.raises(ValueError, match="released"):
        ours.tensor_bytes("x")


def test_odd_but_valid_files(tmp_path: Path) -> None:
    """The library takes all of these."""
    path = tmp_path / "m.safetensors"
    four = {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}
    none = {"dtype": "I8", "shape": [3, 0], "data_offsets": [0, 0]}
    headers = [
        {"__metadata__": None, "x": four},
        {"x": four, "__metadata__": {"quoted": 'a "b" {c} \\ \U0001f600', "": ""}},
        {"x": four | {"unknown": [1, [2.5, None]]}, "a": none},
        {"x": four, "z": none | {"data_offsets": [4, 4]}},
    ]
    for header in headers:
        for blanks in ("", " " * 9, "\n\t "):
            path.write_bytes(file_of(json.dumps(header) + blanks, 4))
            theirs = dict(library.deserialize(path.read_bytes()))
            with open_safetensors(path) as ours:
                assert ours.tensors.keys() == theirs.keys()
                assert ours.metadata == (header.get("__metadata__") or {})
    path.write_bytes(file_of("{}", 0))
    with open_safetensors(path) as ours:
        assert (ours.tensors, ours.metadata, ours.size) == ({}, {}, 10)
