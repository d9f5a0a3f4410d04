"""Decode attention: one query token per sequence over a paged cache, and the merge of two partial results."""

from __future__ import annotations

import torch

from .attention import attend, cached, slopes_of, wide_dtype


def paged_decode_attention(
    *,
    q: torch.Tensor,  # [batch, num_heads, head_dim]
    k_cache: torch.Tensor,  # [num_pages, page_size, num_kv_heads, head_dim]
    v_cache: torch.Tensor,  # [num_pages, page_size, num_kv_heads, head_dim_v]
    block_table: torch.Tensor,  # [batch, max_pages_per_seq]
    seqlens_k: torch.Tensor,  # [batch]
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    causal: bool,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    split_size: int,
    workspace: torch.Tensor | None,
    compute_dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The query of a sequence is its last token -> out [batch, num_heads, head_dim_v], lse [num_heads, batch].

    A sequence of length 0 gives out = 0, lse = -inf. `split_size` and `workspace` say how the work is divided, which
    changes rounding only; here it is not divided.
    """
    del split_size, workspace
    batch, num_heads, _ = q.shape
    out = torch.zeros(batch, num_heads, v_cache.shape[-1], dtype=compute_dtype)
    lse = torch.full((num_heads, batch), -torch.inf, dtype=wide_dtype(compute_dtype))
    for b, k_len in enumerate(seqlens_k.tolist()):
        row = slice(b, b + 1)
        out[row], lse[:, row] = attend(
            q[row],
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


def merge_attention_states(
    *,
    out_a: torch.Tensor,  # [tokens, num_heads, head_dim_v]
    lse_a: torch.Tensor,  # [num_heads, tokens]
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    compute_dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of two disjoint sets of keys, from the results over each -> out, lse.

    lse = log(exp(lse_a) + exp(lse_b)), out = out_a exp(lse_a - lse) + out_b exp(lse_b - lse). A side with lse = -inf
    saw nothing and contributes nothing, whatever its out holds; two such sides give (0, -inf).
    """
    wide = wide_dtype(compute_dtype)
    lse_a, lse_b = lse_a.to(wide), lse_b.to(wide)
    peak = torch.maximum(lse_a, lse_b)
    peak = torch.where(peak == -torch.inf, 0.0, peak)
    share_a, share_b = torch.exp(lse_a - peak), torch.exp(lse_b - peak)
    total = share_a + share_b
    out = torch.zeros(out_a.shape, dtype=wide)
    for part, share in ((out_a, share_a), (out_b, share_b)):
        weight = torch.where(total == 0, 0.0, share / total).T[:, :, None]  # [tokens, num_heads, 1]
        saw_something = (share != 0).T[:, :, None]
        out = out + torch.where(saw_something, part.to(compute_dtype).to(wide) * weight, 0.0)
    return out.to(compute_dtype), peak + torch.log(total)
