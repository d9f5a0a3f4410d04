"""The attention kernel that prefill and decode launch: ragged queries over contiguous or paged keys and values.

Online softmax (Milakov and Gimelshein 2018; Dao 2023) over tiles of keys, in base 2:
`m' = max(m, s)`, `p = 2^(s - m')`, `l' = l 2^(m - m') + sum p`, `acc' = acc 2^(m - m') + p V`.
Rows of a tile are (query position, head of the group) pairs, so that a group shares every key and value that is read.
Keys that every row sees are walked without a mask; the tiles at both ends of what is visible are masked.
A scale of K multiplies columns of S, a scale of V columns of P after `l` is summed; a static one is applied once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import INTERPRETED, LN2, LOG2E, NEG_INF, multiply_subtract, narrow, power_of_two
from .fp8 import widen_e4m3, widen_int8


@triton.jit
def _find_sequence(CuQ, tile, num_seqs, BLOCK_Q: tl.constexpr):
    """The sequence that owns `tile` when sequence i starts at tile `cu[i] // BLOCK_Q + i`; num_seqs owns padded rows."""
    low = 0
    high = num_seqs + 1
    while low < high:
        middle = (low + high) // 2
        if tl.load(CuQ + middle) // BLOCK_Q + middle <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def split_tokens(length, split_size, SPLIT_TOKENS: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """Tokens per split from the sequence's own length alone, so that its bits do not depend on its batch."""
    chosen = tl.maximum((length + MAX_SPLITS - 1) // MAX_SPLITS, SPLIT_TOKENS)
    chosen = (chosen + 63) // 64 * 64
    return tl.where(split_size > 0, split_size, chosen)


@triton.jit
def sink_share(lse, sink):
    """The factor that a sink logit in the denominator leaves of the output; nothing is left of nothing."""
    return 1.0 / (1.0 + tl.exp2((sink - tl.where(lse == NEG_INF, 0.0, lse)) * LOG2E))


@triton.jit
def _offsets(
    BlockTable, base, start, live, s_page, s_slot, PAGE: tl.constexpr, WIDE: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Element offsets of BLOCK_N tokens, 64-bit: a cache may hold more than 2^31 elements (WIDE: one page may)."""
    column = tl.arange(0, BLOCK_N)
    if PAGE == 0:
        at = (base + start).to(tl.int64) * s_slot + column.to(tl.int64) * s_slot
    else:
        n = (start + column).to(tl.uint32)  # a signed division by a power of two takes four instructions more
        slot = (n % PAGE).to(tl.int64 if WIDE else tl.int32)
        if MASKED:
            page = tl.load(BlockTable + base + n // PAGE, mask=live, other=0)
        else:
            page = tl.load(BlockTable + base + n // PAGE)
        at = page.to(tl.int64) * s_page + slot * s_slot
    return at


@triton.jit
def _load_tile(X, offsets, live, WIDTH: tl.constexpr, PAD: tl.constexpr, MASKED: tl.constexpr):
    """[BLOCK_N, PAD] of K or V. Masked rows are zero whatever lies there: 0 x NaN would reach the sum."""
    d = tl.arange(0, PAD)
    at = X + offsets[:, None] + d[None, :]
    if MASKED and WIDTH != PAD:
        x = tl.load(at, mask=live[:, None] & (d < WIDTH)[None, :], other=0.0)
    elif MASKED:
        x = tl.load(at, mask=live[:, None], other=0.0)
    elif WIDTH != PAD:
        x = tl.load(at, mask=(d < WIDTH)[None, :], other=0.0)
    else:
        x = tl.load(at)
    return x


@triton.jit
def _visible(n, q_pos, low, high, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """[BLOCK_M, len(n)]: which keys each row sees."""
    keep = ((n >= low) & (n < high))[None, :]
    if RIGHT:
        keep = keep & (n[None, :] <= q_pos[:, None] + right)
    if LEFT:
        keep = keep & (n[None, :] >= q_pos[:, None] - left)
    return keep


@triton.jit
def _walk(
    q, first, m, l, acc, v_unit, dirty, K, V, KBoxes, VBoxes, KScale, VScale, BlockTable, begin, end, low, high, base, head, q_pos,
    scale, softcap, slope, left, right, sk_page, sk_slot, sv_page, sv_slot, sks_page, sks_slot, svs_page, svs_slot,
    D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr,
    SAME: tl.constexpr, WIDE: tl.constexpr, TYPE: tl.constexpr, E4M3_BITS: tl.constexpr,
    INT8_PTX: tl.constexpr, DYNAMIC: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Tiles [begin, end) of keys, of which [low, high) are real. MASKED: some row may not see some key of a tile.

    `first` is the largest score of a row, `m` the same in base 2, rounded.
    """
    DOT: tl.constexpr = tl.float32 if INTERPRETED else TYPE
    SCALED: tl.constexpr = SOFTCAP or ALIBI  # the scale is in s already
    FULL: tl.constexpr = tl.float32 == TYPE
    for start in range(begin, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        live = (n >= low) & (n < high)
        if KBoxes is not None and not MASKED:
            k = KBoxes.load([base + start, head * D])
            v = VBoxes.load([base + start, head * DV])
        else:
            k_at = _offsets(BlockTable, base, start, live, sk_page, sk_slot, PAGE, WIDE, BLOCK_N, MASKED)
            v_at = k_at
            if not SAME:
                v_at = _offsets(BlockTable, base, start, live, sv_page, sv_slot, PAGE, WIDE, BLOCK_N, MASKED)
            k = _load_tile(K, k_at, live, D, D_PAD, MASKED)
            v = _load_tile(V, v_at, live, DV, DV_PAD, MASKED)
        if INT8_PTX:
            k = widen_int8(k)
            v = widen_int8(v)
        else:
            k = widen_e4m3(k, DOT, E4M3_BITS)
            v = widen_e4m3(v, DOT, E4M3_BITS)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        if DYNAMIC:
            ks_at = _offsets(BlockTable, base, start, live, sks_page, sks_slot, PAGE, WIDE, BLOCK_N, MASKED)
            vs_at = ks_at
            if not SAME:
                vs_at = _offsets(BlockTable, base, start, live, svs_page, svs_slot, PAGE, WIDE, BLOCK_N, MASKED)
            if MASKED:
                ks = tl.load(KScale + ks_at, mask=live, other=0.0)
                vs = tl.load(VScale + vs_at, mask=live, other=0.0)
            else:
                ks = tl.load(KScale + ks_at)
                vs = tl.load(VScale + vs_at)
            s = s * ks[None, :]
        if SOFTCAP:
            s = (1.0 - 2.0 / (tl.exp2(s * (2.0 * scale / softcap)[:, None]) + 1.0)) * (softcap * LOG2E)
        elif ALIBI:
            s = s * scale[:, None]
        if ALIBI:
            s = s - slope[:, None] * tl.abs(q_pos[:, None] - n[None, :]).to(tl.float32)
        if MASKED:
            keep = _visible(n, q_pos, low, high, left, right, LEFT, RIGHT)
            s = tl.where(keep, s, NEG_INF)
            # A value that is not finite would reach rows that do not see it (0 x NaN): count it, put it back at the end.
            finite = tl.abs(v.to(tl.float32)) < float("inf")
            dirty = tl.maximum(dirty, tl.max(tl.max(tl.where(finite, 0, 1), 1), 0))
            v = tl.where(finite, v, tl.zeros([1, 1], v.dtype))
        new = tl.maximum(first, tl.max(s, 1))
        top = new if SCALED else new * scale
        if MASKED:  # a wholly masked tile must not poison the maximum
            base_line = tl.where(top == NEG_INF, 0.0, top)
            base_score = tl.where(new == NEG_INF, 0.0, new)
        else:
            base_line = top
            base_score = new
        if SCALED:
            p = tl.exp2(s - base_line[:, None])
            alpha = tl.exp2(m - base_line)
        elif FULL:  # the difference first: a key above all others has p = 1, and gives its value to the last bit
            p = tl.exp2((s - base_score[:, None]) * scale[:, None])
            alpha = tl.exp2((first - base_score) * scale)
        else:
            p = tl.exp2(multiply_subtract(s, scale[:, None], base_line[:, None]))
            alpha = tl.exp2(m - base_line)
        first = new
        m = top
        l = l * alpha + tl.sum(p, 1)
        if DYNAMIC:
            # P x scale must fit a 16-bit product: keep it relative to the largest scale so far, a power of two.
            unit = tl.maximum(v_unit, power_of_two(tl.max(tl.where(vs < float("inf"), vs, 0.0), 0)))
            inverse = 1.0 / unit
            alpha = alpha * (v_unit * inverse)
            p = p * (vs * inverse)[None, :]
            if MASKED:
                p = tl.where(keep, p, 0.0)
            v_unit = unit
        acc = acc * alpha[:, None]
        acc = tl.dot(narrow(p, TYPE).to(DOT), v, acc, input_precision="ieee")
    return first, m, l, acc, v_unit, dirty


@triton.jit
def _restore_not_finite(
    acc, V, BlockTable, begin, end, base, q_pos, left, right, sv_page, sv_slot, DV: tl.constexpr, DV_PAD: tl.constexpr,
    PAGE: tl.constexpr, E4M3_BITS: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    """NaN and infinities of V, key by key, into the rows that see them. Never runs on finite values."""
    d = tl.arange(0, DV_PAD)
    for n in range(begin, end):
        if PAGE > 0:
            page = tl.load(BlockTable + base + n // PAGE).to(tl.int64)
            at = page * sv_page + tl.full([], n % PAGE, tl.int64) * sv_slot
        else:
            at = (base + n).to(tl.int64) * sv_slot
        v = widen_e4m3(tl.load(V + at + d, mask=d < DV, other=0.0), tl.float32, E4M3_BITS)
        keep = q_pos == q_pos
        if RIGHT:
            keep = keep & (n <= q_pos + right)
        if LEFT:
            keep = keep & (n >= q_pos - left)
        lost = (tl.abs(v) < float("inf")) == 0
        acc = tl.where(keep[:, None] & lost[None, :], acc + v[None, :], acc)
    return acc


@triton.jit(
    do_not_specialize=[
        "total_q",
        "num_seqs",
        "left",
        "right",
        "split_size",
        "s_table",
        "so_part",
        "sl_part",
        "sl_head",
    ],
    do_not_specialize_on_alignment=["BlockTable", "CuQ", "CuK", "SeqK"],
)
def attention(
    Q, K, V, KBoxes, VBoxes, Out, Lse, KScale, VScale, Alibi, Sinks, BlockTable, CuQ, CuK, SeqK,
    total_q, num_seqs, scale_high, scale_low, softcap, left, right, split_size, s_table,
    sq_row, sq_head, so_part, so_row, so_head, sl_part, sl_head, sk_page, sk_slot, sk_head, sv_page, sv_slot, sv_head,
    sks_page, sks_slot, sks_head, svs_page, svs_slot, svs_head, sa_seq,
    D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr, SAME: tl.constexpr, WIDE: tl.constexpr,
    TYPE: tl.constexpr, NORM_Q: tl.constexpr, E4M3_BITS: tl.constexpr, INT8_PTX: tl.constexpr,
    DYNAMIC: tl.constexpr, SOFTCAP: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SPLIT: tl.constexpr, SPLIT_TOKENS: tl.constexpr, MAX_SPLITS: tl.constexpr,
):  # fmt: skip
    """grid = (tiles, kv heads, splits). Pointers that are None switch their option off; PAGE 0 is contiguous K and V.

    CuQ None is decode: tile i is the one query of sequence i. SPLIT writes float32 parts, one plane per split.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    DOT: tl.constexpr = tl.float32 if INTERPRETED else TYPE
    # Masked tiles hold more in registers, and less of a smaller one is wasted.
    MASK_N: tl.constexpr = BLOCK_N // 2 if BLOCK_N >= 32 else 16  # `max` is no constexpr in Triton 3.4
    tile = (
        tl.num_programs(0) - 1 - tl.program_id(0)
    )  # under a causal mask the last tiles are the longest: start them first
    head = tl.program_id(1)
    split = tl.program_id(2)
    if CuQ is None:
        seq = tile
        q_begin = tile
        q_first = 0
        len_q = 1
        len_k = tl.load(SeqK + seq)
    else:
        seq = _find_sequence(CuQ, tile, num_seqs, BLOCK_Q)
        q_begin = tl.load(CuQ + seq)
        q_first = (tile - (q_begin // BLOCK_Q + seq)) * BLOCK_Q
        real = seq < num_seqs
        len_q = tl.load(CuQ + seq + 1, mask=real, other=0)
        len_q = tl.where(real, len_q, total_q) - q_begin
        if SeqK is None:
            len_k = tl.load(CuK + seq + 1, mask=real, other=0) - tl.load(CuK + seq, mask=real, other=0)
        else:
            len_k = tl.load(SeqK + seq, mask=real, other=0)
    if q_first >= len_q:
        return

    rows = tl.arange(0, BLOCK_M)
    q_local = q_first + rows // GROUP
    q_head = head * GROUP + rows % GROUP
    row_ok = (q_local < len_q) & (rows < BLOCK_Q * GROUP)
    q_row = (q_begin + q_local).to(tl.int64)
    offset = len_k - len_q  # bottom-right: query i stands at key i + offset
    q_pos = q_local + offset
    q_low = q_first + offset
    q_high = tl.minimum(q_first + BLOCK_Q, len_q) - 1 + offset

    # [low, high): keys that some row sees; [head_end, tail): whole tiles of keys that every row sees.
    low = 0
    high = len_k
    if RIGHT:
        high = tl.minimum(high, q_high + right + 1)
    if LEFT:
        low = tl.maximum(low, q_low - left)
    if SPLIT:
        size = split_tokens(len_k, split_size, SPLIT_TOKENS, MAX_SPLITS)
        if split * size >= len_k:
            return
        low = tl.maximum(low, split * size)
        high = tl.minimum(high, (split + 1) * size)
    head_end = low
    if LEFT:
        head_end = low + (tl.maximum(q_high - left - low, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    tail = high
    if RIGHT:
        tail = tl.minimum(tail, q_low + right + 1)
    tail = head_end + tl.maximum(tail - head_end, 0) // BLOCK_N * BLOCK_N

    d = tl.arange(0, D_PAD)
    q_at = Q + q_row[:, None] * sq_row + q_head[:, None] * sq_head + d[None, :]
    q = tl.load(q_at, mask=row_ok[:, None] & (d < D)[None, :], other=0.0)
    # One rounding in all: an error of the scale is the same for every key, so it is multiplied by the largest logit.
    scale_now = tl.full([], scale_high, tl.float64) + tl.full([], scale_low, tl.float64)
    if KScale is not None and not DYNAMIC:
        scale_now = scale_now * tl.load(KScale + head * sks_head).to(tl.float64)
    if E4M3_BITS:
        scale_now = scale_now * 256.0
    scale_now = scale_now.to(tl.float32)
    q = tl.where(scale_now < 0, -q, q)  # a negative scale turns the scores, so that the maximum stays one
    # Not quite zero: 0 x -inf, at a masked key, would be NaN.
    scale = tl.zeros([BLOCK_M], tl.float32) + tl.maximum(tl.abs(scale_now), 1.0e-30)
    if NORM_Q:  # a power of two per row brings bfloat16 queries into float16's range without rounding
        unit = power_of_two(tl.max(tl.abs(q.to(tl.float32)), 1))
        q = q.to(tl.float32) * (1.0 / unit)[:, None]
        scale = scale * unit
    q = q.to(DOT)
    slope = scale
    if Alibi is not None:
        slope = tl.load(Alibi + tl.minimum(seq, num_seqs - 1) * sa_seq + q_head, mask=row_ok, other=0.0) * LOG2E
    if PAGE > 0:
        base = seq.to(tl.int64) * s_table
    else:
        base = tl.load(CuK + seq)
    K += head * sk_head
    V += head * sv_head
    if DYNAMIC:
        KScale += head * sks_head
        VScale += head * svs_head

    first = tl.full([BLOCK_M], NEG_INF, tl.float32)
    m = first
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DV_PAD], tl.float32)
    v_unit = 1.1754943508222875e-38
    dirty = 0
    for part in tl.static_range(3):
        if part == 1 or part == 2 or LEFT:
            begin = low if part == 0 else (head_end if part == 1 else tail)
            end = head_end if part == 0 else (tail if part == 1 else high)
            first, m, l, acc, v_unit, dirty = _walk(
                q, first, m, l, acc, v_unit, dirty, K, V, KBoxes, VBoxes, KScale, VScale, BlockTable, begin, tl.minimum(end, high),
                low, high, base, head, q_pos, scale, softcap, slope, left, right, sk_page, sk_slot, sv_page, sv_slot,
                sks_page, sks_slot, svs_page, svs_slot, D, DV, D_PAD, DV_PAD, BLOCK_N if part == 1 else MASK_N, PAGE, SAME,
                WIDE, TYPE, E4M3_BITS, INT8_PTX, DYNAMIC, SOFTCAP, Alibi is not None, LEFT, RIGHT, part != 1,
            )  # fmt: skip
    if dirty > 0:
        for part in tl.static_range(2):
            begin = low if part == 0 else tail
            end = tl.minimum(head_end, high) if part == 0 else high
            acc = _restore_not_finite(acc, V, BlockTable, begin, end, base, q_pos, left, right, sv_page, sv_slot, DV, DV_PAD,
                                      PAGE, E4M3_BITS, LEFT, RIGHT)  # fmt: skip

    norm = tl.where(l == 0, 0.0, 1.0 / tl.where(l == 0, 1.0, l))
    if not (SOFTCAP or DYNAMIC or tl.float32 == TYPE) and Alibi is None:
        # m is rounded, so the largest p is not quite 1, and the product takes it rounded to TYPE: with logits of 1e4 and more
        # that shows. The sum must hold what the product does.
        largest = tl.where(l == 0, 1.0, tl.exp2(multiply_subtract(first, scale, m)))
        norm = norm * (largest / narrow(largest, TYPE).to(tl.float32))
    lse = tl.where(l == 0, NEG_INF, (m + tl.log2(tl.where(l == 0, 1.0, l))) * LN2)
    if DYNAMIC:
        norm = norm * v_unit
    elif VScale is not None:
        norm = norm * tl.load(VScale + head * svs_head)
    if E4M3_BITS:
        norm = norm * 256.0
    if Sinks is not None and not SPLIT:
        norm = norm * sink_share(lse, tl.load(Sinks + q_head, mask=row_ok, other=0.0))
    dv = tl.arange(0, DV_PAD)
    o_at = Out + split * so_part + q_row[:, None] * so_row + q_head[:, None] * so_head + dv[None, :]
    out = narrow(acc * norm[:, None], Out.dtype.element_ty)
    tl.store(o_at, out, mask=row_ok[:, None] & (dv < DV)[None, :])
    if Lse is not None:
        tl.store(Lse + split * sl_part + q_head * sl_head + q_row, lse, mask=row_ok)
