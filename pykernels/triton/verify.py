"""Draft verification: chain rejection sampling (Leviathan et al. 2023).

Draft token d at its position is accepted when u q(d) < p(d); the first rejected one is replaced by a draw from max(p - q, 0),
and when all are accepted one more token is drawn from the last row, as `sample` would draw it at that position.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import configs
from .common import NEG_INF
from .philox import ACCEPT, RESAMPLE_NOISE, SAMPLE_NOISE, uniform_at, uniforms
from .prefix import LAST_ID, combine, key_of, prefix_of, supported, within
from .scan import owner_of, scan


@triton.jit(do_not_specialize=["rows", "requests"])
def _prefixes(
    Y, Temperature, TopK, TopP, MinP, CuDraft, Numbers, Tokens, Values, Kept, Rows, Ends, rows, requests, vocab, s_y,
    CHUNKS: tl.constexpr, PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """grid = (target rows,). Rows [rows, 3]: top, mass, heat; Ends [rows, 4]: key, last id, top id, whether usable."""
    row = tl.program_id(0).to(tl.int64)
    owner = owner_of(CuDraft, row, requests)
    heat = tl.load(Temperature + owner)
    top_k = tl.load(TopK + owner)
    top_p = tl.load(TopP + owner)
    min_p = tl.load(MinP + owner)
    top, top_id, bad, mass, _winner = combine(Numbers, Tokens, row, rows, heat, CHUNKS, PAD)
    usable = (top > NEG_INF) & (bad == 0)
    key = tl.full([], 0, tl.uint32)
    last = tl.full([], 2147483647, tl.int32)
    filtered = ((top_k > 0) & (top_k < vocab)) | (top_p < 1) | (min_p > 0)
    if heat == 0:
        key = key_of(top)
        last = top_id
        heat = tl.full([], 1.0, tl.float32)
        mass = tl.full([], 1.0, tl.float32)
    elif filtered & usable:
        key, last, mass, _count = prefix_of(Y + row * s_y, Values + row * vocab, Kept + row * vocab, vocab, top, top_id, heat, top_k,
                                       top_p, min_p, BLOCK)  # fmt: skip
    tl.store(Rows + row * 3, top)
    tl.store(Rows + row * 3 + 1, mass)
    tl.store(Rows + row * 3 + 2, heat)
    tl.store(Ends + row * 4, key.to(tl.int32, bitcast=True))
    tl.store(Ends + row * 4 + 1, last)
    tl.store(Ends + row * 4 + 2, top_id)
    tl.store(Ends + row * 4 + 3, usable.to(tl.int32))


@triton.jit
def _probability(Y, Rows, Ends, row, ids, mask, min_p):
    """p of tokens `ids` of a target row, 0 outside what is kept."""
    y = tl.load(Y + ids, mask=mask, other=NEG_INF).to(tl.float32) + 0.0
    key = tl.load(Ends + row * 4).to(tl.uint32, bitcast=True)
    e, fits = supported(
        y, ids, tl.load(Rows + row * 3), tl.load(Ends + row * 4 + 2), tl.load(Rows + row * 3 + 2), min_p
    )
    return tl.where(
        mask & fits & within(y, ids, key, tl.load(Ends + row * 4 + 1)), e / tl.load(Rows + row * 3 + 1), 0.0
    )


@triton.jit
def _draw(Y, Q, Rows, Ends, row, drafted, share, min_p, seed, position, purpose, vocab, BLOCK: tl.constexpr):
    """The winner under max(p - share x q, 0), q given or one-hot at `drafted`; -1 when nothing is left."""
    best = tl.full([], NEG_INF, tl.float32)
    winner = tl.full([], -1, tl.int32)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        mask = ids < vocab
        p = _probability(Y, Rows, Ends, row, ids, mask, min_p)
        if Q is None:
            p = p - share * tl.where(ids == drafted, p, 0.0)
        else:
            p = p - share * tl.load(Q + ids, mask=ids < tl.where(share > 0, vocab, 0), other=0.0)
        race = tl.where(p > 0, tl.log(uniforms(seed, position, start, purpose, BLOCK)) / p, NEG_INF)
        fastest = tl.max(race, 0)
        first = tl.min(tl.where(race == fastest, ids, LAST_ID), 0)
        winner = tl.where(fastest > best, first, winner)
        best = tl.maximum(best, fastest)
    return winner


@triton.jit
def _verify(
    Y, DraftIds, Q, CuDraft, MinP, Seeds, Positions, Rows, Ends, Ids, NumAccepted, vocab, max_tokens, s_y, s_q, s_ids,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """grid = (requests,). Accepts drafts until one is rejected or its target row is unusable, then draws one more token."""
    request = tl.program_id(0).to(tl.int64)
    begin = tl.load(CuDraft + request)
    length = tl.load(CuDraft + request + 1) - begin
    seed = tl.load(Seeds + request)
    position = tl.load(Positions + request)
    min_p = tl.load(MinP + request)
    step = length - length
    going = step + 1
    while (going > 0) & (step < length):
        row = begin + request + step
        drafted = tl.load(DraftIds + begin + step)
        inside = (drafted >= 0) & (drafted < vocab)
        token = tl.where(inside, drafted, 0).to(tl.int32)
        p = _probability(Y + row * s_y, Rows, Ends, row, token, inside, min_p)
        q = p - p + 1.0
        if Q is not None:
            q = tl.load(Q + (begin + step).to(tl.int64) * s_q + token)
        u = uniform_at(seed, position + step, token - token, ACCEPT)
        accepted = (tl.load(Ends + row * 4 + 3) != 0) & inside & (u * q < p)
        tl.store(Ids + request * s_ids + step, token.to(tl.int64), mask=accepted)
        going = accepted.to(tl.int32)
        step += going
    tl.store(NumAccepted + request, step)

    row = begin + request + step
    at = begin + step
    rejected = step < length
    drafted = tl.load(DraftIds + at, mask=rejected, other=-1)
    purpose = tl.where(rejected, RESAMPLE_NOISE, SAMPLE_NOISE).to(tl.uint32)
    share = tl.where(rejected, 1.0, 0.0)
    winner = step - step - 1
    rest = Q
    if Q is not None:
        rest = Q + tl.where(rejected, at, 0).to(tl.int64) * s_q
    if tl.load(Ends + row * 4 + 3) != 0:
        tries = step - step
        while (winner < 0) & (tries < 2):  # only rounding can leave nothing of p - q: then p itself
            winner = _draw(
                Y + row * s_y,
                rest,
                Rows,
                Ends,
                row,
                drafted,
                share,
                min_p,
                seed,
                position + step,
                purpose,
                vocab,
                BLOCK,
            )
            share = share * 0.0
            tries += 1
    for place in range(step, max_tokens):
        tl.store(Ids + request * s_ids + place, tl.where(place == step, winner, -1).to(tl.int64))


def verify_draft(
    *, target_logits, draft_ids, draft_probs, cu_draft, temperature, top_k, top_p, min_p, seeds, positions, ids, num_accepted,
):  # fmt: skip
    """Target logits [total_draft + batch, vocab] judge the drafts -> ids [batch, max_tokens], num_accepted [batch]."""
    rows, vocab = target_logits.shape
    batch = temperature.shape[0]
    if batch == 0:
        return
    device = target_logits.device
    block = configs.scan_block(vocab)
    chunks = triton.cdiv(vocab, block)
    numbers = torch.empty(6, rows, chunks, dtype=torch.float32, device=device)
    tokens = torch.empty(2, rows, chunks, dtype=torch.int32, device=device)
    launch = dict(num_warps=configs.scan_warps(block))
    stride = target_logits.stride(0)
    scan[rows, chunks](target_logits, temperature, None, None, cu_draft, None, None, None, None, None, None, None, numbers,
                       tokens, rows, batch, vocab, stride, 0, 0, False, False, block, **launch)  # fmt: skip
    values = torch.empty(rows, vocab, dtype=torch.float32, device=device)
    kept = torch.empty(rows, vocab, dtype=torch.int32, device=device)
    numbers_of_rows = torch.empty(rows, 3, dtype=torch.float32, device=device)
    ends = torch.empty(rows, 4, dtype=torch.int32, device=device)
    _prefixes[rows,](target_logits, temperature, top_k, top_p, min_p, cu_draft, numbers, tokens, values, kept, numbers_of_rows,
                     ends, rows, batch, vocab, stride, chunks, triton.next_power_of_2(chunks), block, **launch)  # fmt: skip
    _verify[batch,](target_logits, draft_ids, draft_probs, cu_draft, min_p, seeds, positions, numbers_of_rows, ends, ids,
                    num_accepted, vocab, ids.shape[1], stride, 0 if draft_probs is None else draft_probs.stride(0),
                    ids.stride(0), max(block // 2, 64), **launch)  # fmt: skip
