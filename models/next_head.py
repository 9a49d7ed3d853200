"""NextHead: one layer behind a model's last one, which predicts the token after the next one.

Owns what enters that layer: the embedding of a token and the model's hidden state of the position before it
(DeepSeek-V3, arXiv 2412.19437, section 2.2). Embedding and output are those of the model, unless its files have others.
Knows nothing of drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from edgelm.kernels.cache import LayerCache
from edgelm.kernels.embedding import embedding
from edgelm.kernels.matmul import Norm, matmul
from edgelm.kernels.norm import rms_norm
from edgelm.models.config import ModelConfig
from edgelm.models.decoder import Batch, Decoder, Linear, Weights


class Entrance(NamedTuple):
    """Joins an embedding and a hidden state."""

    embedding_norm: Norm
    hidden_norm: Norm
    joint: Linear  # [hidden_size, 2 * hidden_size]: the columns of the embedding first


class NextHead(Decoder):
    """A decoder of that one layer."""

    def __init__(
        self, config: ModelConfig, weights: Weights, entrance: Entrance, dtype: torch.dtype, implementation: str
    ) -> None:
        super().__init__(config, weights, dtype, implementation)
        self._entrance = entrance

    def predict(self, ids: Tensor, hidden: Tensor, batch: Batch, caches: Sequence[LayerCache]) -> Tensor:
        """Run token ids, int32 [tokens], beside hidden states, [tokens, hidden_size]; return the head's own.

        `logits` takes them, and so does `predict` for the next token. All have the type of the activations.
        """
        joined = embedding(ids, self.weights.embedding, implementation=self.implementation)
        sides = [
            rms_norm(side.float(), norm.weight, norm.eps, out_dtype=self.dtype, implementation=self.implementation)
            for side, norm in ((joined, self._entrance.embedding_norm), (hidden, self._entrance.hidden_norm))
        ]
        joint = self._entrance.joint
        x = torch.cat(sides, 1)
        residual = matmul(x, joint.weight, bias=joint.bias, out_dtype=torch.float32, implementation=self.implementation)
        return self._normed(self._through(residual, batch, caches), self.dtype)
