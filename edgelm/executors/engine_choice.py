"""Which engine runs a model, on which device, and why not the others.

Owns the rule of `--engine` and `--device` auto. Everything it decides by is an argument: what the settings say, what
the model is, what this machine has. Knows nothing of how an engine is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from edgelm.config import Settings
from edgelm.errors import EdgeLMError, ModelError
from edgelm.executors.cuda_state import INSTALL, CudaState

EngineName = Literal["torch", "llama"]
DeviceName = Literal["cuda", "gpu", "cpu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What the choice depends on beside the settings. A problem is a reason why not; empty: there is none."""

    model: str  # its name, for messages
    llama_problem: str = ""  # why llama.cpp cannot run this model, such as that it is a folder of safetensors
    torch_problem: str = ""  # why the torch engine cannot, such as an architecture that it does not know
    kernel_problem: str = ""  # why it can on the processor alone, such as heads that its kernels do not take
    fit_problem: str = ""  # why the model does not fit in the GPU's memory
    has_torch: bool = False
    has_offload: bool = False  # this build of llama.cpp can compute on a GPU
    cuda: CudaState


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """An engine, its device, and in one line each why the others were not taken."""

    engine: EngineName
    device: DeviceName
    reasons: tuple[str, ...] = ()


def choose_engine(settings: Settings, found: Situation) -> EngineChoice:
    """Choose as the settings say, and where they say auto: CUDA by our kernels, else llama.cpp.

    Raises ModelError where nothing can run the model, EdgeLMError where what was asked for is not there.
    """
    if settings.engine == "torch":
        return _torch(settings, found)
    if settings.engine == "llama":
        return _llama(settings, found, ())
    reasons = []
    if settings.device in ("auto", "cuda"):
        why = _cuda_problem(found) or _llamas_own(settings, found)
        if not why:
            return EngineChoice("torch", "cuda")
        reasons.append(f"CUDA is not used: {why}")
        if settings.device == "cuda":
            raise EdgeLMError(f"--device cuda: {why}", found.cuda.hint or "use --device auto")
    if not found.llama_problem:
        return _llama(settings, found, tuple(reasons))
    if found.torch_problem:
        raise ModelError(f"{found.model} cannot be run: {found.torch_problem}", "take a GGUF of the same model")
    if not found.has_torch:
        raise ModelError(
            f"{found.model} is a folder of safetensors, which needs torch",
            f"{INSTALL}, or take a GGUF of the same model",
        )
    if settings.device == "gpu":
        raise EdgeLMError("--device gpu is llama.cpp's own, which cannot run safetensors", "use --device auto")
    return EngineChoice("torch", "cpu", (*reasons, found.llama_problem))


def _torch(settings: Settings, found: Situation) -> EngineChoice:
    """Return what --engine torch means here."""
    if not found.has_torch:
        raise EdgeLMError("--engine torch needs torch, which is not installed", INSTALL)
    if found.torch_problem:
        hint = "use --engine llama" if not found.llama_problem else "take a GGUF of the same model"
        raise ModelError(f"{found.model} cannot be run with --engine torch: {found.torch_problem}", hint)
    if settings.device == "gpu":
        raise EdgeLMError("--device gpu is llama.cpp's own", "use --device cuda with --engine torch")
    if settings.gpu_layers != "auto":
        raise EdgeLMError("--gpu-layers is llama.cpp's: our kernels take a whole model", "leave it away")
    if settings.device == "cpu":
        return EngineChoice("torch", "cpu")
    why = found.cuda.problem or found.kernel_problem or found.fit_problem
    if not why:
        return EngineChoice("torch", "cuda")
    if why == found.fit_problem:
        raise EdgeLMError(f"--engine torch on CUDA: {why}", "lower --ctx, or use --engine llama")
    if settings.device == "cuda":
        raise EdgeLMError(f"--device cuda: {why}", found.cuda.hint or "use --device auto")
    return EngineChoice("torch", "cpu", (f"CUDA is not used: {why}",))


def _llama(settings: Settings, found: Situation, reasons: tuple[str, ...]) -> EngineChoice:
    if found.llama_problem:
        raise ModelError(
            f"{found.model}: {found.llama_problem}", "use --engine torch, or take a GGUF of the same model"
        )
    wanted = settings.device in ("gpu", "cuda") or settings.gpu_layers not in ("auto", "0")
    if wanted and not found.has_offload:
        raise EdgeLMError(
            "this build of llama.cpp computes on the processor only",
            "leave --device and --gpu-layers away, or reinstall llama-cpp-python with CUDA, Metal or Vulkan",
        )
    on_gpu = found.has_offload and settings.device != "cpu" and settings.gpu_layers != "0"
    return EngineChoice("llama", "gpu" if on_gpu else "cpu", reasons)


def _cuda_problem(found: Situation) -> str:
    return found.cuda.problem or found.torch_problem or found.kernel_problem or found.fit_problem


def _llamas_own(settings: Settings, found: Situation) -> str:
    """Return what was asked for that only llama.cpp has; a model that it cannot run is told so later."""
    if found.llama_problem or settings.device == "cuda":
        return ""
    if settings.draft is not None and settings.spec != "off":
        return "--draft is of llama.cpp's engine"
    return "--gpu-layers is llama.cpp's" if settings.gpu_layers != "auto" and found.has_offload else ""
