"""The rule of `--engine` and `--device`: which engine runs a model, on which device, and why not the others.

On a GPU the order is: ours where it runs the whole model and a trial on this GPU showed it faster (kept_trials.py);
before a trial llama.cpp's build for GPUs, which runs every GGUF, also in part, and starts in seconds; ours where that
is not installed. The processor is last.

Everything that it depends on is an argument: settings, model, machine. Knows nothing of how an engine is built.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from edgelm.base.config import Settings
from edgelm.base.errors import EdgeLMError, ModelError
from edgelm.base.kv_modes import LLAMA_KV
from edgelm.base.machine.gpu import CudaState, StandingGpu
from edgelm.base.machine.llama_build import extra_command

EngineName = Literal["torch", "llama"]
DeviceName = Literal["cuda", "gpu", "cpu"]  # gpu: one or more devices of llama.cpp
OURS, OFFLOAD = "our own kernels", "llama.cpp on the GPU"
NO_OFFLOAD = "this llama.cpp computes on the processor only"
LAST = "a GPU is faster"
PLAN = "`edgelm plan MODEL` shows what fits"


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """The facts about model and machine. A problem is a reason against an engine; empty: there is none."""

    model: str  # its name, for messages
    llama_problem: str = ""  # why llama.cpp cannot run this model: it is a folder of safetensors
    torch_problem: str = ""  # why the torch engine cannot: it does not know the architecture
    kernel_problem: str = ""  # why the torch engine can run it only on the CPU: the kernels do not take its heads
    fit_problem: str = ""  # why the model does not fit in the GPU's memory
    draft_problem: str = ""  # why the torch engine cannot run the draft model
    has_torch: bool = False
    has_offload: bool = False  # this build of llama.cpp can compute on a GPU
    has_card: bool = False  # on one with memory of its own: none that is part of the processor
    faster: EngineName | None = None  # by the trial on this GPU; None: there was none
    offload_problem: str = ""  # why an installed backend for GPUs is not used
    offload_hint: str = ""  # what to type where none is installed
    gpu: StandingGpu | None = None  # whatever its driver
    held_bytes: int = 0  # of its memory, by other engines of the same server
    cuda: CudaState


@dataclass(frozen=True, slots=True)
class Route:
    """A way to run a model. `reason` is why it is not taken."""

    name: str
    taken: bool
    reason: str


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """An engine, its device, and one line for each alternative that was not taken."""

    engine: EngineName
    device: DeviceName
    reasons: tuple[str, ...] = ()
    unused_gpu: str = field(default="", compare=False)  # the line of `unused_gpu`
    routes: tuple[Route, ...] = field(default=(), compare=False)


def choose_engine(settings: Settings, situation: Situation) -> EngineChoice:
    """Follow the settings; where they say auto, prefer CUDA with our kernels, then llama.cpp.

    Raises ModelError where nothing can run the model, or the draft model beside it; EdgeLMError where the requested
    engine or device is missing.
    """
    if settings.lora:
        _check_lora(settings, situation)
    choice = _choose(settings, situation)
    if choice.engine == "torch" and situation.draft_problem:
        raise ModelError(f"--draft with the torch engine: {situation.draft_problem}", "omit it: n-gram drafting is on")
    unused, ways = unused_gpu(choice, settings, situation), routes(choice, settings, situation)
    return replace(choice, unused_gpu=unused, routes=ways)


def unused_gpu(choice: EngineChoice, settings: Settings, situation: Situation) -> str:
    """Return the one line about a GPU that stands here and is not used: why, and what to do. Empty: nothing to say.

    Whoever asks for the processor is not told.
    """
    gpu = situation.gpu
    if choice.device != "cpu" or not may_be_told(settings) or gpu is None:
        return ""
    reason = gpu.problem or _cuda_problem(situation) or _needs_llama(settings, situation)
    hint = gpu.hint or situation.offload_problem or situation.offload_hint
    if situation.llama_problem:
        hint = gpu.hint or situation.cuda.hint
    elif situation.offload_problem and not gpu.problem and (settings.engine == "llama" or not situation.has_torch):
        return f"{gpu.is_not_used}: {situation.offload_problem}"  # whoever installed that needs no torch
    elif settings.engine == "llama":
        reason = gpu.problem or "--engine llama"
    elif situation.cuda.old_driver:
        hint = gpu.hint or situation.offload_problem or situation.cuda.hint
    cuda = situation.cuda
    if reason == situation.fit_problem and cuda.free_bytes + situation.held_bytes < cuda.total_bytes / 2:
        hint = "; ".join(filter(None, ["end other programs on it", hint]))
    if not (situation.llama_problem or gpu.hint or situation.offload_problem):
        reason += f", and {NO_OFFLOAD}"
    return f"{gpu.is_not_used}: {reason}" + (f"; {hint}" if hint else "")


def is_partial(device: str) -> bool:
    """Return whether llama.cpp computes a part of a model on the processor, by its words about the device."""
    return device == "cpu" or "layers" in device


def partly_used(device: str, choice: EngineChoice, settings: Settings) -> str:
    """Return the line about a model of which llama.cpp computes a part on the processor; empty: it does not.

    Whoever places the parts is not told.
    """
    if choice.device != "gpu" or not is_partial(device) or _placing_flag(settings):
        return ""
    if device == "cpu":
        return f"the GPU has no room for a single layer of the model: the processor computes it; {PLAN}"
    return f"the GPU has no room for the whole model ({device}): the processor computes the rest; {PLAN}"


def _choose(settings: Settings, situation: Situation) -> EngineChoice:
    if settings.engine == "torch":
        return _choose_torch(settings, situation)
    if settings.engine == "llama":
        return _choose_llama(settings, situation, ())
    reasons = []
    if settings.device in ("auto", "cuda"):
        problem = _kernels_problem(settings, situation)
        if not problem:
            return EngineChoice("torch", "cuda")
        reasons.append(f"{OURS} are not used: {problem}")
        if settings.device == "cuda":
            raise EdgeLMError(f"--device cuda: {problem}", situation.cuda.hint or "use --device auto")
    if not situation.llama_problem:
        return _choose_llama(settings, situation, tuple(reasons))
    if situation.torch_problem:
        raise ModelError(f"{situation.model} cannot be run: {situation.torch_problem}", "take a GGUF of the same model")
    if not situation.has_torch:
        raise ModelError(
            f"{situation.model} is a folder of safetensors, which needs torch",
            f"{extra_command('cuda')}, or take a GGUF of the same model",
        )
    if names_llama_device(settings):
        raise EdgeLMError(
            f"only llama.cpp has --device {settings.device}, and it cannot run safetensors", "use --device auto"
        )
    return EngineChoice("torch", "cpu", (*reasons, situation.llama_problem))


def _choose_torch(settings: Settings, situation: Situation) -> EngineChoice:
    if not situation.has_torch:
        raise EdgeLMError("--engine torch needs torch, which is not installed", extra_command("cuda"))
    if situation.torch_problem:
        hint = "use --engine llama" if not situation.llama_problem else "take a GGUF of the same model"
        raise ModelError(f"{situation.model} cannot be run with --engine torch: {situation.torch_problem}", hint)
    if names_llama_device(settings):
        raise EdgeLMError(f"only llama.cpp has --device {settings.device}", "use --device cuda with --engine torch")
    if flag := _placing_flag(settings):
        raise EdgeLMError(f"only llama.cpp has {flag}: our kernels take a whole model", f"omit {flag}")
    if settings.device == "cpu":
        return EngineChoice("torch", "cpu")
    problem = situation.cuda.problem or situation.kernel_problem or situation.fit_problem
    if not problem:
        return EngineChoice("torch", "cuda")
    if problem == situation.fit_problem:
        raise EdgeLMError(f"--engine torch on CUDA: {problem}", "lower --ctx, or use --engine llama")
    if settings.device == "cuda":
        raise EdgeLMError(f"--device cuda: {problem}", situation.cuda.hint or "use --device auto")
    return EngineChoice("torch", "cpu", (f"{OURS} are not used: {problem}",))


def _choose_llama(settings: Settings, situation: Situation, reasons: tuple[str, ...]) -> EngineChoice:
    if situation.llama_problem:
        hint = "use --engine torch, or take a GGUF of the same model"
        raise ModelError(f"{situation.model}: {situation.llama_problem}", hint)
    named = settings.device == "cuda" or names_llama_device(settings)
    given_layers = settings.gpu_layers not in ("auto", "0")
    if settings.device == "cpu":
        unused = (f"--gpu-layers {settings.gpu_layers} is not used: --device is cpu",) if given_layers else ()
        return EngineChoice("llama", "cpu", (*reasons, *unused))
    if (named or given_layers) and not situation.has_offload:
        raise EdgeLMError(
            situation.offload_problem or NO_OFFLOAD,
            "omit --device and --gpu-layers; `edgelm doctor` says how to get a GPU",
        )
    on_gpu = situation.has_offload and (settings.gpu_layers != "0" or bool(settings.override_tensor))
    return EngineChoice("llama", "gpu" if on_gpu else "cpu", reasons)


def routes(choice: EngineChoice, settings: Settings, situation: Situation) -> tuple[Route, ...]:
    """Return the three ways to run a model, in their order, each with why it is not taken."""
    ours, offload = (choice.engine, choice.device) == ("torch", "cuda"), choice.device == "gpu"
    on_processor = choice.device == "cpu"
    by = "torch, slowly" if situation.llama_problem or settings.engine == "torch" else "llama.cpp"
    return (
        Route(OURS, ours, "" if ours else _setting_against(OURS, settings) or _kernels_problem(settings, situation)),
        Route(OFFLOAD, offload, "" if offload else _offload_problem(settings, situation)),
        Route(f"the processor ({by})", on_processor, "" if on_processor else LAST),
    )


def _offload_problem(settings: Settings, situation: Situation) -> str:
    """Return why llama.cpp does not compute on the GPU."""
    if situation.llama_problem or not situation.has_offload:
        return situation.llama_problem or situation.offload_problem or NO_OFFLOAD
    if setting := _setting_against(OFFLOAD, settings):
        return setting
    if flag := _needs_torch(settings):
        return f"only our own kernels have {flag} on a GPU"
    if not situation.has_card:
        return "the GPU that it sees is a part of the processor"
    return "our own kernels were faster in the trial on this GPU"


def _setting_against(name: str, settings: Settings) -> str:
    """Return the setting that leaves out a way to use a GPU; empty: none does."""
    if settings.engine == ("llama" if name == OURS else "torch"):
        return f"--engine {settings.engine}"
    others = names_llama_device(settings) if name == OURS else settings.device == "cuda"
    if others or settings.device == "cpu":
        return f"--device {settings.device}"
    return "--gpu-layers 0" if name == OFFLOAD and settings.gpu_layers == "0" else ""


def _kernels_problem(settings: Settings, situation: Situation) -> str:
    """Return why our kernels are not taken where the settings leave the choice to us; empty: they are."""
    problem = _cuda_problem(situation) or _needs_llama(settings, situation)
    if problem or situation.llama_problem or settings.device == "cuda" or _needs_torch(settings):
        return problem
    if not situation.has_card or situation.faster == "torch":
        return ""
    if situation.faster == "llama":
        return "llama.cpp was faster in the trial on this GPU"
    return "no trial has shown them faster on this GPU yet; `edgelm doctor --gpu` makes it"


def _needs_torch(settings: Settings) -> str:
    """Return a flag of the settings that llama.cpp lacks on a GPU; empty: there is none."""
    flags = {
        "--repeatable": settings.repeatable,
        f"--quantize {settings.quantize}": settings.quantize != "off",
        f"--kv {settings.kv}": settings.kv not in ("auto", *LLAMA_KV),
    }
    return next((flag for flag, is_set in flags.items() if is_set), "")


def _cuda_problem(situation: Situation) -> str:
    return situation.cuda.problem or situation.torch_problem or situation.kernel_problem or situation.fit_problem


def _needs_llama(settings: Settings, situation: Situation) -> str:
    """Return a reason for llama.cpp in the settings; empty where llama.cpp cannot run the model anyway."""
    if situation.llama_problem or settings.device == "cuda":
        return ""
    if situation.draft_problem:
        return f"the draft model: {situation.draft_problem}"
    if settings.lora:
        return "only llama.cpp has --lora"
    flag = _placing_flag(settings)
    return f"only llama.cpp has {flag}" if flag and situation.has_offload else ""


def _check_lora(settings: Settings, situation: Situation) -> None:
    """Raise EdgeLMError where an adapter cannot be loaded beside the model: only llama.cpp does that."""
    merge = "edgelm convert FOLDER OUT.gguf --lora ADAPTER"
    if situation.llama_problem:
        problem = f"{situation.model} is a folder of safetensors, and --lora needs a GGUF"
        raise EdgeLMError(problem, f"make a GGUF with the adapter in it: {merge}")
    flag = "--engine torch" if settings.engine == "torch" else "--device cuda" if settings.device == "cuda" else ""
    if flag:
        raise EdgeLMError(f"{flag} has no --lora, only llama.cpp has it", f"omit {flag}, or merge the adapter: {merge}")


def may_be_told(settings: Settings) -> bool:
    """Return whether the settings leave it to us that a GPU is not used."""
    return settings.device != "cpu" and settings.gpu_layers != "0"


def may_go_without_cuda(settings: Settings) -> bool:
    """Return whether the settings leave the choice of engine and device to us."""
    return settings.engine == "auto" and settings.device == "auto"


def names_llama_device(settings: Settings) -> bool:
    """Return whether --device means a GPU by llama.cpp."""
    return settings.device not in ("auto", "cuda", "cpu")


def _placing_flag(settings: Settings) -> str:
    """Return a flag of the settings that places parts of a model, which only llama.cpp does."""
    flags = {
        "--gpu-layers": settings.gpu_layers != "auto",
        "--n-cpu-moe": settings.n_cpu_moe != "auto",
        "--override-tensor": bool(settings.override_tensor),
    }
    return next((flag for flag, is_set in flags.items() if is_set), "")
