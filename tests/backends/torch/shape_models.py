"""Decoders with the shapes of real models and without numbers: two layers of each, on the fake GPU.

Owns the shapes. Knows nothing of steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from edgelm.kernels.activation import Gate
from edgelm.kernels.layout import DenseWeight, Weight
from edgelm.kernels.matmul import Norm
from edgelm.kernels.rope import Rope
from edgelm.models.decoder import Attention, Decoder, FeedForward, Layer, Linear, Weights
from edgelm.models.loading.packed import PlaneFiller
from edgelm.models.loading.stored import BLOCK_TYPES
from edgelm.models.moe import Experts, Stack
from edgelm.models.next_head import Entrance, NextHead

DEVICE = torch.device("cuda")


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=DEVICE)


def matrix(kind: str, rows: int, columns: int, num_matrices: int = 0, *, gated: bool = False) -> Weight:
    """Return a matrix, or a stack, of a quantized GGML type or of a dtype."""
    if kind in BLOCK_TYPES:
        weight = PlaneFiller(BLOCK_TYPES[kind].layout, rows, columns, DEVICE, num_matrices).weight()
        return replace(weight, gated=gated)
    stack = (num_matrices,) if num_matrices else ()
    return DenseWeight(empty(*stack, rows, columns, dtype=getattr(torch, kind)), gated=gated)


def decoder(
    *,
    hidden_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    vocab: int,
    feeds: list[Callable[[int], FeedForward | Experts]],
    kind: str,
    value: str = "",  # the type of V, and of the output matrix
    bias: bool = False,
    windows: tuple[int, int] = (0, 0),
    gate: str = "silu",
    softcap: float = 0.0,
    post_norm: bool = False,
    sinks: bool = False,
    num_layers: int = 2,
) -> Decoder:
    """Return a decoder whose layers take turns with `feeds` and `windows`; only the first layer has `value`."""
    q, kv = num_heads * head_dim, num_kv_heads * head_dim
    rope = Rope(empty(head_dim // 2))

    def linear(kind: str, rows: int, columns: int, sizes: tuple[int, ...] = ()) -> Linear:
        return Linear(matrix(kind, rows, columns), empty(rows) if bias else None, sizes)

    def layer(number: int) -> Layer:
        if value and number % 2 == 0:
            qkv = (linear(kind, q + kv, hidden_size, (q, kv)), linear(value, kv, hidden_size, (kv,)))
        else:
            qkv = (linear(kind, q + 2 * kv, hidden_size, (q, kv, kv)),)
        attention = Attention(
            norm=Norm(empty(hidden_size), 1e-5),
            qkv=qkv,
            out=linear(kind, hidden_size, q),
            rope=rope,
            window=windows[number % 2],
            head_dim=head_dim,
            num_kv_heads=num_kv_heads,
            q_norm=empty(head_dim) if post_norm else None,
            k_norm=empty(head_dim) if post_norm else None,
            sinks=empty(num_heads) if sinks else None,
            post_norm=empty(hidden_size) if post_norm else None,
        )
        feed = feeds[number % len(feeds)](hidden_size)
        if post_norm and isinstance(feed, FeedForward):
            feed = replace(feed, post_norm=empty(hidden_size))
        return Layer(attention, feed)

    weights = Weights(
        embedding=matrix(kind, vocab, hidden_size),
        layers=tuple(layer(number) for number in range(num_layers)),
        norm=Norm(empty(hidden_size), 1e-5),
        output=Linear(matrix(value or kind, vocab, hidden_size)),
    )
    config: Any = SimpleNamespace(
        layers=[
            SimpleNamespace(window=windows[number % 2], num_kv_heads=num_kv_heads, head_dim=head_dim, delta=None)
            for number in range(num_layers)
        ],
        hidden_size=hidden_size,
        num_heads=num_heads,
        norm_eps=1e-5,
        attention_scale=head_dim**-0.5,
        attention_softcap=softcap,
        final_softcap=softcap,
        stream_scale=1.0,
        gate=Gate(gate),  # type: ignore[arg-type]  # one of its kinds
    )
    return Decoder(config, weights, torch.bfloat16, "triton")


def head_of(decoder: Decoder, kind: str) -> NextHead:
    """Return a head that predicts the token after the next one, with the first layer of a decoder as its own."""
    config: Any = SimpleNamespace(**{**vars(decoder.config), "layers": decoder.config.layers[:1]})
    width = decoder.config.hidden_size
    norm = Norm(empty(width), 1e-5)
    entrance = Entrance(norm, norm, Linear(matrix(kind, width, 2 * width), None, (width,)))
    weights = replace(decoder.weights, layers=decoder.weights.layers[:1])
    return NextHead(config, weights, entrance, decoder.dtype, "triton")


def dense(kind: str, down: str, width: int) -> Callable[[int], FeedForward]:
    """Return a function that makes a feed-forward of an inner width."""

    def make(hidden_size: int) -> FeedForward:
        return FeedForward(
            norm=Norm(empty(hidden_size), 1e-5),
            gate_up=(Linear(matrix(kind, 2 * width, hidden_size, gated=True), None, (width, width)),),
            down=Linear(matrix(down, hidden_size, width)),
        )

    return make


def experts(kind: str, down: str, width: int, count: int, used: int, *, bias: bool = False) -> Callable[[int], Experts]:
    """Return a function that makes a mixture of `count` experts."""

    def make(hidden_size: int) -> Experts:
        def stack(kind: str, rows: int, columns: int, *, gated: bool = False) -> Stack:
            return Stack(matrix(kind, rows, columns, count, gated=gated), empty(count, rows) if bias else None)

        return Experts(
            norm=Norm(empty(hidden_size), 1e-5),
            router=matrix("float32", count, hidden_size),
            router_bias=empty(count) if bias else None,
            gate_up=(stack(kind, 2 * width, hidden_size, gated=True),),
            down=stack(down, hidden_size, width),
            used=used,
            routing="softmax",
            normalised=True,
        )

    return make


def llama_8b(num_layers: int = 2) -> Decoder:
    """Return Llama-3.1-8B as Q4_K_M: V, half of the down matrices and the output are Q6_K."""
    feeds: list[Any] = [dense("Q4_K", "Q6_K", 14336), dense("Q4_K", "Q4_K", 14336)]
    return decoder(
        hidden_size=4096, num_heads=32, num_kv_heads=8, head_dim=128, vocab=128256, feeds=feeds, kind="Q4_K",
        value="Q6_K", num_layers=num_layers,
    )  # fmt: skip


def qwen_bf16() -> Decoder:
    """Return Qwen2.5-0.5B in bfloat16, with biases."""
    return decoder(
        hidden_size=896, num_heads=14, num_kv_heads=2, head_dim=64, vocab=151936, kind="bfloat16", bias=True,
        feeds=[dense("bfloat16", "bfloat16", 4864)],
    )  # fmt: skip


def small_f16() -> Decoder:
    """Return a model with float16 weights under bfloat16 activations, and a vocabulary that 16 does not divide."""
    return decoder(
        hidden_size=576, num_heads=9, num_kv_heads=3, head_dim=64, vocab=49155, kind="float16",
        feeds=[dense("float16", "float16", 1536)],
    )  # fmt: skip


def qwen_experts() -> Decoder:
    """Return Qwen3-30B-A3B as Q4_K_M."""
    return decoder(
        hidden_size=2048, num_heads=32, num_kv_heads=4, head_dim=128, vocab=151936, kind="Q4_K", value="Q6_K",
        feeds=[experts("Q4_K", "Q6_K", 768, 128, 8), experts("Q4_K", "Q4_K", 768, 128, 8)],
    )  # fmt: skip


def gpt_oss() -> Decoder:
    """Return gpt-oss-20b: MXFP4 experts with biases, sinks, a window in every second layer."""
    return decoder(
        hidden_size=2880, num_heads=64, num_kv_heads=8, head_dim=64, vocab=201088, kind="bfloat16", bias=True,
        feeds=[experts("MXFP4", "MXFP4", 2880, 32, 4, bias=True)], windows=(128, 0), sinks=True, gate="swiglu_oai",
    )  # fmt: skip


def gemma() -> Decoder:
    """Return a Gemma with a window in every second layer, soft caps, post-norms and an odd vocabulary."""
    return decoder(
        hidden_size=2304, num_heads=8, num_kv_heads=4, head_dim=256, vocab=256003, kind="Q4_0", value="Q8_0",
        feeds=[dense("Q4_0", "Q4_0", 9216)], windows=(4096, 0), softcap=30.0, post_norm=True, gate="gelu_tanh",
    )  # fmt: skip


MODELS: dict[str, Callable[[], Decoder]] = {
    "llama_8b": llama_8b,
    "qwen_bf16": qwen_bf16,
    "small_f16": small_f16,
    "qwen_experts": qwen_experts,
    "gpt_oss": gpt_oss,
    "gemma": gemma,
}
