"""The gated delta net: linear attention whose memory of a sequence is one matrix for each head.

Owns the op's signature and the choice of its implementation; `states.py` owns the memory of states. Knows nothing of
models or of who fills the states. With S = 0 before the first token, and c the short causal convolution of the
projections, with SiLU:

    q, k = c(q) / |c(q)| / sqrt(key_dim), c(k) / |c(k)|        v = c(v)
    S    = exp(decay * softplus(alpha + bias)) * S
    S    = S + k (sigmoid(beta) * (v - S^T k))^T
    out  = S^T q

A state is what a sequence needs to go on from a position: S behind it, and the last inputs. Drafted tokens may be
rejected, and S cannot go back. So a step says up to which position it moves S: not beyond the tokens that are certain.
The next step computes the accepted tokens behind that again, from their kept inputs, in the same order and with the
same numbers. That is one state a sequence instead of one for each drafted token, and a step reads and writes it once.
"""

from __future__ import annotations

from torch import Tensor

from edgelm.kernels.choice import dispatch
from edgelm.kernels.delta import reference
from edgelm.kernels.delta.states import RING, StateCache, allocate, state_bytes
from edgelm.kernels.delta_sizes import DELTA_DIMS, DeltaSizes

__all__ = ["RING", "StateCache", "allocate", "gated_delta", "state_bytes"]


def gated_delta(
    qkv: Tensor,
    beta: Tensor,
    alpha: Tensor,
    conv: Tensor,
    decay: Tensor,
    bias: Tensor,
    cache: StateCache,
    spans: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    max_query_len: int,
    implementation: str | None = None,
) -> Tensor:
    """Return the result of each head and row: float32 [tokens, num_value_heads, value_dim].

    qkv: [tokens, channels], beta and alpha: [tokens, num_value_heads], each with contiguous rows. conv: float32
    [channels, window], the weight of the newest token last. decay: float32 [num_value_heads], negative; bias the same.
    spans: int32 [sequences, 3]: a sequence's slot, the position of its state, and the position up to which this step
    moves it, which is at most the last one of its rows; with more than 16 rows, it is the last one, and the state is at
    the first. A state at position 0 is not read. query_start_loc, seq_lens, max_query_len and rows outside of all
    sequences: as for `attention`.

    A row depends neither on later rows nor on other sequences, bit for bit, nor on how the tokens before it were
    divided into steps, as long as none has more than 16 rows of the sequence.
    """
    sizes = cache.sizes
    tokens = qkv.shape[0]
    assert qkv.shape == (tokens, sizes.channels)
    assert beta.shape == alpha.shape == (tokens, sizes.num_value_heads)
    assert qkv.stride(1) == beta.stride(1) == alpha.stride(1) == 1
    assert qkv.dtype == beta.dtype == alpha.dtype == cache.inputs.dtype
    assert conv.shape == (sizes.channels, sizes.window)
    assert spans.shape == (seq_lens.shape[0], 3)
    assert query_start_loc.shape == (seq_lens.shape[0] + 1,)
    return dispatch(
        "gated_delta",
        __name__,
        reference.gated_delta,
        implementation,
        qkv,
        beta,
        alpha,
        conv,
        decay,
        bias,
        cache,
        spans,
        query_start_loc,
        seq_lens,
        max_query_len,
        declined=_declined(sizes),
    )


def _declined(sizes: DeltaSizes) -> str | None:
    if not {sizes.key_dim, sizes.value_dim} <= DELTA_DIMS:
        return f"heads of {sizes.key_dim} and {sizes.value_dim}: it takes {', '.join(map(str, sorted(DELTA_DIMS)))}"
    return None
