"""The card of a model, read from its headers, for other programs: what it can do, its template, its metadata.

Owns the names of the capabilities, which are Ollama's. Loads no weights.
"""

from __future__ import annotations

import math
from typing import Any

from edgelm.checkpoints.gguf import GGUF
from edgelm.checkpoints.gguf_parse import Array
from edgelm.checkpoints.safetensors import Safetensors
from edgelm.library.details import MAX_TEXT, Details, folder_details, gguf_details
from edgelm.text.fim import find_marks
from edgelm.text.reasoning import find_reasoning

HIDDEN = ("tokenizer.ggml.", "tokenizer.chat_template")  # of the metadata: large


def gguf_card(gguf: GGUF) -> dict[str, Any]:
    """Return the card of an open GGUF. Raises ModelError if its metadata is impossible."""
    details = gguf_details(gguf)
    tokens = gguf.metadata.get("tokenizer.ggml.tokens")
    strings = {str(token) for token in tokens} if isinstance(tokens, Array) else set()
    info = {
        name: value[:MAX_TEXT] if isinstance(value, str) else value
        for name, value in gguf.metadata.items()
        if not name.startswith(HIDDEN) and _is_plain(value)
    }
    return _card(details, strings) | {"model_info": info | {"general.parameter_count": details.summary.parameters}}


def folder_card(model: Safetensors) -> dict[str, Any]:
    """Return the card of an open folder of safetensors. Raises ModelError if its config is impossible."""
    details = folder_details(model)
    summary = details.summary
    kind = summary.architecture
    return _card(details, set()) | {
        "model_info": {
            "general.architecture": kind,
            "general.parameter_count": summary.parameters,
            f"{kind}.context_length": summary.context,
            f"{kind}.embedding_length": summary.width,
            f"{kind}.block_count": summary.layers,
            f"{kind}.attention.head_count": summary.heads,
        }
    }


def _card(details: Details, strings: set[str]) -> dict[str, Any]:
    """Return the part of a card that both formats have."""
    template = details.template or ""
    if details.summary.kind != "text":
        capabilities: list[str] = [details.summary.kind]
    else:
        # A model that was not trained to call tools gets their description and a grammar: it needs a template.
        capabilities = ["completion", *(["tools"] if template else [])]
        capabilities += ["thinking"] if find_reasoning(template) else []
        capabilities += ["insert"] if find_marks(strings) else []
    return {
        "template": details.template,
        "licence": details.licence,
        "special": details.special_tokens,
        "context": details.summary.context,
        "capabilities": capabilities,
    }


def _is_plain(value: object) -> bool:
    return isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))
