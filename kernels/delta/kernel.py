"""The gated delta net in Triton.

Owns three kernels and their launch. `step_kernel` walks through the tokens of a sequence with few rows one by one,
with its part of S in registers. `prompt_kernel` takes CHUNK tokens at a time: within them, the corrections are the
solution of one triangular system (Yang et al., "Gated Delta Networks", arXiv 2412.06464), and S moves once.
Both have a program for VALUES columns of S of one head. `keep_kernel` keeps the last inputs of prompts: programs of
`prompt_kernel` may still read the rows of the ring that it writes.

fla-core has the same rule, but its kernels take S from one tensor to another instead of from and to slots, have no
tokens to compute again, and choose their configurations by measuring at the first call, which a graph must not do.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from edgelm.kernels.activation.kernel import sigmoid
from edgelm.kernels.attention.reference import VERIFY_LEN
from edgelm.kernels.delta.reference import EPSILON
from edgelm.kernels.delta.states import StateCache
from edgelm.kernels.delta_sizes import DeltaSizes
from edgelm.kernels.pdl import begin_dependent, uses_pdl

VALUES = 32  # columns of S of a program
CHUNK = 16  # tokens
PROMPT_WARPS = 8
KEPT_BLOCK = 1024  # numbers of a row that a program keeps
OPTIONS = {"enable_fp_fusion": True}  # explicit, since Triton's default is about to change
assert VERIFY_LEN == 16


@triton.jit
def _growth(alpha, decay, bias):
    """Return the logarithm of the factor of S."""
    x = alpha + bias
    return decay * (tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x))))


@triton.jit
def _convolved(
    qkv_ptr,  # at the sequence's first row
    qkv_row,
    inputs_ptr,  # at the sequence's slot
    conv_ptr,
    channel,  # [N]
    at,  # position: a scalar
    start,  # position of the first row
    WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,
    RING: tl.constexpr,
):
    """Return the convolution of some channels at a position, with SiLU: float32 [N]."""
    x = tl.zeros(channel.shape, tl.float32)
    for i in tl.static_range(WINDOW):
        position = at - (WINDOW - 1) + i + tl.zeros_like(channel)
        row = (position - start).to(tl.int64) * qkv_row
        new = tl.load(qkv_ptr + row + channel, position >= start, other=0.0)
        is_kept = (position < start) & (position >= 0)
        old = tl.load(inputs_ptr + position % RING * WIDTH + channel, is_kept, other=0.0)
        weight = tl.load(conv_ptr + channel * WINDOW + i)
        x += (new.to(tl.float32) + old.to(tl.float32)) * weight
    return x * sigmoid(x)


@triton.jit
def step_kernel(
    qkv_ptr,  # [tokens, channels], rows qkv_row apart
    beta_ptr,  # [tokens, HEADS]
    alpha_ptr,
    conv_ptr,  # float32 [channels, WINDOW]
    decay_ptr,  # float32 [HEADS]
    bias_ptr,
    states_ptr,  # float32 [slots, HEADS, KEY, VALUE]
    inputs_ptr,  # [slots, RING, channels + 2 * HEADS]
    spans_ptr,  # int32 [sequences, 3]
    query_start_ptr,  # int32 [sequences + 1]
    seq_lens_ptr,  # int32 [sequences]
    out_ptr,  # float32 [tokens, HEADS, VALUE]
    qkv_row,
    beta_row,
    alpha_row,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    WINDOW: tl.constexpr,
    ALTERNATING: tl.constexpr,
    RING: tl.constexpr,
    MOST: tl.constexpr,  # rows of a sequence
    BLOCK: tl.constexpr,  # columns of S
    EPSILON: tl.constexpr,
    launch_pdl: tl.constexpr = False,
):
    """Compute the rows of one sequence and BLOCK columns of a head. Grid: sequences, heads, blocks of columns."""
    begin_dependent(launch_pdl)
    sequence, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(query_start_ptr + sequence)
    rows = tl.load(query_start_ptr + sequence + 1) - first
    if (rows > 0) & (rows <= MOST):
        CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY + HEADS * VALUE
        WIDTH: tl.constexpr = CHANNELS + 2 * HEADS
        SHARED: tl.constexpr = HEADS // KEY_HEADS
        slot = tl.load(spans_ptr + sequence * 3).to(tl.int64)
        position = tl.load(spans_ptr + sequence * 3 + 1)
        goal = tl.load(spans_ptr + sequence * 3 + 2)
        end = tl.load(seq_lens_ptr + sequence)
        start = end - rows
        key_head = head % KEY_HEADS if ALTERNATING else head // SHARED
        d = tl.arange(0, KEY)
        column = block * BLOCK + tl.arange(0, BLOCK)
        of_q = key_head * KEY + d
        of_k = (KEY_HEADS + key_head) * KEY + d
        of_v = 2 * KEY_HEADS * KEY + head * VALUE + column
        qkv_ptr += first.to(tl.int64) * qkv_row
        beta_ptr += first.to(tl.int64) * beta_row + head
        alpha_ptr += first.to(tl.int64) * alpha_row + head
        out = out_ptr + (first.to(tl.int64) * HEADS + head) * VALUE + column
        inputs_ptr += slot * RING * WIDTH
        stored = states_ptr + (slot * HEADS + head) * KEY * VALUE + d[:, None] * VALUE + column[None, :]
        decay, bias = tl.load(decay_ptr + head), tl.load(bias_ptr + head)
        # the first of the heads that share keys and queries keeps these
        keeps_keys = (block == 0) & (head == (key_head if ALTERNATING else key_head * SHARED))
        state = tl.zeros([KEY, BLOCK], tl.float32)
        if position > 0:
            state = tl.load(stored)
        for step in range(end - position):
            at = position + step
            is_new = at >= start
            row = (at - start).to(tl.int64)
            kept = inputs_ptr + at % RING * WIDTH
            q = _convolved(qkv_ptr, qkv_row, inputs_ptr, conv_ptr, of_q, at, start, WIDTH, WINDOW, RING)
            k = _convolved(qkv_ptr, qkv_row, inputs_ptr, conv_ptr, of_k, at, start, WIDTH, WINDOW, RING)
            v = _convolved(qkv_ptr, qkv_row, inputs_ptr, conv_ptr, of_v, at, start, WIDTH, WINDOW, RING)
            beta = tl.load(beta_ptr + row * beta_row, is_new, other=0.0)
            beta += tl.load(kept + CHANNELS + head, at < start, other=0.0)
            alpha = tl.load(alpha_ptr + row * alpha_row, is_new, other=0.0)
            alpha += tl.load(kept + CHANNELS + HEADS + head, at < start, other=0.0)
            q = q * (1.0 / tl.sqrt_rn(tl.sum(q * q) + EPSILON)) * (KEY**-0.5)
            k = k * (1.0 / tl.sqrt_rn(tl.sum(k * k) + EPSILON))
            state *= tl.exp(_growth(alpha.to(tl.float32), decay, bias))
            wrong = v - tl.sum(state * k[:, None], 0)
            state += k[:, None] * (sigmoid(beta.to(tl.float32)) * wrong)[None, :]
            if at + 1 == goal:
                tl.store(stored, state)
            if is_new:
                tl.store(out + row * HEADS * VALUE, tl.sum(state * q[:, None], 0))
                qkv = qkv_ptr + row * qkv_row
                tl.store(kept + of_v, tl.load(qkv + of_v))
                if keeps_keys:
                    tl.store(kept + of_q, tl.load(qkv + of_q))
                    tl.store(kept + of_k, tl.load(qkv + of_k))
                if block == 0:
                    tl.store(kept + CHANNELS + head, beta)
                    tl.store(kept + CHANNELS + HEADS + head, alpha)


@triton.jit
def _convolved_rows(
    qkv_ptr,
    qkv_row,
    inputs_ptr,
    conv_ptr,
    channel,  # [N]
    at,  # positions [CHUNK]
    start,
    end,
    WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,
    RING: tl.constexpr,
):
    """Return the same as `_convolved` for some positions, and zeros from `end` on: float32 [CHUNK, N]."""
    x = tl.zeros([at.shape[0], channel.shape[0]], tl.float32)
    for i in tl.static_range(WINDOW):
        position = at - (WINDOW - 1) + i
        row = (position - start).to(tl.int64) * qkv_row
        is_new, is_kept = (position >= start) & (position < end), (position < start) & (position >= 0)
        new = tl.load(qkv_ptr + row[:, None] + channel[None, :], is_new[:, None] & (channel >= 0)[None, :], other=0.0)
        kept = inputs_ptr + (position % RING * WIDTH)[:, None] + channel[None, :]
        old = tl.load(kept, is_kept[:, None] & (channel >= 0)[None, :], other=0.0)
        x += (new.to(tl.float32) + old.to(tl.float32)) * tl.load(conv_ptr + channel * WINDOW + i)[None, :]
    return tl.where((at < end)[:, None], x * sigmoid(x), 0.0)


@triton.jit
def prompt_kernel(
    qkv_ptr,  # all as for `step_kernel`
    beta_ptr,
    alpha_ptr,
    conv_ptr,
    decay_ptr,
    bias_ptr,
    states_ptr,
    inputs_ptr,
    spans_ptr,
    query_start_ptr,
    seq_lens_ptr,
    out_ptr,
    qkv_row,
    beta_row,
    alpha_row,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    WINDOW: tl.constexpr,
    ALTERNATING: tl.constexpr,
    RING: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
    EPSILON: tl.constexpr,
    CHUNK: tl.constexpr,
    launch_pdl: tl.constexpr = False,
):
    """Compute a sequence of more than MOST rows, CHUNK of them at a time. Grid: sequences, heads, blocks of columns."""
    begin_dependent(launch_pdl)
    sequence, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(query_start_ptr + sequence)
    rows = tl.load(query_start_ptr + sequence + 1) - first
    if rows > MOST:
        CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY + HEADS * VALUE
        WIDTH: tl.constexpr = CHANNELS + 2 * HEADS
        slot = tl.load(spans_ptr + sequence * 3).to(tl.int64)
        end = tl.load(seq_lens_ptr + sequence)
        start = end - rows
        key_head = head % KEY_HEADS if ALTERNATING else head // (HEADS // KEY_HEADS)
        d = tl.arange(0, KEY)
        column = block * BLOCK + tl.arange(0, BLOCK)
        of_q = key_head * KEY + d
        of_k = (KEY_HEADS + key_head) * KEY + d
        of_v = 2 * KEY_HEADS * KEY + head * VALUE + column
        qkv_ptr += first.to(tl.int64) * qkv_row
        beta_ptr += first.to(tl.int64) * beta_row + head
        alpha_ptr += first.to(tl.int64) * alpha_row + head
        out = out_ptr + (first.to(tl.int64) * HEADS + head) * VALUE + column[None, :]
        inputs_ptr += slot * RING * WIDTH
        stored = states_ptr + (slot * HEADS + head) * KEY * VALUE + d[:, None] * VALUE + column[None, :]
        decay, bias = tl.load(decay_ptr + head), tl.load(bias_ptr + head)
        t = tl.arange(0, CHUNK)
        before = t[:, None] > t[None, :]
        state = tl.zeros([KEY, BLOCK], tl.float32)
        if start > 0:
            state = tl.load(stored)
        for step in range(0, rows, CHUNK):
            at = start + step + t
            row = (at - start).to(tl.int64)
            inside = at < end
            q = _convolved_rows(qkv_ptr, qkv_row, inputs_ptr, conv_ptr, of_q, at, start, end, WIDTH, WINDOW, RING)
            k = _convolved_rows(qkv_ptr, qkv_row, inputs_ptr, conv_ptr, of_k, at, start, end, WIDTH, WINDOW, RING)
            v = _convolved_rows(qkv_ptr, qkv_row, inputs_ptr, conv_ptr, of_v, at, start, end, WIDTH, WINDOW, RING)
            beta = tl.load(beta_ptr + row * beta_row, inside, other=0.0).to(tl.float32)
            alpha = tl.load(alpha_ptr + row * alpha_row, inside, other=0.0).to(tl.float32)
            rate = tl.where(inside, sigmoid(beta), 0.0)
            q = q * (1.0 / tl.sqrt_rn(tl.sum(q * q, 1) + EPSILON))[:, None] * (KEY**-0.5)
            k = k * (1.0 / tl.sqrt_rn(tl.sum(k * k, 1) + EPSILON))[:, None]
            # the logarithm of S's growth from the chunk's beginning to behind each token
            growth = tl.cumsum(tl.where(inside, _growth(alpha, decay, bias), 0.0), 0)
            total = tl.sum(tl.where(inside, _growth(alpha, decay, bias), 0.0))
            since = tl.exp(tl.minimum(growth[:, None] - growth[None, :], 0.0))  # from the second token to the first
            keys = tl.trans(k)
            # each token's correction is what S lacks at its time, without those of the tokens before it in the chunk
            wrong = v - tl.exp(growth)[:, None] * tl.dot(k, state, input_precision="tf32")
            wrong = rate[:, None] * wrong
            share = tl.where(before, rate[:, None] * tl.dot(k, keys, input_precision="tf32") * since, 0.0)
            for i in range(CHUNK - 1):
                solved = tl.sum(tl.where((t == i)[:, None], wrong, 0.0), 0)
                column_i = tl.sum(tl.where((t == i)[None, :], share, 0.0), 1)
                wrong -= column_i[:, None] * solved[None, :]
            seen = tl.where(before | (t[:, None] == t[None, :]), tl.dot(q, keys, input_precision="tf32") * since, 0.0)
            result = tl.exp(growth)[:, None] * tl.dot(q, state, input_precision="tf32")
            result += tl.dot(seen, wrong, input_precision="tf32")
            tl.store(out + row[:, None] * HEADS * VALUE, result, inside[:, None])
            rest = tl.exp(total - growth)
            state = tl.exp(total) * state + tl.dot(tl.trans(k * rest[:, None]), wrong, input_precision="tf32")
        tl.store(stored, state)


@triton.jit
def keep_kernel(
    qkv_ptr,
    beta_ptr,
    alpha_ptr,
    inputs_ptr,
    spans_ptr,
    query_start_ptr,
    seq_lens_ptr,
    qkv_row,
    beta_row,
    alpha_row,
    CHANNELS: tl.constexpr,
    HEADS: tl.constexpr,
    WINDOW: tl.constexpr,
    RING: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
    launch_pdl: tl.constexpr = False,
):
    """Keep a part of one of the last inputs of a prompt. Grid: sequences, WINDOW - 1, blocks of an input."""
    begin_dependent(launch_pdl)
    sequence, back = tl.program_id(0), tl.program_id(1) + 1
    first = tl.load(query_start_ptr + sequence)
    last = tl.load(query_start_ptr + sequence + 1)
    if last - first > MOST:
        WIDTH: tl.constexpr = CHANNELS + 2 * HEADS
        slot = tl.load(spans_ptr + sequence * 3).to(tl.int64)
        at = tl.load(seq_lens_ptr + sequence) - back
        row = (last - back).to(tl.int64)
        i = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        is_beta, is_alpha = (i >= CHANNELS) & (i < CHANNELS + HEADS), (i >= CHANNELS + HEADS) & (i < WIDTH)
        x = tl.load(qkv_ptr + row * qkv_row + i, i < CHANNELS, other=0.0)
        x += tl.load(beta_ptr + row * beta_row + i - CHANNELS, is_beta, other=0.0)
        x += tl.load(alpha_ptr + row * alpha_row + i - CHANNELS - HEADS, is_alpha, other=0.0)
        tl.store(inputs_ptr + (slot * RING + at % RING) * WIDTH + i, x, i < WIDTH)


def constants(sizes: DeltaSizes, ring: int) -> dict[str, int | bool | float]:
    """Return the constexprs of the kernels that move S, without CHUNK."""
    return {
        "KEY_HEADS": sizes.num_key_heads,
        "HEADS": sizes.num_value_heads,
        "KEY": sizes.key_dim,
        "VALUE": sizes.value_dim,
        "WINDOW": sizes.window,
        "ALTERNATING": sizes.alternating,
        "RING": ring,
        "MOST": VERIFY_LEN,
        "BLOCK": min(sizes.value_dim, VALUES),
        "EPSILON": EPSILON,
    }


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
    max_query_len: int,
) -> Tensor:
    """Launch the kernels; those of prompts only where a sequence may have so many rows."""
    sizes, sequences = cache.sizes, len(seq_lens)
    out = torch.empty(len(qkv), sizes.num_value_heads, sizes.value_dim, device=qkv.device)
    if not out.numel() or not sequences:
        return out
    ring = cache.inputs.shape[1]
    fixed = constants(sizes, ring)
    grid = sequences, sizes.num_value_heads, sizes.value_dim // int(fixed["BLOCK"])
    weights = conv, decay, bias, cache.states, cache.inputs
    where = spans, query_start_loc, seq_lens
    strides = qkv.stride(0), beta.stride(0), alpha.stride(0)
    step_kernel[grid](
        qkv, beta, alpha, *weights, *where, out, *strides,
        **fixed, num_warps=step_warps(sizes), launch_pdl=uses_pdl(), **OPTIONS,
    )  # fmt: skip
    if max_query_len > VERIFY_LEN:
        prompt_kernel[grid](
            qkv, beta, alpha, *weights, *where, out, *strides,
            **fixed, CHUNK=CHUNK, num_warps=PROMPT_WARPS, launch_pdl=uses_pdl(), **OPTIONS,
        )  # fmt: skip
        keep_kernel[(sequences, sizes.window - 1, triton.cdiv(cache.inputs.shape[2], KEPT_BLOCK))](
            qkv, beta, alpha, cache.inputs, *where, *strides,
            CHANNELS=sizes.channels, HEADS=sizes.num_value_heads, WINDOW=sizes.window, RING=ring, MOST=VERIFY_LEN,
            BLOCK=KEPT_BLOCK, num_warps=4, launch_pdl=uses_pdl(), **OPTIONS,
        )  # fmt: skip
    return out


def step_warps(sizes: DeltaSizes) -> int:
    """Return the warps of a program of `step_kernel`: 32 numbers of S for each thread."""
    return max(min(sizes.key_dim * min(sizes.value_dim, VALUES) // 1024, 8), 1)
