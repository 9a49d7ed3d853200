"""BERT in a folder of safetensors, such as all-MiniLM, BGE and E5: its values, checked.

Owns which of them llama.cpp computes, and the reason against each other one. Its vocabulary is in
making/conversion/wordpiece.py. Knows nothing of tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgelm.base.errors import ModelError
from edgelm.checkpoints.config_json import CONFIG, decoder_values, folder_shape, vocab_size
from edgelm.checkpoints.json_scan import read_json
from edgelm.checkpoints.quantization import file_exists
from edgelm.checkpoints.values import Values, described
from edgelm.engine.core import Pooling

BERT = "bert"  # its model_type, and its architecture in a GGUF
# encoders with another tokenizer or other layers; a GGUF of one may run
OTHERS = frozenset(
    "albert camembert deberta deberta-v2 distilbert electra eurobert mpnet modernbert neobert new nomic_bert roberta "
    "xlm-roberta".split()
)
POOLING = "1_Pooling/config.json"
POOLING_MODES: dict[str, Pooling] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}
GELU = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_python")  # llama.cpp has one table for them
CLASSIFIER = re.compile(r"For(?:Sequence|Token)Classification|ForQuestionAnswering|ForMultipleChoice")
_MODULE = re.compile(r"\d_(\w{1,40})")  # the folder of one, such as 2_Dense
_KNOWN_MODULES = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """A BERT."""

    num_layers: int
    hidden_size: int
    num_heads: int
    inner_size: int  # of the feed-forward network
    context: int
    norm_eps: float
    num_types: int  # of tokens, by the text of a pair that they are in
    num_tokens: int
    pooling: Pooling


def is_encoder(config: Mapping[str, Any]) -> bool:
    """Tell by a config.json whether a model is a BERT."""
    return config.get("model_type") == BERT


def is_encoder_folder(folder: Path) -> bool:
    """Tell whether a folder holds a BERT; False where it cannot be read."""
    try:
        return is_encoder(read_json(folder / CONFIG))
    except ModelError:
        return False


def other_encoder(config: Mapping[str, Any]) -> str:
    """Return why an encoder that is no BERT is not run from its folder; empty: it is none."""
    kind = config.get("model_type")
    is_other = isinstance(kind, str) and kind in OTHERS
    return f"of encoders, edgelm runs only BERT from a folder, and this is {kind}" if is_other else ""


def encoder_config(folder: Path, config: Mapping[str, Any]) -> EncoderConfig:
    """Return the values of a BERT. Raises ModelError for one that llama.cpp would compute in another way."""
    values = decoder_values(config)
    refuse_encoder(values)
    if module := other_module(folder):
        raise ModelError(f"its vectors pass through the module {module}, which llama.cpp does not have")
    shape = folder_shape(values)
    if shape.hidden_size % max(shape.num_heads):
        raise values.damaged(f"{shape.hidden_size:,} numbers are no multiple of {max(shape.num_heads)} heads")
    return EncoderConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_heads=max(shape.num_heads),
        inner_size=values.integer("intermediate_size", low=1),
        context=shape.context,
        norm_eps=values.number("layer_norm_eps"),
        num_types=values.integer("type_vocab_size", low=1),
        num_tokens=vocab_size(values),
        pooling=folder_pooling(folder) or "mean",  # as sentence-transformers does without a module for it
    )


def refuse_encoder(values: Values) -> None:
    """Raise ModelError for a BERT that llama.cpp would compute in another way, by its config.json alone."""
    if reason := next(_refusals(values), ""):
        raise ModelError(f"llama.cpp cannot compute this BERT: {reason}", "choose another embedding model")


def folder_pooling(folder: Path) -> Pooling | None:
    """Return how a folder states that its vectors are made; None: it does not. Raises ModelError for another way."""
    if not file_exists(folder / POOLING):
        return None
    document = read_json(folder / POOLING)
    stated = [key for key, value in document.items() if key.startswith("pooling_mode_") and value is True]
    if len(stated) == 1 and stated[0] in POOLING_MODES:
        return POOLING_MODES[stated[0]]
    modes = " and ".join(key.removeprefix("pooling_mode_") for key in stated[:4]) or "none that is known"
    raise ModelError(f"its vectors are pooled by {modes}, which edgelm does not do", "choose another model")


def other_module(folder: Path) -> str:
    """Return a module of sentence-transformers that changes vectors after the pooling; empty: there is none."""
    modules = (match for child in sorted(folder.iterdir()) if (match := _MODULE.fullmatch(child.name)))
    return next((match[1] for match in modules if match[1] not in _KNOWN_MODULES), "")


def _refusals(values: Values) -> Iterator[str]:
    if (activation := values.get("hidden_act")) not in GELU:
        yield f"its activation is {described(activation)}, and there it is gelu"
    if (kind := values.get("position_embedding_type")) not in (None, "absolute"):
        yield f"its positions are {described(kind)}, and there they are absolute"
    if values.get("is_decoder") is True or values.get("add_cross_attention") is True:
        yield "it is a decoder"
    classes = values.get("architectures")
    name = classes[0] if isinstance(classes, list) and classes else ""
    if isinstance(name, str) and CLASSIFIER.search(name):
        yield f"it is a classifier ({name[:40]})"
