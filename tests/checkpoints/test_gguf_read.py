"""Files that the gguf library writes read the same through edgelm and through the gguf library."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import gguf as library
import numpy as np
import pytest
from gguf.constants import GGUFValueType as V
from hypothesis import given
from hypothesis import strategies as st

from edgelm.base.errors import ModelError
from edgelm.checkpoints import gguf_parse
from edgelm.checkpoints.gguf import GGUF, open_gguf
from edgelm.checkpoints.gguf_parse import TENSOR_TYPES, Array, TensorType
from tests.checkpoints.gguf_bytes import RawGGUF, RawTensor, take_apart
from tests.real_data import data_files, vocabulary
from tests.tiny import write_tiny

INTEGERS = {V.UINT8: (0, 8), V.INT8: (1, 8), V.UINT16: (0, 16), V.INT16: (1, 16), V.UINT32: (0, 32), V.INT32: (1, 32)}
INTEGERS |= {V.UINT64: (0, 64), V.INT64: (1, 64)}
SCALARS: dict[V, st.SearchStrategy[Any]] = {
    kind: st.integers(-(2 ** (bits - 1)) * signed, 2 ** (bits - signed) - 1)
    for kind, (signed, bits) in INTEGERS.items()
}
SCALARS |= {
    V.FLOAT32: st.floats(width=32, allow_nan=False),
    V.FLOAT64: st.floats(allow_nan=False),
    V.BOOL: st.booleans(),
    V.STRING: st.text(st.characters(codec="utf-8"), max_size=40),
}
NAMES = st.text("abcdefgh.0123_é", min_size=1, max_size=20)
PLAIN_TYPES = [np.float32, np.float16, np.float64, np.int8, np.int16, np.int32, np.int64]
BLOCK_TYPES = [
    library.GGMLQuantizationType(i) for i, kind in TENSOR_TYPES.items() if kind.block_len > 1 and i not in (9, 42)
]


@st.composite
def values(draw: st.DrawFn) -> tuple[V, Any, V | None]:
    kind = draw(st.sampled_from(sorted(SCALARS)))
    if draw(st.booleans()):
        return kind, draw(SCALARS[kind]), None
    return V.ARRAY, draw(st.lists(SCALARS[kind], min_size=1, max_size=20)), kind


@st.composite
def tensors(draw: st.DrawFn) -> tuple[tuple[int, ...], Any]:
    return tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))), draw(
        st.sampled_from(PLAIN_TYPES + BLOCK_TYPES)
    )


def add_tensor(
    writer: library.GGUFWriter, name: str, shape: tuple[int, ...], kind: Any, rng: np.random.Generator
) -> None:
    """Add random bytes; the last size of `shape` counts blocks, where the type has blocks."""
    if isinstance(kind, library.GGMLQuantizationType):
        size = TENSOR_TYPES[kind].block_bytes
        data = rng.integers(0, 256, (*shape[:-1], shape[-1] * size), dtype=np.uint8)
        writer.add_tensor(name, data, raw_dtype=kind)
    else:
        item = np.dtype(kind).itemsize
        writer.add_tensor(name, rng.integers(0, 256, (*shape[:-1], shape[-1] * item), dtype=np.uint8).view(kind))


def write(writer: library.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def assert_same(ours: GGUF, theirs: library.GGUFReader) -> None:
    fields = {name: field for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert set(ours.metadata) == set(fields)
    for key, field in fields.items():
        value = ours.metadata[key]
        if isinstance(value, Array):
            assert field.types[0] == V.ARRAY
            assert value.type == field.types[-1]
            expected = field.contents()
            assert list(value) == expected
            assert [value[i] for i in range(len(value))] == expected
            assert value[::-2] == expected[::-2]
            if value.type != V.STRING:
                assert value.numpy().tolist() == expected
        else:
            assert value == field.contents()
            assert type(value) is type(field.contents())
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.shape == tuple(tensor.shape.tolist())
        assert mine.type.id == tensor.tensor_type
        assert (mine.offset, mine.nbytes) == (tensor.data_offset, tensor.n_bytes)
        assert mine.num_elements == tensor.n_elements
        assert bytes(ours.tensor_bytes(tensor.name)) == tensor.data.tobytes()
        array = ours.array(tensor.name)
        assert (array.dtype, array.shape) == (tensor.data.dtype, tensor.data.shape)
        assert array.tobytes() == tensor.data.tobytes()
        assert not array.flags.writeable


@given(
    st.dictionaries(NAMES, values(), max_size=8),
    st.dictionaries(NAMES, tensors(), max_size=8),
    st.sampled_from([None, 8, 16, 64, 1024]),
    st.integers(0, 2**32 - 1),
)
def test_files_of_the_library_read_the_same(
    keys: dict[str, Any], tensors: dict[str, Any], alignment: int | None, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        writer = library.GGUFWriter(path, "llama")
        if alignment:
            writer.add_custom_alignment(alignment)
        for key, (kind, value, of) in keys.items():
            writer.add_key_value("x." + key, value, kind, of)
        for name, (shape, kind) in tensors.items():
            add_tensor(writer, name, shape, kind, rng)
        write(writer)
        with open_gguf(path) as ours:
            assert ours.architecture == "llama"
            assert (ours.version, ours.size, ours.paths) == (3, path.stat().st_size, (path,))
            assert_same(ours, library.GGUFReader(path))


@given(st.dictionaries(NAMES, tensors(), min_size=2, max_size=8), st.integers(1, 3), st.booleans(), st.integers(0, 99))
def test_the_parts_of_a_split_model_read_as_one(tensors: dict[str, Any], most: int, lean: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder:
        writer = library.GGUFWriter(Path(folder) / "m.gguf", "llama", split_max_tensors=most, small_first_shard=lean)
        writer.add_block_count(7)
        for name, (shape, kind) in tensors.items():
            add_tensor(writer, name, shape, kind, rng)
        write(writer)
        paths = sorted(Path(folder).glob("*.gguf"))
        theirs = {tensor.name: (tensor, path) for path in paths for tensor in library.GGUFReader(path).tensors}
        for opened in (paths[0], paths[-1]):
            with open_gguf(opened) as ours:
                assert ours.path == paths[0]
                assert ours.paths == tuple(paths)
                assert ours.size == sum(path.stat().st_size for path in paths)
                assert ours.values.get("block_count") == 7
                assert list(ours.tensors) == list(theirs)
                for name, (tensor, path) in theirs.items():
                    assert ours.tensors[name].path == path
                    assert bytes(ours.tensor_bytes(name)) == tensor.data.tobytes()


def test_real_models_read_the_same() -> None:
    for path in data_files("models", ".gguf"):
        if "unsupported" in path.name:
            with pytest.raises(ModelError, match="version 1"):
                open_gguf(path)
        else:
            with open_gguf(path) as ours:
                assert_same(ours, library.GGUFReader(path))


def test_quantized_tensors_become_numbers(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    numbers = rng.standard_normal((3, 64)).astype(np.float32)
    kinds = [library.GGMLQuantizationType[name] for name in ("F32", "F16", "BF16", "Q8_0", "Q4_0")]
    writer = library.GGUFWriter(tmp_path / "m.gguf", "llama")
    for kind in kinds:
        writer.add_tensor(kind.name, library.quants.quantize(numbers, kind), raw_dtype=kind)
    writer.add_tensor("whole", np.arange(6, dtype=np.int32).reshape(2, 3))
    write(writer)
    with open_gguf(tmp_path / "m.gguf") as ours:
        for kind in kinds:
            back = ours.dequantized(kind.name)
            assert back.dtype == np.float32
            assert np.array_equal(back, library.quants.dequantize(library.quants.quantize(numbers, kind), kind))
            assert np.allclose(back, numbers, atol=0.3)
        with pytest.raises(ModelError, match="I32 cannot be dequantized"):
            ours.dequantized("whole")


@pytest.mark.parametrize("kind", TENSOR_TYPES.values(), ids=lambda kind: kind.name)
def test_any_bytes_of_any_type_become_numbers_or_an_error(tmp_path: Path, kind: TensorType) -> None:
    shape = (2 * kind.block_len, 3)
    data = np.random.default_rng(0).bytes(6 * kind.block_bytes)
    path = tmp_path / "m.gguf"
    path.write_bytes(RawGGUF(tensors=[RawTensor("t", shape, kind.id, data)]).to_bytes())
    with open_gguf(path) as ours:
        try:
            assert ours.dequantized("t").shape == (3, 2 * kind.block_len)
        except ModelError as error:
            message = str(error)
        else:
            message = ""
        assert message in ("", f"m.gguf: {kind.name} cannot be dequantized")


def test_real_vocabularies_read_the_same() -> None:
    path = vocabulary("phi-3")  # the library's reader takes too long for the others
    with open_gguf(path) as ours:
        assert_same(ours, library.GGUFReader(path))
    for path in data_files("vocab", ".gguf"):
        with open_gguf(path) as ours:
            tokens = ours.metadata["tokenizer.ggml.tokens"]
            assert isinstance(tokens, Array)
            assert sum(1 for _ in tokens) == len(tokens) == tokens.len
            assert tokens[-1] == list(tokens)[-1]


def test_version_2_reads_like_3(tmp_path: Path) -> None:
    true = write_tiny(tmp_path / "v3.gguf")
    old = tmp_path / "v2.gguf"
    old.write_bytes(true.read_bytes().replace(b"GGUF\x03", b"GGUF\x02", 1))
    with open_gguf(true) as new, open_gguf(old) as ours:
        assert ours.version == 2
        assert dict(ours.metadata).keys() == dict(new.metadata).keys()
        assert [(t.name, t.offset) for t in ours.tensors.values()] == [(t.name, t.offset) for t in new.tensors.values()]


def test_our_writer_of_test_files_equals_the_library(tmp_path: Path) -> None:
    true = write_tiny(tmp_path / "true.gguf", quant="q4_0")
    copy = tmp_path / "copy.gguf"
    with open_gguf(true) as ours:
        copy.write_bytes(take_apart(ours).to_bytes())
    with open_gguf(copy) as ours:
        assert_same(ours, library.GGUFReader(true))


def test_long_strings_are_decoded_on_access(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_parse, "EAGER_BYTES", 8)
    path = tmp_path / "m.gguf"
    path.write_bytes(
        RawGGUF({"a": (V.STRING, "12345"), "b": (V.STRING, "long é" * 9), "c": (V.STRING, "123")}).to_bytes()
    )
    with open_gguf(path) as ours:
        assert dict(ours.metadata) == {"a": "12345", "b": "long é" * 9, "c": "123"}


def test_text_that_is_not_utf8_is_readable(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(RawGGUF({"a": (V.STRING, b"x\xff"), "b": (V.ARRAY, (V.STRING, [b"\xfe", b"y"]))}).to_bytes())
    with open_gguf(path) as ours:
        assert ours.metadata["a"] == "x\ufffd"
        array = ours.metadata["b"]
        assert isinstance(array, Array)
        assert list(array) == ["\ufffd", "y"]
        assert list(array.raw()) == [b"\xfe", b"y"]
        with pytest.raises(IndexError):
            array[2]


@pytest.mark.parametrize("kind", [V.INT32, V.BOOL, V.STRING])
def test_an_array_may_be_empty(tmp_path: Path, kind: V) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(RawGGUF({"a": (V.ARRAY, (kind, [])), "b": (V.UINT8, 3)}).to_bytes())
    with open_gguf(path) as ours:
        array = ours.metadata["a"]
        assert isinstance(array, Array)
        assert list(array) == array[:] == []
        assert ours.metadata["b"] == 3


def test_a_view_outlives_the_file_object(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(RawGGUF(tensors=[RawTensor("t", (4,), 24, b"abcd")]).to_bytes())
    gguf = open_gguf(path)
    view = gguf.tensor_bytes("t")
    numbers = np.frombuffer(view, np.uint8)
    gguf.close()
    gguf.close()
    assert bytes(view) == b"abcd"
    assert numbers.tolist() == [97, 98, 99, 100]
    with pytest.raises(ValueError, match="released"):
        gguf.tensor_bytes("t")


def test_type_sizes_are_those_of_llama_cpp() -> None:
    ctypes = pytest.importorskip("ctypes")
    pytest.importorskip("llama_cpp")
    from edgelm.backends.llama.binding import L

    try:
        ggml = ctypes.CDLL(str(next(Path(L.__file__).parent.glob("lib/libggml-base.*"))))
    except (OSError, StopIteration):
        pytest.skip("ggml's library is not where it was")
    ggml.ggml_type_size.restype = ctypes.c_size_t
    ggml.ggml_blck_size.restype = ctypes.c_int64
    for kind in TENSOR_TYPES.values():
        assert (ggml.ggml_blck_size(kind.id), ggml.ggml_type_size(kind.id)) == (kind.block_len, kind.block_bytes), kind
