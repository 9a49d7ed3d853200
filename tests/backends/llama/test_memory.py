"""The memory formulas against the reports and the behaviour of the installed llama.cpp."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Quant

from edgelm.backends.llama.api import native_log
from edgelm.backends.llama.binding import L
from edgelm.backends.llama.buffers import LlamaBuffers
from edgelm.backends.llama.memory import AMX, LlamaMemory, repacked_types
from edgelm.backends.llama.model import LlamaModel
from edgelm.backends.llama.random_gguf import ALL_QUANTS, write_random_gguf
from edgelm.backends.questions import BufferProbe
from edgelm.base.kv_modes import LLAMA_KV
from edgelm.checkpoints.gguf import open_gguf
from edgelm.checkpoints.summary import ModelFacts, model_facts
from tests.tiny import write_tiny

MIB = 2**20
SEQUENCES = 4
SHAPES = {
    "small": {},
    "wide": {"width": 1024, "heads": 16, "kv_heads": 4, "head_dim": 64, "ffn": 3072},
    "qwen3, long heads": {"arch": "qwen3", "width": 256, "heads": 8, "kv_heads": 8, "head_dim": 128, "ffn": 512},
    "vocabulary": {"vocab_size": 20_000, "layers": 1},
    "odd heads": {"heads": 6, "kv_heads": 3, "head_dim": 48, "width": 96, "ffn": 256},
}


def facts_of(path: Path) -> ModelFacts:
    with open_gguf(path) as gguf:
        return model_facts(gguf)


@pytest.mark.parametrize("shape", SHAPES)
def test_llama_cpp_reports_the_sizes_that_the_formulas_give(shape: str, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny.gguf", context=16_384, **SHAPES[shape])
    model = facts_of(path)
    memory = LlamaMemory(model, sequences=SEQUENCES)
    with LlamaBuffers(path, model.summary, sequences=SEQUENCES) as buffers:
        for kv in LLAMA_KV:
            for context in (300, 2048, 16_384):
                if memory.refusal(kv):
                    continue
                estimate, actual = memory.estimated_buffers(kv, context), buffers(kv, context)
                assert estimate.kv == pytest.approx(actual.kv, abs=0.02 * MIB), (kv, context)
                assert estimate.compute == pytest.approx(actual.compute, rel=0.15, abs=4 * MIB), (kv, context)


@pytest.mark.parametrize("quant", ALL_QUANTS, ids=lambda quant: quant.name)
def test_llama_cpp_copies_the_tensors_that_we_think_it_copies(quant: Quant, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_random_gguf(path, layers=2, width=512, ffn=1024, kv_heads=4, quants=[quant])
    weights = LlamaMemory(facts_of(path), sequences=1, copied_types=repacked_types()).weights
    model = LlamaModel(path)
    lines = [line for line in native_log.lines if re.search("(CPU_REPACK|AMX) model buffer size", line)]
    model.close()
    copied = sum(float(line.split("=")[1].split()[0]) for line in lines)
    assert weights.copied / MIB == pytest.approx(copied, abs=0.02)


def test_nothing_is_copied_where_the_fast_kernels_are_not_safe(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_random_gguf(path, layers=1, width=256, ffn=512, kv_heads=4, quants=[Quant.Q4_0])
    weights = LlamaMemory(facts_of(path), sequences=1).weights
    assert weights.copied == 0
    assert weights.resident == weights.load_peak - LlamaMemory(facts_of(path), sequences=1)._base_bytes


def test_processors_copy_what_they_have_kernels_for() -> None:
    old, new = repacked_types("x86_64", frozenset({"sse4_2"})), repacked_types("x86_64", frozenset({"avx2", "avx512f"}))
    assert old == frozenset()
    assert new == {"Q4_0", "Q4_K", "IQ4_NL", "MXFP4", "Q2_K"}
    assert "Q8_0" in repacked_types("aarch64")
    assert repacked_types("riscv64") == frozenset()


def test_amx_copies_more_types_and_more_bytes_but_no_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = frozenset({"avx2", "avx512f", "avx512_vnni", "amx_int8"})
    types = repacked_types("x86_64", flags)
    assert AMX in types

    def copied(quant: Quant, experts: int = 0) -> int:
        path = tmp_path / f"{quant.name}{experts}.gguf"
        write_random_gguf(path, layers=1, width=512, ffn=1024, kv_heads=4, quants=[quant], experts=experts)
        facts = facts_of(path)
        plain = LlamaMemory(facts, sequences=1, copied_types=types - {AMX}).weights.copied
        return LlamaMemory(facts, sequences=1, copied_types=types).weights.copied - plain

    matrices = 2 * 512 * 512 + 2 * 256 * 512 + 3 * 512 * 1024 + 320 * 512
    assert copied(Quant.Q4_0) == 0  # repacked without AMX, too
    assert copied(Quant.F16) == 2 * matrices
    assert copied(Quant.Q8_0) == matrices / 32 * (34 + 4)
    assert copied(Quant.Q5_1) == 0
    assert copied(Quant.F16, experts=4) == (matrices - 3 * 512 * 1024) / 32 * (34 + 4)  # all but experts are Q8_0
    monkeypatch.setenv("EDGELM_NO_AMX", "1")
    assert AMX not in repacked_types("x86_64", flags)


def test_a_probe_answers_as_llama_cpp_does_and_leaves_no_process(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny.gguf")
    model = facts_of(path)
    with LlamaBuffers(path, model.summary, sequences=SEQUENCES) as buffers:
        true = buffers("int8", 1024)
    memory = LlamaMemory(model, sequences=SEQUENCES)
    with BufferProbe(path, memory.estimated_buffers, sequences=SEQUENCES) as probe:
        assert probe("int8", 1024) == true
        assert probe.exact
    assert probe._worker.exited


def test_a_probe_whose_process_dies_answers_from_the_formulas(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny.gguf")
    memory = LlamaMemory(facts_of(path), sequences=SEQUENCES)
    path.write_bytes(path.read_bytes()[:1000])
    with BufferProbe(path, memory.estimated_buffers, sequences=SEQUENCES) as probe:
        assert probe("f16", 512) == memory.estimated_buffers("f16", 512)
        assert not probe.exact


def test_asking_for_sizes_reads_neither_weights_nor_vocabulary(tmp_path: Path) -> None:
    """The file may have the length of one and the header alone, as the first megabytes of a remote file give it."""
    whole = write_tiny(tmp_path / "whole.gguf")
    with open_gguf(whole) as gguf:
        data_start = min(tensor.offset for tensor in gguf.tensors.values())
    hollow = tmp_path / "hollow.gguf"
    hollow.write_bytes(whole.read_bytes()[:data_start])
    with hollow.open("r+b") as file:
        file.truncate(whole.stat().st_size)
    assert facts_of(hollow) == facts_of(whole)
    with LlamaBuffers(hollow, facts_of(hollow).summary, sequences=1) as buffers:
        assert buffers("f16", 8192).kv == 2 * 2 * 2 * 32 * 2 * 8192  # layers, heads, K and V, numbers, bytes, cells
        assert L.llama_model_n_params(buffers._model) > 0
