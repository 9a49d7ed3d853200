"""The tensors of a GGUF for a folder with a BERT.

Owns the mapping of their names. Reads no numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from edgelm.base.errors import ModelError
from edgelm.checkpoints.encoder import EncoderConfig
from edgelm.making.conversion.layout import DOWNLOAD, Layout, wrong_size
from edgelm.making.conversion.number_types import Kind, Target, kind_for
from edgelm.making.conversion.reader import FolderReader
from edgelm.making.conversion.tensors import OutTensor, Part, Rows

WORDS, POSITIONS, TYPES = (f"embeddings.{name}_embeddings.weight" for name in ("word", "position", "token_type"))
PREFIX = re.compile(r"(?:bert|model)\.")  # before each name, by the class that saved it
NAMES = {  # of a layer: ours, llama.cpp's, and its rows and columns; 0: a norm
    "attention.self.query": ("attn_q", "width", "width"),
    "attention.self.key": ("attn_k", "width", "width"),
    "attention.self.value": ("attn_v", "width", "width"),
    "attention.output.dense": ("attn_output", "width", "width"),
    "attention.output.LayerNorm": ("attn_output_norm", "width", ""),
    "intermediate.dense": ("ffn_up", "inner", "width"),
    "output.dense": ("ffn_down", "width", "inner"),
    "output.LayerNorm": ("layer_output_norm", "width", ""),
}


def plan_encoder(config: EncoderConfig, reader: FolderReader, target: Target) -> Layout:
    """Return the tensors of the GGUF. Raises ModelError where a tensor is missing or has another size."""
    files = {_plain(name): name for name in reader.model.tensors}
    used: set[str] = set()

    def tensor(our: str, their: str, *shape: int, plain: bool = False) -> OutTensor:
        if our not in files:
            raise ModelError(f"the folder has no tensor {our}", DOWNLOAD)
        source = reader.tensor(files[our])
        if source.shape != shape:
            raise wrong_size(our, source.shape, " x ".join(map(str, shape)))
        used.add(files[our])
        kind = Kind.F32 if plain or len(shape) == 1 else kind_for(target, source.dtype.name, shape[-1])
        return OutTensor(their, shape, kind, Rows((Part(files[our], 0, shape[0]),)))

    def tensors() -> Iterator[OutTensor]:
        width = config.hidden_size
        sizes = {"width": width, "inner": config.inner_size}
        words = reader.tensor(files[WORDS]).shape if WORDS in files else ()
        yield tensor(WORDS, "token_embd.weight", max(words[0] if words else 0, config.num_tokens), width)
        # llama.cpp adds the rows of these two as they are
        yield tensor(POSITIONS, "position_embd.weight", config.context, width, plain=True)
        yield tensor(TYPES, "token_types.weight", config.num_types, width, plain=True)
        for part in ("weight", "bias"):
            yield tensor(f"embeddings.LayerNorm.{part}", f"token_embd_norm.{part}", width)
        for i in range(config.num_layers):
            for our, (their, rows, columns) in NAMES.items():
                shape = (sizes[rows], sizes[columns]) if columns else (sizes[rows],)
                yield tensor(f"encoder.layer.{i}.{our}.weight", f"blk.{i}.{their}.weight", *shape)
                yield tensor(f"encoder.layer.{i}.{our}.bias", f"blk.{i}.{their}.bias", sizes[rows])

    planned = tuple(tensors())
    left = sorted(set(files.values()) - used)
    for name in left:
        if re.match(r"encoder\.layer\.\d+\.", _plain(name)):
            raise ModelError(f"a BERT with a tensor {_plain(name)} cannot be converted")
    return Layout(planned, (), tuple(name for name in left if not name.endswith("embeddings.position_ids")))


def _plain(name: str) -> str:
    """Return a tensor's name without prefix, and with the newer names of a norm's numbers."""
    name = PREFIX.sub("", name, count=1) if PREFIX.match(name) else name
    return re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name))
