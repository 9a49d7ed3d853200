"""The details of a model, read from its files: tokenizer, chat template, licence, tensor types.

Owns the reading. Any file may be damaged, so every text is shortened and every number's type is checked. Loads no
weights, and does not know how the details are displayed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgelm.base.errors import ModelError
from edgelm.checkpoints.files import shown
from edgelm.checkpoints.folder import folder_facts
from edgelm.checkpoints.gguf import GGUF
from edgelm.checkpoints.gguf_parse import Array
from edgelm.checkpoints.json_scan import read_json
from edgelm.checkpoints.llama_checks import check_for_llama
from edgelm.checkpoints.recommended import folder_sampling, gguf_sampling
from edgelm.checkpoints.safetensors import Safetensors
from edgelm.checkpoints.summary import ModelSummary, model_summary, mtp_heads
from edgelm.checkpoints.values import is_integer
from edgelm.library.ollama_format import refuse_ollamas_own
from edgelm.models.config import folder_problem

MAX_TEXT = 200
MAX_TEMPLATE = 1_000_000
MAX_README = 65_536  # bytes that are searched for a licence
SPECIALS = ("bos", "eos", "eot", "eom", "unknown", "separator", "padding", "mask", "cls")
LICENCE = re.compile(r"^license(?:_name)?:[ \t]*['\"]?([\w.+ -]{1,80}?)['\"]?[ \t]*$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorTypes:
    """The totals of all tensors of one type."""

    type: str
    tensors: int
    parameters: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Details:
    """A model as `edgelm show` displays it. Texts are shortened and printable, except the template."""

    summary: ModelSummary
    tokenizer: str  # its kind, such as "gpt2 (qwen2)"; "" if unknown
    special_tokens: dict[str, str] = field(default_factory=dict)
    template: str | None = None
    licence: str | None = None
    tensor_types: tuple[TensorTypes, ...] = ()
    mtp_heads: int = 0  # layers that predict the tokens after the next one, which draft
    sampling: Mapping[str, float] = field(default_factory=dict)  # as the files recommend
    problem: str | None = None  # why it cannot be run although it can be read

    def document(self) -> dict[str, Any]:
        """Return the JSON document for scripts."""
        summary = self.summary
        return {
            "title": summary.name,
            "architecture": summary.architecture,
            "parameters": summary.parameters,
            "quantization": summary.quantization,
            "bytes": summary.nbytes,
            "context": summary.context,
            "kind": summary.kind,
            "layers": summary.layers,
            "width": summary.width,
            "heads": summary.heads,
            "kv_heads": max(summary.kv_heads, default=0),
            "sliding_window": summary.sliding_window,
            "kv_bytes_per_token": summary.kv_bytes_per_token,
            "tokenizer": {"kind": self.tokenizer, "tokens": summary.vocab_size, "special": self.special_tokens},
            "template": self.template,
            "licence": self.licence,
            "tensor_types": [
                {"type": row.type, "tensors": row.tensors, "parameters": row.parameters, "bytes": row.nbytes}
                for row in self.tensor_types
            ],
            "mtp_heads": self.mtp_heads,
            "sampling": dict(self.sampling),
            "problem": self.problem,
        }


def gguf_details(gguf: GGUF) -> Details:
    """Read an open GGUF. Raises ModelError if its metadata is impossible."""
    summary = model_summary(gguf)
    problem = None
    try:
        refuse_ollamas_own(gguf)
        check_for_llama(gguf)
    except ModelError as error:
        problem = str(error)
    kinds = [_text(gguf.metadata.get(f"tokenizer.ggml.{key}")) for key in ("model", "pre")]
    licence_id, licence_name = (_text(gguf.metadata.get(f"general.license{suffix}")) for suffix in ("", ".name"))
    template = gguf.metadata.get("tokenizer.chat_template")
    return Details(
        summary=summary,
        tokenizer=kinds[0] + (f" ({kinds[1]})" if kinds[0] and kinds[1] else ""),
        special_tokens=_special_tokens(gguf),
        template=template[:MAX_TEMPLATE] if isinstance(template, str) else None,
        licence=next((text for text in (licence_name, licence_id) if text and text != "other"), licence_id or None),
        tensor_types=_by_type((info.type.name, info.num_elements, info.nbytes) for info in gguf.tensors.values()),
        mtp_heads=mtp_heads(gguf, summary),
        sampling=gguf_sampling(gguf.metadata),
        problem=problem,
    )


def folder_details(model: Safetensors) -> Details:
    """Read an open folder of safetensors and its config files. Raises ModelError if they are impossible."""
    facts = folder_facts(model)
    config = _json(model.folder / "tokenizer_config.json")
    special = {
        name.removesuffix("_token"): text
        for name, value in config.items()
        if name.endswith("_token") and (text := _text(value.get("content") if isinstance(value, dict) else value))
    }
    return Details(
        summary=facts.summary,
        tokenizer=_text(config.get("tokenizer_class")),
        special_tokens=special,
        template=_folder_template(model.folder, config),
        licence=folder_licence(model.folder),
        problem=folder_problem(model.folder) or None,
        tensor_types=_by_type((info.dtype.name, info.num_elements, info.nbytes) for info in model.tensors.values()),
        mtp_heads=facts.mtp_heads,
        sampling=folder_sampling(model.folder),
    )


def _special_tokens(gguf: GGUF) -> dict[str, str]:
    tokens = gguf.metadata.get("tokenizer.ggml.tokens")
    special: dict[str, str] = {}
    for name in SPECIALS:
        token = gguf.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if isinstance(tokens, Array) and is_integer(token) and 0 <= token < len(tokens):
            special[name] = shown(str(tokens[token]))
    return special


def _folder_template(folder: Path, config: dict[str, Any]) -> str | None:
    try:
        with (folder / "chat_template.jinja").open("rb") as file:
            return file.read(MAX_TEMPLATE).decode("utf-8", "replace")
    except OSError:
        pass
    template = config.get("chat_template") or _json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):  # several, of which only "default" has no special purpose
        defaults = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = defaults[0].get("template") if defaults else None
    return template[:MAX_TEMPLATE] if isinstance(template, str) else None


def folder_licence(folder: Path) -> str | None:
    """Return the licence in the head of the README, which the hub's model card has too."""
    try:
        with (folder / "README.md").open("rb") as file:
            head = file.read(MAX_README).decode("utf-8", "replace")
    except OSError:
        return None
    front = head.partition("---\n")[2].partition("\n---")[0] if head.startswith("---") else ""
    names = LICENCE.findall(front)
    return next((name for name in reversed(names) if name != "other"), names[0] if names else None)


def _by_type(tensors: Iterable[tuple[str, int, int]]) -> tuple[TensorTypes, ...]:
    """Sum up tensors by their type, the type with the most bytes first."""
    sums: dict[str, list[int]] = {}
    for kind, elements, nbytes in tensors:
        totals = sums.setdefault(kind, [0, 0, 0])
        totals[0], totals[1], totals[2] = totals[0] + 1, totals[1] + elements, totals[2] + nbytes
    ordered = sorted(sums.items(), key=lambda item: -item[1][2])
    return tuple(TensorTypes(type=kind, tensors=n, parameters=p, nbytes=b) for kind, (n, p, b) in ordered)


def _json(path: Path) -> dict[str, Any]:
    """Return the object in a small JSON file, empty if the file is missing or unreadable."""
    try:
        return read_json(path)
    except ModelError:
        return {}


def _text(value: object) -> str:
    return shown(value.strip(), MAX_TEXT) if isinstance(value, str) else ""
