"""All that a model's files say of it, for a person who looks at one: tokenizer, template, licence, tensor types.

Owns the reading. Any file may be damaged, so every text is cut and every number is asked for its type. Loads nothing,
and knows nothing of how it is shown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from edgelm.errors import ModelError
from edgelm.weights.checks import check_for_llama
from edgelm.weights.folder import folder_summary
from edgelm.weights.gguf import GGUF
from edgelm.weights.gguf_parse import Array
from edgelm.weights.json_scan import read_json
from edgelm.weights.mapped import shown
from edgelm.weights.safetensors import Safetensors
from edgelm.weights.shape import is_integer
from edgelm.weights.summary import ModelSummary, model_summary

MAX_TEXT = 200
MAX_TEMPLATE = 1_000_000
MAX_README = 65_536  # bytes in which a licence is looked for
SPECIALS = ("bos", "eos", "eot", "eom", "unknown", "separator", "padding", "mask", "cls")
LICENCE = re.compile(r"^license(?:_name)?:[ \t]*['\"]?([\w.+ -]{1,80}?)['\"]?[ \t]*$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorTypes:
    """The tensors of one type, all together."""

    type: str
    tensors: int
    parameters: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Details:
    """A model as `edgelm show` shows it. Texts are cut and printable, but for the template."""

    summary: ModelSummary
    tokenizer: str  # its kind, such as "gpt2 (qwen2)"; empty where the files do not say
    special_tokens: dict[str, str] = field(default_factory=dict)
    template: str | None = None
    licence: str | None = None
    tensor_types: tuple[TensorTypes, ...] = ()
    problem: str | None = None  # why it cannot be run, though it can be read

    def document(self) -> dict[str, Any]:
        """Return it as the JSON document that scripts read."""
        summary = self.summary
        return {
            "title": summary.name,
            "architecture": summary.architecture,
            "parameters": summary.parameters,
            "quantization": summary.quantization,
            "bytes": summary.nbytes,
            "context": summary.context,
            "layers": summary.layers,
            "width": summary.width,
            "heads": summary.heads,
            "kv_heads": max(summary.kv_heads, default=0),
            "sliding_window": summary.sliding_window,
            "kv_bytes_per_token": summary.kv_bytes_per_token,
            "tokenizer": {
                "kind": self.tokenizer,
                "tokens": summary.vocab_size,
                "special": self.special_tokens,
            },
            "template": self.template,
            "licence": self.licence,
            "tensor_types": [_renamed(asdict(each)) for each in self.tensor_types],
            "problem": self.problem,
        }


def gguf_details(gguf: GGUF) -> Details:
    """Read an open GGUF. Raises ModelError where its metadata cannot be true."""
    summary = model_summary(gguf)
    problem = None
    try:
        check_for_llama(gguf)
    except ModelError as error:
        problem = str(error)
    kinds = [_text(gguf.metadata.get(f"tokenizer.ggml.{key}")) for key in ("model", "pre")]
    licence = [_text(gguf.metadata.get(f"general.license{suffix}")) for suffix in ("", ".name")]
    template = gguf.metadata.get("tokenizer.chat_template")
    return Details(
        summary=summary,
        tokenizer=kinds[0] + (f" ({kinds[1]})" if kinds[0] and kinds[1] else ""),
        special_tokens=_special_tokens(gguf),
        template=template[:MAX_TEMPLATE] if isinstance(template, str) else None,
        licence=next((each for each in reversed(licence) if each and each != "other"), licence[0] or None),
        tensor_types=_by_type((each.type.name, each.num_elements, each.nbytes) for each in gguf.tensors.values()),
        problem=problem,
    )


def folder_details(model: Safetensors) -> Details:
    """Read an open folder of safetensors with the files beside. Raises ModelError where they cannot be true."""
    summary = folder_summary(model)
    config = _json(model.folder / "tokenizer_config.json")
    special = {
        name.removesuffix("_token"): text
        for name, value in config.items()
        if name.endswith("_token") and (text := _text(value.get("content") if isinstance(value, dict) else value))
    }
    return Details(
        summary=summary,
        tokenizer=_text(config.get("tokenizer_class")),
        special_tokens=special,
        template=_folder_template(model.folder, config),
        licence=_folder_licence(model.folder),
        tensor_types=_by_type((each.dtype.name, each.num_elements, each.nbytes) for each in model.tensors.values()),
    )


def _special_tokens(gguf: GGUF) -> dict[str, str]:
    tokens = gguf.metadata.get("tokenizer.ggml.tokens")
    found: dict[str, str] = {}
    for name in SPECIALS:
        token = gguf.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if isinstance(tokens, Array) and is_integer(token) and 0 <= token < len(tokens):
            found[name] = shown(str(tokens[token]))
    return found


def _folder_template(folder: Path, config: dict[str, Any]) -> str | None:
    try:
        with (folder / "chat_template.jinja").open("rb") as file:
            return file.read(MAX_TEMPLATE).decode("utf-8", "replace")
    except OSError:
        pass
    template = config.get("chat_template") or _json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):  # several: the one without a purpose of its own
        defaults = [each for each in template if isinstance(each, dict) and each.get("name") == "default"]
        template = defaults[0].get("template") if defaults else None
    return template[:MAX_TEMPLATE] if isinstance(template, str) else None


def _folder_licence(folder: Path) -> str | None:
    """Return what the head of the README says, as the hub has it."""
    try:
        with (folder / "README.md").open("rb") as file:
            head = file.read(MAX_README).decode("utf-8", "replace")
    except OSError:
        return None
    front = head.partition("---\n")[2].partition("\n---")[0] if head.startswith("---") else ""
    found = LICENCE.findall(front)
    return next((each for each in reversed(found) if each != "other"), found[0] if found else None)


def _by_type(tensors: Iterable[tuple[str, int, int]]) -> tuple[TensorTypes, ...]:
    """Sum up tensors by their type, the type with the most bytes first."""
    sums: dict[str, list[int]] = {}
    for kind, elements, nbytes in tensors:
        each = sums.setdefault(kind, [0, 0, 0])
        each[0], each[1], each[2] = each[0] + 1, each[1] + elements, each[2] + nbytes
    ordered = sorted(sums.items(), key=lambda item: -item[1][2])
    return tuple(TensorTypes(type=kind, tensors=n, parameters=p, nbytes=b) for kind, (n, p, b) in ordered)


def _json(path: Path) -> dict[str, Any]:
    """Return a small JSON file; an empty object where there is none, or none that can be read."""
    try:
        return read_json(path)
    except ModelError:
        return {}


def _text(value: object) -> str:
    return shown(value.strip(), MAX_TEXT) if isinstance(value, str) else ""


def _renamed(each: dict[str, Any]) -> dict[str, Any]:
    return {"bytes" if name == "nbytes" else name: value for name, value in each.items()}
