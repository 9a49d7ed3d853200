"""The folder's own logits and tokens, to judge a converted file by: the torch engine on the processor.

Imports torch; check.py calls it only where that is installed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from edgelm.backends.model import OpenedModel
from edgelm.backends.torch.build import load_decoder, tokenizer_of_folder
from edgelm.backends.torch.executor import TorchExecutor, TorchOptions
from edgelm.base.config import Settings
from edgelm.base.errors import EdgeLMError
from edgelm.checkpoints.config_json import read_config_json
from edgelm.checkpoints.folder import folder_facts
from edgelm.checkpoints.safetensors import Safetensors
from edgelm.evaluation.evaluate import run_tokens
from edgelm.making.conversion.convert import Source
from edgelm.making.conversion.number_types import STORED, rounded, to_float32
from edgelm.making.conversion.reader import Change, spans
from edgelm.text.tokenizer import Tokenizer

TEXTS = (
    "Hello, world!",
    " two  spaces   and\ttabs\n\n and lines \r\n",
    "It's 3.14159, isn't it? We'LL see: 1234567 items",
    "Äpfel, naïve café, Ωμέγα, привет, 你好 世界, こんにちは, 한국어, שלום",
    "🚀 emoji 👩\u200d👩\u200d👧 and \u00a0 spaces",
    "def f(x):\n    return {'a': [x ** 2, -1]}  # comment\n",
    "<s>[INST] a user's text </s> <|im_end|>",
    "",
    "a",
    " ",
)


class _Changed(Safetensors):
    """The tensors of a folder after a change of their rows, in their own types."""

    def __init__(self, model: Safetensors, change: Change) -> None:
        self.__dict__.update(model.__dict__)
        self._change = change

    def tensor_bytes(self, name: str) -> memoryview:
        tensor, kind = self.tensors[name], STORED.get(self.tensors[name].dtype.name)
        raw = super().tensor_bytes(name)
        if kind is None or tensor.dtype.name == "F64" or not tensor.num_elements:
            return raw
        columns = tensor.shape[-1] if len(tensor.shape) > 1 else 1
        rows = np.frombuffer(raw, tensor.dtype.numpy).reshape(-1, columns)
        data = bytearray()
        for first, count in spans(len(rows), columns):
            values = self._change(name, to_float32(rows[first : first + count], tensor.dtype.name), first)
            data += rounded(np.ascontiguousarray(values, np.float32), kind).tobytes()
        return memoryview(bytes(data))


def folder_logits(source: Source, tokens: Sequence[int], context: int, threads: int) -> NDArray[np.float32]:
    """Return the folder's logits of all tokens [tokens, vocabulary], for a cache of so many positions."""
    torch.set_num_threads(threads)
    model = source.reader.model
    if source.reader.change:
        model = _Changed(model, source.reader.change)
    config = _as_llama_computes(read_config_json(source.folder))
    opened = OpenedModel(source.folder, folder_facts(model), folder=model, config=config)
    decoder = load_decoder(opened, Settings(), "cpu", context)
    options = TorchOptions(
        context=context, capacity=context, max_sequences=1, max_tokens=context, max_rows=len(tokens), graphs=False
    )
    executor = TorchExecutor(decoder, options)
    try:
        return run_tokens(executor, tokens)
    finally:
        executor.close()


def tokenizer_notes(source: Source, tokenizer: Tokenizer) -> list[str]:
    """Return a note if llama.cpp splits a text otherwise than the folder's tokenizer, where that can be loaded."""
    if find_spec("tokenizers") is None:
        return []
    try:
        own = tokenizer_of_folder(source.folder, read_config_json(source.folder))
        different = [text for text in TEXTS if _ids(own, text) != _ids(tokenizer, text)]
    except EdgeLMError as error:
        return [f"the folder's tokenizer was not compared: {error.message}"]
    if not different:
        return []
    return [
        f"llama.cpp splits {len(different)} of {len(TEXTS)} test texts in another way, such as {different[0][:40]!r}"
    ]


def _ids(tokenizer: Tokenizer, text: str) -> list[int] | None:
    """Return the tokens of a text; None: the vocabulary cannot write it."""
    try:
        return tokenizer.encode(text, special=False, bos=True)
    except EdgeLMError:
        return None


def _as_llama_computes(config: dict[str, Any]) -> Mapping[str, Any]:
    """Return a configuration with the one simplification of llama.cpp: YaRN's ramp ends at whole dimensions."""
    changed = dict(config)
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(rope := config.get(name), Mapping) and "truncate" in rope:
            changed[name] = {**rope, "truncate": True}
    return changed
