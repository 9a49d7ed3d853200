"""TorchEmbedder: vectors by our own kernels, on the weights of a loaded decoder.

Owns a KV cache of its own, whose size follows the longest input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from edgelm.backends.pooling import CausalBatch, Piece
from edgelm.backends.torch.failures import gpu_errors
from edgelm.backends.torch.memory import STEP_TOKENS
from edgelm.base.errors import EngineError
from edgelm.base.machine.memory import available_memory_bytes
from edgelm.engine.core import EmbedderInfo, Pooling
from edgelm.kernels.attention import VERIFY_LEN
from edgelm.kernels.cache import BLOCK_LEN, FORMATS, LayerCache
from edgelm.kernels.delta import StateCache, state_bytes
from edgelm.models.decoder import Batch, Decoder

FIRST_SIZE = 512  # positions of the first cache
MAX_INPUTS = 64  # of a batch
STATEFUL_INPUTS = 4  # the same for models whose states take much memory
USABLE = 0.9  # of the free memory
KV = "f16"  # the format: its numbers are not quantized


@dataclass(frozen=True, slots=True)
class _Places:
    """Where the inputs of a batch lie: their blocks follow each other."""

    first_blocks: tuple[int, ...]
    num_blocks: tuple[int, ...]


class TorchEmbedder:
    """An `Embedder` over a decoder, which stays the executor's."""

    def __init__(self, decoder: Decoder, pooling: Pooling, context: int) -> None:
        self._decoder: Decoder | None = decoder
        self._pooling = pooling
        self._device = decoder.device
        self._caches: list[LayerCache | StateCache] = []
        self._size = 0  # blocks
        self._places = _Places((), ())
        max_inputs = STATEFUL_INPUTS if any(layer.delta for layer in decoder.config.layers) else MAX_INPUTS
        self._info = EmbedderInfo(width=decoder.config.hidden_size, context=context, max_inputs=max_inputs)

    @property
    def info(self) -> EmbedderInfo:
        return self._info

    def begin(self, inputs: Sequence[Sequence[int]]) -> CausalBatch:
        assert self._decoder is not None, "the embedder is closed"
        assert all(0 < len(tokens) <= self._info.context for tokens in inputs)
        assert all(0 <= min(tokens) <= max(tokens) < self._decoder.vocab_size for tokens in inputs)
        counts = [-(-len(tokens) // BLOCK_LEN) for tokens in inputs]
        firsts = np.cumsum([0, *counts[:-1]]).tolist()
        self._make_room(sum(counts))
        self._places = _Places(tuple(firsts), tuple(counts))
        max_piece = STEP_TOKENS[self._device.type]
        return CausalBatch(inputs, self._info.width, self._pooling, max_piece, self._run)

    def close(self) -> None:
        self._decoder, self._caches, self._size = None, [], 0

    def _run(self, pieces: Sequence[Piece]) -> NDArray[np.float32]:
        """Run pieces; return the hidden states of their tokens. Raises EngineError."""
        assert self._decoder is not None
        ids = [token for piece in pieces for token in piece.tokens]
        lengths = [len(piece.tokens) for piece in pieces]
        ends = [piece.start + len(piece.tokens) for piece in pieces]
        firsts = [self._places.first_blocks[piece.seq] for piece in pieces]
        positions = np.concatenate([np.arange(piece.start, end) for piece, end in zip(pieces, ends, strict=True)])
        slots = positions + BLOCK_LEN * np.repeat(firsts, lengths)
        width = max(self._places.num_blocks[piece.seq] for piece in pieces)
        tables = np.minimum(np.array(firsts)[:, None] + np.arange(width), self._size - 1)

        def tensor(values: object, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.as_tensor(np.asarray(values), dtype=dtype).to(self._device)

        with gpu_errors(), torch.inference_mode():
            batch = Batch(
                positions=tensor(positions),
                slot_mapping=tensor(slots, torch.int64),
                block_tables=tensor(tables),
                query_start_loc=tensor(np.cumsum([0, *lengths])),
                seq_lens=tensor(ends),
                max_query_len=max(lengths),
                only_prompts=min(lengths) > VERIFY_LEN,
                states=tensor([(piece.seq, piece.start, end) for piece, end in zip(pieces, ends, strict=True)]),
            )
            hidden: NDArray[np.float32] = self._decoder.forward(tensor(ids), batch, self._caches).cpu().numpy()
        return hidden

    def _make_room(self, num_blocks: int) -> None:
        """Allocate a cache for a batch, unless the one that exists is large enough. Raises EngineError."""
        assert self._decoder is not None
        if num_blocks <= self._size:
            return
        self._caches, self._size = [], 0
        size = FIRST_SIZE // BLOCK_LEN
        while size < num_blocks:
            size *= 2
        layers = self._decoder.config.layers
        dtype = torch.float16 if self._device.type == "cuda" else torch.float32
        numbers = sum(layer.num_kv_heads * layer.head_dim for layer in layers)
        states = sum(state_bytes(layer.delta, dtype) for layer in layers if layer.delta)
        needed = size * BLOCK_LEN * numbers * 2 * dtype.itemsize + self._info.max_inputs * states
        if self._device.type == "cpu" and (free := available_memory_bytes()) * USABLE < needed:
            raise EngineError(
                f"embeddings of {num_blocks * BLOCK_LEN:,} tokens need {needed / 2**30:.2f} GiB of memory, "
                f"{free / 2**30:.2f} GiB are free",
                "send shorter texts, or close other programs",
            )
        with gpu_errors():
            self._caches = self._decoder.new_caches(FORMATS[KV], size, self._info.max_inputs, dtype)
        self._size = size
