"""Builds an engine over our own kernels, from settings and an open model.

Owns the choices that need all parts: context and KV mode by the free memory, the dtype, and the tokenizer. A GGUF's
tokenizer is llama.cpp's; a folder's uses the library `tokenizers`.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch

from edgelm.backends.drafting import (
    NO_HEADS,
    heads_proof,
    measured_clock,
    ngram_drafter,
    require_same_vocabulary,
    throttled,
)
from edgelm.backends.model import LoadedModel, OpenedModel, open_model
from edgelm.backends.plan import DRAFT_KV, MIN_CONTEXT, SNAPSHOT_SHARE, MachineMemory, Option, Plan
from edgelm.backends.reports import LOGGED, Reports
from edgelm.backends.snapshot_files import PROMPT_TOKENS, Bounds, SnapshotFolder
from edgelm.backends.snapshots import SnapshotStore
from edgelm.backends.torch.block_states import FORMAT as STATE_FORMAT
from edgelm.backends.torch.embedding import TorchEmbedder
from edgelm.backends.torch.executor import MAX_ROWS, TorchExecutor, TorchOptions, device_name
from edgelm.backends.torch.failures import gpu_errors
from edgelm.backends.torch.kept_checks import verdict_for
from edgelm.backends.torch.memory import TorchPlan, capacity, may_use_head, plan_for_torch
from edgelm.base.config import Settings
from edgelm.base.errors import DeviceError, DoesNotFitError, EdgeLMError, ModelError, OutOfMemoryError
from edgelm.base.machine.cpu import usable_cores
from edgelm.base.machine.cuda import context_bytes, gpu_memory
from edgelm.base.machine.llama_build import extra_command
from edgelm.base.machine.memory import available_memory_bytes
from edgelm.base.places import Places, own_places
from edgelm.base.workers.messages import EngineJob
from edgelm.checkpoints.config_json import CONFIG
from edgelm.checkpoints.files import file_identity
from edgelm.checkpoints.gguf import GGUF
from edgelm.checkpoints.json_scan import read_json
from edgelm.engine.clock import StepClock
from edgelm.engine.core import Drafter, ExecutorInfo
from edgelm.engine.engine import Engine
from edgelm.engine.kv_paged import PagedKV
from edgelm.engine.scheduler import Scheduler
from edgelm.engine.speculation.model_drafter import ModelDrafter
from edgelm.engine.speculation.mtp_drafter import MtpDrafter
from edgelm.kernels.cache import BLOCK_LEN
from edgelm.kernels.choice import PDL, PLAIN_OPS
from edgelm.kernels.delta import RING
from edgelm.kernels.matmul import ROWS
from edgelm.kernels.tuning import TUNED
from edgelm.models.config import CONTEXT_FREE_ROPES, ModelConfig, read_config
from edgelm.models.decoder import Decoder
from edgelm.models.loading.decoder import load, load_next_head
from edgelm.models.loading.sources import FolderSource, GGUFSource, WeightSource
from edgelm.models.next_head import NextHead
from edgelm.text.prompt_token_cache import PromptTokenCache
from edgelm.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}
MAX_TEMPLATE_BYTES = 2**20
NO_MEMORY = "there is no memory for them"
OTHER_TOKENIZERS = ("tokenizer.model", "tekken.json", "tiktoken.model", "vocab.json")  # recognized, not supported


@gpu_errors()
def build_torch(
    model: OpenedModel, job: EngineJob, *, device: str, draft: Path | None, places: Places, reports: Reports
) -> LoadedModel:
    """Load the open model of a job on a device, "cuda" or "cpu", and start an engine over it.

    `draft` is a model that drafts. Raises ModelError for a model that is damaged, not supported or too large,
    DoesNotFitError if only loading shows it; EdgeLMError for a context that the model cannot have; EngineError where
    the device fails.
    """
    settings = job.settings
    if settings.repeatable and device == "cpu":
        raise EdgeLMError("the torch engine is repeatable with CUDA only", "take a GGUF, or omit --repeatable")
    torch.set_num_threads(settings.threads or usable_cores().physical)
    tokenizer = tokenizer_of(model)
    with open_model(draft) if draft else nullcontext() as small:
        _require_drafting(small)
        planned, sequences, step_tokens = _plan(model, small, job, device)
        option = planned.require()
        settings = replace(settings, parallel=sequences)
        if planned.note:
            reports.say(planned.note)
        if device == "cuda":
            for checked, mode in ((model, option.kv), (small, DRAFT_KV)):
                if checked:
                    check_ops(checked, settings, mode, reports.say)
        decoder = load_decoder(model, settings, device, option.context, reports)
        load_head = partial(_load_head, model, settings, decoder, planned, reports) if job.drafts else None
        folder = _snapshot_folder(job.prefixes, model, settings, decoder, option) if job.prefixes else None
        store = SnapshotStore(int(SNAPSHOT_SHARE * available_memory_bytes()), folder) if folder else None
        tuned = own_places().cache / TUNED if settings.tune else None
        executor = _executor(decoder, settings, option, model.name, step_tokens, tuned, store, reports, load_head)
        clock, drafter = StepClock(), None
        try:
            if job.drafts and settings.drafts:
                identity = _identity(model, settings, executor)
                reports.alive()
                clock = measured_clock(executor, settings, places, identity)
                drafters: dict[str, Drafter] = {}
                if settings.may_draft("ngram"):
                    drafters["ngram"] = ngram_drafter(tokenizer, settings, places, identity)
                if executor.heads:
                    drafters["mtp"] = MtpDrafter(executor.heads, clock.token_s)
                if small:
                    drafters["model"] = _load_draft_model(
                        small, settings, decoder, executor.info, tokenizer, clock, places, reports
                    )
                if drafters:
                    proof = heads_proof(places, identity, model.heads.path if model.heads else None)
                    drafter = throttled(drafters, clock, settings, proof)
                else:
                    _say_no_heads(model, settings, reports)
        except EdgeLMError:
            executor.close()
            raise
    shared_share = settings.prefix_cache_shared / 100
    paged = PagedKV(executor.info, executor.info.block_len, store, shared_share=shared_share)
    scheduler = Scheduler(executor.info, paged, clock, drafter)
    prompt_tokens = PromptTokenCache(folder.path / PROMPT_TOKENS if folder else None)
    summary = model.facts.summary
    make_embedder = partial(TorchEmbedder, decoder, summary.pooling, executor.info.context)
    engine = Engine(executor, scheduler, clock, make_embedder=make_embedder).start()
    return LoadedModel(model.name, engine, tokenizer, prompt_tokens, planned.footprint(device), summary.kind)


def _require_drafting(draft: OpenedModel | None) -> None:
    """Raise ModelError for a draft model that cannot go back to an earlier position."""
    if draft and draft.facts.state_bytes:
        message = f"{draft.name} cannot draft with the torch engine: its recurrent layers cannot go back"
        raise ModelError(message, "omit --draft: n-gram drafting is on")


def _plan(model: OpenedModel, draft: OpenedModel | None, job: EngineJob, device: str) -> TorchPlan:
    """Choose context and KV mode by the free memory of the device, and on the CPU by what the job may take."""
    free = gpu_memory()[0] if device == "cuda" else available_memory_bytes()
    limit = job.memory_bytes if device == "cpu" else None
    machine = MachineMemory(free_bytes=free, cores=usable_cores().physical, limit_bytes=limit)
    return plan_for_torch(
        model.facts,
        draft.facts if draft else None,
        job.settings,
        machine,
        device,
        context_bytes=context_bytes() if device == "cuda" else 0,
        least_context=job.least_context,
    )


def check_ops(model: OpenedModel, settings: Settings, mode: str, notify: Callable[[str], None] = log.info) -> None:
    """Check the ops of a model on this GPU, once; those that are wrong are plain torch in this process from then on.

    `mode` is that of the KV cache. Call it before anything is loaded: the check takes memory of the GPU for a while.
    Raises DeviceError where no kernel can run. `notify` takes lines of progress.
    """
    verdict = verdict_for(model, settings, mode, own_places().cache, notify)
    if verdict.problem:
        raise DeviceError(verdict.problem, verdict.hint)
    for reason in verdict.reasons:
        log.warning("%s", reason)
    PLAIN_OPS.update(verdict.wrong)


def load_decoder(
    model: OpenedModel, settings: Settings, device: str, context: int, reports: Reports = LOGGED
) -> Decoder:
    """Load the weights, for contexts of this length. Raises ModelError, EngineError where the device fails."""

    def watch(done: int) -> None:  # bytes
        if not reports.loaded(min(done / max(source.total_bytes, 1), 1.0)):
            raise ModelError(f"loading {model.name} was cancelled")

    config, source = weights_of(model, settings.quantize, watch)
    implementation = "triton" if device == "cuda" else "reference"
    try:
        with gpu_errors():
            return load(config, source, device, DTYPES[device], implementation, context=context)
    except OutOfMemoryError as error:
        if device == "cpu":
            raise DoesNotFitError(f"{model.name} does not fit in memory", "take a smaller model") from error
        hint = "take a smaller model, use --quantize int4, or --engine llama"
        raise DoesNotFitError(f"{model.name} does not fit in the memory of the GPU", hint) from error


def weights_of(
    model: OpenedModel, quantize: str = "off", progress: Callable[[int], None] = lambda _: None
) -> tuple[ModelConfig, WeightSource]:
    """Return the configuration and the tensors of an open model, quantized as --quantize says. Raises ModelError."""
    to: Literal["int4"] | None = "int4" if quantize == "int4" else None
    if model.gguf:
        return read_config(model.gguf.metadata), GGUFSource(model.gguf, quantize=to, progress=progress)
    assert model.folder is not None
    assert model.config is not None
    return read_config(model.config), FolderSource(model.folder, model.config, quantize=to, progress=progress)


def _load_head(
    model: OpenedModel, settings: Settings, decoder: Decoder, planned: Plan, reports: Reports
) -> NextHead | None:
    """Load the head that predicts the token after the next one, if it may draft; None: there is none to use."""
    if not may_use_head(model.facts, settings):
        return None
    own, reason = model.with_head, NO_MEMORY
    if planned.heads:
        try:
            with gpu_errors():
                return load_next_head(decoder, *weights_of(own, settings.quantize), planned.require().context)
        except (ModelError, OutOfMemoryError) as error:
            reason = error.message
    reports.say(f"the heads of {own.gguf.name if own.gguf else own.name} do not draft: {reason}")
    return None


def _say_no_heads(model: OpenedModel, settings: Settings, reports: Reports) -> None:
    """Say that a model has no heads. Of one whose head is left out, `_load_head` said the reason."""
    if not may_use_head(model.facts, settings):
        reports.say(NO_HEADS)


def _executor(
    decoder: Decoder,
    settings: Settings,
    option: Option,
    name: str,
    step_tokens: int,
    tuned: Path | None = None,
    store: SnapshotStore | None = None,
    reports: Reports = LOGGED,
    load_head: Callable[[], NextHead | None] | None = None,
) -> TorchExecutor:
    """Make the executor; if its memory cannot be allocated, retry without the head, then with half the context."""
    context = option.context
    head = load_head() if load_head else None  # no caller holds it: what is dropped here is free
    while (
        executor := _try_executor(
            decoder, settings, option.kv, context, step_tokens, tuned, store, reports, head, recomputes=True
        )
    ) is None:
        if head:
            head = None
            reports.say(f"the heads of {name} do not draft: {NO_MEMORY}")
            continue
        if (settings.ctx is not None and not settings.ctx_is_default) or context // 2 < MIN_CONTEXT:
            device = device_name(decoder.device)
            message = f"{name} and {context:,} tokens of context do not fit in the memory of {device}"
            raise DoesNotFitError(message, "lower --ctx, choose a smaller --kv, or use --engine llama")
        context //= 2
    return executor


def _try_executor(
    decoder: Decoder,
    settings: Settings,
    kv: str,
    context: int,
    step_tokens: int,
    tuned: Path | None,
    store: SnapshotStore | None = None,
    reports: Reports = LOGGED,
    head: NextHead | None = None,
    *,
    recomputes: bool = False,
) -> TorchExecutor | None:
    """Make an executor; None if its memory cannot be allocated. Raises EngineError for other failures."""
    options = TorchOptions(
        context=context,
        capacity=capacity(context, settings.parallel),
        kv=kv,
        max_sequences=settings.parallel,
        max_tokens=ROWS if settings.repeatable else step_tokens,
        max_rows=max(MAX_ROWS, settings.parallel),
        repeatable=settings.repeatable,
        graphs=settings.graphs and not PLAIN_OPS - {PDL},  # the plain version of an op may wait for the device
        tuned=tuned,
        recomputes=recomputes,
    )
    try:
        return TorchExecutor(decoder, options, store, reports, head)
    except OutOfMemoryError:
        return None


def _load_draft_model(
    draft: OpenedModel,
    settings: Settings,
    large: Decoder,
    info: ExecutorInfo,
    tokenizer: Tokenizer,
    clock: StepClock,
    places: Places,
    reports: Reports,
) -> ModelDrafter:
    """Load a draft model on the device of the large one, whose executor has `info`.

    Raises ModelError for a model that has another vocabulary, is damaged, or does not fit in memory.
    """
    require_same_vocabulary(tokenizer, tokenizer_of(draft), draft.name)
    context = min(info.context, draft.facts.summary.context or info.context)
    own = replace(reports, progress=None)  # the share is that of the large model
    decoder = load_decoder(draft, settings, large.device.type, context, own)
    tuned = places.cache / TUNED if settings.tune else None
    executor = _try_executor(decoder, settings, DRAFT_KV, context, info.max_tokens, tuned, reports=own)
    if executor is None:
        message = f"the draft model {draft.name} does not fit in the memory of {device_name(decoder.device)}"
        raise DoesNotFitError(message, "lower --ctx, or omit --draft")
    return ModelDrafter(executor, clock.token_s)


def _snapshot_folder(
    root: Path, model: OpenedModel, settings: Settings, decoder: Decoder, option: Option
) -> SnapshotFolder | None:
    """Return the folder of a model's snapshots; None where the settings forbid it, or the files cannot be read."""
    bounds = Bounds.of(settings)
    if not bounds.max_bytes:
        return None
    facts: list[object] = [STATE_FORMAT, device_name(decoder.device), option.kv, BLOCK_LEN, settings.quantize]
    if settings.repeatable:
        facts.append("repeatable")
    if any(layer.delta for layer in decoder.config.layers):
        facts.append((RING, decoder.dtype))  # of the inputs beside states
    if any(layer.rope and layer.rope.kind not in CONTEXT_FREE_ROPES for layer in decoder.config.layers):
        facts.append(option.context)
    digest = hashlib.blake2b(repr(facts).encode(), digest_size=16)
    try:
        for part in file_identity(_files(model)):
            digest.update(part)
    except OSError as error:
        log.warning("conversations are not kept on disk: %s", error)
        return None
    return SnapshotFolder(root, digest.digest(), bounds)


def _files(model: OpenedModel) -> list[Path]:
    """Return the files that the numbers of a model depend on."""
    return [*model.files, *([model.files[0].parent / CONFIG] if model.folder else [])]


def _identity(model: OpenedModel, settings: Settings, executor: TorchExecutor) -> bytes:
    """Return 16 bytes that identify the weights, the versions and the format of the KV cache. Raises ModelError."""
    info = executor.info
    digest = hashlib.blake2b(digest_size=16)
    digest.update(repr((torch.__version__, info.device, info.kv_bytes_per_token, settings.quantize)).encode())
    try:
        for part in file_identity(_files(model)):
            digest.update(part)
    except OSError as error:
        raise ModelError(f"{model.name} cannot be read any more: {error.strerror}", "try again") from None
    return digest.digest()


# -- the tokenizer -----------------------------------------------------------------------------------------------------


def tokenizer_of(model: OpenedModel) -> Tokenizer:
    """Return the tokenizer of an open model. Raises ModelError."""
    if model.gguf:
        return _gguf_tokenizer(model.gguf)
    assert model.folder is not None
    return tokenizer_of_folder(model.folder.folder, model.config or {})


def _gguf_tokenizer(gguf: GGUF) -> Tokenizer:
    from edgelm.backends.llama.api import start_backend  # native code, which a folder of safetensors does not need
    from edgelm.backends.llama.tokenizer import LlamaTokenizer

    start_backend()
    return LlamaTokenizer.from_file(gguf.path)


def tokenizer_of_folder(folder: Path, config: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer of a folder; `config` is its config.json. Raises ModelError."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        other = next((name for name in OTHER_TOKENIZERS if (folder / name).is_file()), None)
        if other is not None:
            raise ModelError(f"the model's folder has {other} and no tokenizer.json", "take a GGUF of the same model")
        raise ModelError("the model's folder has no tokenizer.json", "download all files of the model into one folder")
    _require_tokenizers()
    from edgelm.text.fast_tokenizer import FastTokenizer

    tokenizer_config = _read_optional(folder / "tokenizer_config.json")
    text_config = config.get("text_config")  # of a model that reads images too
    return FastTokenizer.of_folder(
        path,
        config=tokenizer_config,
        generation=_read_optional(folder / "generation_config.json"),
        model={**text_config, **config} if isinstance(text_config, Mapping) else config,
        chat_template=_chat_template(folder, tokenizer_config),
    )


def _require_tokenizers() -> None:
    """Raise ModelError without the package `tokenizers`: torch may be installed without edgelm's other extras."""
    if find_spec("tokenizers") is None:
        raise ModelError(
            "the model's tokenizer needs the package tokenizers, which is not installed", extra_command("cuda")
        )


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _chat_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """Return the chat template, from its own file or from the tokenizer's configuration; of several, the default."""
    path = folder / "chat_template.jinja"
    if path.is_file() and path.stat().st_size <= MAX_TEMPLATE_BYTES:
        return path.read_text(encoding="utf-8", errors="replace")
    template = _read_optional(folder / "chat_template.json").get("chat_template")
    template = template or tokenizer_config.get("chat_template")
    if isinstance(template, list):
        by_name = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = by_name.get("default") or next(iter(by_name.values()), None)
    return template if isinstance(template, str) else None
