"""What the CUDA backend's decode attention leaves to others."""

from __future__ import annotations

from typing import Any

import torch


def refuses_paged_decode_attention(
    *, scratch_bytes: int, q: torch.Tensor, workspace: torch.Tensor | None, **_: Any
) -> list[str]:
    """The tensor cores take 16-bit floats; a workspace must hold the partial results of every split."""
    if q.dtype not in (torch.float16, torch.bfloat16):
        return [f"the tensor-core kernels take float16 and bfloat16 queries, got {str(q.dtype).removeprefix('torch.')}"]
    if workspace is not None and workspace.numel() < scratch_bytes:
        return [f"workspace must have at least {scratch_bytes} bytes, got {workspace.numel()}"]
    return []
