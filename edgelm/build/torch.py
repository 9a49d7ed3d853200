"""An engine over our own kernels, from settings and an open model.

Owns the choices that need all sides: context and KV mode by the memory that is free, the dtype, the tokenizer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import torch

from edgelm.build.loaded import Loaded
from edgelm.build.opened import OpenedModel
from edgelm.build.vocabulary import tokenizer_of_folder, tokenizer_of_gguf
from edgelm.config import Places, Settings
from edgelm.core import Drafter
from edgelm.drafting import guarded, measured_clock, ngram_drafter
from edgelm.engine.clock import StepClock
from edgelm.engine.engine import Engine
from edgelm.engine.paged import PagedKV
from edgelm.engine.scheduler import Scheduler
from edgelm.errors import EdgeLMError, ModelError
from edgelm.executors.cores import usable_cores
from edgelm.executors.file_identity import file_identity
from edgelm.executors.memory import available_memory_bytes
from edgelm.executors.torch import MAX_ROWS, OutOfMemoryError, TorchExecutor, TorchOptions, device_name
from edgelm.executors.torch_memory import STEP_TOKENS, TorchMemory, capacity
from edgelm.library.plan import MachineMemory, Option, plan
from edgelm.models.config import read_config
from edgelm.models.decoder import Decoder
from edgelm.models.load import load
from edgelm.text.known_chats import KnownChats
from edgelm.text.tokenizer import Tokenizer
from edgelm.weights.folder_config import CONFIG
from edgelm.weights.sources import FolderSource, GGUFSource

LEAST_CONTEXT = 512  # below, a model that does not fit is refused
DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}


def build_torch(
    model: OpenedModel,
    settings: Settings,
    *,
    device: str,
    least_context: int = 0,
    progress: Callable[[float], bool] | None = None,
    places: Places | None = None,
) -> Loaded:
    """Load an open model on a device, "cuda" or "cpu", and start an engine over it.

    Raises ModelError for what is damaged, not supported or does not fit; EdgeLMError for a context that the model
    cannot have, and for settings that are llama.cpp's alone.
    """
    if settings.draft is not None and settings.spec != "off":
        raise EdgeLMError(
            "--draft is of llama.cpp's engine", "leave it away: n-gram drafting is on, or use --engine llama"
        )
    torch.set_num_threads(settings.threads or usable_cores().physical)
    tokenizer = tokenizer_of(model)
    option = _choose(model, settings, device, least_context)
    decoder = load_decoder(model, settings, device, option.context, progress)
    executor = _executor(decoder, settings, option, model.name, places)
    try:
        clock, drafter = StepClock(), None
        if places and settings.spec != "off":
            clock, drafter = _drafting(executor, model, tokenizer, settings, places)
    except EdgeLMError:
        executor.close()
        raise
    scheduler = Scheduler(executor.info, PagedKV(executor.info, executor.info.block_len), clock, drafter)
    return Loaded(model.name, Engine(executor, scheduler, clock).start(), tokenizer, KnownChats(None))


def tokenizer_of(model: OpenedModel) -> Tokenizer:
    """Return the tokenizer of an open model. Raises ModelError."""
    if model.gguf:
        return tokenizer_of_gguf(model.gguf)
    assert model.folder is not None
    return tokenizer_of_folder(model.folder.folder, model.config or {})


def _choose(model: OpenedModel, settings: Settings, device: str, least_context: int) -> Option:
    """Choose context and KV mode by what is free on the device."""
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else available_memory_bytes()
    memory = TorchMemory(model.facts, sequences=settings.parallel, device=device, quantize=settings.quantize)
    machine = MachineMemory(free_bytes=free, cores=usable_cores().physical)
    return plan(model.facts, settings, machine, memory, least_context=least_context).require()


def load_decoder(
    model: OpenedModel,
    settings: Settings,
    device: str,
    context: int,
    progress: Callable[[float], bool] | None = None,
) -> Decoder:
    """Load the weights for contexts of that length; `progress` returns False to cancel. Raises ModelError."""
    quantize: Literal["int4"] | None = "int4" if settings.quantize == "int4" else None

    def watch(done: int) -> None:  # bytes
        if progress and not progress(min(done / max(source.total_bytes, 1), 1.0)):
            raise ModelError(f"loading {model.name} was cancelled")

    source: GGUFSource | FolderSource
    if model.gguf:
        config, source = read_config(model.gguf.metadata), GGUFSource(model.gguf, quantize=quantize, progress=watch)
    else:
        assert model.folder is not None
        assert model.config is not None
        config = read_config(model.config)
        source = FolderSource(model.folder, model.config, quantize=quantize, progress=watch)
    implementation = "triton" if device == "cuda" else "reference"
    try:
        return load(config, source, device, DTYPES[device], implementation, context=context)
    except torch.OutOfMemoryError:
        hint = "take a smaller model, use --quantize int4, or --engine llama"
        raise ModelError(f"{model.name} does not fit in the memory of the GPU", hint) from None


def _executor(
    decoder: Decoder, settings: Settings, option: Option, name: str, places: Places | None = None
) -> TorchExecutor:
    """Make the executor; where its memory is not there after all, with half the context until it is."""
    context = option.context
    tuned = places.cache / "kernels" if places else None
    while (executor := _try_executor(decoder, settings, option.kv, context, tuned)) is None:
        if settings.ctx is not None or context // 2 < LEAST_CONTEXT:
            device = device_name(decoder.device)
            message = f"{name} and {context:,} tokens of context do not fit in the memory of {device}"
            raise ModelError(message, "lower --ctx, choose a smaller --kv, or use --engine llama")
        context //= 2
    return executor


def _try_executor(
    decoder: Decoder, settings: Settings, kv: str, context: int, tuned: Path | None
) -> TorchExecutor | None:
    """Make an executor; None: there is no memory for it. Raises EngineError for what less memory would not help."""
    options = TorchOptions(
        context=context,
        capacity=capacity(context, settings.parallel),
        kv=kv,
        max_sequences=settings.parallel,
        max_tokens=STEP_TOKENS[decoder.device.type],
        max_rows=max(MAX_ROWS, settings.parallel),
        graphs=settings.graphs,
        tuned=tuned,
    )
    try:
        return TorchExecutor(decoder, options)
    except OutOfMemoryError:
        return None


def _drafting(
    executor: TorchExecutor, model: OpenedModel, tokenizer: Tokenizer, settings: Settings, places: Places
) -> tuple[StepClock, Drafter]:
    """Return what drafting needs: a clock that knows what rows cost, and the drafter."""
    files = [*model.files, *([model.files[0].parent / CONFIG] if model.folder else [])]
    try:
        identity = _identity(files, settings, executor)
    except OSError as error:
        raise ModelError(f"{model.name} cannot be read any more: {error.strerror}", "try again") from None
    clock = measured_clock(executor, settings, places, identity)
    return clock, guarded([ngram_drafter(tokenizer, settings, places, identity)], clock, settings)


def _identity(files: Sequence[Path], settings: Settings, executor: TorchExecutor) -> bytes:
    """Return 16 bytes that stand for the weights, the versions and how keys and values are stored."""
    info = executor.info
    digest = hashlib.blake2b(digest_size=16)
    digest.update(repr((torch.__version__, info.device, info.kv_bytes_per_token, settings.quantize)).encode())
    for part in file_identity(files):
        digest.update(part)
    return digest.digest()
