"""RMS normalisation, alone or after a residual addition."""

from __future__ import annotations

import torch

from .attention import wide_dtype


def rms_norm(
    *,
    x: torch.Tensor,  # [tokens, hidden]
    weight: torch.Tensor,  # [hidden]
    eps: float,
    residual: torch.Tensor | None,  # [tokens, hidden]
    compute_dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """h = x + residual; h / sqrt(mean(h^2) + eps) * weight -> out, h (both [tokens, hidden]).

    h is rounded to `compute_dtype` before it is normalised: it is the stream that the next layer adds to.
    """
    wide = wide_dtype(compute_dtype)
    h = x.to(wide) if residual is None else x.to(wide) + residual.to(wide)
    h = h.to(compute_dtype).to(wide)
    normed = h / torch.sqrt(h.square().mean(dim=-1, keepdim=True) + eps)
    return (normed * weight.to(wide)).to(compute_dtype), h.to(compute_dtype)
