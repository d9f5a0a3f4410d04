"""What the CUDA backend's prefill attention leaves to others."""

from __future__ import annotations

from typing import Any

import torch

from .queries import refuses_queries


def refuses_prefill_attention(*, q: torch.Tensor, **_: Any) -> list[str]:
    return refuses_queries(q)


def refuses_paged_prefill_attention(*, q: torch.Tensor, **_: Any) -> list[str]:
    return refuses_queries(q)
