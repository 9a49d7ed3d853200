"""What models are, read from their headers in a process of its own: the front stays free of numpy and of bad files.

    python -m edgelm.library.describe    standard input: a JSON list of paths; standard output: one JSON object a path

Owns that exchange. The reading is done by weights/summary.py and weights/folder.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from edgelm.errors import ModelError
from edgelm.weights.folder import folder_summary
from edgelm.weights.gguf import open_gguf
from edgelm.weights.safetensors import open_safetensors
from edgelm.weights.summary import ModelSummary, model_summary


def main() -> None:
    """Describe the models whose paths standard input names, one line each, in order."""
    for path in json.load(sys.stdin):
        sys.stdout.write(json.dumps(describe(Path(path))) + "\n")
        sys.stdout.flush()  # what was read stays, if the next file kills us


def describe(path: Path) -> dict[str, Any]:
    """Return what `/v1/models` and `edgelm list` show of a model, or the error that opening it gives."""
    try:
        summary = summarize(path)
    except ModelError as error:
        return {"error": str(error)}
    return {
        "bytes": summary.nbytes,
        "context": summary.context,
        "architecture": summary.architecture,
        "quantization": summary.quantization,
        "parameters": summary.parameters,
    }


def summarize(path: Path) -> ModelSummary:
    """Read the header of a GGUF, or those of a folder of safetensors. Raises ModelError."""
    if path.is_dir():
        with open_safetensors(path) as model:
            return folder_summary(model)
    with open_gguf(path) as gguf:
        return model_summary(gguf)


if __name__ == "__main__":
    main()
