"""The importance matrix against the same numbers by hooks in transformers, its cache, and its file formats."""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter, TokenType
from numpy.typing import NDArray

from edgelm.backends.llama.tokenizer import LlamaTokenizer
from edgelm.base.errors import EdgeLMError, ModelError, RequestError
from edgelm.checkpoints.gguf import open_gguf
from edgelm.making.quantization.imatrix_file import Statistics, read_statistics, write_statistics
from edgelm.making.quantization.importance import LEAST_WINDOWS, measure
from edgelm.making.quantization.native import quantize
from edgelm.making.quantization.recipe import Recipe
from tests.models import tiny_models
from tests.models.tiny_gguf import write_gguf
from tests.tiny import write_tiny

LETTERS = [chr(code) for code in range(33, 33 + tiny_models.VOCAB - 4)]
SPACE = "\u2581"
TEXT = "the quick brown fox jumps over the lazy dog and says hello to all of them; " * 12

Squares = dict[str, list[NDArray[np.float32]]]


def add_letters(writer: GGUFWriter) -> None:
    """Add a vocabulary of letters to a model: no word is merged, so that a text of them is random enough."""
    writer.kv_data[0].pop("tokenizer.ggml.model")
    writer.kv_data[0].pop("llama.vocab_size")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", SPACE, *LETTERS])
    writer.add_token_scores([0.0] * tiny_models.VOCAB)
    kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL]
    writer.add_token_types([*kinds, *[TokenType.NORMAL] * (tiny_models.VOCAB - 3)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


@contextmanager
def hooked(model: Any) -> Iterator[Squares]:
    """Collect the inputs of the matrices of a model by their names in a GGUF."""
    inputs: Squares = defaultdict(list)
    handles = []
    for i, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        linears = {"attn_q": attention.q_proj, "attn_k": attention.k_proj, "attn_output": attention.o_proj}
        if hasattr(layer.mlp, "down_proj"):
            linears |= {"ffn_gate": layer.mlp.gate_proj, "ffn_down": layer.mlp.down_proj}
        else:
            handles.append(layer.mlp.experts.register_forward_pre_hook(_experts(inputs, i)))
        for name, linear in linears.items():
            handles.append(linear.register_forward_pre_hook(_dense(inputs, f"blk.{i}.{name}.weight")))
    try:
        yield inputs
    finally:
        for handle in handles:
            handle.remove()


def _dense(inputs: Squares, name: str) -> Any:
    return lambda _, arguments: inputs[name].append(arguments[0].reshape(-1, arguments[0].shape[-1]).numpy())


def _experts(inputs: Squares, layer: int) -> Any:
    def hook(module: Any, arguments: Any) -> None:
        hidden, index, _ = arguments
        for expert in range(module.num_experts):
            rows = hidden[(index == expert).any(-1)]
            gate, up = (rows @ module.gate_up_proj[expert].T).chunk(2, dim=-1)
            inputs[f"blk.{layer}.ffn_up_exps.weight", expert].append(rows.numpy())
            inputs[f"blk.{layer}.ffn_down_exps.weight", expert].append((module.act_fn(gate) * up).numpy())

    return hook


@pytest.mark.parametrize("family", ["llama2", "mixtral"])
def test_the_importance_is_the_mean_square_of_the_inputs_by_transformers(family: str, tmp_path: Path) -> None:
    model = tiny_models.build(family)
    path = write_gguf(model, tmp_path / "model.gguf", add=add_letters)
    means = measure(path, TEXT, threads=1).means()
    tokens = LlamaTokenizer.from_file(path).encode(TEXT, special=False, bos=False)
    with hooked(model) as inputs:
        for start in range(0, len(tokens) - 254, 255):  # the context of the model is 256
            tiny_models.expected(model, [1, *tokens[start : start + 255]])
    assert len(tokens) > 3 * 255
    for name, rows in inputs.items():
        want = np.square(np.concatenate(rows), dtype=np.float64).mean(0)
        got = means[name[0]][name[1]] if isinstance(name, tuple) else means[name]
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-6, err_msg=str(name))
    assert len(inputs) >= 10
    with open_gguf(path) as source:  # llama.cpp takes them, also those of experts
        quantize(source, tmp_path / "quantized.gguf", Recipe("Q4_0"), means)


def test_an_expert_without_tokens_counts_as_much_as_any_column() -> None:
    statistics = Statistics()
    statistics.add("blk.0.ffn_up_exps.weight", 2, 0, np.array([8.0, 2.0]), 4)
    assert statistics.means()["blk.0.ffn_up_exps.weight"].tolist() == [[2.0, 0.5], [1.0, 1.0]]


def test_a_run_is_kept_and_goes_on_where_it_was_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, cache = write_tiny(tmp_path / "m.gguf", context=64), tmp_path / "cache"
    monkeypatch.setattr("edgelm.making.quantization.importance.SAVE_EVERY_S", 0.0)
    whole = measure(model, TEXT, threads=1).means()
    seen: list[tuple[int, int]] = []

    def stop(done: int, total: int) -> None:
        seen.append((done, total))
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(model, TEXT, cache=cache, threads=1, progress=stop)
    seen.clear()
    kept = measure(model, TEXT, cache=cache, threads=1, progress=lambda *at: seen.append(at)).means()
    assert seen[0] == (1, seen[-1][0])
    assert seen[-1][0] == seen[-1][1] > 2
    for name, values in whole.items():
        np.testing.assert_allclose(kept[name], values, rtol=1e-4)
    seen.clear()
    assert (
        measure(model, TEXT, cache=cache, threads=1, progress=lambda *at: seen.append(at)).means().keys()
        == whole.keys()
    )
    assert not seen  # nothing was computed


def test_what_cannot_be_calibrated_is_one_error(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "m.gguf")
    with pytest.raises(RequestError, match="has 1 tokens"):
        measure(model, "hello", threads=1).means()
    with pytest.raises(ModelError, match="no numbers"):
        measure(write_tiny(tmp_path / "nan.gguf", nan_logits=True), TEXT, with_output=True, threads=1).means()


def test_files_are_written_as_llama_cpp_reads_them_and_read_back(tmp_path: Path) -> None:
    statistics = Statistics(num_chunks=3, chunk_len=512, texts=("a.txt",))
    statistics.add("blk.0.attn_q.weight", 1, 0, np.array([1.0, 2.0, 3.0]), 10)
    statistics.add("blk.0.ffn_up_exps.weight", 2, 1, np.array([4.0, 5.0]), 7)
    write_statistics(statistics, tmp_path / "i.gguf")
    again = read_statistics(tmp_path / "i.gguf")
    assert (again.num_chunks, again.chunk_len, again.texts) == (3, 512, ("a.txt",))
    for name in statistics.sums:
        assert again.sums[name].tolist() == statistics.sums[name].tolist()
        assert again.counts[name].tolist() == statistics.counts[name].tolist()
    assert [path.name for path in tmp_path.iterdir()] == ["i.gguf"]


def test_the_older_format_is_read(tmp_path: Path) -> None:
    name, values = b"blk.0.attn_q.weight", [2.0, 4.0]
    data = struct.pack("<ii", 1, len(name)) + name + struct.pack("<ii2f", 2, len(values), *values)
    path = tmp_path / "old.dat"
    path.write_bytes(data + struct.pack("<ii", 9, 0))
    read = read_statistics(path)
    assert read.means()["blk.0.attn_q.weight"].tolist() == [1.0, 2.0]
    assert read.num_chunks == 9


@pytest.mark.parametrize("cut", [0, 3, 20, 40])
def test_damaged_files_are_one_error(cut: int, tmp_path: Path) -> None:
    statistics = Statistics()
    statistics.add("a.weight", 1, 0, np.array([1.0, np.nan]), 1)
    write_statistics(statistics, tmp_path / "nan.gguf")
    with pytest.raises(RequestError, match="impossible numbers"):
        read_statistics(tmp_path / "nan.gguf")
    (tmp_path / "cut").write_bytes((tmp_path / "nan.gguf").read_bytes()[:cut] or b"\1\0\0\0\7")
    for file in ("cut", "missing"):
        with pytest.raises(EdgeLMError):
            read_statistics(tmp_path / file)
    with pytest.raises(RequestError, match="no importance matrix"):
        read_statistics(write_tiny(tmp_path / "model.gguf"))


def test_a_time_limit_leaves_some_windows_and_the_same_call_goes_on(tmp_path: Path) -> None:
    model, cache = write_tiny(tmp_path / "m.gguf", context=64), tmp_path / "cache"
    text = TEXT * 4
    whole = measure(model, text, threads=1).num_chunks
    limited = measure(model, text, cache=cache, threads=1, limit_s=0.0)
    assert limited.num_chunks == LEAST_WINDOWS < whole
    assert limited.means().keys() == measure(model, text, threads=1).means().keys()
    seen: list[tuple[int, int]] = []
    measure(model, text, cache=cache, threads=1, progress=lambda *at: seen.append(at))
    assert seen[0] == (LEAST_WINDOWS, whole)
