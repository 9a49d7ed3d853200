"""The child process of `edgelm show`: reads one model wholly, and plans its memory.

    standard input     a JSON list of {"path", "settings"}
    standard output    one line of JSON for each

Owns that exchange. A file that kills it (SIGBUS) or that is damaged costs a line, nothing more.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgelm.config import Settings
from edgelm.errors import EdgeLMError, ModelError
from edgelm.executors.cores import usable_cores
from edgelm.executors.cuda_state import INSTALL, has_torch
from edgelm.executors.llama_memory import LlamaMemory
from edgelm.executors.memory import available_memory_bytes
from edgelm.executors.torch_memory import TorchMemory
from edgelm.library.details import folder_details, gguf_details
from edgelm.library.plan import EngineMemory, MachineMemory, plan
from edgelm.weights.facts import ModelFacts, folder_facts, model_facts
from edgelm.weights.gguf import GGUF, open_gguf
from edgelm.weights.safetensors import Safetensors, open_safetensors


def main() -> None:
    """Answer each entry of the list on standard input, in order."""
    for job in json.load(sys.stdin):
        sys.stdout.write(json.dumps(read_details(Path(job["path"]), Settings(**job["settings"]))) + "\n")
        sys.stdout.flush()


def read_details(path: Path, settings: Settings) -> dict[str, Any]:
    """Return the document of a model, or `{"error": …}`; never raises for what is in a file."""
    try:
        if path.is_dir():
            with open_safetensors(path) as model:
                details = folder_details(model)
                if not has_torch():
                    details = replace(details, problem=f"safetensors need torch, which is not installed; {INSTALL}")
                memory = None if details.problem else _folder_memory(model, settings)
            return details.document() | {"format": "safetensors", "memory": memory}
        with open_gguf(path) as gguf:
            details = gguf_details(gguf)
            memory = None if details.problem else _memory(gguf, settings)
        return details.document() | {"format": "gguf", "memory": memory}
    except ModelError as error:
        return {"error": str(error)}


def _memory(gguf: GGUF, settings: Settings) -> dict[str, Any]:
    """Return what the model will take here, by formulas alone: `edgelm plan` asks llama.cpp as well."""
    return _planned(settings, lambda: model_facts(gguf), lambda facts: LlamaMemory(facts, sequences=settings.parallel))


def _folder_memory(model: Safetensors, settings: Settings) -> dict[str, Any]:
    """Return what the model will take in the torch engine, on the processor."""
    return _planned(
        settings,
        lambda: folder_facts(model),
        lambda facts: TorchMemory(facts, sequences=settings.parallel, device="cpu", quantize=settings.quantize),
    )


def _planned(
    settings: Settings, read: Callable[[], ModelFacts], engine: Callable[[ModelFacts], EngineMemory]
) -> dict[str, Any]:
    here = MachineMemory(free_bytes=available_memory_bytes(), cores=usable_cores().physical)
    try:
        facts = read()
        found = plan(facts, settings, here, engine(facts))
    except EdgeLMError as error:
        return {"error": str(error)}
    if found.chosen is None:
        return {"error": str(found.refusal), "free_bytes": here.free_bytes}
    chosen = found.chosen
    return {
        "context": chosen.context,
        "kv": chosen.kv,
        "weights_bytes": found.weights.resident,
        "kv_bytes": chosen.kv_bytes,
        "workspace_bytes": chosen.workspace_bytes,
        "total_bytes": chosen.total_bytes,
        "free_bytes": here.free_bytes,
    }


if __name__ == "__main__":
    main()
