"""What the CUDA backend's sampling leaves to others."""

from __future__ import annotations

from typing import Any

import torch

MAX_VOCAB = 1 << 20  # csrc/cuda/device/token_order.cuh: masses are sums of integers of 43 bits
MAX_LOGPROBS = 1024  # csrc/cuda/sampling.cu: they are ranked in shared memory


def refuses_sample(*, logits: torch.Tensor, top_ids: torch.Tensor | None, **_: Any) -> list[str]:
    """Vocabularies and lists of log-probabilities past a kernel's room."""
    reasons = refuses_verify_draft(target_logits=logits)
    if top_ids is not None and top_ids.shape[1] > MAX_LOGPROBS:
        reasons.append(f"at most {MAX_LOGPROBS} top logprobs a row, got {top_ids.shape[1]}")
    return reasons


def refuses_verify_draft(*, target_logits: torch.Tensor, **_: Any) -> list[str]:
    vocab = target_logits.shape[-1]
    return [f"a vocabulary of at most {MAX_VOCAB} tokens, got {vocab}"] if vocab > MAX_VOCAB else []
