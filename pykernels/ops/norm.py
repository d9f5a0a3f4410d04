"""RMS normalisation."""

from __future__ import annotations

import torch

from ..contract.norm import RMS_NORM
from ..library import call
from .rows import rows, written_rows


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`y = x / sqrt(mean(x^2) + eps) * weight` over the last dimension (Zhang and Sennrich, 2019).

    Args:
        x: `[..., hidden]`, float32, float16 or bfloat16; the sum of squares is float32.
        weight: `[hidden]`, any float type.
        eps: added to the mean of squares; at least 0.
        residual: `[..., hidden]`, the dtype of x; the norm is then of `x + residual`.
        out: where to write, `[..., hidden]` of any float type; x's dtype when allocated here.
        residual_out: where to write `x + residual` (may be `residual` itself).

    Returns:
        `out`, or `(out, x + residual)` when a residual is given.

    Raises:
        ValueError: shape, dtype, device or stride; TypeError: not a tensor.
    """
    if residual is not None and residual_out is None and isinstance(x, torch.Tensor):
        residual_out = torch.empty_like(x, memory_format=torch.contiguous_format)
    args = call(
        RMS_NORM,
        backend,
        x=rows(x),
        weight=weight,
        eps=eps,
        residual=rows(residual),
        out=written_rows(out),
        residual_out=written_rows(residual_out),
    )
    result = out if out is not None else args["out"].view(x.shape)
    return result if residual_out is None else (result, residual_out)
