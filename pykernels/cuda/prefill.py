"""What the prefill kernels leave to other backends."""

from __future__ import annotations

from typing import Any

import torch


def refuses_prefill_attention(*, q: torch.Tensor, **_: Any) -> list[str]:
    if q.dtype == torch.float32:
        return ["the tensor-core kernels take float16 and bfloat16, and q is float32"]
    return []


refuses_paged_prefill_attention = refuses_prefill_attention
