"""The first pass of sampling and verification: every chunk of every row in parallel, what can be known without the others."""

from __future__ import annotations

import triton
import triton.language as tl

from .common import LOG2E, NEG_INF
from .philox import SAMPLE_NOISE, uniforms

IN_PROMPT = tl.constexpr(1 << 30)  # a bit beside the count of a token in the output


@triton.jit(do_not_specialize=["length", "s_ids"])
def count_tokens(Ids, Counts, vocab, length, s_ids, AMOUNT: tl.constexpr, BLOCK: tl.constexpr):
    """grid = (rows, length / BLOCK). Integer atomics: the order in which they land does not matter."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(Ids + row * s_ids + at, mask=at < length, other=-1).to(tl.int64)
    real = (ids >= 0) & (ids < vocab)
    if AMOUNT == IN_PROMPT:
        tl.atomic_or(Counts + row * vocab + ids, AMOUNT, mask=real)
    else:
        tl.atomic_add(Counts + row * vocab + ids, AMOUNT, mask=real)


@triton.jit
def adjusted(
    raw, Bias, Mask, Counts, Repetition, Presence, Frequency, row, ids, inside, vocab, s_bias, s_mask,
):  # fmt: skip
    """Bias, mask, then the penalties, in float32, each step rounded."""
    x = raw
    if Bias is not None:
        x = x + tl.load(Bias + row * s_bias + ids, mask=inside, other=0.0)
    if Mask is not None:
        x = tl.where(tl.load(Mask + row * s_mask + ids, mask=inside, other=0) != 0, x, NEG_INF)
    if Counts is not None:
        seen = tl.load(Counts + row * vocab + ids, mask=inside, other=0)
        count = (seen & (IN_PROMPT - 1)).to(tl.float32)
        if Repetition is not None:
            penalty = tl.load(Repetition + row)
            penalised = tl.where(x > 0, tl.div_rn(x, tl.zeros_like(x) + penalty), x * penalty)
            x = tl.where(seen > 0, penalised, x)
        if Presence is not None:
            x = x - tl.load(Presence + row) * tl.where(count > 0, 1.0, 0.0)
        if Frequency is not None:
            x = x - tl.load(Frequency + row) * count
    return x + 0.0  # -0 becomes 0: they are one value, and must have one key


@triton.jit
def owner_of(CuDraft, row, requests):
    """The request that owns a target row: request b owns rows cu_draft[b] + b .. cu_draft[b + 1] + b."""
    low = 0
    high = requests
    while low < high:
        middle = (low + high) // 2
        if tl.load(CuDraft + middle) + middle <= row:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def heated(y, top, heat):
    """z = (y - top) / heat, 0 at the top even where that is infinite: equal infinities share the probability."""
    z = tl.where(y == top, 0.0, (y - top) / heat)
    return tl.where(y == NEG_INF, NEG_INF, z)


@triton.jit(do_not_specialize=["rows", "requests"])
def scan(
    Logits, Temperature, Seeds, Positions, CuDraft, Bias, Mask, Counts, Repetition, Presence, Frequency, Adjusted, Numbers, Tokens,
    rows, requests, vocab, s_logits, s_bias, s_mask, RAW: tl.constexpr, NOISE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """grid = (rows, vocab / BLOCK). Numbers [6, rows, chunks] and Tokens [2, rows, chunks] are what `prefix.py` combines.

    Adjusted, where there is one, receives the logits after bias, mask and penalties.
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    chunks = tl.num_programs(1)
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab
    raw = tl.load(Logits + row * s_logits + ids, mask=inside, other=NEG_INF).to(tl.float32)
    y = adjusted(raw, Bias, Mask, Counts, Repetition, Presence, Frequency, row, ids, inside, vocab, s_bias, s_mask)
    if Adjusted is not None:
        tl.store(Adjusted + row * vocab + ids, y, mask=inside)
    bad = tl.max(tl.where((y != y) | (raw != raw), 1, 0), 0)
    y = tl.where(y == y, y, NEG_INF)
    top = tl.max(y, 0)
    top_id = tl.min(tl.where(y == top, ids, 2147483647), 0)
    plane = rows.to(tl.int64) * chunks
    at = row * chunks + chunk
    tl.store(Numbers + at, top)
    tl.store(Numbers + plane + at, bad.to(tl.float32))
    tl.store(Tokens + at, top_id)
    if RAW:
        raw = tl.where(raw == raw, raw, NEG_INF)
        raw_top = tl.max(raw, 0)
        weight = tl.exp2(heated(raw, raw_top, 1.0) * LOG2E)
        tl.store(Numbers + 2 * plane + at, raw_top)
        tl.store(Numbers + 3 * plane + at, tl.sum(weight, 0))
    owner = row
    if CuDraft is not None:
        owner = owner_of(CuDraft, row, requests)
    heat = tl.load(Temperature + owner)
    if heat != 0:
        z = heated(y, top, heat)
        tl.store(Numbers + 4 * plane + at, tl.sum(tl.exp2(z * LOG2E), 0))
        if NOISE:
            u = uniforms(tl.load(Seeds + row), tl.load(Positions + row), chunk * BLOCK, SAMPLE_NOISE, BLOCK)
            race = tl.where(z == NEG_INF, NEG_INF, tl.log(u) * tl.exp2(-z * LOG2E))
            best = tl.max(race, 0)
            tl.store(Numbers + 5 * plane + at, best)
            tl.store(Tokens + plane + at, tl.min(tl.where(race == best, ids, 2147483647), 0))
