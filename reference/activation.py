"""Gated activations: the first half of the last dimension gates the second."""

from __future__ import annotations

import math

import torch

from .attention import wide_dtype


def gated_activation(
    *,
    x: torch.Tensor,  # [tokens, 2 * width]
    kind: str,
    compute_dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor]:
    """act(x[:, :width]) * x[:, width:] -> out [tokens, width].

    "silu" is g / (1 + exp(-g)); "gelu_tanh" is 0.5 g (1 + tanh(sqrt(2 / pi) (g + 0.044715 g^3))).
    """
    gate, up = x.to(compute_dtype).to(wide_dtype(compute_dtype)).chunk(2, dim=-1)
    if kind == "silu":
        active = gate / (1 + torch.exp(-gate))
    elif kind == "gelu_tanh":
        active = 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    else:
        raise ValueError(f'kind must be "silu" or "gelu_tanh", got {kind!r}')
    return ((active * up).to(compute_dtype),)
