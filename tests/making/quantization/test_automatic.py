"""Types by budget: the file that llama.cpp writes by them, measurements that are kept, and what a kill leaves."""

from __future__ import annotations

import fcntl
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgelm.base.errors import ModelError, RequestError
from edgelm.checkpoints.gguf import open_gguf
from edgelm.checkpoints.summary import quantization
from edgelm.making.quantization import automatic, candidates
from edgelm.making.quantization.automatic import Effort, Report, choose_types
from edgelm.making.quantization.candidates import TYPES, Group, with_importance
from edgelm.making.quantization.chosen_types import NativeQuantizer
from edgelm.making.quantization.divergence import DivergenceMeter, TextCut
from edgelm.making.quantization.file_size import parse_budget
from edgelm.making.quantization.recipe import Recipe
from edgelm.making.quantization.rounding import rounded
from edgelm.making.quantization.scratch import scratch_copy
from edgelm.making.quantization.sensitivity import Importance
from tests.odd_models import write_odd
from tests.tiny import write_tiny

TEXT = "Once upon a time there was a little girl. She said hello to the big dog and her friend. " * 20
WIDE: dict[str, Any] = {"width": 256, "heads": 4, "head_dim": 64, "ffn": 256, "layers": 1, "vocab_size": 320}
NARROW: dict[str, Any] = {"width": 64, "ffn": 96, "layers": 1, "vocab_size": 320}
QUANTIZER = NativeQuantizer(threads=1)
EFFORT = Effort(num_tokens=128, max_groups=64, num_probes=2)


class Measured(list[float]):
    """The divergences that were measured, and not taken from the file; `left` is how many may be."""

    left = 10**9

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        measure = DivergenceMeter.measure

        def counted(meter: DivergenceMeter) -> float:
            if len(self) >= self.left:
                raise KeyboardInterrupt
            self.append(measure(meter))
            return self[-1]

        monkeypatch.setattr(DivergenceMeter, "measure", counted)


def chosen(
    source: Path, bits: float, importance: Importance | None = None, text: str = TEXT, **options: Any
) -> tuple[Recipe, Report]:
    folder = source.parent
    with open_gguf(source) as gguf:
        weights = sum(tensor.num_elements for tensor in gguf.tensors.values())
        header = gguf.size - sum(tensor.nbytes for tensor in gguf.tensors.values())
    options = {"effort": EFFORT, "threads": 1} | options
    return choose_types(
        source,
        int(bits * weights / 8) + header,
        text,
        importance,
        quantizer=QUANTIZER,
        cache=folder / "cache",
        scratch=folder / "scratch",
        **options,
    )


def written(source: Path, recipe: Recipe, importance: Importance | None = None) -> tuple[int, Mapping[str, str]]:
    """Return the size of the file that llama.cpp writes, and its types."""
    path = source.with_name("written.gguf")
    with open_gguf(source) as gguf:
        QUANTIZER.write(gguf, path, recipe, importance)
    with open_gguf(path) as gguf:
        return gguf.size, {name: tensor.type.name for name, tensor in gguf.tensors.items()}


@pytest.mark.parametrize(
    ("shape", "bits"),
    [(WIDE, 3.2), (WIDE | {"experts": 2, "quant": "q8_0"}, 4.6), (NARROW | {"arch": "qwen3", "quant": "f16"}, 15.0)],
)
def test_llama_cpp_writes_the_file_of_the_report(tmp_path: Path, shape: dict[str, Any], bits: float) -> None:
    source = write_tiny(tmp_path / "tiny.gguf", **shape)
    recipe, report = chosen(source, bits)
    size, types = written(source, recipe)
    assert size == report.nbytes <= report.budget_bytes
    assert {name: types[name] for name in recipe.tensor_types} == recipe.tensor_types
    assert report.measured >= 0
    assert not list((tmp_path / "scratch").iterdir())


def test_a_head_that_predicts_ahead_is_not_measured_and_keeps_four_bits(tmp_path: Path) -> None:
    """No text runs through it, so any type would seem to cost nothing."""
    source = write_odd(tmp_path / "model.gguf", "qwen35", heads=1.0)
    for bits, least in ((6.0, {"Q5_0"}), (15.9, {"Q5_0"})):
        recipe, report = chosen(source, bits, effort=replace(EFFORT, max_groups=16, num_probes=1))
        size, types = written(source, recipe)
        assert size == report.nbytes <= report.budget_bytes
        head = {name: kind for name, kind in types.items() if name.startswith("blk.4.") and "norm" not in name}
        assert set(head.values()) == least
        assert not any("nextn" in row.name or "blk.4." in row.name for row in report.rows)
    recipe, report = chosen(source, 20.0, effort=replace(EFFORT, max_groups=16, num_probes=1))
    assert not any(row.type.startswith("Q") for row in report.rows), "the budget leaves them as they are"
    assert written(source, recipe) == (report.nbytes, types | recipe.tensor_types)
    with open_gguf(source.with_name("written.gguf")) as gguf:
        assert quantization(gguf) == "F16"


def test_a_mixture_of_delta_nets_without_what_llama_cpp_never_quantizes(tmp_path: Path) -> None:
    """Routers and gates of Qwen 3.5's shared experts stay, also where a file has them in a quantized type."""
    source = write_odd(tmp_path / "model.gguf", "qwen35moe")
    with open_gguf(source) as gguf:
        kinds = {name.partition(".ffn_gate_inp")[1] for name in QUANTIZER.matrices(gguf)}
        assert gguf.tensors["blk.0.ffn_gate_inp.weight"].type.name == "Q8_0"
    assert kinds == {""}
    recipe, report = chosen(source, 6.0, effort=replace(EFFORT, max_groups=16, num_probes=1))
    size, types = written(source, recipe)
    assert size == report.nbytes <= report.budget_bytes
    assert types["blk.0.ffn_gate_inp_shexp.weight"] == "Q8_0"
    assert {"blk.0.ffn_gate_shexp.weight", "blk.0.ffn_down_exps.weight"} <= recipe.tensor_types.keys()


def test_groups_of_layers_share_a_type(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "tiny.gguf", **WIDE | {"layers": 4, "width": 64, "head_dim": 16, "ffn": 64})
    recipe, report = chosen(source, 5.5, effort=replace(EFFORT, max_groups=16, num_probes=1))
    assert len(report.rows) <= 16
    assert sum(row.numbers for row in report.rows) == 4 * (4 * 64 * 64 - 2 * 64 * 32 + 3 * 64 * 64) + 2 * 320 * 64
    assert written(source, recipe)[0] == report.nbytes


def test_importance_weighs_errors_and_allows_more_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_tiny(tmp_path / "tiny.gguf", **WIDE)
    with open_gguf(source) as gguf:
        matrices = [tensor for tensor in gguf.tensors.values() if len(tensor.shape) == 2]
        importance = {
            tensor.name: np.geomspace(1, 100, tensor.shape[0], dtype=np.float32)
            for tensor in matrices
            if tensor.name.startswith("blk")
        }
        allowed = {tensor.name for tensor in matrices if with_importance(Group("", (tensor,)), importance)}
    assert allowed == importance.keys()
    monkeypatch.setattr(candidates, "WITH_IMPORTANCE", ())  # their tables take ggml 20 seconds
    one = replace(EFFORT, num_probes=1)
    recipe, report = chosen(source, 4.0, importance, effort=one)
    assert written(source, recipe, importance)[0] == report.nbytes <= report.budget_bytes
    weighed, plain = ([row.probes for row in other.rows] for other in (report, chosen(source, 4.0, effort=one)[1]))
    assert weighed != plain


def test_more_bytes_are_never_worse_and_reuse_the_measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_tiny(tmp_path / "tiny.gguf", **NARROW)
    measured = Measured(monkeypatch)
    first = chosen(source, 5.5)[1]
    assert len(measured) == sum(len(row.probes) for row in first.rows) + 1
    measured.clear()
    second = chosen(source, 7.5)[1]
    assert len(measured) == 1  # the choice as a whole
    assert second.predicted <= first.predicted
    measured.left = 0
    assert chosen(source, 5.5)[1] == first
    assert measured.left == 0


def test_an_interrupted_search_goes_on_and_another_text_starts_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_tiny(tmp_path / "tiny.gguf", **NARROW)
    measured = Measured(monkeypatch)
    measured.left = 5
    with pytest.raises(KeyboardInterrupt):
        chosen(source, 6.0)
    measured.clear()
    measured.left = 10**9
    report = chosen(source, 6.0)[1]
    assert len(measured) == sum(len(row.probes) for row in report.rows) + 1 - 5
    assert not list((tmp_path / "scratch").iterdir())
    measured.clear()
    other = chosen(source, 6.0, effort=replace(EFFORT, num_probes=1), text=TEXT[9:])[1]
    assert len(measured) == len(other.rows) + 1
    assert other.rows[0].probes["Q5_0"] != report.rows[0].probes["Q5_0"]


def test_a_budget_that_is_too_small_names_one_that_is_not(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "tiny.gguf", **NARROW)
    with pytest.raises(RequestError) as error:
        chosen(source, 1.0)
    size = re.search(r"at least (.+?),", error.value.hint)
    assert size
    assert "\n" not in str(error.value)
    recipe, report = choose_types(
        source,
        parse_budget(size[1], 1),
        TEXT,
        None,
        quantizer=QUANTIZER,
        cache=tmp_path,
        scratch=tmp_path / "scratch",
        effort=EFFORT,
    )
    assert written(source, recipe)[0] == report.nbytes


def test_a_text_without_words_is_refused(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "tiny.gguf", **NARROW)
    with pytest.raises(RequestError, match="give a text of some thousand words"):
        chosen(source, 8.0, text="too short")


def test_a_model_that_does_not_fit_in_memory_is_refused_before_it_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(automatic, "available_memory_bytes", lambda: 2**20)
    source = write_tiny(tmp_path / "tiny.gguf", **NARROW)
    with pytest.raises(ModelError, match="with 16-bit weights"):
        chosen(source, 8.0)
    assert not (tmp_path / "scratch").exists()


def test_copies_of_dead_processes_are_removed_and_those_in_use_stay(tmp_path: Path) -> None:
    dead, used = tmp_path / ".edgelm-1.scratch", tmp_path / ".edgelm-2.scratch"
    dead.write_bytes(b"x")
    used.write_bytes(b"x")
    source = write_tiny(tmp_path / "tiny.gguf", **NARROW)
    with used.open("rb") as file, open_gguf(source) as gguf:
        fcntl.flock(file, fcntl.LOCK_EX)
        with scratch_copy(gguf, tmp_path, lambda path: QUANTIZER.write(gguf, path, Recipe("F16"), None)) as copy:
            assert sorted(path.name for path in tmp_path.glob("*.scratch")) == sorted([copy.path.name, used.name])
    assert [path.name for path in tmp_path.glob("*.scratch")] == [used.name]


def test_a_changed_copy_is_the_changed_model_and_returns_to_what_it_was(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "tiny.gguf", **WIDE)
    name = "blk.0.ffn_down.weight"
    with (
        open_gguf(source) as gguf,
        scratch_copy(gguf, tmp_path, lambda path: QUANTIZER.write(gguf, path, Recipe("F16"), None)) as copy,
        DivergenceMeter(copy.path, TextCut(TEXT, 128), threads=1) as meter,
    ):
        values = gguf.dequantized(name)
        assert meter.measure() == 0
        copy.write(name, rounded(values[np.newaxis], TYPES["Q2_K"], None)[0])
        coarse = meter.measure()
        copy.write(name, rounded(values[np.newaxis], TYPES["Q6_K"], None)[0])
        assert coarse > 10 * meter.measure() > 0
        copy.write(name, values)
        assert meter.measure() == 0


@pytest.mark.parametrize("kind", ["Q2_K", "Q6_K", "IQ4_XS", "Q5_0"])
@pytest.mark.parametrize("weighted", [False, True])
def test_rounded_values_are_those_of_the_file(tmp_path: Path, kind: str, weighted: bool) -> None:
    source = write_tiny(tmp_path / "tiny.gguf", **WIDE | {"experts": 2})
    name = "blk.0.ffn_up_exps.weight"
    weights = np.geomspace(1, 1000, 512, dtype=np.float32) if weighted else None
    with open_gguf(source) as gguf:
        QUANTIZER.write(gguf, tmp_path / "q.gguf", Recipe("Q8_0", {name: kind}), {name: weights} if weighted else None)
        values = rounded(gguf.dequantized(name), TYPES[kind], None if weights is None else weights.reshape(2, 256))
    with open_gguf(tmp_path / "q.gguf") as gguf:
        assert gguf.tensors[name].type.name == kind
        np.testing.assert_array_equal(values, gguf.dequantized(name))
