"""The choice of an engine by settings, model and machine, and the error line where there is none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgelm.backends.choice import EngineChoice, Situation, choose_engine, partly_used
from edgelm.base.config import Settings
from edgelm.base.errors import EdgeLMError, ModelError
from edgelm.base.machine.gpu import CudaState, StandingGpu

GPU = CudaState("", "", "GPU X", 80 * 2**30, 80 * 2**30)
NO_DRIVER = CudaState("no NVIDIA driver was found")
NO_TORCH = CudaState("torch is not installed", "pipx install 'edgelm[cuda]'")
NO_TRITON = CudaState("triton is not installed", "pipx install 'edgelm[cuda]'")
GGUF = Situation(model="m", has_torch=True, cuda=GPU)
FOLDER = replace(GGUF, llama_problem="llama.cpp does not read safetensors")
BARE = Situation(model="m", cuda=NO_DRIVER)
BARE_TORCH = replace(BARE, has_torch=True)


def choose(situation: Situation, **settings: object) -> tuple[str, str]:
    choice = choose_engine(Settings(**settings), situation)  # type: ignore[arg-type]
    return choice.engine, choice.device


def test_auto_takes_cuda_where_all_of_it_is_there() -> None:
    assert choose_engine(Settings(), GGUF) == EngineChoice("torch", "cuda")
    assert choose(FOLDER) == ("torch", "cuda")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cuda": NO_DRIVER}, "no NVIDIA driver"),
        ({"cuda": NO_TRITON}, "triton is not installed"),
        ({"torch_problem": "mamba is unknown"}, "mamba"),
        ({"fit_problem": "it needs 100 GiB"}, "100 GiB"),
    ],
)
def test_otherwise_llama_cpp_and_the_reason_is_told(changes: dict[str, object], message: str) -> None:
    choice = choose_engine(Settings(), replace(GGUF, **changes))  # type: ignore[arg-type]
    assert (choice.engine, choice.device) == ("llama", "cpu")
    assert len(choice.reasons) == 1
    assert message in choice.reasons[0]
    offload = choose_engine(Settings(), replace(GGUF, has_offload=True, **changes))  # type: ignore[arg-type]
    assert (offload.engine, offload.device) == ("llama", "gpu")


def test_what_was_asked_for_is_kept() -> None:
    assert choose(GGUF, engine="llama") == ("llama", "cpu")
    assert choose(GGUF, device="cpu") == ("llama", "cpu")
    assert choose(GGUF, engine="torch", device="cpu") == ("torch", "cpu")
    assert choose(replace(GGUF, cuda=NO_DRIVER), engine="torch") == ("torch", "cpu")
    assert choose(replace(GGUF, has_offload=True), device="gpu") == ("llama", "gpu")
    assert choose(replace(GGUF, has_offload=True), engine="llama", gpu_layers="0") == ("llama", "cpu")
    assert choose(replace(GGUF, has_offload=True), engine="llama", gpu_layers="20") == ("llama", "gpu")


@pytest.mark.parametrize("has_offload", [False, True])
def test_a_cpu_has_no_layers_of_a_gpu(has_offload: bool) -> None:
    choice = choose_engine(Settings(device="cpu", gpu_layers="5"), replace(GGUF, has_offload=has_offload))
    assert choice == EngineChoice("llama", "cpu", ("--gpu-layers 5 is not used: --device is cpu",))


def test_what_only_llama_cpp_has_is_not_lost_on_cuda() -> None:
    situation = replace(GGUF, has_offload=True)
    choice = choose_engine(Settings(gpu_layers="12"), situation)
    assert (choice.engine, choice.device) == ("llama", "gpu")
    assert "only llama.cpp has --gpu-layers" in choice.reasons[0]
    assert choose(situation, gpu_layers="12", device="cuda") == ("torch", "cuda")  # --device cuda says more


def test_adapters_are_for_llama_cpp() -> None:
    adapted = Settings(lora=("a",))
    assert choose_engine(adapted, replace(GGUF, has_offload=True)) == EngineChoice(
        "llama", "gpu", ("our own kernels are not used: only llama.cpp has --lora",)
    )
    for settings in (replace(adapted, engine="torch"), replace(adapted, device="cuda")):
        with pytest.raises(EdgeLMError, match="merge the adapter: edgelm convert"):
            choose_engine(settings, GGUF)
    for situation in (FOLDER, replace(FOLDER, has_torch=False), replace(FOLDER, cuda=NO_DRIVER)):
        with pytest.raises(EdgeLMError, match=r"m is a folder of safetensors.*edgelm convert FOLDER OUT.gguf --lora"):
            choose_engine(adapted, situation)


def test_a_draft_model_runs_where_the_model_runs() -> None:
    assert choose(GGUF, draft="small") == ("torch", "cuda")
    assert choose(replace(GGUF, cuda=NO_DRIVER), draft="small") == ("llama", "cpu")
    strange = replace(GGUF, draft_problem="mamba is unknown")
    choice = choose_engine(Settings(draft="small"), strange)
    assert choice == EngineChoice("llama", "cpu", ("our own kernels are not used: the draft model: mamba is unknown",))
    with pytest.raises(ModelError, match="--draft with the torch engine: mamba is unknown; omit it"):
        choose(strange, draft="small", engine="torch")
    with pytest.raises(ModelError, match="mamba"):
        choose(replace(FOLDER, draft_problem="mamba is unknown"), draft="small")


def test_safetensors_without_a_gpu_run_on_the_processor() -> None:
    choice = choose_engine(Settings(), replace(FOLDER, cuda=NO_DRIVER))
    reasons = ("our own kernels are not used: no NVIDIA driver was found", "llama.cpp does not read safetensors")
    assert choice == EngineChoice("torch", "cpu", reasons)
    assert choose(replace(FOLDER, cuda=NO_DRIVER), gpu_layers="12") == ("torch", "cpu")  # nothing else can run it
    assert choose(replace(FOLDER, cuda=NO_DRIVER), device="cpu") == ("torch", "cpu")


@pytest.mark.parametrize(
    ("situation", "settings", "message", "hint"),
    [
        (BARE, {"engine": "torch"}, "needs torch", "edgelm[cuda]"),
        (BARE, {"device": "cuda"}, "--device cuda: no NVIDIA driver", "--device auto"),
        (replace(GGUF, cuda=NO_TRITON), {"device": "cuda"}, "triton", "edgelm[cuda]"),
        (replace(GGUF, torch_problem="mamba is unknown"), {"engine": "torch"}, "mamba", "--engine llama"),
        (replace(GGUF, fit_problem="it needs 9 GiB"), {"engine": "torch"}, "9 GiB", "--ctx"),
        (replace(FOLDER, has_torch=False, cuda=NO_DRIVER), {}, "needs torch", "edgelm[cuda]"),
        (replace(FOLDER, torch_problem="mamba is unknown"), {}, "mamba", "GGUF"),
        (FOLDER, {"engine": "llama"}, "does not read safetensors", "--engine torch"),
        (GGUF, {"device": "gpu"}, "processor only", "edgelm doctor"),
        (GGUF, {"engine": "llama", "gpu_layers": "8"}, "processor only", "--gpu-layers"),
        (replace(GGUF, offload_problem="vulkan is not used"), {"device": "gpu"}, "vulkan is not used", "edgelm doctor"),
        (GGUF, {"engine": "torch", "device": "gpu"}, "only llama.cpp has --device gpu", "--device cuda"),
        (GGUF, {"engine": "torch", "gpu_layers": "12"}, "only llama.cpp has --gpu-layers", "omit"),
        (BARE_TORCH, {"engine": "torch", "device": "cuda"}, "--device cuda: no NVIDIA driver", "--device auto"),
        (replace(GGUF, cuda=NO_TRITON), {"engine": "torch", "device": "cuda"}, "triton", "edgelm[cuda]"),
        (replace(FOLDER, cuda=NO_DRIVER), {"device": "gpu"}, "it cannot run safetensors", "--device auto"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_do(
    situation: Situation, settings: dict[str, object], message: str, hint: str
) -> None:
    with pytest.raises(EdgeLMError) as caught:
        choose(situation, **settings)
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_a_model_that_nothing_runs_is_the_models_fault() -> None:
    with pytest.raises(ModelError):
        choose(replace(FOLDER, torch_problem="mamba is unknown"))


CARD = StandingGpu("NVIDIA GeForce RTX 4090")
TYPE = "type: pipx inject edgelm edgelm-llama-cuda"
ALONE = "this llama.cpp computes on the processor only"
END = "end other programs on it"
UNUSED = replace(GGUF, gpu=CARD, offload_hint=TYPE)


@pytest.mark.parametrize(
    ("changes", "settings", "line"),
    [
        ({"torch_problem": "no mamba"}, {}, f"NVIDIA GeForce RTX 4090 is not used: no mamba, and {ALONE}; {TYPE}"),
        ({"cuda": NO_TRITON}, {}, f"NVIDIA GeForce RTX 4090 is not used: triton is not installed, and {ALONE}; {TYPE}"),
        ({}, {"engine": "llama"}, f"NVIDIA GeForce RTX 4090 is not used: --engine llama, and {ALONE}; {TYPE}"),
        (
            {"torch_problem": "no mamba", "offload_problem": "edgelm-llama-cuda finds no GPU; update the driver"},
            {},
            "NVIDIA GeForce RTX 4090 is not used: no mamba; edgelm-llama-cuda finds no GPU; update the driver",
        ),
        (
            {
                "has_torch": False,
                "cuda": NO_TORCH,
                "offload_problem": "edgelm-llama-cuda finds no GPU; update the driver",
            },
            {},
            "NVIDIA GeForce RTX 4090 is not used: edgelm-llama-cuda finds no GPU; update the driver",
        ),
        (
            {"offload_problem": "edgelm-llama-cuda finds no GPU; update the driver"},
            {"engine": "llama"},
            "NVIDIA GeForce RTX 4090 is not used: edgelm-llama-cuda finds no GPU; update the driver",
        ),
        (
            {"cuda": NO_DRIVER, "gpu": StandingGpu("the NVIDIA GPU", "no NVIDIA driver was found", "install it")},
            {},
            "the NVIDIA GPU is not used: no NVIDIA driver was found; install it",
        ),
        (
            {"cuda": CudaState("the driver is too old", "update it, or use llama.cpp", old_driver=True)},
            {},
            f"NVIDIA GeForce RTX 4090 is not used: the driver is too old, and {ALONE}; update it, or use llama.cpp",
        ),
        (
            {"llama_problem": "llama.cpp does not read safetensors", "cuda": NO_TRITON},
            {},
            "NVIDIA GeForce RTX 4090 is not used: triton is not installed; pipx install 'edgelm[cuda]'",
        ),
        (
            {"fit_problem": "it needs 2 GiB, 1 GiB are free", "cuda": replace(GPU, free_bytes=1, total_bytes=12)},
            {},
            f"NVIDIA GeForce RTX 4090 is not used: it needs 2 GiB, 1 GiB are free, and {ALONE}; {END}; {TYPE}",
        ),
        (
            {
                "fit_problem": "it needs 2 GiB, 1 GiB are free",
                "held_bytes": 8,
                "cuda": replace(GPU, free_bytes=1, total_bytes=12),
            },
            {},
            f"NVIDIA GeForce RTX 4090 is not used: it needs 2 GiB, 1 GiB are free, and {ALONE}; {TYPE}",
        ),
        (
            {"fit_problem": "it needs 40 GiB, 11 GiB are free", "cuda": replace(GPU, free_bytes=11, total_bytes=12)},
            {},
            f"NVIDIA GeForce RTX 4090 is not used: it needs 40 GiB, 11 GiB are free, and {ALONE}; {TYPE}",
        ),
        ({}, {}, ""),  # it is used
        ({"torch_problem": "no mamba", "has_offload": True}, {}, ""),
        ({"torch_problem": "no mamba"}, {"device": "cpu"}, ""),  # the user's own choice
        ({"torch_problem": "no mamba", "has_offload": True}, {"gpu_layers": "0"}, ""),
        ({"torch_problem": "no mamba", "gpu": None}, {}, ""),
    ],
)
def test_a_gpu_that_is_not_used_has_one_line_with_what_to_do(
    changes: dict[str, object], settings: dict[str, object], line: str
) -> None:
    choice = choose_engine(Settings(**settings), replace(UNUSED, **changes))  # type: ignore[arg-type]
    assert choice.unused_gpu == line


BOTH = replace(UNUSED, has_offload=True, has_card=True)


@pytest.mark.parametrize(
    ("changes", "settings", "taken"),
    [
        ({}, {}, ("llama", "gpu")),  # no trial yet
        ({"faster": "llama"}, {}, ("llama", "gpu")),
        ({"faster": "torch"}, {}, ("torch", "cuda")),
        ({"has_offload": False, "has_card": False}, {}, ("torch", "cuda")),
        ({"has_card": False}, {}, ("torch", "cuda")),  # llama.cpp has only the one in the processor
        ({"faster": "torch", "fit_problem": "it needs 9 GiB"}, {}, ("llama", "gpu")),
        ({}, {"device": "cuda"}, ("torch", "cuda")),
        ({"faster": "torch"}, {"device": "gpu"}, ("llama", "gpu")),
        ({}, {"repeatable": True}, ("torch", "cuda")),
        ({}, {"kv": "fp8"}, ("torch", "cuda")),
        ({"llama_problem": "llama.cpp does not read safetensors"}, {}, ("torch", "cuda")),
    ],
)
def test_of_two_engines_on_a_gpu_the_faster_one_is_taken(
    changes: dict[str, object], settings: dict[str, object], taken: tuple[str, str]
) -> None:
    assert choose(replace(BOTH, **changes), **settings) == taken  # type: ignore[arg-type]


def test_each_way_says_why_it_is_not_taken() -> None:
    first, second, third = choose_engine(Settings(), BOTH).routes
    assert (first.taken, second.taken, third.taken) == (False, True, False)
    assert "`edgelm doctor --gpu` makes it" in first.reason
    first, second, third = choose_engine(Settings(), replace(UNUSED, torch_problem="no mamba")).routes
    assert (first.reason, second.reason, third.taken) == ("no mamba", ALONE, True)


@pytest.mark.parametrize(
    ("changes", "settings", "reasons"),
    [
        ({"faster": "torch"}, {}, ("", "our own kernels were faster in the trial on this GPU", "a GPU is faster")),
        ({"has_card": False}, {}, ("", "the GPU that it sees is a part of the processor", "a GPU is faster")),
        ({}, {"device": "cuda"}, ("", "--device cuda", "a GPU is faster")),
        ({}, {"engine": "torch"}, ("", "--engine torch", "a GPU is faster")),
        ({}, {"kv": "fp8"}, ("", "only our own kernels have --kv fp8 on a GPU", "a GPU is faster")),
        ({}, {"repeatable": True}, ("", "only our own kernels have --repeatable on a GPU", "a GPU is faster")),
        ({"faster": "torch"}, {"device": "Vulkan0"}, ("--device Vulkan0", "", "a GPU is faster")),
        ({"faster": "torch"}, {"engine": "llama"}, ("--engine llama", "", "a GPU is faster")),
        ({"faster": "torch"}, {"device": "cpu"}, ("--device cpu", "--device cpu", "")),
        ({"faster": "torch"}, {"gpu_layers": "0"}, ("only llama.cpp has --gpu-layers", "--gpu-layers 0", "")),
    ],
)
def test_each_way_names_the_setting_or_the_trial(
    changes: dict[str, object], settings: dict[str, object], reasons: tuple[str, ...]
) -> None:
    choice = choose_engine(Settings(**settings), replace(BOTH, **changes))  # type: ignore[arg-type]
    assert tuple(route.reason for route in choice.routes) == reasons
    assert [route.taken for route in choice.routes] == [not reason for reason in reasons]


def test_the_processor_row_names_the_engine_that_would_run_there() -> None:
    def last(situation: Situation, **settings: object) -> str:
        return choose_engine(Settings(**settings), situation).routes[2].name  # type: ignore[arg-type]

    assert last(GGUF) == "the processor (llama.cpp)"  # though our kernels are taken
    assert last(GGUF, engine="torch") == last(FOLDER) == "the processor (torch, slowly)"


@pytest.mark.parametrize(
    ("device", "settings", "told"),
    [
        (
            "CUDA0, 20 of 33 layers",
            {},
            "no room for the whole model (CUDA0, 20 of 33 layers): the processor computes the rest",
        ),
        ("cpu", {}, "no room for a single layer of the model: the processor computes it"),
        ("Vulkan0, experts of 9 layers on cpu", {"gpu_layers": "all"}, ""),
        ("CUDA0 + CUDA1", {}, ""),
        ("CUDA0, 20 of 33 layers", {"gpu_layers": "20"}, ""),  # the user's own choice
        ("CUDA0, experts of 9 layers on cpu", {"n_cpu_moe": "9"}, ""),
        ("cpu", {"device": "cpu"}, ""),
    ],
)
def test_a_model_that_is_partly_on_the_gpu_says_so(device: str, settings: dict[str, object], told: str) -> None:
    own = Settings(**settings)  # type: ignore[arg-type]
    line = partly_used(device, choose_engine(own, BOTH), own)
    assert told in line
    assert bool(told) == bool(line)
