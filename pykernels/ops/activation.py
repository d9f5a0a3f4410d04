"""Gated activations."""

from __future__ import annotations

import torch

from ..contract.activation import GATED_ACTIVATION
from ..library import call


def gated_activation(
    x: torch.Tensor,
    *,
    kind: str = "silu",
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """`act(x[..., :width]) * x[..., width:]` (GLU variants, Shazeer, 2020).

    Args:
        x: `[..., 2 * width]`, float32, float16 or bfloat16: gate, then up.
        kind: "silu" is `g / (1 + exp(-g))`; "gelu_tanh" is `0.5 g (1 + tanh(sqrt(2 / pi) (g + 0.044715 g^3)))`.
        out: where to write, `[..., width]` of any float type; may be the first half of x.

    Returns:
        `out`, of x's dtype when allocated here.

    Raises:
        ValueError: shape, dtype, device, stride or kind; TypeError: not a tensor.
    """
    is_tensor = isinstance(x, torch.Tensor)
    args = call(
        GATED_ACTIVATION,
        backend,
        x=x.reshape(-1, x.shape[-1]) if is_tensor and x.dim() not in (0, 2) else x,
        kind=kind,
        out=out.view(-1, out.shape[-1]) if out is not None and out.dim() != 2 else out,
    )
    if out is not None:
        return out
    return args["out"].view(*x.shape[:-1], -1)
