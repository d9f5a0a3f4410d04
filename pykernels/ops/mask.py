"""From the public mask options to the contract's mask arguments; shared by prefill and decode."""

from __future__ import annotations

import math
from typing import Any

import torch


def mask_arguments(
    q: torch.Tensor,
    causal: bool,
    softmax_scale: float | None,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> dict[str, Any]:
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise ValueError(f"window_size must be a pair (left, right), got {window_size!r}")
    if softmax_scale is None and isinstance(q, torch.Tensor) and q.dim() == 3:
        softmax_scale = 1.0 / math.sqrt(max(q.shape[-1], 1))
    return {
        "causal": causal,
        "softmax_scale": softmax_scale,
        "window_left": window_size[0],
        "window_right": window_size[1],
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
        "sinks": sinks,
    }


def lse_buffer(q: torch.Tensor, lse: torch.Tensor | None, return_lse: bool) -> torch.Tensor | None:
    """The caller's lse, or a new `[num_heads, rows]` float32 tensor when one is asked for."""
    if lse is None and return_lse and isinstance(q, torch.Tensor) and q.dim() == 3:
        return torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32, device=q.device)
    return lse
