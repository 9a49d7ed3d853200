"""`write_kv` in Triton: a program processes a few heads of one token, either of q, of k or of v."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from edgelm.kernels import rope as angles
from edgelm.kernels.cache import BLOCK_LEN, LayerCache, order
from edgelm.kernels.cache.kernel import hadamard, quantize
from edgelm.kernels.matmul import ROWS
from edgelm.kernels.pdl import begin_dependent, uses_pdl
from edgelm.kernels.rope import Rope

S0, S1, S2, S3, S4 = (tl.constexpr(c) for c in angles.SINE)
C0, C1, C2, C3, C4, C5 = (tl.constexpr(c) for c in angles.COSINE)
RADIANS = tl.constexpr(angles.RADIANS)
OPTIONS = {"enable_fp_fusion": False}  # every operation is rounded as in the reference
assert BLOCK_LEN == 32
FEW_TOKENS = ROWS  # up to this many, a program has one head: to fill the GPU, and to sum in one order in these steps


@triton.jit
def _sine_cosine(position, turns, scale):
    """Return the sine and the cosine as edgelm.kernels.rope.sine_cosine does: float32 [P].

    position: a scalar. turns: int64 [P].
    """
    top = (position.to(tl.int64) * turns) >> 32
    quadrant = (top + 536870912) >> 30
    x = (top - (quadrant << 30)).to(tl.int32).to(tl.float32) * RADIANS
    square = x * x
    sine = ((((S4 * square + S3) * square + S2) * square + S1) * square + S0) * x
    cosine = ((((C5 * square + C4) * square + C3) * square + C2) * square + C1) * square + C0
    odd = (quadrant & 1) == 1
    rotated_sine = tl.where(odd, cosine, sine)
    rotated_cosine = tl.where(odd, sine, cosine)
    rotated_sine = tl.where((quadrant & 2) == 2, -rotated_sine, rotated_sine)
    rotated_cosine = tl.where(((quadrant + 1) & 2) == 2, -rotated_cosine, rotated_cosine)
    return rotated_sine * scale, rotated_cosine * scale


@triton.jit
def _rotated(
    x_ptr,  # [heads_left, D], the program's first head
    stride,  # between heads
    heads_left,
    norm_ptr,  # float32 [D]; None: no norm
    position,
    turns_ptr,  # int64 [ROT / 2]
    eps,
    scale,
    D: tl.constexpr,
    P: tl.constexpr,
    ROT: tl.constexpr,  # 0: no rotation
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Return ROWS heads after norm and rotary embedding, float32 [ROWS, P]; columns from D on are 0."""
    row = tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, P)
    real = (row < heads_left) & (d < D)[None, :]
    x = tl.load(x_ptr + row * stride + d[None, :], real, 0.0).to(tl.float32)
    if norm_ptr is not None:
        wide = x.to(tl.float64)
        mean = tl.sum(wide * wide, 1).to(tl.float32) * (1 / D)
        one = tl.full(mean.shape, 1.0, tl.float32)
        inverse = tl.div_rn(one, tl.sqrt_rn(mean + eps))[:, None]
        x = x * inverse * tl.load(norm_ptr + d, d < D, 0.0)[None, :]
    if ROT > 0:
        HALF: tl.constexpr = ROT // 2
        in_rotation = d < ROT
        if INTERLEAVED:
            partner = d ^ 1
            pair = d // 2
            first = (d & 1) == 0
        else:
            first = d < HALF
            partner = tl.where(first, d + HALF, d - HALF)
            pair = tl.where(first, d, d - HALF)
        other = tl.load(x_ptr + row * stride + partner[None, :], real & in_rotation[None, :], 0.0).to(tl.float32)
        if norm_ptr is not None:
            other = other * inverse * tl.load(norm_ptr + partner, in_rotation, 0.0)[None, :]
        sine, cosine = _sine_cosine(position, tl.load(turns_ptr + pair, in_rotation, 0), scale)
        sine = tl.where(first, -sine, sine)
        x = tl.where(in_rotation[None, :], x * cosine[None, :] + other * sine[None, :], x)
    return x


@triton.jit
def _store_scales(scales_ptr, scales, plane, offset, heads_left, ROWS: tl.constexpr, STORED: tl.constexpr):
    """Store float16 [ROWS, groups]; the cache has only the first STORED groups."""
    GROUPS: tl.constexpr = scales.shape[1]
    row = tl.arange(0, ROWS)[:, None]
    g = tl.arange(0, GROUPS)[None, :]
    tl.store(scales_ptr + ((plane + row) * STORED + g) * 32 + offset, scales, (row < heads_left) & (g < STORED))


@triton.jit
def _store_key_words(
    codes,
    keys_ptr,
    high_ptr,
    start,  # [ROWS, 1]: row of the token in the plane of each head
    real,  # [ROWS, 1]: the head exists
    WIDTH: tl.constexpr,
    P: tl.constexpr,
    SPAN: tl.constexpr,
    HIGH_SPAN: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Store 6-bit codes [ROWS, P]: four bits of each in the plane `keys`, two in `key_high`."""
    GROUPS: tl.constexpr = P // 32
    codes = tl.where(tl.arange(0, P)[None, :] < WIDTH, codes, 0)  # the last pair may have one group only
    j = tl.arange(0, 8)  # 2 * slot + h
    low = tl.reshape(codes & 15, [ROWS * GROUPS * 4, 8]) << ((j >> 1) * 4 + (j & 1) * 16)[None, :]
    words = tl.reshape(tl.xor_sum(low, 1), [ROWS, GROUPS // SPAN, SPAN, 4])
    words = tl.reshape(tl.permute(words, [0, 1, 3, 2]), [ROWS, GROUPS * 4])
    w = tl.arange(0, GROUPS * 4)[None, :]
    tl.store(keys_ptr + start * (WIDTH // 8) + w, words, real & (w < WIDTH // 8))
    IN_PAIR: tl.constexpr = 2 if GROUPS > 1 else 1
    PAIRS: tl.constexpr = GROUPS // IN_PAIR
    i = tl.arange(0, IN_PAIR * 8)  # 8 * half of the pair + 2 * slot + h
    top = tl.permute(tl.reshape(codes >> 4, [ROWS * PAIRS, IN_PAIR, 4, 8]), [0, 2, 1, 3])
    top = (
        tl.reshape(top, [ROWS * PAIRS * 4, IN_PAIR * 8]) << (((i & 7) >> 1) * 2 + (i >> 3) * 8 + (i & 1) * 16)[None, :]
    )
    words = tl.reshape(tl.xor_sum(top, 1), [ROWS, PAIRS // HIGH_SPAN, HIGH_SPAN, 4])
    words = tl.reshape(tl.permute(words, [0, 1, 3, 2]), [ROWS, PAIRS * 4])
    w = tl.arange(0, PAIRS * 4)[None, :]
    tl.store(high_ptr + start * (PAIRS * 4) + w, words, tl.broadcast_to(real, [ROWS, PAIRS * 4]))


@triton.jit
def _store_keys(
    x,
    keys_ptr,
    high_ptr,
    scales_ptr,
    plane,  # int64: block * num_kv_heads + first head
    offset,
    heads_left,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    P: tl.constexpr,
    SPAN: tl.constexpr,
    HIGH_SPAN: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Round ROWS keys, float32 [ROWS, P], and store them as the entry `offset` of a block."""
    row = tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, P)[None, :]
    start = (plane + row) * 32 + offset
    real = row < heads_left
    if KIND == "f16":
        tl.store(keys_ptr + start * WIDTH + d, x.to(keys_ptr.dtype.element_ty), real & (d < WIDTH))
    else:
        codes, scales = quantize(x, KIND, ROWS, P)
        _store_scales(scales_ptr, scales, plane, offset, heads_left, ROWS, 1 if KIND == "fp8" else WIDTH // 32)
        if KIND == "int6":
            _store_key_words(codes, keys_ptr, high_ptr, start, real, WIDTH, P, SPAN, HIGH_SPAN, ROWS)
        else:
            units = tl.permute(tl.reshape(codes, [ROWS, P // 32 // SPAN, SPAN, 4, 8]), [0, 1, 3, 2, 4])
            stored = tl.reshape(units, [ROWS, P]).to(tl.uint8)
            tl.store(keys_ptr + start * WIDTH + d, stored, real & (d < WIDTH))


@triton.jit
def _store_values(
    x,
    values_ptr,
    scales_ptr,
    plane,
    offset,
    heads_left,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    P: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Round ROWS values, float32 [ROWS, P], and store them as the entry `offset` of a block."""
    row = tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, P)[None, :]
    real = row < heads_left
    kk, jb, lm, h = offset >> 4, (offset >> 3) & 1, (offset >> 1) & 3, offset & 1
    values_ptr += plane * (32 * WIDTH // 2 if KIND == "int4" else 32 * WIDTH) + 8 * lm + 4 * kk
    if KIND == "f16":
        target = values_ptr + (row * WIDTH + d) * 32 + 2 * jb + h
        tl.store(target, x.to(values_ptr.dtype.element_ty), real & (d < WIDTH))
    else:
        codes, scales = quantize(x, KIND, ROWS, P)
        _store_scales(scales_ptr, scales, plane, offset, heads_left, ROWS, 1 if KIND == "fp8" else WIDTH // 32)
        if KIND == "int4":
            low, high = tl.split(tl.permute(tl.reshape(codes, [ROWS, P // 16, 2, 8]), [0, 1, 3, 2]))
            packed = tl.reshape(low | (high << 4), [ROWS, P // 2]).to(tl.uint8)
            b = tl.arange(0, P // 2)[None, :]
            tl.store(values_ptr + (row * (WIDTH // 2) + b) * 32 + 2 * h + jb, packed, real & (b < WIDTH // 2))
        else:
            target = values_ptr + (row * WIDTH + d) * 32 + 2 * jb + h
            tl.store(target, codes.to(tl.uint8), real & (d < WIDTH))


@triton.jit
def write_kv_kernel(
    q_ptr,  # [tokens, HEADS, D], strides q_token and q_head
    k_ptr,  # [tokens, KV_HEADS, D], as is v
    v_ptr,
    positions_ptr,  # int32 [tokens]
    slot_mapping_ptr,  # int64 [tokens]
    out_ptr,  # [tokens, HEADS, D]
    turns_ptr,  # int64 [ROT / 2]
    q_norm_ptr,  # float32 [D]
    k_norm_ptr,
    v_norm_ptr,
    growth_ptr,  # float32 [spans]: factors of q; None: 1
    keys_ptr,  # the planes of the cache
    values_ptr,
    key_scales_ptr,
    value_scales_ptr,
    key_high_ptr,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    eps,
    rope_scale,
    span,  # positions with the same factor of q
    last_span,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    P: tl.constexpr,
    ROT: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    HADAMARD: tl.constexpr,
    SPAN: tl.constexpr,
    HIGH_SPAN: tl.constexpr,
    ROWS: tl.constexpr,  # heads of a program
    launch_pdl: tl.constexpr = False,
):
    """Write ROWS heads of one token. Grid: tokens; tiles of q heads, then of keys, then of values."""
    begin_dependent(launch_pdl)
    Q_TILES: tl.constexpr = (HEADS + ROWS - 1) // ROWS
    KV_TILES: tl.constexpr = (KV_HEADS + ROWS - 1) // ROWS
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    position = tl.load(positions_ptr + token)
    if tile < Q_TILES:
        head = tile * ROWS
        q_ptr += token * q_token + head * q_head
        left = HEADS - head
        x = _rotated(
            q_ptr, q_head, left, q_norm_ptr, position, turns_ptr, eps, rope_scale, D, P, ROT, INTERLEAVED, ROWS
        )
        if growth_ptr is not None:
            x = x * tl.load(growth_ptr + tl.minimum(position // span, last_span))
        row = tl.arange(0, ROWS)[:, None]
        d = tl.arange(0, P)[None, :]
        out = out_ptr + (token * HEADS + head + row) * D + d
        tl.store(out, x.to(out_ptr.dtype.element_ty), (row < left) & (d < D))
    else:
        slot = tl.load(slot_mapping_ptr + token)
        if slot >= 0:
            offset = slot % 32
            if tile < Q_TILES + KV_TILES:
                head = (tile - Q_TILES) * ROWS
                k_ptr += token * k_token + head * k_head
                left = KV_HEADS - head
                x = _rotated(
                    k_ptr, k_head, left, k_norm_ptr, position, turns_ptr, eps, rope_scale, D, P, ROT, INTERLEAVED, ROWS
                )
                if HADAMARD:
                    x = hadamard(x, ROWS, P)
                plane = slot // 32 * KV_HEADS + head
                _store_keys(
                    x, keys_ptr, key_high_ptr, key_scales_ptr, plane, offset, left, KEY, WIDTH, P, SPAN, HIGH_SPAN, ROWS
                )
            else:
                head = (tile - Q_TILES - KV_TILES) * ROWS
                v_ptr += token * v_token + head * v_head
                left = KV_HEADS - head
                x = _rotated(
                    v_ptr, v_head, left, v_norm_ptr, position, None, eps, rope_scale, D, P, 0, INTERLEAVED, ROWS
                )
                if HADAMARD:
                    x = hadamard(x, ROWS, P)
                plane = slot // 32 * KV_HEADS + head
                _store_values(x, values_ptr, value_scales_ptr, plane, offset, left, VALUE, WIDTH, P, ROWS)


def constants(
    cache: LayerCache, num_heads: int, rotated_dim: int, interleaved: bool, rows: int
) -> dict[str, int | bool | str]:
    """Return the constexprs of the kernel."""
    width = cache.width
    groups = width // 32
    return {
        "HEADS": num_heads,
        "KV_HEADS": cache.num_kv_heads,
        "D": cache.head_dim,
        "WIDTH": width,
        "P": triton.next_power_of_2(width),
        "ROT": rotated_dim,
        "INTERLEAVED": interleaved,
        "KEY": cache.format.key or "f16",
        "VALUE": cache.format.value or "f16",
        "HADAMARD": cache.format.rotated,
        "SPAN": order.span(groups, 4 if cache.format.key == "int6" else 8),
        "HIGH_SPAN": order.span(-(-groups // 2), 4),
        "ROWS": rows,
    }


def launch_shape(num_tokens: int, width: int) -> tuple[int, int]:
    """Return the number of heads of a program, and its number of warps."""
    rows = 1 if num_tokens <= FEW_TOKENS else 4
    return rows, max(1, rows * triton.next_power_of_2(width) // 512)


def write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    cache: LayerCache,
    rope: Rope | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    v_norm: Tensor | None,
    eps: float,
    out_dtype: torch.dtype,
) -> Tensor:
    """Launch the kernel, once for every format."""
    num_tokens, num_heads, _ = q.shape
    out = torch.empty(q.shape, dtype=out_dtype, device=q.device)
    if num_tokens == 0:
        return out
    values = cache.values.view(torch.uint8) if cache.format.value == "int4" else cache.values
    rows, num_warps = launch_shape(num_tokens, cache.width)
    rotated_dim, interleaved = (0, False) if rope is None else (rope.rotated_dim, rope.interleaved)
    growth = None if rope is None else rope.growth
    grid = (num_tokens, triton.cdiv(num_heads, rows) + 2 * triton.cdiv(cache.num_kv_heads, rows))
    write_kv_kernel[grid](
        q,
        k,
        v,
        positions,
        slot_mapping,
        out,
        None if rope is None else rope.turns,
        q_norm,
        k_norm,
        v_norm,
        growth,
        cache.keys,
        values,
        cache.key_scales,
        cache.value_scales,
        cache.key_high,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        eps,
        1.0 if rope is None else rope.scale,
        1 if rope is None or growth is None else rope.span,
        0 if growth is None else len(growth) - 1,
        **constants(cache, num_heads, rotated_dim, interleaved, rows),
        num_warps=num_warps,
        **OPTIONS,
        launch_pdl=uses_pdl(),
    )
    return out
