"""What the CUDA backend's linear layers leave to others."""

from __future__ import annotations

from typing import Any

import torch

MAX_TOKENS = 8  # csrc/cuda/linear.cu: weights are read once for all


def refuses_linear(*, x: torch.Tensor, layout: str, activations: str, weight_format: str, **_: Any) -> list[str]:
    """Large products, and layouts and activations that belong to the CPU backend."""
    reasons = refuses_embedding(layout=layout, weight_format=weight_format)
    if activations != "float":
        reasons.append(f"activations are used as floats, got {activations}")
    if x.shape[0] > MAX_TOKENS:
        reasons.append(
            f"a product of more than {MAX_TOKENS} tokens is the vendor library's, through torch.matmul (got {x.shape[0]})"
        )
    return reasons


def refuses_embedding(*, layout: str, weight_format: str, **_: Any) -> list[str]:
    if weight_format != "dense" and layout != "plain":
        return [f"packed weights are read in the plain layout, got {layout}"]
    return []
