"""Builds an engine with a GGUF that writes no text: an embedding model, or one that ranks documents.

Owns the limits of its inputs, and an executor that runs no step: all its work is that of the embedder.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from edgelm.backends.llama.binding import L
from edgelm.backends.llama.embedding import embedder_of
from edgelm.backends.llama.model import LlamaModel
from edgelm.backends.llama.tokenizer import LlamaTokenizer
from edgelm.backends.model import LoadedModel
from edgelm.base.errors import EdgeLMError, ModelError, RequestError
from edgelm.base.workers.messages import Footprint
from edgelm.checkpoints.summary import ModelFacts
from edgelm.engine.clock import StepClock
from edgelm.engine.core import CompletedSamples, ExecutorInfo, Masks, Step
from edgelm.engine.engine import Engine
from edgelm.engine.kv_slots import SlotKV
from edgelm.engine.scheduler import Scheduler
from edgelm.text.pairs import PairEncoder
from edgelm.text.prompt_token_cache import PromptTokenCache


def build_encoder(
    model: LlamaModel, facts: ModelFacts, context: int, threads: int, footprint: Footprint
) -> LoadedModel:
    """Start an engine with a loaded model, which it owns, for inputs of at most `context` tokens.

    Raises ModelError for a model without a vocabulary, and for one that ranks without a classifier.
    """
    summary = facts.summary
    try:
        if summary.kind == "rerank" and not any(tensor.name.startswith("cls.") for tensor in facts.tensors):
            message = f"{summary.name} has no classifier, so it cannot rank documents"
            raise ModelError(message, "take another conversion of the model")
        tokenizer = LlamaTokenizer.of_model(model.native, model)
    except EdgeLMError:
        model.close()
        raise
    rows = [tensor.shape[1] for tensor in facts.tensors if tensor.name == "position_embd.weight"]
    context = min([context, *rows])  # llama.cpp aborts behind the last position of a table
    executor, clock = EncoderExecutor(model, context), StepClock()
    scheduler = Scheduler(executor.info, SlotKV(executor.info, 0), clock, None)
    make_embedder = partial(embedder_of, model, facts, context, threads)
    engine = Engine(executor, scheduler, clock, make_embedder=make_embedder).start()
    pairs = None
    if summary.kind == "rerank":
        template = L.llama_model_chat_template(model.native, b"rerank")
        text = template.decode("utf-8", "replace") if template else None
        pairs = PairEncoder(tokenizer, text, tokenizer.pair_separator)
    return LoadedModel(summary.name, engine, tokenizer, PromptTokenCache(), footprint, summary.kind, pairs)


class EncoderExecutor:
    """The `Executor` of a model that writes no text: it has its limits, and owns its weights."""

    def __init__(self, model: LlamaModel, context: int) -> None:
        self._model = model
        self._info = ExecutorInfo(
            engine="llama",
            device=model.placement.describe(model.num_layers),
            num_vocab=model.num_vocab,
            context=context,
            capacity=context,
            max_tokens=context,
            max_rows=1,
            max_sequences=1,
            kv_bytes_per_token=0,
        )

    @property
    def info(self) -> ExecutorInfo:
        return self._info

    def forward(self, step: Step) -> None:
        """Refuse a step; there is none to run but for a request that should have been refused before."""
        raise RequestError("this model writes no text", "take a model for chats")

    def sample(self, step: Step, masks: Masks | None) -> CompletedSamples:
        raise AssertionError("no step succeeds")

    def logits(self, step: Step) -> NDArray[np.float32]:
        raise AssertionError("no step succeeds")

    def close(self) -> None:
        self._model.close()
