"""Prefill attention: many query tokens per sequence, over contiguous (ragged) or paged keys and values."""

from __future__ import annotations

import torch

from .attention import attend, cached, slopes_of, wide_dtype


def prefill_attention(
    *,
    q: torch.Tensor,  # [total_q, num_heads, head_dim]
    k: torch.Tensor,  # [total_k, num_kv_heads, head_dim]
    v: torch.Tensor,  # [total_k, num_kv_heads, head_dim_v]
    cu_seqlens_q: torch.Tensor,  # [batch + 1]
    cu_seqlens_k: torch.Tensor,  # [batch + 1]
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    compute_dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each sequence attends to its own keys -> out [total_q, num_heads, head_dim_v], lse [num_heads, total_q].

    Rows past the last sequence are padding: out = 0, lse = -inf. The maximal lengths bound a kernel's grid and mean
    nothing more, so lengths above them are refused.
    """
    q_lens, k_lens = (torch.diff(c).tolist() for c in (cu_seqlens_q, cu_seqlens_k))
    _check_bounds(q_lens, k_lens, max_seqlen_q, max_seqlen_k)
    out, lse = _empty_result(q, v.shape[-1], compute_dtype)
    q_starts, k_starts = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for b in range(len(q_lens)):
        rows = slice(q_starts[b], q_starts[b + 1])
        keys = slice(k_starts[b], k_starts[b + 1])
        out[rows], lse[:, rows] = attend(
            q[rows],
            k[keys],
            v[keys],
            causal=causal,
            softmax_scale=softmax_scale,
            window_left=window_left,
            window_right=window_right,
            softcap=softcap,
            alibi_slopes=slopes_of(alibi_slopes, b),
            sinks=sinks,
            compute_dtype=compute_dtype,
        )
    return out, lse


def paged_prefill_attention(
    *,
    q: torch.Tensor,  # [total_q, num_heads, head_dim]
    k_cache: torch.Tensor,  # [num_pages, page_size, num_kv_heads, head_dim]
    v_cache: torch.Tensor,  # [num_pages, page_size, num_kv_heads, head_dim_v]
    cu_seqlens_q: torch.Tensor,  # [batch + 1]
    block_table: torch.Tensor,  # [batch, max_pages_per_seq]
    seqlens_k: torch.Tensor,  # [batch]
    max_seqlen_q: int,
    max_seqlen_k: int,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    causal: bool,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    compute_dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `prefill_attention`, with the keys of sequence b in the pages of `block_table[b]`.

    The new tokens' own keys are in the cache already: the last query of a sequence stands at position seqlens_k - 1.
    """
    q_lens, k_lens = torch.diff(cu_seqlens_q).tolist(), seqlens_k.tolist()
    _check_bounds(q_lens, k_lens, max_seqlen_q, max_seqlen_k)
    out, lse = _empty_result(q, v_cache.shape[-1], compute_dtype)
    starts = cu_seqlens_q.tolist()
    for b, k_len in enumerate(k_lens):
        rows = slice(starts[b], starts[b + 1])
        out[rows], lse[:, rows] = attend(
            q[rows],
            cached(k_cache, k_scale, block_table[b], k_len, compute_dtype),
            cached(v_cache, v_scale, block_table[b], k_len, compute_dtype),
            causal=causal,
            softmax_scale=softmax_scale,
            window_left=window_left,
            window_right=window_right,
            softcap=softcap,
            alibi_slopes=slopes_of(alibi_slopes, b),
            sinks=sinks,
            compute_dtype=compute_dtype,
        )
    return out, lse


def _check_bounds(q_lens: list[int], k_lens: list[int], max_seqlen_q: int, max_seqlen_k: int) -> None:
    for name, lens, bound in (("max_seqlen_q", q_lens, max_seqlen_q), ("max_seqlen_k", k_lens, max_seqlen_k)):
        if max(lens, default=0) > bound:
            raise ValueError(f"{name} is {bound}, but a sequence has length {max(lens)}")


def _empty_result(q: torch.Tensor, head_dim_v: int, compute_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    total_q, num_heads, _ = q.shape
    out = torch.zeros(total_q, num_heads, head_dim_v, dtype=compute_dtype)
    return out, torch.full((num_heads, total_q), -torch.inf, dtype=wide_dtype(compute_dtype))
