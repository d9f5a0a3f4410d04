"""Reads an attention mask as a band: a range of keys per sequence, cut by two diagonals. Or says why it is none.

The smallest such band around the visible pairs is computed from the mask, built, and compared with all of the mask; so what
is recognised is right, and what is not is left alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class Band:
    """Query i of sequence b sees key j if `start[b] <= j < end[b]` and `-left <= j - i <= right` (None: unbounded)."""

    start: list[int]
    end: list[int]
    left: int | None = None
    right: int | None = None


def full_band(batch: int, seqlen_k: int) -> Band:
    return Band([0] * batch, [seqlen_k] * batch)


def band_of(mask: torch.Tensor, batch: int, seqlen_q: int, seqlen_k: int) -> Band | str:
    """The band that a mask `[batch or 1, heads or 1, seqlen_q or 1, seqlen_k or 1]`, bool or additive, is; or a reason."""
    mask = mask[tuple(slice(0, 1) if step == 0 else slice(None) for step in mask.stride())]  # broadcast dimensions
    visible = mask if mask.dtype == torch.bool else _visible_of_bias(mask, seqlen_q, seqlen_k)
    if isinstance(visible, str):
        return visible
    if visible.shape[1] > 1 and not torch.equal(visible, visible[:, :1].expand_as(visible)):
        return "attn_mask differs between heads"
    seen = visible[:, 0].expand(-1, seqlen_q, seqlen_k)
    columns = seen.any(1)
    start, end = first_true(columns), seqlen_k - first_true(columns.flip(-1))
    none = ~columns.any(-1)
    start, end = start.masked_fill(none, 0), end.masked_fill(none, 0)
    rows = torch.arange(seqlen_q, device=mask.device)
    sees = seen.any(-1)
    low, high = rows - first_true(seen), seqlen_k - 1 - first_true(seen.flip(-1)) - rows
    if not bool(sees.any()):
        return Band([0] * batch, [0] * batch)
    left, right = int(low[sees].max()), int(high[sees].max())
    j, i = torch.arange(seqlen_k, device=mask.device), rows[:, None]
    inside = (j - i <= right) & (i - j <= left)
    candidate = inside & (j >= start[:, None, None]) & (j < end[:, None, None])
    if not torch.equal(candidate, seen):
        return "attn_mask is no band: not full, causal, padding, a window, nor these together"
    repeat = batch if seen.shape[0] == 1 else 1
    starts, ends = start.tolist() * repeat, end.tolist() * repeat
    bounded_left = left < seqlen_q - 1 - min(starts)
    return Band(starts, ends, left if bounded_left else None, right if right < max(ends) - 1 else None)


def first_true(x: torch.Tensor) -> torch.Tensor:
    """Index of the first True of the last dimension, 0 where there is none."""
    return x.to(torch.uint8).argmax(-1)


def _visible_of_bias(bias: torch.Tensor, seqlen_q: int, seqlen_k: int) -> torch.Tensor | str:
    """Where an additive mask is 0; everything else must hide: -inf, or the least finite value of a type that has float32's
    range, which underflows every visible weight unless the whole row has it."""
    visible, hidden = bias == 0, bias == -torch.inf
    least = bias == torch.finfo(bias.dtype).min
    if bias.dtype in (torch.float32, torch.bfloat16) and bool(least.any()):
        if not bool(visible.expand(*bias.shape[:2], seqlen_q, seqlen_k).any(-1).all()):
            return "attn_mask hides a whole row with a finite value, which softmax spreads evenly"
        hidden = hidden | least
    if not bool((visible | hidden).all()):
        return "attn_mask adds other values than 0 and -inf"
    return visible
