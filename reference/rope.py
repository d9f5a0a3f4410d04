"""Rotary position embedding of queries and keys."""

from __future__ import annotations

import torch

from .attention import wide_dtype


def rotary_embedding(
    *,
    q: torch.Tensor,  # [tokens, num_heads, head_dim]
    k: torch.Tensor,  # [tokens, num_kv_heads, head_dim]
    positions: torch.Tensor,  # [tokens]
    inv_freq: torch.Tensor,  # [rotary_pairs]
    interleaved: bool,
    rope_scale: float,
    compute_dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotates pair p of the token at position t by the angle t * inv_freq[p] -> q_out, k_out."""
    q_out, k_out = (rotate(x, positions, inv_freq, interleaved, rope_scale, compute_dtype) for x in (q, k))
    return q_out, k_out


def rotate(
    x: torch.Tensor,  # [tokens, heads, head_dim]
    positions: torch.Tensor,
    inv_freq: torch.Tensor,
    interleaved: bool,
    rope_scale: float,
    compute_dtype: torch.dtype,
) -> torch.Tensor:
    """(a, b) -> rope_scale (a cos - b sin, a sin + b cos) for every pair; rope_scale is YaRN's attention factor.

    Pair p is elements (p, p + rotary_pairs), or (2p, 2p + 1) when interleaved. Elements past 2 * rotary_pairs are kept.
    Any scaling of positions or frequencies is already in inv_freq. Angles are never below float32: bfloat16 cannot
    count to 257.
    """
    wide = wide_dtype(compute_dtype)
    pairs = inv_freq.shape[0]
    angle = positions.to(wide)[:, None] * inv_freq.to(wide)  # [tokens, pairs]
    cos, sin = (f(angle)[:, None, :] * rope_scale for f in (torch.cos, torch.sin))  # [tokens, 1, pairs]
    x = x.to(compute_dtype).to(wide)
    rotated, kept = x[..., : 2 * pairs], x[..., 2 * pairs :]
    pair_axis = rotated.unflatten(-1, (pairs, 2) if interleaved else (2, pairs))
    a, b = pair_axis.unbind(-1 if interleaved else -2)
    turned = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1 if interleaved else -2).flatten(-2)
    return torch.cat((turned, kept), dim=-1).to(compute_dtype)
