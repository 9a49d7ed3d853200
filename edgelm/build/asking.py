"""The choice of an engine, made in a child: for the commands that show it, which load no native code themselves.

    standard input     one line of JSON: {"model", "settings"}
    standard output    one line: {"engine", "device", "reasons", "cuda"}, or {"error", "hint"}

Owns that exchange.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from edgelm.build import choose
from edgelm.build.opened import open_model
from edgelm.config import Settings
from edgelm.errors import EdgeLMError
from edgelm.executors.cuda import find_cuda


def answer(path: Path, settings: Settings) -> dict[str, Any]:
    """Return the document of a choice; what the user must be told is in it too."""
    try:
        with open_model(path) as model:
            choice = choose(model, settings)
    except EdgeLMError as error:
        return {"error": error.message, "hint": error.hint}
    return asdict(choice) | {"cuda": asdict(find_cuda()) if choice.device == "cuda" else None}


if __name__ == "__main__":
    job = json.loads(sys.stdin.readline())
    json.dump(answer(Path(job["model"]), Settings(**job["settings"])), sys.stdout)
