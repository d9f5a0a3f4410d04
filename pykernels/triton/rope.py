"""Rotary position embedding (Su et al. 2021): (a, b) -> (a cos - b sin, a sin + b cos), angle = position x inv_freq[pair].

Pair p is elements (p, p + pairs), or (2p, 2p + 1) when interleaved; elements past 2 x pairs are kept. A thread holds both
elements of a pair before it writes either, so outputs may alias inputs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import configs
from .common import narrow


@triton.jit
def _sin_cos(angle):
    """sin and cos of float32 angles to float32's precision, whatever their size.

    The library's functions carry a reduction for huge arguments that lives in local memory; float64 needs none: quarter
    turns are counted exactly, and the rest, within pi / 4, goes through the polynomials of Cephes (Moshier).
    """
    quarters = angle.to(tl.float64) * 0.63661977236758134308
    whole = tl.floor(quarters + 0.5)
    r = ((quarters - whole) * 1.57079632679489661923).to(tl.float32)
    turn = (whole - 4.0 * tl.floor(whole * 0.25)).to(tl.int32)  # 0 to 3
    r2 = r * r
    sin = r + r * r2 * (-1.6666654611e-1 + r2 * (8.3321608736e-3 + r2 * -1.9515295891e-4))
    cos = 1.0 - 0.5 * r2 + r2 * r2 * (4.166664568298827e-2 + r2 * (-1.388731625493765e-3 + r2 * 2.443315711809948e-5))
    odd = (turn & 1) != 0
    s = tl.where(odd, cos, sin)
    c = tl.where(odd, sin, cos)
    return tl.where(turn >= 2, -s, s), tl.where((turn == 1) | (turn == 2), -c, c)


@triton.jit
def angles(Positions, InvFreq, token, rope_scale, PAIRS: tl.constexpr, PAIRS_PAD: tl.constexpr):
    """cos and sin [PAIRS_PAD] of one token, float32, times rope_scale (YaRN's attention factor)."""
    p = tl.arange(0, PAIRS_PAD)
    position = tl.load(Positions + token).to(tl.float32)
    angle = position * tl.load(InvFreq + p, mask=p < PAIRS, other=0.0)
    sin, cos = _sin_cos(angle)
    return cos * rope_scale, sin * rope_scale


@triton.jit
def rotated_pairs(X, cos, sin, mask, PAIRS: tl.constexpr, PAIRS_PAD: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Both halves of the rotated pairs, float32 [rows, PAIRS_PAD], for row pointers X [rows, 1]; and their columns."""
    p = tl.arange(0, PAIRS_PAD)
    if INTERLEAVED:
        first = 2 * p
        second = 2 * p + 1
    else:
        first = p
        second = p + PAIRS
    a = tl.load(X + first[None, :], mask=mask, other=0.0).to(tl.float32)
    b = tl.load(X + second[None, :], mask=mask, other=0.0).to(tl.float32)
    return a * cos[None, :] - b * sin[None, :], a * sin[None, :] + b * cos[None, :], first, second


@triton.jit
def rotate_heads(
    X, Out, head_ok, cos, sin, D: tl.constexpr, PAIRS: tl.constexpr, PAIRS_PAD: tl.constexpr, REST_PAD: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Rotates rows: X and Out are row pointers [HEADS, 1]. D - 2 x PAIRS elements are copied."""
    p = tl.arange(0, PAIRS_PAD)
    mask = head_ok[:, None] & (p < PAIRS)[None, :]
    a, b, first, second = rotated_pairs(X, cos, sin, mask, PAIRS, PAIRS_PAD, INTERLEAVED)
    if D > 2 * PAIRS:
        d = 2 * PAIRS + tl.arange(0, REST_PAD)
        kept = head_ok[:, None] & (d < D)[None, :]
        rest = tl.load(X + d[None, :], mask=kept, other=0.0).to(tl.float32)
        tl.store(Out + d[None, :], narrow(rest, Out.dtype.element_ty), mask=kept)
    tl.store(Out + first[None, :], narrow(a, Out.dtype.element_ty), mask=mask)
    tl.store(Out + second[None, :], narrow(b, Out.dtype.element_ty), mask=mask)


@triton.jit
def _rotary(
    Q, K, Positions, InvFreq, QOut, KOut, rope_scale, q_heads, k_heads, q_blocks, sq_row, sq_head, sk_row, sk_head, sqo_row,
    sqo_head, sko_row, sko_head, D: tl.constexpr, PAIRS: tl.constexpr, PAIRS_PAD: tl.constexpr, REST_PAD: tl.constexpr,
    HEADS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """grid = (tokens, blocks of query heads, then of key heads)."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    cos, sin = angles(Positions, InvFreq, token, rope_scale, PAIRS, PAIRS_PAD)
    if block < q_blocks:
        head = block * HEADS + tl.arange(0, HEADS)
        x = Q + token * sq_row + head[:, None] * sq_head
        out = QOut + token * sqo_row + head[:, None] * sqo_head
        rotate_heads(x, out, head < q_heads, cos, sin, D, PAIRS, PAIRS_PAD, REST_PAD, INTERLEAVED)
    else:
        head = (block - q_blocks) * HEADS + tl.arange(0, HEADS)
        x = K + token * sk_row + head[:, None] * sk_head
        out = KOut + token * sko_row + head[:, None] * sko_head
        rotate_heads(x, out, head < k_heads, cos, sin, D, PAIRS, PAIRS_PAD, REST_PAD, INTERLEAVED)


def pair_sizes(head_dim: int, pairs: int) -> tuple[int, int]:
    """Padded sizes of the pairs and of the elements that are kept."""
    return triton.next_power_of_2(max(pairs, 1)), triton.next_power_of_2(max(head_dim - 2 * pairs, 1))


def rotary_embedding(*, q, k, positions, inv_freq, interleaved, rope_scale, q_out, k_out):
    """q [tokens, num_heads, head_dim], k [tokens, num_kv_heads, head_dim] -> q_out, k_out."""
    tokens, q_heads, head_dim = q.shape
    k_heads, pairs = k.shape[1], inv_freq.shape[0]
    heads = configs.ROTATED_HEADS
    q_blocks, k_blocks = triton.cdiv(q_heads, heads), triton.cdiv(k_heads, heads)
    if tokens == 0 or q_blocks + k_blocks == 0:
        return
    strides = [s for t in (q, k, q_out, k_out) for s in t.stride()[:2]]
    _rotary[tokens, q_blocks + k_blocks](
        q, k, positions, inv_freq, q_out, k_out, float(rope_scale), q_heads, k_heads, q_blocks, *strides, head_dim, pairs,
        *pair_sizes(head_dim, pairs), heads, interleaved, num_warps=4,
    )  # fmt: skip
