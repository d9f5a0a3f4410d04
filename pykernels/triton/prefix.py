"""Which tokens of a row are kept: always a prefix of the order (logit descending, id ascending).

The prefix is named by its last token: an order-preserving key of the logit, and an id. Counts and masses are compared as
float64, as the reference does; a search takes 16 passes, two bits of the key each, over the tokens that can matter.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import LOG2E, NEG_INF
from .scan import heated

LAST_ID = tl.constexpr(2147483647)
FLOOR = tl.constexpr(2.0**-14)  # tokens less likely than this, against the first, are collected only when they must be


@triton.jit
def key_of(y):
    """uint32 that orders as float32 does: negative numbers are complemented, the others get the top bit."""
    bits = y.to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def combine(Numbers, Tokens, row, rows, heat, CHUNKS: tl.constexpr, PAD: tl.constexpr):
    """(top, its id, whether a NaN was met, mass, winner of the race) of a row, from its chunks; mass is relative to top."""
    c = tl.arange(0, PAD)
    at = row * CHUNKS + c
    plane = rows.to(tl.int64) * CHUNKS
    tops = tl.load(Numbers + at, mask=c < CHUNKS, other=NEG_INF)
    top = tl.max(tops, 0)
    bad = tl.max(tl.load(Numbers + plane + at, mask=c < CHUNKS, other=0.0), 0) > 0
    top_ids = tl.load(Tokens + at, mask=c < CHUNKS, other=LAST_ID)
    top_id = tl.min(tl.where(tops == top, top_ids, LAST_ID), 0)
    mass = tl.full([], 1.0, tl.float32)
    winner = top_id
    if heat != 0:
        z = heated(tops, top, heat)
        masses = tl.load(Numbers + 4 * plane + at, mask=c < CHUNKS, other=0.0)
        mass = tl.sum(tl.where(z == NEG_INF, 0.0, masses * tl.exp2(z * LOG2E)), 0)
        races = tl.load(Numbers + 5 * plane + at, mask=c < CHUNKS, other=NEG_INF)
        races = tl.where(z == NEG_INF, NEG_INF, races * tl.exp2(-z * LOG2E))
        best = tl.max(races, 0)
        winners = tl.load(Tokens + plane + at, mask=c < CHUNKS, other=LAST_ID)
        winner = tl.min(tl.where(races == best, winners, LAST_ID), 0)
    return top, top_id, bad, mass, winner


@triton.jit
def raw_mass(Numbers, row, rows, CHUNKS: tl.constexpr, PAD: tl.constexpr):
    """(top, mass relative to it) of the logits as given."""
    c = tl.arange(0, PAD)
    at = 2 * rows.to(tl.int64) * CHUNKS + row * CHUNKS + c
    tops = tl.load(Numbers + at, mask=c < CHUNKS, other=NEG_INF)
    masses = tl.load(Numbers + rows.to(tl.int64) * CHUNKS + at, mask=c < CHUNKS, other=0.0)
    top = tl.max(tops, 0)
    z = heated(tops, top, 1.0)
    return top, tl.sum(tl.where(z == NEG_INF, 0.0, masses * tl.exp2(z * LOG2E)), 0)


@triton.jit
def within(y, ids, key, last):
    """Whether tokens stand in the prefix that ends at (key, last)."""
    k = key_of(y)
    return (k > key) | ((k == key) & (ids <= last))


@triton.jit
def supported(y, ids, top, top_id, heat, min_p):
    """(weights relative to the top, whether min-p and float32 leave the token a probability); the first one always."""
    e = tl.exp2(heated(y, top, heat) * LOG2E)
    return e, ((e > 0) & (e >= min_p)) | (ids == top_id)


@triton.jit
def _collect(Y, Values, Ids, vocab, top, top_id, heat, min_p, floor, BLOCK: tl.constexpr):
    """Copies the supported tokens of weight >= floor, in order of id; returns their count and mass, and those of all."""
    count = tl.full([], 0, tl.int32)
    count_all = tl.full([], 0, tl.int32)
    mass = tl.full([], 0.0, tl.float64)
    mass_all = tl.full([], 0.0, tl.float64)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        y = tl.load(Y + ids, mask=ids < vocab, other=NEG_INF).to(tl.float32) + 0.0
        e, fits = supported(y, ids, top, top_id, heat, min_p)
        fits = fits & (ids < vocab)
        taken = fits & (e >= floor)
        place = count + tl.cumsum(taken.to(tl.int32), 0) - 1
        tl.store(Values + place, y, mask=taken)
        tl.store(Ids + place, ids, mask=taken)
        count += tl.sum(taken.to(tl.int32), 0)
        count_all += tl.sum(fits.to(tl.int32), 0)
        mass += tl.sum(tl.where(taken, e, 0.0), 0).to(tl.float64)
        mass_all += tl.sum(tl.where(fits, e, 0.0), 0).to(tl.float64)
    tl.debug_barrier()  # the threads of this block read what others of them have written
    return count, count_all, mass, mass_all


@triton.jit
def _amounts(Values, Ids, count, start, key, last, top, heat, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """(keys, ids, amounts) of a block of collected tokens; tokens past the prefix (key, last) have amount 0."""
    at = start + tl.arange(0, BLOCK)
    y = tl.load(Values + at, mask=at < count, other=NEG_INF)
    ids = tl.load(Ids + at, mask=at < count, other=LAST_ID)
    inside = (at < count) & within(y, ids, key, last)
    amount = tl.where(inside, 1.0, 0.0)
    if BY_MASS:
        amount = amount * tl.exp2(heated(y, top, heat) * LOG2E)
    return key_of(y), ids, amount


@triton.jit
def last_of_prefix(Values, Ids, count, key, last, top, heat, target, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The token at which the prefix's count or mass reaches `target`, among collected tokens up to (key, last)."""
    found = tl.full([], 0, tl.uint32)
    shift = tl.full([], 30, tl.uint32)
    for _digits in range(16):
        low = found
        for digit in tl.static_range(1, 4):
            trial = low | (tl.full([], digit, tl.uint32) << shift)
            total = tl.full([], 0.0, tl.float64)
            for start in range(0, count, BLOCK):
                keys, _ids, amount = _amounts(Values, Ids, count, start, key, last, top, heat, BY_MASS, BLOCK)
                total += tl.sum(tl.where(keys >= trial, amount, 0.0), 0).to(tl.float64)
            found = tl.where(total >= target, trial, found)
        shift = tl.where(shift > 0, shift - 2, shift)
    run = tl.full([], 0.0, tl.float64)
    for start in range(0, count, BLOCK):
        keys, _ids, amount = _amounts(Values, Ids, count, start, key, last, top, heat, BY_MASS, BLOCK)
        run += tl.sum(tl.where(keys > found, amount, 0.0), 0).to(tl.float64)
    end = tl.full([], 2147483647, tl.int32)
    for start in range(0, count, BLOCK):
        keys, ids, amount = _amounts(Values, Ids, count, start, key, last, top, heat, BY_MASS, BLOCK)
        tied = tl.where(keys == found, amount, 0.0)
        reached = (tl.cumsum(tied, 0).to(tl.float64) + run) >= target
        end = tl.minimum(end, tl.min(tl.where(reached & (tied > 0), ids, LAST_ID), 0))
        run += tl.sum(tied, 0).to(tl.float64)
    return found, end


@triton.jit
def prefix_of(Y, Values, Ids, vocab, top, top_id, heat, top_k, top_p, min_p, BLOCK: tl.constexpr):
    """(key, last id, mass, tokens collected) of what min-p, top-k and top-p keep of the logits Y [vocab]."""
    count, count_all, mass, mass_all = _collect(Y, Values, Ids, vocab, top, top_id, heat, min_p, FLOOR, BLOCK)
    by_count = (top_k > 0) & (top_k < count_all)
    enough = (by_count & (top_k <= count)) | ((by_count == 0) & (top_p < 1) & (mass >= top_p.to(tl.float64) * mass_all))
    if (enough == 0) & (count < count_all):
        count, count_all, mass, mass_all = _collect(Y, Values, Ids, vocab, top, top_id, heat, min_p, 0.0, BLOCK)
    key = tl.full([], 0, tl.uint32)
    last = tl.full([], 2147483647, tl.int32)
    mass = mass_all
    if by_count:
        key, last = last_of_prefix(Values, Ids, count, key, last, top, heat, top_k.to(tl.float64), False, BLOCK)
        mass = _mass(Values, Ids, count, key, last, top, heat, BLOCK)
    if top_p < 1:
        # The first token is kept whatever top_p says: any positive target is reached by it.
        target = tl.maximum(top_p.to(tl.float64) * mass, 1e-300)
        key, last = last_of_prefix(Values, Ids, count, key, last, top, heat, target, True, BLOCK)
        mass = _mass(Values, Ids, count, key, last, top, heat, BLOCK)
    return key, last, mass.to(tl.float32), count


@triton.jit
def _mass(Values, Ids, count, key, last, top, heat, BLOCK: tl.constexpr):
    total = tl.full([], 0.0, tl.float64)
    for start in range(0, count, BLOCK):
        _keys, _ids, amount = _amounts(Values, Ids, count, start, key, last, top, heat, True, BLOCK)
        total += tl.sum(amount, 0).to(tl.float64)
    return total
