"""The worker that answers questions.py. Native code is loaded for the questions that need it."""

from __future__ import annotations

import logging
import resource
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from edgelm.backends.llama.placement import Device, Wish
from edgelm.backends.questions import (
    BufferSizes,
    ChooseEngine,
    ChosenEngine,
    DescribeLlama,
    FindCuda,
    KeepCheck,
    LayOutContext,
    LlamaBuild,
    WriteRandomModel,
    Written,
)
from edgelm.base.machine.cuda import find_cuda
from edgelm.base.places import own_places
from edgelm.base.workers.child import Child, answer_requests
from edgelm.base.workers.messages import Predict

if TYPE_CHECKING:
    from edgelm.backends.llama.buffers import LlamaBuffers


def _choose(request: ChooseEngine, child: Child) -> None:
    from edgelm.backends.build import choose
    from edgelm.backends.model import open_heads, open_model
    from edgelm.backends.projectors import fitting_heads, names_heads

    with open_model(request.model) as model:
        draft = None if names_heads(request.draft) else request.draft
        beside = fitting_heads(request.settings, request.model, model.facts, request.draft)
        with open_heads(model, beside.path if beside else None) as drafting:
            choice = choose(drafting, request.settings, draft=draft)
        devices: tuple[Device, ...] = ()
        if choice.device == "gpu":
            from edgelm.backends.llama.devices import llama_devices

            devices = llama_devices(model.facts)
        rollback, heads = 0, False
        if choice.engine == "llama" and request.settings.drafts:
            from edgelm.backends.llama.build import may_use_heads, rollback_len

            facts, settings = model.facts, request.settings
            rollback = rollback_len(request.model, facts)
            if beside:
                facts = facts.with_heads(beside.facts)
            heads = may_use_heads(facts, settings, rollback, Wish.of(settings, devices))
    cuda = find_cuda() if choice.device == "cuda" else None
    found = (cuda, devices, rollback, heads)
    child.send(ChosenEngine(choice.engine, choice.device, choice.reasons, *found, choice.unused_gpu, choice.routes))


def _predict(request: Predict, child: Child) -> None:
    from edgelm.backends.build import predict

    logging.getLogger("llama.cpp").addHandler(logging.NullHandler())
    child.send(
        predict(
            request.model,
            request.settings,
            draft=request.draft,
            repack=request.repack,
            usable_bytes=request.usable_bytes,
            limited=request.limited,
            freed_gpu_bytes=request.freed_gpu_bytes,
            cuda_problem=request.cuda_problem,
        )
    )


def _describe_llama(_: DescribeLlama, child: Child) -> None:
    from edgelm.backends.llama.binding import BUILD, L, cpu_library, gpu_problem
    from edgelm.backends.llama.devices import llama_devices, weight_buffers

    devices = llama_devices()
    parts = [part.strip() for part in L.llama_print_system_info().decode().replace(" : ", " | ").split("|")]
    features = tuple(name for part in parts if (name := part.removesuffix(" = 1")) != part)
    version = L.llama_version().decode()
    child.send(LlamaBuild(version, features, devices, BUILD.label, str(cpu_library), weight_buffers(), gpu_problem))


def _write_random_model(request: WriteRandomModel, child: Child) -> None:
    from gguf import GGMLQuantizationType as Quant

    from edgelm.backends.llama.random_gguf import write_random_gguf

    write_random_gguf(request.path, layers=8, width=4096, ffn=12288, kv_heads=8, quants=(Quant.Q4_K,))
    child.send(Written())


def _keep_check(request: KeepCheck, child: Child) -> None:
    from edgelm.backends.model import open_heads, open_model
    from edgelm.backends.torch.kept_checks import keep_whole

    with open_model(request.model) as model, open_heads(model, request.heads) as drafting:
        keep_whole(drafting, request.settings, request.modes, own_places().cache, request.verdict)
    child.send(Written())


def _lay_out(request: LayOutContext, child: Child) -> None:
    buffers = _buffers(request.model, request.sequences, request.repack, request.rollback, request.heads)
    sizes = buffers(request.kv, request.context)
    child.send(BufferSizes(sizes.kv, sizes.compute))


@cache
def _buffers(path: Path, sequences: int, repack: bool, rollback: int, heads: Path | None) -> LlamaBuffers:
    from edgelm.backends.llama.buffers import LlamaBuffers
    from edgelm.checkpoints.gguf import open_gguf
    from edgelm.checkpoints.summary import model_summary

    logging.getLogger("llama.cpp").addHandler(logging.NullHandler())
    with open_gguf(path) as gguf:
        summary = model_summary(gguf)
        return LlamaBuffers(path, summary, sequences=sequences, repack=repack, rollback=rollback, heads=heads)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash here is an answer, not a thing to report
    answer_requests(
        {
            ChooseEngine: _choose,
            Predict: _predict,
            FindCuda: lambda _, child: child.send(find_cuda()),
            DescribeLlama: _describe_llama,
            LayOutContext: _lay_out,
            KeepCheck: _keep_check,
            WriteRandomModel: _write_random_model,
        }
    )
