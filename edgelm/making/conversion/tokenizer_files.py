"""The files of a folder that describe its tokenizer, read and checked as far as every vocabulary needs them.

Owns their names, the limits of their sizes, and which chat template holds. Knows nothing of GGUF.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgelm.base.errors import ModelError
from edgelm.base.macos_files import is_macos_file
from edgelm.checkpoints.config_json import CONFIG
from edgelm.checkpoints.files import DOWNLOAD, map_file, shown
from edgelm.checkpoints.json_scan import read_json
from edgelm.checkpoints.quantization import file_exists

TOKENIZER, PIECES = "tokenizer.json", "tokenizer.model"
SETTINGS, GENERATION = "tokenizer_config.json", "generation_config.json"
TEMPLATE, OLD_TEMPLATE = "chat_template.jinja", "chat_template.json"
EXTRA_TEMPLATES = "additional_chat_templates"
NAMES = (TOKENIZER, PIECES, SETTINGS, GENERATION, TEMPLATE, OLD_TEMPLATE)
MAX_BYTES = 2**26  # of one file; real ones have up to 35 MB
MAX_TEMPLATE_BYTES = 2**20
OTHERS = ("tekken.json", "vocab.txt", "spiece.model", "qwen.tiktoken", "vocab.json")


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The contents of the files; empty for those that are missing."""

    tokenizer: Mapping[str, Any] = field(default_factory=dict)  # tokenizer.json
    pieces: bytes = b""  # tokenizer.model
    config: Mapping[str, Any] = field(default_factory=dict)  # tokenizer_config.json
    generation: Mapping[str, Any] = field(default_factory=dict)  # generation_config.json
    model: Mapping[str, Any] = field(default_factory=dict)  # config.json
    templates: Mapping[str, str] = field(default_factory=dict)  # of chats, by name; "default" is the usual one

    def section(self, name: str) -> Mapping[str, Any]:
        """Return an object of tokenizer.json, empty where it is null. Raises ModelError."""
        value = self.tokenizer.get(name)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise damaged(f"{name} is no object")
        return value


def read_tokenizer_files(folder: Path) -> TokenizerFiles:
    """Read the files of a folder. Raises ModelError where there is no tokenizer, or one that is damaged."""
    tokenizer = _large_json(folder / TOKENIZER) if file_exists(folder / TOKENIZER) else {}
    pieces = _bytes(folder / PIECES) if file_exists(folder / PIECES) else b""
    if not tokenizer and not pieces:
        other = next((name for name in OTHERS if file_exists(folder / name)), "")
        has = f"has {other} and no {TOKENIZER}" if other else f"has no {TOKENIZER}"
        raise ModelError(f"the folder {shown(folder.name)} {has}", "download all files of the model into one folder")
    config = _optional(folder / SETTINGS)
    return TokenizerFiles(
        tokenizer=tokenizer,
        pieces=pieces,
        config=config,
        generation=_optional(folder / GENERATION),
        model=_model_values(_optional(folder / CONFIG)),
        templates=dict(_templates(folder, config)),
    )


def tokenizer_paths(folder: Path) -> list[Path]:
    """Return the files of a folder that are read here."""
    paths = [folder / name for name in NAMES]
    return [path for path in (*paths, *_extra_templates(folder)) if path.is_file()]


def _extra_templates(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / EXTRA_TEMPLATES).glob("*.jinja") if not is_macos_file(path.name))


def damaged(reason: str) -> ModelError:
    """Return the error for a tokenizer.json that cannot be true."""
    return ModelError(f"{TOKENIZER} is damaged: {reason}", DOWNLOAD)


def _templates(folder: Path, config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the chat templates by name: a file of its own holds before the tokenizer's configuration."""
    own = folder / TEMPLATE
    if file_exists(own):
        yield "default", _text(own)
        for path in _extra_templates(folder):
            yield path.stem, _text(path)
        return
    template = _optional(folder / OLD_TEMPLATE).get("chat_template") or config.get("chat_template")
    if isinstance(template, str):
        yield "default", template
    for entry in template if isinstance(template, list) else ():
        if isinstance(entry, Mapping) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str):
            yield entry["name"], entry["template"]


def _model_values(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return config.json with the part that describes the language model on top."""
    text = config.get("text_config")
    return {**config, **{key: value for key, value in text.items() if value is not None}} if text else config


def _optional(path: Path) -> Mapping[str, Any]:
    return read_json(path) if file_exists(path) else {}


def _large_json(path: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(_bytes(path))
    except (ValueError, RecursionError):
        raise damaged("it is not valid JSON") from None
    if not isinstance(value, dict):
        raise damaged("it is not a JSON object")
    return value


def _text(path: Path) -> str:
    return _bytes(path, MAX_TEMPLATE_BYTES).decode("utf-8", "replace")


def _bytes(path: Path, limit: int = MAX_BYTES) -> bytes:
    with map_file(path, "a folder with the files of a model") as mapped:
        if len(mapped) > limit:
            raise ModelError(f"{shown(path.name)} is {len(mapped):,} bytes long, but the limit is {limit:,}", DOWNLOAD)
        return bytes(mapped)
