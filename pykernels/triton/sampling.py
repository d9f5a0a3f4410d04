"""Sampling: penalties, temperature, min-p, top-k, top-p and the draw.

The draw is an exponential race, the same winner as Gumbel-max: argmax log p - log(-log u) = argmax log(u) / p, one logarithm
for two. What is kept is always a prefix of the order (logit descending, id ascending), found by a bounded search over the
32 bits of an order-preserving key.

`scan` runs over chunks of the vocabulary in parallel and leaves what plain rows need: the largest logit, the mass, the
winner of the race. `_finish` combines a row; only a filtered row reads its logits again, once, to collect the few tokens that
can matter, and searches among those.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import configs
from .common import LN2, LOG2E, NEG_INF
from .philox import SAMPLE_NOISE, uniform_at, uniforms
from .prefix import LAST_ID, combine, key_of, prefix_of, raw_mass, within
from .scan import IN_PROMPT, count_tokens, heated, scan
from .verify import verify_draft

__all__ = ["philox_uniform", "sample", "verify_draft"]


@triton.jit
def _race(Values, Ids, count, key, last, top, heat, seed, position, BLOCK: tl.constexpr):
    """The winner among collected tokens of the prefix that ends at (key, last)."""
    best = tl.full([], NEG_INF, tl.float32)
    winner = tl.full([], 2147483647, tl.int32)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        y = tl.load(Values + at, mask=at < count, other=NEG_INF)
        ids = tl.load(Ids + at, mask=at < count, other=0)
        kept = (at < count) & within(y, ids, key, last)
        slowness = tl.exp2(-heated(y, top, heat) * LOG2E)
        race = tl.where(kept, tl.log(uniform_at(seed, position, ids, SAMPLE_NOISE)) * slowness, NEG_INF)
        fastest = tl.max(race, 0)
        first = tl.min(tl.where(race == fastest, ids, LAST_ID), 0)
        winner = tl.where(fastest > best, first, winner)
        best = tl.maximum(best, fastest)
    return winner


@triton.jit(do_not_specialize=["rows"])
def _finish(
    Y, Logits, Temperature, TopK, TopP, MinP, Seeds, Positions, Numbers, Tokens, Values, Kept, Ids, Valid, Logprob, Rows, Ends,
    rows, vocab, s_y, s_logits, RAW: tl.constexpr, CHUNKS: tl.constexpr, PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """grid = (rows,). Rows [rows, 3] (top, log mass, heat) and Ends [rows, 3] (key, last id, valid) describe what is reported."""
    row = tl.program_id(0).to(tl.int64)
    heat = tl.load(Temperature + row)
    top_k = tl.load(TopK + row)
    top_p = tl.load(TopP + row)
    min_p = tl.load(MinP + row)
    top, top_id, bad, mass, winner = combine(Numbers, Tokens, row, rows, heat, CHUNKS, PAD)
    valid = (top > NEG_INF) & (bad == 0)
    key = tl.full([], 0, tl.uint32)
    last = tl.full([], 2147483647, tl.int32)
    filtered = ((top_k > 0) & (top_k < vocab)) | (top_p < 1) | (min_p > 0)
    if heat == 0:
        key = key_of(top)
        last = top_id
    elif filtered & valid:
        values = Values + row * vocab
        kept = Kept + row * vocab
        key, last, mass, count = prefix_of(
            Y + row * s_y, values, kept, vocab, top, top_id, heat, top_k, top_p, min_p, BLOCK
        )
        winner = _race(values, kept, count, key, last, top, heat, tl.load(Seeds + row), tl.load(Positions + row), BLOCK)
    token = tl.where(valid, winner, -1)
    tl.store(Ids + row, token.to(tl.int64))
    tl.store(Valid + row, valid)
    if Logprob is not None:
        x = Y + row * s_y
        if RAW:
            x = Logits + row * s_logits
            top, mass = raw_mass(Numbers, row, rows, CHUNKS, PAD)
            heat = tl.full([], 1.0, tl.float32)
            key = tl.full([], 0, tl.uint32)
            last = tl.full([], 2147483647, tl.int32)
        log_mass = tl.log2(mass) * LN2
        value = tl.load(x + tl.where(valid, winner, 0)).to(tl.float32)
        z = heated(value, top, tl.where(heat == 0, 1.0, heat))
        tl.store(Logprob + row, tl.where(valid, z - log_mass, float("nan")))
        tl.store(Rows + row * 3, top)
        tl.store(Rows + row * 3 + 1, log_mass)
        tl.store(Rows + row * 3 + 2, tl.where(heat == 0, 1.0, heat))
        tl.store(Ends + row * 3, key.to(tl.int32, bitcast=True))
        tl.store(Ends + row * 3 + 1, last)
        tl.store(Ends + row * 3 + 2, valid.to(tl.int32))


@triton.jit
def _top_logprobs(X, Rows, Ends, MinP, TopIds, TopLogprobs, vocab, count, s_x, s_ids, s_logprobs, RAW: tl.constexpr,
                  BLOCK: tl.constexpr):  # fmt: skip
    """grid = (rows,). One pass for each entry: the first token after the one before it in (value, id) order."""
    row = tl.program_id(0).to(tl.int64)
    top = tl.load(Rows + row * 3)
    log_mass = tl.load(Rows + row * 3 + 1)
    heat = tl.load(Rows + row * 3 + 2)
    end_key = tl.load(Ends + row * 3).to(tl.uint32, bitcast=True)
    end_id = tl.load(Ends + row * 3 + 1)
    valid = tl.load(Ends + row * 3 + 2) != 0
    min_p = tl.load(MinP + row)
    before = tl.full([], NEG_INF, tl.float32) * -1.0
    before_id = tl.full([], -1, tl.int32)
    for entry in range(count):
        best = tl.full([], NEG_INF, tl.float32)
        best_id = tl.full([], 2147483647, tl.int32)
        for start in range(0, vocab, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            x = tl.load(X + row * s_x + ids, mask=ids < vocab, other=NEG_INF).to(tl.float32) + 0.0
            left = (x < before) | ((x == before) & (ids > before_id))
            if not RAW:
                e = tl.exp2(heated(x, top, heat) * LOG2E)
                left = left & within(x, ids, end_key, end_id) & (((e > 0) & (e >= min_p)) | (x == top))
            x = tl.where(left, x, NEG_INF)
            first = tl.max(x, 0)
            first_id = tl.min(tl.where(left & (x == first), ids, LAST_ID), 0)
            best_id = tl.where(first > best, first_id, best_id)
            best = tl.maximum(best, first)
        z = heated(best, top, heat)
        some = valid & (z > NEG_INF)
        tl.store(TopIds + row * s_ids + entry, tl.where(some, best_id, -1).to(tl.int64))
        tl.store(
            TopLogprobs + row * s_logprobs + entry, tl.where(valid, tl.where(some, z - log_mass, NEG_INF), float("nan"))
        )
        before = best
        before_id = best_id


def _token_counts(prompt_ids, output_ids, batch: int, vocab: int) -> torch.Tensor | None:
    """int32 [batch, vocab]: how often each token stands in the output, and a bit when it is in the prompt."""
    lists = [(x, n) for x, n in ((prompt_ids, IN_PROMPT.value), (output_ids, 1)) if x is not None and x.shape[1] > 0]
    if not lists:
        return None
    counts = torch.zeros(batch, vocab, dtype=torch.int32, device=lists[0][0].device)
    for ids, amount in lists:
        grid = (batch, triton.cdiv(ids.shape[1], 256))
        count_tokens[grid](ids, counts, vocab, ids.shape[1], ids.stride(0), amount, 256, num_warps=4)
    return counts


def sample(
    *, logits, temperature, top_k, top_p, min_p, seeds, positions, repetition_penalty, presence_penalty, frequency_penalty,
    prompt_ids, output_ids, logit_bias, allowed_mask, logprobs_mode, ids, valid, logprob, top_ids, top_logprobs,
):  # fmt: skip
    """One token per row of logits [batch, vocab] -> ids, valid, and where asked logprob, top_ids, top_logprobs."""
    batch, vocab = logits.shape
    if batch == 0:
        return
    device, raw = logits.device, logprobs_mode == "raw"
    block = configs.scan_block(vocab)
    chunks = triton.cdiv(vocab, block)
    counts = _token_counts(prompt_ids, output_ids, batch, vocab)
    changed = any(x is not None for x in (counts, logit_bias, allowed_mask))
    y = torch.empty(batch, vocab, dtype=torch.float32, device=device) if changed else None
    numbers = torch.empty(6, batch, chunks, dtype=torch.float32, device=device)
    tokens = torch.empty(2, batch, chunks, dtype=torch.int32, device=device)
    bias_stride, mask_stride = (0 if t is None or t.dim() == 1 else t.stride(0) for t in (logit_bias, allowed_mask))
    # Each step of the penalties is rounded, so no multiplication may be fused with the subtraction after it.
    scan[batch, chunks](
        logits, temperature, seeds, positions, None, logit_bias, allowed_mask, counts, repetition_penalty, presence_penalty,
        frequency_penalty, y, numbers, tokens, batch, batch, vocab, logits.stride(0), bias_stride, mask_stride,
        raw and logprob is not None, True, block, num_warps=configs.scan_warps(block), enable_fp_fusion=False,
    )  # fmt: skip
    y = logits if y is None else y
    values = torch.empty(batch, vocab, dtype=torch.float32, device=device)
    kept = torch.empty(batch, vocab, dtype=torch.int32, device=device)
    rows = torch.empty(batch, 3, dtype=torch.float32, device=device)
    ends = torch.empty(batch, 3, dtype=torch.int32, device=device)
    pad = triton.next_power_of_2(chunks)
    _finish[batch,](
        y, logits, temperature, top_k, top_p, min_p, seeds, positions, numbers, tokens, values, kept, ids, valid, logprob, rows,
        ends, batch, vocab, y.stride(0), logits.stride(0), raw, chunks, pad, block, num_warps=configs.scan_warps(block),
    )  # fmt: skip
    if top_ids is not None and top_ids.shape[1] > 0:
        x = logits if raw else y
        _top_logprobs[batch,](
            x, rows, ends, min_p, top_ids, top_logprobs, vocab, top_ids.shape[1], x.stride(0), top_ids.stride(0),
            top_logprobs.stride(0), raw, block, num_warps=configs.scan_warps(block),
        )  # fmt: skip


@triton.jit
def _philox_uniform(Seeds, Positions, Out, count, s_out, BLOCK: tl.constexpr):
    """grid = (rows, count / BLOCK)."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    u = uniforms(tl.load(Seeds + row), tl.load(Positions + row), first, SAMPLE_NOISE, BLOCK)
    at = first + tl.arange(0, BLOCK)
    tl.store(Out + row * s_out + at, u, mask=at < count)


def philox_uniform(*, seeds, positions, out):
    """The stream that `sample` draws its noise from: out float32 [batch, count]."""
    batch, count = out.shape
    if batch == 0 or count == 0:
        return
    block = configs.scan_block(count)
    _philox_uniform[batch, triton.cdiv(count, block)](seeds, positions, out, count, out.stride(0), block, num_warps=4)
