"""What the CUDA backend's decode attention leaves to others."""

from __future__ import annotations

from typing import Any

import torch

from .queries import refuses_queries

ALIGNMENT = 16  # bytes, of memory for partial results: csrc/cuda/kernels.h


def refuses_paged_decode_attention(
    *, scratch_bytes: int, q: torch.Tensor, workspace: torch.Tensor | None, **_: Any
) -> list[str]:
    """A workspace must hold the partial results of every split."""
    reasons = refuses_queries(q)
    if workspace is not None and workspace.numel() < scratch_bytes:
        reasons.append(f"workspace must have at least {scratch_bytes} bytes, got {workspace.numel()}")
    if workspace is not None and workspace.data_ptr() % ALIGNMENT:
        reasons.append(f"workspace must be aligned to {ALIGNMENT} bytes")
    return reasons
