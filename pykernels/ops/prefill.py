"""Prefill attention: whole prompts or chunks of them, over contiguous or paged keys and values."""

from __future__ import annotations

import torch

from ..contract.prefill import PAGED_PREFILL_ATTENTION, PREFILL_ATTENTION
from ..library import call
from .mask import lse_buffer, mask_arguments


def prefill_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = True,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of ragged sequences packed one after another (FlashAttention: Dao et al., 2022; Dao, 2023).

    `out_i = softmax(scale * q_i K^T + mask) V` per sequence; query head h reads kv head
    `h // (num_heads / num_kv_heads)`.

    Args:
        q: `[total_q, num_heads, head_dim]` float32, float16 or bfloat16; last dimension contiguous, as in every tensor.
        k: `[total_k, num_kv_heads, head_dim]`, the dtype of q.
        v: `[total_k, num_kv_heads, head_dim_v]`, the dtype of q.
        cu_seqlens_q, cu_seqlens_k: int32 `[batch + 1]`, where each sequence begins; the last entry is the total.
        max_seqlen_q, max_seqlen_k: upper bounds of the sequence lengths.
        causal: bottom-right aligned: row i sees keys up to `i + seqlen_k - seqlen_q`.
        softmax_scale: `1 / sqrt(head_dim)` when None.
        window_size: (left, right) inclusive, -1 unbounded; a model window of W tokens is `(W - 1, 0)`.
        softcap: `cap * tanh(x / cap)` on the scaled logits, before the mask; 0 is off.
        alibi_slopes: float32 `[num_heads]` or `[batch, num_heads]`.
        sinks: float32 `[num_heads]`: one more logit per head in the denominator; `lse` excludes it.
        return_lse: also return the natural-log sum of exponentials, float32 `[num_heads, total_q]`.
        out, lse: where to write.

    Returns:
        `out` `[total_q, num_heads, head_dim_v]`, or `(out, lse)`. A row that sees no key is 0 with lse -inf.

    Raises:
        ValueError, TypeError: an argument that cannot be; NotImplementedError: no backend can, with the reasons.
    """
    lse = lse_buffer(q, lse, return_lse)
    args = call(
        PREFILL_ATTENTION,
        backend,
        q=q,
        k=k,
        v=v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        **mask_arguments(q, causal, softmax_scale, window_size, softcap, alibi_slopes, sinks),
        out=out,
        lse=lse,
    )
    return (args["out"], lse) if return_lse and lse is not None else args["out"]


def paged_prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    block_table: torch.Tensor,
    seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    causal: bool = True,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of several new tokens per sequence over a paged cache: chunked prefill, prefix reuse, verification.

    The new tokens are already in the cache: `seqlens_k` counts them, and they are the last of their sequence.

    Args:
        q: `[total_q, num_heads, head_dim]`, packed by `cu_seqlens_q` (int32 `[batch + 1]`).
        k_cache: `[num_pages, page_size, num_kv_heads, head_dim]`: q's dtype, int8 or float8_e4m3fn; any page size.
        v_cache: `[num_pages, page_size, num_kv_heads, head_dim_v]`, the dtype of k_cache.
        block_table: int32 `[batch, max_pages_per_seq]`; -1 is an unused entry, never dereferenced.
        seqlens_k: int32 `[batch]`, tokens valid in the cache. What lies past them may be NaN.
        k_scale, v_scale: float32, real = stored x scale: `[]`, `[num_kv_heads]` or
            `[num_pages, page_size, num_kv_heads]`; required for a quantised cache.
        max_seqlen_q, max_seqlen_k, causal ... lse: as in `prefill_attention`.

    Returns:
        `out` `[total_q, num_heads, head_dim_v]`, or `(out, lse)`.

    Raises:
        ValueError, TypeError: an argument that cannot be; NotImplementedError: no backend can, with the reasons.
    """
    lse = lse_buffer(q, lse, return_lse)
    args = call(
        PAGED_PREFILL_ATTENTION,
        backend,
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        cu_seqlens_q=cu_seqlens_q,
        block_table=block_table,
        seqlens_k=seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        k_scale=k_scale,
        v_scale=v_scale,
        **mask_arguments(q, causal, softmax_scale, window_size, softcap, alibi_slopes, sinks),
        out=out,
        lse=lse,
    )
    return (args["out"], lse) if return_lse and lse is not None else args["out"]
