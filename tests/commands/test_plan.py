"""`edgelm plan` as a user and a script see it: a page or one document, and one line for each error."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from edgelm.backends.llama.build import ROLLBACK_LEN
from edgelm.backends.llama.placement import Device
from edgelm.backends.questions import ChosenEngine
from edgelm.base.config import Settings
from edgelm.base.machine.bandwidth import Bandwidth
from edgelm.base.machine.conditions import conditions
from edgelm.base.machine.facts import MachineFacts
from edgelm.base.machine.gpu import CudaState, Gpu
from edgelm.checkpoints.gguf import open_gguf
from edgelm.checkpoints.summary import model_facts
from edgelm.commands import plan as plan_module
from edgelm.commands.cli import run_cli
from edgelm.commands.plan_loaded import Beside, Loaded
from tests.adapters import write_adapter
from tests.library.projector_file import write_projector
from tests.odd_models import write_odd
from tests.tiny import write_tiny

GIB = 2**30
KV_MODES = ["f16", "k8v16", "int8", "k8v4"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "tiny.gguf", context=4096, layers=4, kv_heads=4)


@pytest.fixture(autouse=True)
def small_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 1 GiB of free memory that has passed its check."""
    for kind in ("CACHE", "CONFIG", "RUNTIME"):  # a server that runs here would take memory
        monkeypatch.setenv(f"EDGELM_{kind}_DIR", str(tmp_path / kind.lower()))
    monkeypatch.setattr(plan_module.machine, "facts", lambda *_, **__: MachineFacts(canary="ok"))
    monkeypatch.setattr(plan_module, "available_memory_bytes", lambda: GIB)
    monkeypatch.setattr(plan_module, "read_bandwidth", lambda _, threads: Bandwidth(threads * 10e9, 0.7))


class Edgelm:
    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys = capsys
        self._monkeypatch = monkeypatch

    def __call__(self, *arguments: str | Path) -> tuple[int, str, str]:
        """Return exit code, standard output and standard error."""
        self._monkeypatch.setattr(sys, "argv", ["edgelm", *map(str, arguments)])
        code = run_cli()
        return code, *self._capsys.readouterr()

    def document(self, *arguments: str | Path) -> dict[str, Any]:
        code, out, errors = self("plan", *arguments, "--json")
        assert (code, errors) == (0, "")
        document: dict[str, Any] = json.loads(out)
        return document


@pytest.fixture
def edgelm(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Edgelm:
    return Edgelm(capsys, monkeypatch)


def test_json_is_one_document_with_all_fields(edgelm: Edgelm, model: Path) -> None:
    document = edgelm.document(model)
    assert set(document) >= {"model", "weights_bytes", "kv_bytes_per_token", "workspace_bytes", "options", "chosen"}
    assert list(document["kv_bytes_per_token"]) == KV_MODES
    assert all(set(option) >= {"kv", "context", "total_bytes", "fits"} for option in document["options"])
    assert {option["kv"] for option in document["options"]} == set(KV_MODES)
    chosen = document["chosen"]
    parts = chosen["weights_bytes"] + chosen["kv_bytes"] + chosen["workspace_bytes"]
    assert (chosen["kv"], chosen["context"], chosen["total_bytes"]) == ("f16", 4096, parts)
    assert {"kv": "f16", "context": 4096, "total_bytes": parts, "fits": True} in document["options"]
    assert document["sizes"] == "llama.cpp"
    assert document["machine"]["free_bytes"] == GIB
    assert document["error"] is None


def test_flags_change_the_choice_and_not_the_options(edgelm: Edgelm, model: Path) -> None:
    plain, flagged = edgelm.document(model), edgelm.document(model, "--ctx", "1000", "--kv", "k8v4", "--threads", "3")
    assert (flagged["chosen"]["context"], flagged["chosen"]["kv"], flagged["chosen"]["threads"]) == (1000, "k8v4", 3)
    assert flagged["machine"]["read_bytes_per_second"] == 30e9
    assert flagged["kv_bytes_per_token"] == plain["kv_bytes_per_token"]
    assert flagged["weights_bytes"] == plain["weights_bytes"]


def test_experts_beside_the_gpu_are_planned(edgelm: Edgelm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = Device("CUDA0", "a card", GIB, GIB)
    monkeypatch.setattr(plan_module, "ask_choice", lambda *_: ChosenEngine("llama", "gpu", (), None, (card,)))
    mixture = write_tiny(tmp_path / "mixture.gguf", layers=4, experts=4, context=4096)
    none, three = (edgelm.document(mixture, "--n-cpu-moe", layers) for layers in ("0", "3"))
    assert (none["cpu_expert_layers"], three["cpu_expert_layers"]) == (0, 3)


def test_a_page_shows_the_sizes_a_bar_and_the_choice(
    edgelm: Edgelm, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = [Gpu("NVIDIA H100", 80 * GIB, 79 * GIB), Gpu("NVIDIA GB10", 0, 0)]
    monkeypatch.setattr(plan_module, "usable_gpus", lambda: gpus)
    code, out, errors = edgelm("plan", model)
    assert (code, errors) == (0, "")
    assert "weights" in out
    bar = next(line for line in out.splitlines() if "░░" in line)
    assert len(bar.rstrip()) == plan_module.BAR_LEN
    assert "chosen: --ctx 4096 --kv f16 --threads" in out
    assert "estimate" in out
    assert "NVIDIA H100: 79.00 GiB of 80.00 GiB free; not used" in out
    assert "NVIDIA GB10: its driver tells no memory; not used" in out
    measured = conditions("llama", 0.7)
    assert out.endswith(f"{measured}\n")
    assert edgelm.document(model)["measured"] == asdict(measured)


ONE_GPU = "our own kernels use one GPU, CUDA_VISIBLE_DEVICES chooses"


@pytest.mark.parametrize(
    ("gpus", "state", "lines"),
    [
        (
            [Gpu("RTX 4090", 24 * GIB, 4 * GIB), Gpu("RTX 3060", 12 * GIB, 11 * GIB)],
            CudaState("", "", "RTX 3060", 10 * GIB, 12 * GIB),
            ["RTX 3060: 10.00 GiB of 12.00 GiB free", f"RTX 4090: 4.00 GiB of 24.00 GiB free; not used: {ONE_GPU}"],
        ),
        (
            [Gpu("RTX 3090", 24 * GIB, 5 * GIB), Gpu("RTX 3090", 24 * GIB, 23 * GIB)],
            CudaState("", "", "RTX 3090", 22 * GIB, 24 * GIB),
            ["RTX 3090: 22.00 GiB of 24.00 GiB free", f"RTX 3090: 5.00 GiB of 24.00 GiB free; not used: {ONE_GPU}"],
        ),
        (
            [Gpu("A100", 80 * GIB, 9 * GIB, uuid="GPU-1a"), Gpu("A100", 80 * GIB, 79 * GIB, uuid="GPU-2b")],
            CudaState("", "", "A100", 8 * GIB, 80 * GIB, uuid="1a"),
            ["A100: 8.00 GiB of 80.00 GiB free", f"A100: 79.00 GiB of 80.00 GiB free; not used: {ONE_GPU}"],
        ),
        (
            [Gpu("NVIDIA GB10", 0, 0)],
            CudaState("", "", "NVIDIA GB10", 100 * GIB, 119 * GIB),
            ["NVIDIA GB10: 100.00 GiB of 119.00 GiB free"],
        ),
        (
            [Gpu("A100 MIG 2g.20gb", 20 * GIB, 19 * GIB, mig=True)],
            CudaState("", "", "NVIDIA A100-SXM4-80GB MIG 2g.20gb", 19 * GIB, 20 * GIB),
            ["NVIDIA A100-SXM4-80GB MIG 2g.20gb: 19.00 GiB of 20.00 GiB free"],
        ),
    ],
)
def test_of_several_gpus_the_one_in_use_comes_first(
    edgelm: Edgelm, model: Path, monkeypatch: pytest.MonkeyPatch, gpus: list[Gpu], state: CudaState, lines: list[str]
) -> None:
    monkeypatch.setattr(plan_module, "usable_gpus", lambda: gpus)
    monkeypatch.setattr(plan_module, "ask_choice", lambda *_: ChosenEngine("torch", "cuda", (), state))
    _, out, _ = edgelm("plan", model)
    assert [line for line in out.splitlines() if "GiB free" in line] == lines


def test_a_kv_mode_that_the_gpu_cannot_attend_in_is_told_of(
    edgelm: Edgelm, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = Device("MTL0", "a card", GIB, GIB, slow_kv=("k8v4",))
    monkeypatch.setattr(plan_module, "ask_choice", lambda *_: ChosenEngine("llama", "gpu", (), None, (card,)))
    warning = "--kv k8v4 is slow: MTL0 cannot compute its attention, so the processor does"
    assert f"\nwarning: {warning}; --kv auto takes" in edgelm("plan", model, "--kv", "k8v4")[1]
    assert edgelm.document(model, "--kv", "k8v4")["chosen"]["warning"].startswith(warning)
    assert "warning" not in edgelm("plan", model)[1]
    assert edgelm.document(model)["chosen"]["warning"] is None


def test_a_model_that_does_not_fit_is_shown_and_is_an_error(
    edgelm: Edgelm, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_module, "available_memory_bytes", lambda: GIB // 64)
    code, out, errors = edgelm("plan", model, "--json")
    document = json.loads(out)
    assert (code, document["chosen"]) == (1, None)
    assert not any(option["fits"] for option in document["options"])
    assert errors == f"error: {document['error']}\n"
    assert "take a smaller model" in errors
    code, out, errors = edgelm("plan", model)
    assert code == 1
    assert "x" in out
    assert errors.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "expected", "message"),
    [(["--ctx", "5000"], 1, "more than the 4,096 tokens"), (["--kv", "fast"], 2, "--kv: kv is 'fast'")],
)
def test_an_impossible_setting_is_one_line(
    edgelm: Edgelm, model: Path, arguments: list[str], expected: int, message: str
) -> None:
    code, out, errors = edgelm("plan", model, *arguments)
    assert (code, out, errors.count("\n")) == (expected, "", 1)
    assert message in errors


def test_a_damaged_file_is_one_line(edgelm: Edgelm, model: Path) -> None:
    model.write_bytes(model.read_bytes()[:2000])
    code, out, errors = edgelm("plan", model)
    assert (code, out, errors.count("\n")) == (1, "", 1)
    assert errors.startswith("error: tiny.gguf is cut short")


def test_a_draft_model_is_counted(edgelm: Edgelm, model: Path, tmp_path: Path) -> None:
    small = write_tiny(tmp_path / "small.gguf", context=1024)
    alone, both = edgelm.document(model), edgelm.document(model, "--draft", small)
    assert (alone["draft"], alone["chosen"]["draft_bytes"]) == (None, 0)
    assert both["draft"] == "tiny llama f32"
    draft_bytes = both["chosen"]["draft_bytes"]
    assert draft_bytes > small.stat().st_size
    assert both["chosen"]["total_bytes"] == alone["chosen"]["total_bytes"] + draft_bytes
    assert both["chosen"]["load_peak_bytes"] > alone["chosen"]["load_peak_bytes"]
    assert both["weights_bytes"] == alone["weights_bytes"]
    totals = [[option["total_bytes"] for option in document["options"]] for document in (alone, both)]
    assert all(with_draft > without for without, with_draft in zip(*totals, strict=True))
    assert edgelm.document(model, "--draft", small, "--ctx", "512")["chosen"]["draft_bytes"] < draft_bytes
    code, out, _ = edgelm("plan", model, "--draft", small)
    assert code == 0
    assert "draft model " in out
    assert "which drafts" in out
    assert "draft model" not in edgelm("plan", model)[1]


def test_an_adapter_is_counted_and_must_fit(edgelm: Edgelm, model: Path, tmp_path: Path) -> None:
    with open_gguf(model) as gguf:
        columns, rows = gguf.tensors["blk.0.ffn_down.weight"].shape
    layer = "model.layers.0.mlp.down_proj"
    adapter = write_adapter(tmp_path / "adapter", {layer: (rows, columns)}, rank=4)
    alone, both = edgelm.document(model), edgelm.document(model, "--lora", f"{adapter}:0.5")
    num_bytes = 4 * 4 * (rows + columns)
    assert both["weights_bytes"] == alone["weights_bytes"] + num_bytes
    assert both["chosen"]["total_bytes"] == alone["chosen"]["total_bytes"] + num_bytes
    assert (alone["lora"], both["lora"]) == ([], [f"{adapter}:0.5"])
    code, out, errors = edgelm("plan", model, "--lora", write_adapter(adapter, {layer: (rows, columns + 1)}))
    assert (code, out, errors.count("\n")) == (1, "", 1)
    assert "give an adapter that was trained on this model" in errors


def test_a_draft_model_that_does_not_fit_is_an_error(
    edgelm: Edgelm, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = write_tiny(tmp_path / "large.gguf", layers=24, width=512, ffn=2048)
    monkeypatch.setattr(plan_module, "available_memory_bytes", lambda: 300 * 2**20)
    assert edgelm("plan", model)[0] == 0
    code, _, errors = edgelm("plan", model, "--draft", large)
    assert code == 1
    assert "with the draft model" in errors
    assert "omit --draft" in errors


def test_a_draft_model_that_is_not_here_is_one_line(edgelm: Edgelm, model: Path, tmp_path: Path) -> None:
    code, out, errors = edgelm("plan", model, "--draft", tmp_path / "none.gguf")
    assert (code, out, errors.count("\n")) == (1, "", 1)
    assert "does not exist; give the path" in errors


def test_the_states_that_drafts_go_back_to_are_counted(
    edgelm: Edgelm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hybrid = write_odd(tmp_path / "hybrid.gguf", "qwen35")
    with_drafts = edgelm.document(hybrid, "--ctx", "512")["chosen"]["kv_bytes"]
    monkeypatch.setenv("EDGELM_SPEC", "off")
    without = edgelm.document(hybrid, "--ctx", "512")["chosen"]["kv_bytes"]
    with open_gguf(hybrid) as gguf:
        states = model_facts(gguf).state_bytes * Settings().parallel
    assert with_drafts - without == pytest.approx(ROLLBACK_LEN * states, rel=0.01)


def test_the_memory_of_a_projector_is_planned(model: Path, edgelm: Edgelm) -> None:
    alone = edgelm.document(model)
    assert (alone["projector"], alone["chosen"]["projector_bytes"]) == (None, 0)
    write_projector(model.with_name("mmproj-tiny.gguf"))
    beside = edgelm.document(model)
    nbytes = beside["chosen"]["projector_bytes"]
    assert nbytes > beside["projector"]["bytes"]
    assert beside["chosen"]["total_bytes"] == alone["chosen"]["total_bytes"] + nbytes
    assert edgelm.document(model, "--mmproj", "off")["projector"] is None
    assert "pictures are read by mmproj-tiny.gguf" in edgelm("plan", model)[1]


def test_the_heads_beside_a_model_are_planned(edgelm: Edgelm, tmp_path: Path) -> None:
    model = write_odd(tmp_path / "m.gguf", "qwen35", heads=0.0, part="model")
    alone = edgelm.document(model, "--ctx", "512")
    heads = write_odd(tmp_path / "mtp-m.gguf", "qwen35", heads=0.0, part="heads")
    beside = edgelm.document(model, "--ctx", "512")
    elsewhere = heads.rename(tmp_path / "drafts.gguf")
    named = edgelm.document(model, "--ctx", "512", "--draft", str(elsewhere))
    assert [document["heads"] for document in (alone, beside, named)] == [False, True, True]
    assert beside["chosen"]["kv_bytes"] == named["chosen"]["kv_bytes"] > alone["chosen"]["kv_bytes"]
    assert beside["weights_bytes"] == named["weights_bytes"]
    with open_gguf(elsewhere) as gguf:
        nbytes = sum(tensor.nbytes for tensor in gguf.tensors.values())
    assert beside["weights_bytes"] - alone["weights_bytes"] == pytest.approx(nbytes, rel=0.05)
    assert "drafts come from drafts.gguf" in edgelm("plan", model, "--draft", elsewhere)[1]
    code, _, errors = edgelm("plan", write_odd(tmp_path / "other.gguf", "qwen35moe"), "--draft", elsewhere)
    assert (code, errors.count("\n")) == (1, 1)
    assert "drafts.gguf does not hold the heads of this model" in errors


def test_the_torch_engine_loads_the_heads_beside_a_model_without_their_vocabulary(
    edgelm: Edgelm, tmp_path: Path
) -> None:
    engine = ("--engine", "torch", "--device", "cpu", "--ctx", "512")
    model = write_odd(tmp_path / "m.gguf", "qwen35moe", heads=0.0, part="model")
    alone = edgelm.document(model, *engine)
    heads = write_odd(tmp_path / "mtp-m.gguf", "qwen35moe", heads=0.0, part="heads")
    beside = edgelm.document(model, *engine)
    assert (alone["heads"], beside["heads"]) == (False, True)
    assert beside["chosen"]["kv_bytes"] > alone["chosen"]["kv_bytes"]
    with open_gguf(heads) as gguf:
        nbytes = sum(tensor.nbytes for name, tensor in gguf.tensors.items() if name.startswith("blk."))
    assert beside["weights_bytes"] - alone["weights_bytes"] == pytest.approx(nbytes, rel=0.01)
    assert "drafts come from mtp-m.gguf" in edgelm("plan", model, *engine)[1]
    assert "the heads of mtp-m.gguf" not in edgelm("plan", model, *engine, "--draft", "ngram")[1]


def test_a_projector_of_another_model_is_told_or_refused(model: Path, edgelm: Edgelm) -> None:
    other = write_projector(model.with_name("mmproj-tiny.gguf"), width=96)
    code, out, _ = edgelm("plan", model)
    assert code == 0
    assert "note: pictures are not read: mmproj-tiny.gguf is the projector of another model" in out
    code, _, errors = edgelm("plan", model, "--mmproj", other)
    assert code == 1
    assert "mmproj-tiny.gguf is the projector of another model" in errors


def test_models_of_the_server_that_hold_the_gpu_are_named() -> None:
    idle = Loaded("a", predicted_bytes=0, memory_bytes=10**9, is_idle=True, gpu_bytes=5 * 10**9)
    busy = Loaded("b", predicted_bytes=2 * 10**9, memory_bytes=10**9, is_idle=False)
    beside = Beside((idle, busy))
    lines = [line.strip() for line in beside.lines(10**9, 4 * 10**9, gpu_is_short=True)]
    assert "a: 1.00 GB, and 5.00 GB of the GPU" in lines
    assert "b: 1.00 GB, predicted 2.00 GB" in lines
    assert lines[-1] == "the server unloads a for it where that frees enough of the GPU: 5.00 GB"
    assert not any("unloads" in line for line in beside.lines(10**9, 4 * 10**9))
