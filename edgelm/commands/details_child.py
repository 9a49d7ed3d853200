"""The child process of `edgelm show`: reads one model wholly, and plans its memory.

    standard input     a JSON list of {"path", "settings"}
    standard output    one line of JSON for each

Owns that exchange. A file that kills it (SIGBUS) or that is damaged costs a line, nothing more.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from edgelm.config import Settings
from edgelm.errors import EdgeLMError, ModelError
from edgelm.executors.cores import usable_cores
from edgelm.executors.llama_memory import LlamaMemory
from edgelm.executors.memory import available_memory_bytes
from edgelm.library.details import folder_details, gguf_details
from edgelm.library.plan import MachineMemory, plan
from edgelm.weights.facts import model_facts
from edgelm.weights.gguf import GGUF, open_gguf
from edgelm.weights.safetensors import open_safetensors


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
            return details.document() | {"format": "safetensors", "memory": None}
        with open_gguf(path) as gguf:
            details = gguf_details(gguf)
            memory = None if details.problem else _memory(gguf, settings)
        return details.document() | {"format": "gguf", "memory": memory}
    except ModelError as error:
        return {"error": str(error)}


def _memory(gguf: GGUF, settings: Settings) -> dict[str, Any]:
    """Return what the model will take here, by formulas alone: `edgelm plan` asks llama.cpp as well."""
    here = MachineMemory(free_bytes=available_memory_bytes(), cores=usable_cores().physical)
    try:
        facts = model_facts(gguf)
        found = plan(facts, settings, here, LlamaMemory(facts, sequences=settings.parallel))
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
