"""Rotary position embedding."""

from __future__ import annotations

import torch

from ..contract.rope import ROTARY_EMBEDDING
from ..library import call


def rotary_embedding(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    inv_freq: torch.Tensor,
    *,
    interleaved: bool = False,
    scale: float = 1.0,
    q_out: torch.Tensor | None = None,
    k_out: torch.Tensor | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turns pair p of every head by the angle `position * inv_freq[p]` (RoFormer, Su et al., 2021).

    Args:
        q: `[tokens, num_heads, head_dim]`, float32, float16 or bfloat16, last dimension contiguous.
        k: `[tokens, num_kv_heads, head_dim]`, the dtype of q.
        positions: `[tokens]`, int32 or int64.
        inv_freq: `[rotary_pairs]` float32; elements past `2 * rotary_pairs` of a head are copied.
        interleaved: pairs are neighbours (2p, 2p + 1) instead of (p, p + rotary_pairs).
        scale: multiplies the rotated elements (YaRN's attention factor).
        q_out, k_out: where to write, any float type; may be q and k themselves.

    Returns:
        `(q_out, k_out)`.

    Raises:
        ValueError: shape, dtype, device or stride; TypeError: not a tensor.
    """
    args = call(
        ROTARY_EMBEDDING,
        backend,
        q=q,
        k=k,
        positions=positions,
        inv_freq=inv_freq,
        interleaved=interleaved,
        rope_scale=scale,
        q_out=q_out,
        k_out=k_out,
    )
    return args["q_out"], args["k_out"]
