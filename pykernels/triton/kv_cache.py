"""Paged KV cache: append (quantised, and with K and Q rotated on the way), gather (dequantised), copy pages.

Quantising append, bit for bit: scale = amax / 127 or / 448 (1 for a row of zeros), code = x / scale, both IEEE divisions,
rounded to the nearest even, saturated. Rounding is done in integers, so that the interpreter gives the same codes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import configs
from .common import narrow, padded, target_of
from .fp8 import encode_e4m3, widen_e4m3
from .launch import scale_strides
from .rope import angles, pair_sizes, rotate_heads, rotated_pairs


@triton.jit
def _amax(x):
    """[rows]: max |x|, NaN where a row holds one."""
    top = tl.max(tl.abs(tl.where(x == x, x, 0.0)), 1)
    return tl.where(tl.max(tl.where(x == x, 0, 1), 1) > 0, float("nan"), top)


@triton.jit
def _scale_of(amax, INT8: tl.constexpr):
    largest = 127.0 if INT8 else 448.0
    scale = tl.div_rn(amax, tl.zeros_like(amax) + largest)
    return tl.where(scale == 0, 1.0, scale)


@triton.jit
def _codes(x, scale, KIND: tl.constexpr, Cache):
    """What the cache stores for x [rows, columns] float32. KIND: "float", "int8" or "e4m3"."""
    if KIND == "float":
        y = narrow(x, Cache.dtype.element_ty)
    else:
        ratio = tl.div_rn(x, tl.zeros_like(x) + scale[:, None])
        if KIND == "int8":
            held = tl.minimum(tl.maximum(tl.where(ratio == ratio, ratio, 0.0), -128.0), 127.0)
            # Adding 1.5 x 2^23 leaves the nearest integer, ties to even, in the low bits.
            y = ((held + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000).to(tl.int8)
        else:
            y = encode_e4m3(ratio)
    return y


@triton.jit
def _row_scale(
    Scale, amax, page, slot, head, head_ok, ss_page, ss_slot, ss_head, KIND: tl.constexpr, DYNAMIC: tl.constexpr
):
    """[HEADS]: the scale of each row; a dynamic one is computed and written, a static one read."""
    if KIND == "float":
        scale = tl.zeros_like(amax)
    elif DYNAMIC:
        scale = _scale_of(amax, KIND == "int8")
        tl.store(Scale + page * ss_page + slot * ss_slot + head * ss_head, scale, mask=head_ok)
    else:
        scale = tl.load(Scale + head * ss_head, mask=head_ok, other=1.0)
    return scale


@triton.jit
def _append_row(
    X, Cache, Scale, page, slot, head, head_ok, sc_page, sc_slot, sc_head, ss_page, ss_slot, ss_head, WIDTH: tl.constexpr,
    PAD: tl.constexpr, KIND: tl.constexpr, DYNAMIC: tl.constexpr,
):  # fmt: skip
    """Stores rows X [HEADS, 1] of one token as they are."""
    d = tl.arange(0, PAD)
    mask = head_ok[:, None] & (d < WIDTH)[None, :]
    x = tl.load(X + d[None, :], mask=mask, other=0.0).to(tl.float32)
    scale = _row_scale(Scale, _amax(x), page, slot, head, head_ok, ss_page, ss_slot, ss_head, KIND, DYNAMIC)
    at = Cache + page * sc_page + slot * sc_slot + head[:, None] * sc_head + d[None, :]
    tl.store(at, _codes(x, scale, KIND, Cache), mask=mask)


@triton.jit
def _append_rotated(
    X, Cache, Scale, cos, sin, page, slot, head, head_ok, sc_page, sc_slot, sc_head, ss_page, ss_slot, ss_head,
    WIDTH: tl.constexpr, PAIRS: tl.constexpr, PAIRS_PAD: tl.constexpr, REST_PAD: tl.constexpr, INTERLEAVED: tl.constexpr,
    KIND: tl.constexpr, DYNAMIC: tl.constexpr,
):  # fmt: skip
    """Rotates rows X [HEADS, 1], rounds them to their own type as `rotary_embedding` would, and stores them."""
    mask = head_ok[:, None] & (tl.arange(0, PAIRS_PAD) < PAIRS)[None, :]
    a, b, first, second = rotated_pairs(X, cos, sin, mask, PAIRS, PAIRS_PAD, INTERLEAVED)
    a = narrow(a, X.dtype.element_ty).to(tl.float32)
    b = narrow(b, X.dtype.element_ty).to(tl.float32)
    d = 2 * PAIRS + tl.arange(0, REST_PAD)
    kept = head_ok[:, None] & (d < WIDTH)[None, :]
    rest = tl.load(X + d[None, :], mask=kept, other=0.0).to(tl.float32)
    amax_a = _amax(a)
    amax_b = _amax(b)
    amax_rest = _amax(rest)
    some_nan = (amax_a != amax_a) | (amax_b != amax_b) | (amax_rest != amax_rest)
    amax = tl.where(some_nan, float("nan"), tl.maximum(tl.maximum(amax_a, amax_b), amax_rest))
    scale = _row_scale(Scale, amax, page, slot, head, head_ok, ss_page, ss_slot, ss_head, KIND, DYNAMIC)
    at = Cache + page * sc_page + slot * sc_slot + head[:, None] * sc_head
    tl.store(at + first[None, :], _codes(a, scale, KIND, Cache), mask=mask)
    tl.store(at + second[None, :], _codes(b, scale, KIND, Cache), mask=mask)
    tl.store(at + d[None, :], _codes(rest, scale, KIND, Cache), mask=kept)


@triton.jit(do_not_specialize=["num_pages"])
def _append(
    Q, K, V, Positions, InvFreq, QOut, KCache, VCache, KScale, VScale, Slots, rope_scale, num_pages, page_size, kv_heads,
    q_heads, kv_blocks, sq_row, sq_head, sqo_row, sqo_head, sk_row, sk_head, sv_row, sv_head, skc_page, skc_slot, skc_head,
    svc_page, svc_slot, svc_head, sks_page, sks_slot, sks_head, svs_page, svs_slot, svs_head,
    D: tl.constexpr, D_PAD: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr, PAIRS: tl.constexpr,
    PAIRS_PAD: tl.constexpr, REST_PAD: tl.constexpr, HEADS: tl.constexpr, INTERLEAVED: tl.constexpr, KIND: tl.constexpr,
    DYNAMIC: tl.constexpr,
):  # fmt: skip
    """grid = (tokens, blocks of kv heads, then of query heads). Q None: append alone. PAIRS 0 with Q: nothing to rotate."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    if Q is not None:
        cos, sin = angles(Positions, InvFreq, token, rope_scale, PAIRS, PAIRS_PAD)
        if block >= kv_blocks:
            head = (block - kv_blocks) * HEADS + tl.arange(0, HEADS)
            x = Q + token * sq_row + head[:, None] * sq_head
            out = QOut + token * sqo_row + head[:, None] * sqo_head
            rotate_heads(x, out, head < q_heads, cos, sin, D, PAIRS, PAIRS_PAD, REST_PAD, INTERLEAVED)
    at = tl.load(Slots + token)
    # Negative slots are padding; one past the cache must not write outside it.
    if (block < kv_blocks) & (at >= 0) & (at < num_pages.to(tl.int64) * page_size):
        page = at // page_size
        slot = at % page_size
        head = block * HEADS + tl.arange(0, HEADS)
        head_ok = head < kv_heads
        k = K + token * sk_row + head[:, None] * sk_head
        v = V + token * sv_row + head[:, None] * sv_head
        if Q is not None:
            _append_rotated(k, KCache, KScale, cos, sin, page, slot, head, head_ok, skc_page, skc_slot, skc_head, sks_page,
                            sks_slot, sks_head, D, PAIRS, PAIRS_PAD, REST_PAD, INTERLEAVED, KIND, DYNAMIC)  # fmt: skip
        else:
            _append_row(k, KCache, KScale, page, slot, head, head_ok, skc_page, skc_slot, skc_head, sks_page, sks_slot,
                        sks_head, D, D_PAD, KIND, DYNAMIC)  # fmt: skip
        _append_row(v, VCache, VScale, page, slot, head, head_ok, svc_page, svc_slot, svc_head, svs_page, svs_slot, svs_head,
                    DV, DV_PAD, KIND, DYNAMIC)  # fmt: skip


def _bytes_of(cache: torch.Tensor) -> torch.Tensor:
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache


_KINDS = {torch.int8: "int8", torch.float8_e4m3fn: "e4m3"}


def append_kv(*, k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale):
    """k [tokens, num_kv_heads, head_dim] and v into the slots of the caches; negative slots are skipped."""
    _launch_append(None, k, v, None, None, None, False, 1.0, k_cache, v_cache, slot_mapping, k_scale, v_scale)


def rope_append_kv(
    *, q, k, v, positions, inv_freq, interleaved, rope_scale, k_cache, v_cache, slot_mapping, k_scale, v_scale, q_out,
):  # fmt: skip
    """`rotary_embedding` of q and k and `append_kv` of k and v in one launch."""
    _launch_append(
        q, k, v, positions, inv_freq, q_out, interleaved, rope_scale, k_cache, v_cache, slot_mapping, k_scale, v_scale
    )


def _launch_append(
    q, k, v, positions, inv_freq, q_out, interleaved, rope_scale, k_cache, v_cache, slots, k_scale, v_scale,
):  # fmt: skip
    tokens, kv_heads, head_dim = k.shape
    head_dim_v, q_heads = v.shape[2], 0 if q is None else q.shape[1]
    pairs = 0 if q is None else inv_freq.shape[0]
    heads = configs.ROTATED_HEADS
    kv_blocks, q_blocks = triton.cdiv(kv_heads, heads), triton.cdiv(q_heads, heads)
    if tokens == 0 or kv_blocks + q_blocks == 0:
        return
    rotated = [0, 0, 0, 0] if q is None else [*q.stride()[:2], *q_out.stride()[:2]]
    strides = [s for t in (k, v) for s in t.stride()[:2]] + [s for t in (k_cache, v_cache) for s in t.stride()[:3]]
    _append[tokens, kv_blocks + q_blocks](
        q, k, v, positions, inv_freq, q_out, _bytes_of(k_cache), _bytes_of(v_cache), k_scale, v_scale, slots,
        float(rope_scale), k_cache.shape[0], k_cache.shape[1], kv_heads, q_heads, kv_blocks, *rotated, *strides,
        *scale_strides(k_scale), *scale_strides(v_scale), head_dim, triton.next_power_of_2(head_dim), head_dim_v,
        triton.next_power_of_2(head_dim_v), pairs, *pair_sizes(head_dim, pairs), heads, interleaved,
        _KINDS.get(k_cache.dtype, "float"), k_scale is not None and k_scale.dim() == 3, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["s_table", "total_k"], do_not_specialize_on_alignment=["BlockTable", "SeqK"])
def _gather(
    Cache, Scale, BlockTable, SeqK, Out, total_k, s_table, sc_page, sc_slot, sc_head, ss_page, ss_slot, ss_head, so_row, so_head,
    PAGE: tl.constexpr, WIDTH: tl.constexpr, PAD: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    QUANTISED: tl.constexpr, DYNAMIC: tl.constexpr, E4M3_BITS: tl.constexpr,
):  # fmt: skip
    """grid = (sequences, tokens / BLOCK, heads). Tokens of a page that is not there read as NaN."""
    seq = tl.program_id(0)
    head = tl.program_id(2)
    length = tl.load(SeqK + seq)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if tl.program_id(1) * BLOCK >= length:
        return
    begin = tl.full([], 0, tl.int64)  # tokens of the sequences before this one
    for first in range(0, seq, CHUNK):
        other = first + tl.arange(0, CHUNK)
        begin += tl.sum(tl.load(SeqK + other, mask=other < seq, other=0).to(tl.int64), 0)
    live = (n < length) & (begin + n < total_k)
    page = tl.load(BlockTable + seq.to(tl.int64) * s_table + n // PAGE, mask=live, other=-1).to(tl.int64)
    there = live & (page >= 0)
    slot = (n % PAGE).to(tl.int64)
    d = tl.arange(0, PAD)
    at = Cache + (page * sc_page + slot * sc_slot + head * sc_head)[:, None] + d[None, :]
    x = widen_e4m3(tl.load(at, mask=there[:, None] & (d < WIDTH)[None, :], other=0.0), tl.float32, E4M3_BITS)
    if E4M3_BITS:
        x = x * 256.0
    if DYNAMIC:
        scale = tl.load(Scale + page * ss_page + slot * ss_slot + head * ss_head, mask=there, other=0.0)
        x = x * scale[:, None]
    elif QUANTISED:
        x = x * tl.load(Scale + head * ss_head)
    x = tl.where(there[:, None], x, float("nan"))
    out = Out + (begin + n)[:, None] * so_row + head * so_head + d[None, :]
    tl.store(out, narrow(x, Out.dtype.element_ty), mask=live[:, None] & (d < WIDTH)[None, :])


def gather_kv(*, k_cache, v_cache, block_table, seqlens_k, k_scale, v_scale, k, v):
    """The tokens of all sequences one after the other, dequantised: k, v [total_k, num_kv_heads, head_dim (or _v)]."""
    batch, capacity = block_table.shape[0], block_table.shape[1] * k_cache.shape[1]
    bits = k_cache.dtype == torch.float8_e4m3fn and not target_of(k_cache).has_e4m3
    for cache, scale, out in ((k_cache, k_scale, k), (v_cache, v_scale, v)):
        _, page_size, heads, width = cache.shape
        if batch * capacity * heads == 0:
            continue
        block = configs.GATHERED_TOKENS
        _gather[batch, triton.cdiv(capacity, block), heads](
            _bytes_of(cache) if bits else cache, scale, block_table, seqlens_k, out, out.shape[0], block_table.stride(0),
            *cache.stride()[:3], *scale_strides(scale), *out.stride()[:2], page_size, width, padded(width), block, 128,
            scale is not None, scale is not None and scale.dim() == 3, bits, num_warps=4,
        )  # fmt: skip


@triton.jit(do_not_specialize=["src_count", "dst_count"])
def _copy_rows(
    Src, Dst, SrcPages, DstPages, src_count, dst_count, heads, rows, ss_page, ss_slot, ss_head, sd_page, sd_slot, sd_head,
    WIDTH: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """grid = (copies, rows of a page / ROWS). A list of pages that is None is 0, 1, 2, ..."""
    copy = tl.program_id(0).to(tl.int64)
    source = copy
    target = copy
    if SrcPages is not None:
        source = tl.load(SrcPages + copy)
    if DstPages is not None:
        target = tl.load(DstPages + copy)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    slot = (row // heads).to(tl.int64)
    head = row % heads
    d = tl.arange(0, PAD)
    inside = (source >= 0) & (source < src_count) & (target >= 0) & (target < dst_count)
    mask = (row < tl.where(inside, rows, 0))[:, None] & (d < WIDTH)[None, :]
    x = tl.load(Src + source * ss_page + (slot * ss_slot + head * ss_head)[:, None] + d[None, :], mask=mask)
    tl.store(Dst + target * sd_page + (slot * sd_slot + head * sd_head)[:, None] + d[None, :], x, mask=mask)


def _launch_copy(source, target, src_pages, dst_pages, copies):
    _, page_size, heads, width = source.shape
    rows = page_size * heads
    if copies * rows * width == 0:
        return
    pad = triton.next_power_of_2(width)
    tile = max(1, 2048 // pad)
    _copy_rows[copies, triton.cdiv(rows, tile)](
        source, target, src_pages, dst_pages, source.shape[0], target.shape[0], heads, rows, *source.stride()[:3],
        *target.stride()[:3], width, pad, tile, num_warps=4,
    )  # fmt: skip


def _pools(*caches_and_scales):
    """What is copied row by row: caches, and dynamic scales as rows of one element."""
    pools = (t for t in caches_and_scales if t is not None and t.dim() >= 3)
    return [_bytes_of(t) if t.dim() == 4 else t[..., None] for t in pools]


def copy_pages(*, k_cache, v_cache, src_pages, dst_pages, k_scale, v_scale):
    """Whole pages, dynamic scales included. Every source is read before a destination is written, hence the staging."""
    copies = src_pages.shape[0]
    for pool in _pools(k_cache, v_cache, k_scale, v_scale):
        stage = torch.empty((copies, *pool.shape[1:]), dtype=pool.dtype, device=pool.device)
        _launch_copy(pool, stage, src_pages, None, copies)
        _launch_copy(stage, pool, None, dst_pages, copies)


def swap_pages(
    *, k_from, v_from, k_to, v_to, src_pages, dst_pages, k_scale_from, v_scale_from, k_scale_to, v_scale_to,
):  # fmt: skip
    """Whole pages from one cache into another, dynamic scales included; a pinned host pool is addressed directly."""
    sources = _pools(k_from, v_from, k_scale_from, v_scale_from)
    targets = _pools(k_to, v_to, k_scale_to, v_scale_to)
    for source, target in zip(sources, targets, strict=True):
        _launch_copy(source, target, src_pages, dst_pages, src_pages.shape[0])
