"""Prefill attention over contiguous or paged keys and values: the launchers of `attention.attention`.

The grid is bounded from shapes alone: sequence i starts at tile `cu_seqlens_q[i] // BLOCK_Q + i`, so `total_q // BLOCK_Q +
batch + 1` tiles hold every sequence and the padded rows after the last one; no launch reads device data.
"""

from __future__ import annotations

import torch

from . import configs
from .attention import attention
from .common import padded, target_of
from .launch import AttentionCall, attention_arguments


def prefill_attention(
    *, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, softmax_scale, window_left, window_right,
    softcap, alibi_slopes, sinks, out, lse,
):  # fmt: skip
    """Ragged q [total_q, num_heads, head_dim] over contiguous k, v [total_k, num_kv_heads, head_dim (or _v)]."""
    del max_seqlen_q, max_seqlen_k  # the grid comes from total_q and batch
    call = AttentionCall(
        q=q, k=k[:, None], v=v[:, None], cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, softmax_scale=softmax_scale,
        window_left=window_left, window_right=0 if causal else window_right, softcap=softcap, alibi_slopes=alibi_slopes,
        sinks=sinks, out=out, lse=lse,
    )  # fmt: skip
    _launch(call, cu_seqlens_q, tma_ok=_descriptors_fit(k) and _descriptors_fit(v))


def paged_prefill_attention(
    *, q, k_cache, v_cache, cu_seqlens_q, block_table, seqlens_k, max_seqlen_q, max_seqlen_k, k_scale, v_scale, causal,
    softmax_scale, window_left, window_right, softcap, alibi_slopes, sinks, out, lse,
):  # fmt: skip
    """Ragged q over a paged cache [num_pages, page_size, num_kv_heads, head_dim]: chunked prefill, verification."""
    del max_seqlen_q, max_seqlen_k
    call = AttentionCall(
        q=q, k=k_cache, v=v_cache, cu_seqlens_q=cu_seqlens_q, block_table=block_table, seqlens_k=seqlens_k, k_scale=k_scale,
        v_scale=v_scale, softmax_scale=softmax_scale, window_left=window_left, window_right=0 if causal else window_right,
        softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks, out=out, lse=lse,
    )  # fmt: skip
    _launch(call, cu_seqlens_q, tma_ok=False)


def _descriptors_fit(x: torch.Tensor) -> bool:
    # A descriptor sees [rows, heads * width] in boxes of one head: heads must be adjacent and not padded, rows 16-byte steps.
    rows, _, width = x.shape
    aligned = x.stride(0) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0
    return rows > 0 and x.stride(1) == width == padded(width) and aligned


def _launch(call: AttentionCall, cu_seqlens_q: torch.Tensor, tma_ok: bool) -> None:
    total_q, num_heads = call.q.shape[:2]
    num_kv_heads = call.k.shape[2]
    if total_q == 0 or num_heads == 0:
        return
    if call.batch == 0:  # nothing but padded rows
        call.out.zero_()
        if call.lse is not None:
            call.lse.fill_(float("-inf"))
        return
    tile = configs.prefill_tile(target_of(call.q), call.shape, tma_ok)
    block_q = tile.block_m // call.group
    grid = (total_q // block_q + cu_seqlens_q.shape[0], num_kv_heads, 1)
    attention[grid](**attention_arguments(call, tile), num_warps=tile.num_warps, num_stages=tile.num_stages)
