"""The worker that reads model files for `edgelm list`, `edgelm show` and the front, which stay safe from damaged files.

A file that is cut short while it is mapped kills this process (SIGBUS); library/readers.py then starts another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgelm.base.config import Settings
from edgelm.base.errors import EdgeLMError, ModelError
from edgelm.base.machine.cpu import usable_cores
from edgelm.base.machine.gpu import has_torch
from edgelm.base.machine.llama_build import extra_command
from edgelm.base.machine.memory import available_memory_bytes
from edgelm.base.workers.child import answer_requests
from edgelm.checkpoints.config_json import CONFIG
from edgelm.checkpoints.encoder import is_encoder_folder
from edgelm.checkpoints.files import cannot_open
from edgelm.checkpoints.folder import folder_facts, folder_summary
from edgelm.checkpoints.gguf import GGUF, open_gguf
from edgelm.checkpoints.llama_checks import require_model
from edgelm.checkpoints.safetensors import Safetensors, open_safetensors
from edgelm.checkpoints.summary import ModelFacts, ModelSummary, model_facts, model_summary
from edgelm.library.ollama_format import refuse_ollamas_own
from edgelm.library.readers import Answer, Card, Contents, Describe, Detail
from edgelm.models.config import folder_problem

if TYPE_CHECKING:
    from edgelm.backends.plan import EngineMemory
    from edgelm.library.details import Details

SAMPLE_BYTES = 256  # of each tensor, in its middle
MAX_HEAD_BYTES = 2**28
BESIDE = (CONFIG, "tokenizer.json")  # of a folder: they decide how its weights compute


def describe(path: Path) -> dict[str, Any]:
    """Return the description of a model for `/v1/models` and `edgelm list`, or the error of opening it.

    `problem` says why no engine can run it, as far as its headers tell.
    """
    try:
        summary, problem = summarize(path)
    except ModelError as error:
        return {"error": str(error)}
    return {
        "bytes": summary.nbytes,
        "context": summary.context,
        "architecture": summary.architecture,
        "quantization": summary.quantization,
        "parameters": summary.parameters,
        "kind": summary.kind,
        **({"problem": problem} if problem else {}),
    }


def summarize(path: Path) -> tuple[ModelSummary, str]:
    """Read the header of a GGUF, or those of a folder of safetensors. Raises ModelError."""
    if path.is_dir():
        with open_safetensors(path) as model:
            return folder_summary(model), folder_problem(path)
    with open_gguf(path) as gguf:
        return model_summary(gguf), _not_a_model(gguf)


def _not_a_model(gguf: GGUF) -> str:
    try:
        refuse_ollamas_own(gguf)
    except ModelError as error:
        return f"{error.message}: {error.hint}"
    try:
        require_model(gguf)
    except ModelError as error:
        return error.message
    return ""


def read_details(path: Path, settings: Settings) -> dict[str, Any]:
    """Return the document of a model, or `{"error": …}`; the content of a file never raises."""
    # `edgelm list` needs none of this, and its imports take time; so below.
    from edgelm.library.details import folder_details, gguf_details

    try:
        if path.is_dir():
            with open_safetensors(path) as model:
                details = folder_details(model)
                encoder = is_encoder_folder(path)
                if not has_torch() and not encoder:
                    details = replace(
                        details, problem=f"safetensors need torch, which is not installed; {extra_command('cuda')}"
                    )
                memory = None if details.problem else _folder_memory(model, settings, by_llama=encoder)
                identity = content_identity(model)
            document = {"format": "safetensors", "memory": memory, "identity": identity}
            return details.document() | document | {"projector": None, "heads": None}
        with open_gguf(path) as gguf:
            details = gguf_details(gguf)
            memory = None if details.problem else _gguf_memory(gguf, settings)
            identity = content_identity(gguf)
        document = {"format": "gguf", "memory": memory, "identity": identity}
        beside = {"projector": _projector(path, settings, details.summary), "heads": _heads(path, settings)}
        return details.document() | document | beside
    except ModelError as error:
        return {"error": str(error)}


def _projector(path: Path, settings: Settings, summary: ModelSummary) -> dict[str, Any] | None:
    """Return what the projector of a model is, or why it cannot be used; None: the model has none."""
    from edgelm.backends.projectors import fitting_projector  # as above

    problems: list[str] = []
    try:
        if (projector := fitting_projector(settings, path, summary, problems.append)) is not None:
            return projector.document()
    except ModelError as error:
        problems.append(error.message)
    return {"error": problems[0]} if problems else None


def _heads(path: Path, settings: Settings) -> dict[str, Any] | None:
    """Return what the file of a model's heads is, or why it cannot be used; None: there is none beside it."""
    from edgelm.backends.projectors import heads_beside  # as above

    problems: list[str] = []
    if heads := heads_beside(settings, path, problems.append):
        summary = heads.facts.summary
        return {"path": str(heads.path), "quantization": summary.quantization, "bytes": summary.nbytes}
    return {"error": problems[0]} if problems else None


def read_contents(path: Path) -> dict[str, Any]:
    """Return identity, size and types of a model, or `{"error": …}`."""
    from edgelm.library.details import folder_details, gguf_details  # as above

    try:
        if path.is_dir():
            with open_safetensors(path) as model:
                return _contents(folder_details(model), content_identity(model))
        with open_gguf(path) as gguf:
            return _contents(gguf_details(gguf), content_identity(gguf))
    except ModelError as error:
        return {"error": str(error)}


def _contents(details: Details, identity: str) -> dict[str, Any]:
    summary = details.summary
    return {
        "identity": identity,
        "bytes": summary.nbytes,
        "parameters": summary.parameters,
        "types": {row.type: row.nbytes for row in details.tensor_types},
    }


def read_card(path: Path) -> dict[str, Any]:
    """Return a model's card for other programs, or `{"error": …}`."""
    from edgelm.library.card import folder_card, gguf_card  # as above

    try:
        if path.is_dir():
            with open_safetensors(path) as model:
                return folder_card(model)
        with open_gguf(path) as gguf:
            return gguf_card(gguf)
    except ModelError as error:
        return {"error": str(error)}


def content_identity(model: GGUF | Safetensors) -> str:
    """Return the identity of an open model by its content, in hexadecimal: a copy and another date have the same one.

    The head of each file counts, and a sample of each tensor, since another training or quantization changes every
    tensor that it touches: a model of gigabytes takes milliseconds. Raises ModelError where a file cannot be read.
    """
    digest = hashlib.sha256()
    places: dict[Path, list[tuple[int, int]]] = {path: [] for path in model.paths}
    for tensor in model.tensors.values():
        places[tensor.path].append((tensor.offset, tensor.nbytes))
    try:
        for path in model.paths:
            for part in _samples(path, places[path]):
                digest.update(len(part).to_bytes(8, "little") + part)
        if isinstance(model, Safetensors):
            for path in (model.folder / name for name in BESIDE):
                digest.update(path.read_bytes() if path.is_file() else b"")
    except OSError as error:
        raise cannot_open(model.name, error) from None
    return digest.hexdigest()


def _samples(path: Path, places: list[tuple[int, int]]) -> Iterator[bytes]:
    """Yield the size of a file, all that is before its first tensor, and the samples."""
    with path.open("rb") as file:
        yield str(path.stat().st_size).encode()
        yield file.read(min([*(offset for offset, _ in places), MAX_HEAD_BYTES]))
        for offset, nbytes in sorted(places):
            file.seek(offset + max(nbytes - SAMPLE_BYTES, 0) // 2)
            yield file.read(min(nbytes, SAMPLE_BYTES))


def _gguf_memory(gguf: GGUF, settings: Settings) -> dict[str, Any]:
    try:
        return _llama_memory(model_facts(gguf), settings)
    except EdgeLMError as error:
        return {"error": str(error)}


def _llama_memory(facts: ModelFacts, settings: Settings) -> dict[str, Any]:
    from edgelm.backends.llama.memory import LlamaMemory

    return _planned(facts, settings, LlamaMemory(facts, sequences=settings.parallel))


def _folder_memory(model: Safetensors, settings: Settings, *, by_llama: bool) -> dict[str, Any]:
    from edgelm.backends.torch.memory import TorchMemory

    try:
        facts = folder_facts(model)
        if by_llama:
            return _llama_memory(facts, settings)
        engine = TorchMemory(facts, sequences=settings.parallel, device="cpu", quantize=settings.quantize)
        return _planned(facts, settings, engine)
    except EdgeLMError as error:
        return {"error": str(error)}


def _planned(facts: ModelFacts, settings: Settings, engine: EngineMemory) -> dict[str, Any]:
    """Return the memory plan by formulas only; `edgelm plan` asks llama.cpp too."""
    from edgelm.backends.plan import MachineMemory, plan

    here = MachineMemory(free_bytes=available_memory_bytes(), cores=usable_cores().physical)
    result = plan(facts, settings, here, engine)
    chosen = result.chosen
    if chosen is None:
        return {"error": str(result.refusal), "free_bytes": here.free_bytes}
    return {
        "context": chosen.context,
        "kv": chosen.kv,
        "weights_bytes": result.weights.resident,
        "kv_bytes": chosen.kv_bytes,
        "workspace_bytes": chosen.workspace_bytes,
        "total_bytes": chosen.total_bytes,
        "free_bytes": here.free_bytes,
    }


def main() -> None:
    """Answer the requests of library/readers.py."""
    answer_requests(
        {
            Describe: lambda request, child: child.send(Answer(describe(request.path))),
            Contents: lambda request, child: child.send(Answer(read_contents(request.path))),
            Card: lambda request, child: child.send(Answer(read_card(request.path))),
            Detail: lambda request, child: child.send(Answer(read_details(request.path, request.settings))),
        }
    )


if __name__ == "__main__":
    main()
