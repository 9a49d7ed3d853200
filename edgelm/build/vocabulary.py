"""The tokenizer of a model for the torch engine, from whatever its files are.

Owns the choice: a GGUF's by llama.cpp where that is installed, a folder's by the `tokenizers` library; and which of a
folder's files says what.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from edgelm.errors import ModelError
from edgelm.executors.cuda_state import INSTALL
from edgelm.text.tokenizer import Tokenizer
from edgelm.weights.gguf import GGUF
from edgelm.weights.gguf_parse import Array
from edgelm.weights.json_scan import read_json

MAX_TEMPLATE_BYTES = 2**20
OTHER_TOKENIZERS = ("tokenizer.model", "tekken.json", "tiktoken.model", "vocab.json")  # that are not read


def tokenizer_of_gguf(gguf: GGUF) -> Tokenizer:
    """Return the tokenizer of an open GGUF. Raises ModelError for a vocabulary that cannot be read."""
    if find_spec("llama_cpp") is not None:
        from edgelm.executors.llama_api import start_backend  # native code, which is not on every machine
        from edgelm.text.tokenizer import LlamaTokenizer

        start_backend()
        return LlamaTokenizer.from_file(gguf.path)
    _require_tokenizers()
    from edgelm.text.gguf_tokenizer import gguf_tokenizer

    fields = {key: list(value) if isinstance(value, Array) else value for key, value in gguf.metadata.items()}
    return gguf_tokenizer(fields)


def tokenizer_of_folder(folder: Path, model: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer of a folder whose config.json is `model`. Raises ModelError."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        other = next((name for name in OTHER_TOKENIZERS if (folder / name).is_file()), None)
        if other is not None:
            raise ModelError(f"the model's folder has {other} and no tokenizer.json", "take a GGUF of the same model")
        raise ModelError("the model's folder has no tokenizer.json", "download all files of the model into one folder")
    _require_tokenizers()
    from edgelm.text.fast_tokenizer import FastTokenizer

    config = _optional(folder / "tokenizer_config.json")
    return FastTokenizer.of_folder(
        path,
        config=config,
        generation=_optional(folder / "generation_config.json"),
        model=_of_text(model),
        chat_template=_chat_template(folder, config),
    )


def _require_tokenizers() -> None:
    """Raise ModelError where the library is not there: torch may have been installed without what is beside it."""
    if find_spec("tokenizers") is None:
        raise ModelError("the model's tokenizer needs the package tokenizers, which is not installed", INSTALL)


def _of_text(model: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a configuration with the fields of its text part, where a model reads pictures as well."""
    part = model.get("text_config")
    return {**part, **model} if isinstance(part, Mapping) else model


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return the template: of its own file, or of the configuration, where several have names."""
    path = folder / "chat_template.jinja"
    if path.is_file() and path.stat().st_size <= MAX_TEMPLATE_BYTES:
        return path.read_text(encoding="utf-8", errors="replace")
    template = _optional(folder / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(template, list):
        named = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
        template = named.get("default") or next(iter(named.values()), None)
    return template if isinstance(template, str) else None
