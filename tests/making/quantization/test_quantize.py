"""Quantized files as a caller gets them: the types that were asked for, equal numbers, one error for each trouble."""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import quantize as quantize_array
from numpy.typing import NDArray

from edgelm.base import disk
from edgelm.base.disk import unfinished
from edgelm.base.errors import EdgeLMError, ModelError, RequestError, UsageError
from edgelm.base.workers.child import Child
from edgelm.base.workers.messages import Result
from edgelm.checkpoints.gguf import open_gguf
from edgelm.checkpoints.summary import quantization
from edgelm.making.quantization.imatrix_file import Statistics, write_statistics
from edgelm.making.quantization.job import QuantizeJob
from edgelm.making.quantization.native import Options, check_data, plan, quantize
from edgelm.making.quantization.recipe import Recipe
from edgelm.making.quantization.types import FILE_TYPES, file_type, tensor_type
from edgelm.making.quantization.worker import quantize_file
from tests import odd_models
from tests.counts import Count
from tests.odd_models import write_odd
from tests.tiny import write_tiny

FAST = ["F16", "Q4_K_M", "Q3_K_L", "IQ4_NL", "MXFP4_MOE", "Q2_0"]  # the types with tables take seconds
MADE = [name for name in FILE_TYPES if name != "COPY"][: Count(test=0, soak=99)] or FAST


class Parent:
    """The parent of a worker, without a process."""

    def __init__(self) -> None:
        self.documents: list[dict[str, Any]] = []

    def send(self, reply: object) -> None:
        if isinstance(reply, Result):
            self.documents.append(reply.document)

    def at_end(self, action: object) -> None:
        pass


def run(source: Path, destination: Path, to: str, **options: Any) -> dict[str, Any]:
    """Do the job of the worker in this process, and return its result."""
    parent = Parent()
    recipe = Recipe(to, options.pop("types", {}), pure=options.pop("pure", False))
    job = QuantizeJob(source=source, destination=destination, recipe=recipe, threads=1, **options)
    quantize_file(job, cast(Child, parent))
    return parent.documents[-1]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose rows are multiples of 256."""
    path = tmp_path_factory.mktemp("source") / "wide.gguf"
    return write_tiny(path, width=256, heads=4, kv_heads=4, head_dim=64, ffn=512)


@pytest.fixture(scope="module")
def importance(source: Path) -> dict[str, NDArray[np.float32]]:
    rng = np.random.default_rng(0)
    with open_gguf(source) as gguf:
        sizes = {name: tensor.shape[0] for name, tensor in gguf.tensors.items() if name.startswith("blk")}
    return {name: rng.uniform(0.5, 2, size).astype(np.float32) for name, size in sizes.items()}


@pytest.mark.parametrize("name", [name for name in FILE_TYPES if name != "COPY"])
def test_every_type_is_what_its_name_says(
    name: str, source: Path, importance: Mapping[str, NDArray[np.float32]]
) -> None:
    kind = FILE_TYPES[name]
    with open_gguf(source) as gguf:
        planned = plan(gguf, Recipe(name), importance, Options())
        if kind.needs_importance:
            with pytest.raises(RequestError, match="needs importance data"):
                check_data(plan(gguf, Recipe(name), None, Options()), Recipe(name), None)
        else:
            check_data(plan(gguf, Recipe(name), None, Options()), Recipe(name), None)
    assert name == "MXFP4_MOE" or kind.tensor in {tensor.type for tensor in planned}


@pytest.mark.parametrize("name", MADE)
def test_a_file_has_the_planned_types_and_the_keys_of_its_source(
    name: str, source: Path, importance: Mapping[str, NDArray[np.float32]], tmp_path: Path
) -> None:
    with open_gguf(source) as gguf:
        planned = quantize(gguf, tmp_path / "m.gguf", Recipe(name), importance, Options(threads=1))
        metadata = {key: str(gguf.metadata[key]) for key in gguf.metadata if key.startswith(("llama.", "tokenizer."))}
    with open_gguf(tmp_path / "m.gguf") as made:
        assert {tensor.name: tensor.type.name for tensor in made.tensors.values()} == {t.name: t.type for t in planned}
        assert {tensor.name: tensor.nbytes for tensor in made.tensors.values()} == {t.name: t.nbytes for t in planned}
        assert quantization(made) == name
        assert {key: str(made.metadata[key]) for key in metadata} == metadata


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16", "F16", "TQ2_0"])
def test_the_numbers_are_those_of_the_gguf_library(kind: str, source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "m.gguf", kind, pure=kind not in ("F16", "BF16"))
    name = "blk.1.ffn_down.weight"
    with open_gguf(source) as before, open_gguf(tmp_path / "m.gguf") as after:
        expected = quantize_array(before.dequantized(name), GGMLQuantizationType[kind])
        assert bytes(after.tensor_bytes(name)) == expected.tobytes()


def test_single_tensors_get_their_own_types(source: Path, tmp_path: Path) -> None:
    types = {"blk.1.attn_q.weight": "Q8_0", "blk.0.ffn_up.weight": "F16"}
    run(source, tmp_path / "m.gguf", "Q4_K_S", types=types, pure=True, output_type="Q5_K", embedding_type="Q3_K")
    with open_gguf(tmp_path / "m.gguf") as made:
        kinds = {name: tensor.type.name for name, tensor in made.tensors.items() if len(tensor.shape) > 1}
    special = types | {"output.weight": "Q5_K", "token_embd.weight": "Q3_K"}
    assert {name: kind for name, kind in kinds.items() if kind != "Q4_K"} == special


def test_rows_that_do_not_fit_get_another_type_and_it_is_said(tmp_path: Path) -> None:
    document = run(write_tiny(tmp_path / "narrow.gguf"), tmp_path / "m.gguf", "Q4_K_M")
    assert {"tensor": "blk.0.attn_q.weight", "asked": "Q4_K", "type": "Q5_0"} in document["replaced"]
    counts = Counter({row["type"]: row["tensors"] for row in document["types"]})
    assert counts["Q5_0"] > 5
    assert counts["Q4_K"] == 0


def test_a_tensor_of_integers_is_copied(source: Path, tmp_path: Path) -> None:
    path, table = tmp_path / "table.gguf", np.arange(512, dtype=np.int32)
    reader, writer = GGUFReader(source), GGUFWriter(path, "llama")
    copy_model(reader, writer)
    writer.add_tensor("blk.0.table.weight", table)
    finish(writer)
    run(path, tmp_path / "m.gguf", "Q8_0")
    with open_gguf(tmp_path / "m.gguf") as made:
        assert bytes(made.tensor_bytes("blk.0.table.weight")) == table.tobytes()


def copy_model(reader: GGUFReader, writer: GGUFWriter) -> None:
    """Add the keys and tensors of a file to another."""
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            kind = field.types[0]
            writer.add_key_value(field.name, field.contents(), kind, field.types[-1] if len(field.types) > 1 else None)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)


def finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_types_that_a_tensor_cannot_have_are_said(tmp_path: Path) -> None:
    narrow = write_tiny(tmp_path / "narrow.gguf")
    for option, flag in (("embedding_type", "token_embd"), ("output_type", "output")):
        with pytest.raises(RequestError, match=f"the rows of {flag}.weight are no multiple of Q4_K's blocks"):
            run(narrow, tmp_path / "m.gguf", "Q8_0", **{option: "q4_k"})
    with pytest.raises(RequestError, match=r"has no tensor blk\.9"):
        run(narrow, tmp_path / "m.gguf", "Q8_0", types={"blk.9.attn_q.weight": "Q4_0"})
    document = run(narrow, tmp_path / "m.gguf", "Q8_0", types={"output_norm.weight": "F16"})
    assert document["replaced"] == [{"tensor": "output_norm.weight", "asked": "F16", "type": "F32"}]


def test_importance_changes_the_numbers_and_is_taken_from_a_file(source: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox " * 60)
    kept, saved = tmp_path / "cache", tmp_path / "i.gguf"
    options: dict[str, Any] = {"measure_importance": True, "calibration": text, "cache": kept, "save_imatrix": saved}
    plain = run(source, tmp_path / "plain.gguf", "Q4_K_M")
    measured = run(source, tmp_path / "measured.gguf", "Q4_K_M", **options)
    again = run(source, tmp_path / "again.gguf", "Q4_K_M", imatrix=saved)
    assert plain["importance"] is None
    assert measured["importance"]["windows"] > 0
    assert again["importance"]["tensors"] == measured["importance"]["tensors"]
    with open_gguf(tmp_path / "measured.gguf") as made:
        assert made.metadata["quantize.imatrix.dataset"] == "text.txt"
        assert made.metadata["quantize.imatrix.chunks_count"] == measured["importance"]["windows"]
    files = [(tmp_path / name).read_bytes() for name in ("plain.gguf", "measured.gguf", "again.gguf")]
    assert files[0] != files[1] == files[2]


def test_matrices_that_no_text_runs_through_get_a_type_without_importance_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a head that predicts ahead."""
    for name, size in {"WIDTH": 256, "FFN": 256, "HEADS": 4, "HEAD": 64, "DELTA_HEAD": 64}.items():
        monkeypatch.setattr(odd_models, name, size)
    source = write_odd(tmp_path / "m.gguf", "qwen35", heads=1.0)
    calibration = tmp_path / "text.txt"
    calibration.write_text("Once upon a time there was a little girl. She said hello to the big dog. " * 40)
    options: dict[str, Any] = {"measure_importance": True, "calibration": calibration, "calibration_tokens": 512}
    run(source, tmp_path / "out.gguf", "IQ2_XXS", **options)
    types = {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(tmp_path / "out.gguf").tensors}
    assert types["blk.3.ffn_up.weight"] == types["blk.3.attn_q.weight"] == "IQ2_XXS"
    assert types["blk.4.ffn_up.weight"] == types["blk.4.attn_q.weight"] == "Q4_K"
    assert types["blk.4.nextn.eh_proj.weight"] == "Q4_K"
    with pytest.raises(RequestError, match=r"IQ2_XS needs importance data, and blk\.4\.ffn_up\.weight has none"):
        run(source, tmp_path / "no.gguf", "IQ2_XXS", types={"blk.4.ffn_up.weight": "IQ2_XS"}, **options)


def test_a_quantized_source_needs_leave_but_may_be_dequantized(source: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "q8.gguf", tmp_path / "q4.gguf"
    run(source, first, "Q8_0")
    with pytest.raises(RequestError, match=r"quantized already: \S+ is Q8_0; .*--allow-requantize"):
        run(first, second, "Q4_K_M")
    assert not second.exists()
    run(first, second, "Q4_K_M", allow_requantize=True)
    run(first, tmp_path / "f32.gguf", "F32")
    with open_gguf(first) as before, open_gguf(tmp_path / "f32.gguf") as after:
        name = "blk.0.ffn_up.weight"
        assert np.array_equal(before.dequantized(name), after.dequantized(name))


def test_a_split_source_becomes_one_file(tmp_path: Path) -> None:
    whole = write_tiny(tmp_path / "whole.gguf")
    writer = GGUFWriter(tmp_path / "m.gguf", "llama", split_max_tensors=5)
    copy_model(GGUFReader(whole), writer)
    finish(writer)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    assert len(parts) > 2
    run(parts[0], tmp_path / "joined.gguf", "Q8_0")
    run(whole, tmp_path / "direct.gguf", "Q8_0")
    with open_gguf(tmp_path / "joined.gguf") as joined, open_gguf(tmp_path / "direct.gguf") as direct:
        assert joined.tensors.keys() == direct.tensors.keys()
        assert all(joined.tensor_bytes(name) == direct.tensor_bytes(name) for name in direct.tensors)
        assert "split.count" not in joined.metadata


def test_weights_that_are_no_numbers_are_one_error(source: Path, tmp_path: Path) -> None:
    with open_gguf(source) as gguf:
        offset = gguf.tensors["blk.1.ffn_down.weight"].offset
    broken = bytearray(source.read_bytes())
    broken[offset : offset + 4] = np.float32("nan").tobytes()
    (tmp_path / "nan.gguf").write_bytes(broken)
    with pytest.raises(ModelError, match="no numbers"):
        run(tmp_path / "nan.gguf", tmp_path / "m.gguf", "Q4_K_M")
    assert [path.name for path in tmp_path.iterdir()] == ["nan.gguf"]


def test_an_importance_matrix_of_another_model_is_refused(source: Path, tmp_path: Path) -> None:
    for name, size, message in (("blk.0.attn_q.weight", 64, "has 256 columns, not 64"), ("x.weight", 8, "is not of")):
        statistics = Statistics()
        statistics.add(name, 1, 0, np.ones(size), 1)
        write_statistics(statistics, tmp_path / "i.gguf")
        with pytest.raises(RequestError, match=message):
            run(source, tmp_path / "m.gguf", "Q4_K_M", imatrix=tmp_path / "i.gguf")
    statistics = Statistics()
    statistics.add("blk.0.attn_q.weight", 1, 0, np.ones(256), 1)
    write_statistics(statistics, tmp_path / "part.gguf")
    with pytest.raises(RequestError, match=r"IQ2_XXS needs importance data, and \S+ has none"):
        run(source, tmp_path / "m.gguf", "IQ2_XXS", imatrix=tmp_path / "part.gguf")
    with pytest.raises(RequestError, match=r"token_embd.weight has none; add --embedding-type"):
        run(source, tmp_path / "m.gguf", "Q4_K_M", embedding_type="IQ2_XXS")


def test_a_full_disk_is_said_before_anything_is_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "free_bytes", lambda _: 2**26 + 1000)
    with pytest.raises(EdgeLMError, match=r"m.gguf will take .* free"):
        run(source, tmp_path / "m.gguf", "Q4_K_M")
    assert not any(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_one_error(source: Path) -> None:
    with pytest.raises(EdgeLMError, match=r"/proc/new\.gguf cannot be written"):
        run(source, Path("/proc/new.gguf"), "Q8_0")


def test_a_disk_that_is_full_in_the_middle_leaves_nothing(source: Path, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(EdgeLMError, match="could not be written whole; the disk is full"):
            run(source, tmp_path / "m.gguf", "Q4_K_M")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not any(tmp_path.iterdir())


def test_a_model_that_cannot_be_run_is_quantized_without_importance_unless_it_is_needed(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgelm.making.quantization.importance.available_memory_bytes", lambda: 2**20)
    document = run(source, tmp_path / "m.gguf", "Q4_0", measure_importance=True, may_do_without=True)
    assert "0.0 GiB are free" in document["no_importance"]
    assert document["importance"] is None
    with pytest.raises(ModelError, match="close other programs"):
        run(source, tmp_path / "m.gguf", "IQ2_XS", measure_importance=True)


def test_an_unfinished_file_of_a_killed_process_is_replaced(source: Path, tmp_path: Path) -> None:
    destination = tmp_path / "m.gguf"
    unfinished(destination).write_bytes(b"x" * 10_000_000)
    run(source, destination, "Q8_0")
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_names_of_types_are_taken_in_any_case_and_typing_errors_get_a_suggestion() -> None:
    assert file_type("q4_k_m") == file_type("Q4_K") == FILE_TYPES["Q4_K_M"]
    assert tensor_type("iq4-xs").name == "IQ4_XS"
    with pytest.raises(UsageError, match="did you mean Q4_K_M"):
        file_type("Q4KM")
    with pytest.raises(UsageError, match="mixture for a whole file, no type of a tensor; give Q4_K"):
        tensor_type("Q4_K_M")
