"""A model before and after loading: `OpenedModel` has its files and its header, `LoadedModel` an engine that runs.

Owns the difference between a GGUF and a folder of safetensors for the code that builds an engine, and what a file of
heads adds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgelm.base.errors import RequestError
from edgelm.base.workers.messages import Footprint
from edgelm.checkpoints.gguf import GGUF, open_gguf
from edgelm.checkpoints.llama_checks import check_for_llama
from edgelm.checkpoints.recommended import folder_sampling, gguf_sampling
from edgelm.checkpoints.summary import ModelFacts, ModelKind, model_facts
from edgelm.engine.core import PictureReader
from edgelm.engine.engine import Engine
from edgelm.library.ollama_format import refuse_ollamas_own
from edgelm.text.prompt_token_cache import PromptTokenCache
from edgelm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from edgelm.checkpoints.safetensors import Safetensors
    from edgelm.text.pairs import PairEncoder

_HINTS: dict[ModelKind, str] = {
    "text": "take a model for chats",
    "embedding": "take an embedding model",
    "rerank": "take a reranker, such as bge-reranker-v2-m3",
}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A running engine and its model's tokenizer. Close the engine before dropping it."""

    name: str
    engine: Engine
    tokenizer: Tokenizer
    prompt_tokens: PromptTokenCache  # save it when the engine ends
    footprint: Footprint | None = None  # its memory as it was planned
    kind: ModelKind = "text"
    pairs: PairEncoder | None = None  # of a model that ranks documents
    pictures: PictureReader | None = None  # of a model that sees
    unused_gpu: str = ""  # the line about a GPU that stands here and is not used (choice.py)
    sampling: Mapping[str, float] = field(default_factory=dict)  # as the model's files recommend

    def require(self, kind: ModelKind, asked: str = "") -> None:
        """Raise RequestError for a model of another kind; a model of text embeds, too.

        The error has the name that a client asked for: the title in the file may be another.
        """
        if kind == self.kind or (kind == "embedding" and self.kind == "text"):
            return
        does = {"text": "writes text", "embedding": "computes embeddings", "rerank": "ranks documents"}
        lacks = {"text": "writes no text", "embedding": "computes no embeddings", "rerank": "ranks no documents"}
        raise RequestError(f"{asked or self.name} {does[self.kind]} and {lacks[kind]}", _HINTS[kind])


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """The open files of a model: either `gguf` is set, or `folder` and `config` are."""

    path: Path
    facts: ModelFacts
    gguf: GGUF | None = None
    folder: Safetensors | None = None
    config: Mapping[str, Any] | None = None  # config.json of a folder
    heads: GGUF | None = None  # of a file beside it, which draft in the torch engine; `facts` counts them

    @property
    def name(self) -> str:
        return self.facts.summary.name

    @property
    def files(self) -> tuple[Path, ...]:
        return self.gguf.paths if self.gguf else self.folder.paths if self.folder else ()

    @property
    def sampling(self) -> Mapping[str, float]:
        """The sampling parameters that the files recommend."""
        if self.gguf:
            return gguf_sampling(self.gguf.metadata)
        return folder_sampling(self.folder.folder) if self.folder else {}

    @property
    def with_head(self) -> OpenedModel:
        """The files that have the head which predicts ahead: those of the heads, or its own."""
        return replace(self, gguf=self.heads, heads=None) if self.heads else self

    @property
    def llama_problem(self) -> str:
        """Why llama.cpp cannot run the model at all; empty: it may. Of a BERT it gets a GGUF that is made first."""
        if self.gguf:
            return ""
        from edgelm.checkpoints.encoder import is_encoder

        return "" if is_encoder(self.config or {}) else "llama.cpp does not read safetensors"

    def torch_problem(self, implementation: str = "reference") -> str:
        """Return why the torch engine cannot run the model with "reference" or "triton" ops; empty: it can.

        Call it only where torch is installed.
        """
        if self.facts.summary.kind == "rerank":
            return "the torch engine does not rank documents"
        from edgelm.models.config import folder_problem, unsupported_reason
        from edgelm.models.loading.decoder import unreadable_reason  # it imports torch

        if self.folder and (problem := folder_problem(self.folder.folder)):
            return problem

        weights = self.gguf or self.folder
        assert weights is not None
        metadata = self.gguf.metadata if self.gguf else self.config or {}
        return unsupported_reason(metadata, implementation) or unreadable_reason(weights, metadata) or ""


@contextmanager
def open_model(path: Path) -> Iterator[OpenedModel]:
    """Open a GGUF, or a folder or file of safetensors. Raises ModelError."""
    if path.is_dir() or path.name.endswith((".safetensors", ".safetensors.index.json")):
        from edgelm.checkpoints.config_json import read_config_json  # most models are GGUFs
        from edgelm.checkpoints.folder import folder_facts
        from edgelm.checkpoints.safetensors import open_safetensors

        with open_safetensors(path) as folder:
            yield OpenedModel(path, folder_facts(folder), folder=folder, config=read_config_json(folder.folder))
        return
    with open_gguf(path) as gguf:
        refuse_ollamas_own(gguf)
        check_for_llama(gguf)
        yield OpenedModel(path, model_facts(gguf), gguf=gguf)


@contextmanager
def open_heads(model: OpenedModel, heads: Path | None) -> Iterator[OpenedModel]:
    """Yield an open model with a file of its heads for the torch engine, where they read the model's own vocabulary."""
    if heads is None:
        yield model
        return
    with open_gguf(heads) as gguf:
        yield replace(model, heads=gguf, facts=model.facts.with_heads(model_facts(gguf), share_ends=True))
