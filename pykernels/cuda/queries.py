"""What every attention kernel of the CUDA backend asks of its queries."""

from __future__ import annotations

import torch


def refuses_queries(q: torch.Tensor) -> list[str]:
    """The tensor cores take 16-bit floats."""
    if q.dtype in (torch.float16, torch.bfloat16):
        return []
    return [f"the tensor-core kernels take float16 and bfloat16 queries, got {str(q.dtype).removeprefix('torch.')}"]
