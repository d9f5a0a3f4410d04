"""The interface of FlashAttention-3 (`flash_attn_interface`), forward only.

Where its contract differs from the ops', this follows upstream: errors are RuntimeError; a row that sees no key has lse
-inf; float8 tensors have descales `[batch, num_kv_heads]` and give bfloat16; queries past `seqused_q` (which upstream
leaves unwritten) give 0. `num_splits` bounds the parts of one query's keys, as upstream's dynamic splits do; prefill is
never cut. `pack_gqa` says how upstream's kernels lay queries out in tiles, which no result depends on, and which they decide
for themselves for pages and splits: both values are taken. The kernels plan for themselves, so `get_scheduler_metadata` is
None. Refused: `qv`, `sm_margin`, metadata made elsewhere, tensors that require grad. `deterministic` changes the backward
pass alone.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ..ops.decode import merge_attention_states
from .cache import (
    Queries,
    append,
    attend_cache,
    cache_lengths,
    new_tokens,
    open_cache,
    ragged_tokens,
    require_attention,
    require_indices,
    rotary_of,
)
from .descale import descale_of
from .layout import (
    attend_dense,
    attend_paged,
    attend_ragged,
    batched_lse,
    chunk_segments,
    dense_or_none,
    even_cu_seqlens,
    last_dense,
    mask_options,
    ragged_queries,
    raises_runtime_error,
    refuse_given,
    require,
    require_shape,
    require_tensors,
    token_pages,
    used_segments,
)

__version__ = "3.0.0"
__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]

_UNSEEN = -math.inf


def refuse_hopper_options(qv: Any, sm_margin: int, scheduler_metadata: Any = None) -> None:
    refuse_given("pass it as a part of q and v as a part of k, where the head dim allows", qv=qv)
    refuse_given("the kernels use the whole device", sm_margin=sm_margin)
    refuse_given("the kernels plan for themselves: leave it out", scheduler_metadata=scheduler_metadata)


def split_of(num_splits: int, seqlen_k: int) -> int | None:
    return None if num_splits < 1 else max(1, -(-seqlen_k // num_splits))


@raises_runtime_error
def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: Any = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of dense tensors; causal and windows are aligned to the bottom right.

    Args:
        q: `[batch, seqlen_q, num_heads, head_dim]` float16, bfloat16, float32 or float8_e4m3fn; k: `[batch, seqlen_k,
            num_kv_heads, head_dim]`; v: `[batch, seqlen_k, num_kv_heads, head_dim_v]`, the dtype of q.
        q_descale, k_descale, v_descale: float32 `[batch, num_kv_heads]`, of float8 tensors.

    Returns:
        `out` `[batch, seqlen_q, num_heads, head_dim_v]` (bfloat16 for float8), or `(out, lse)` with lse float32
        `[batch, num_heads, seqlen_q]`.

    Raises:
        RuntimeError: an argument that cannot be or is refused; NotImplementedError: no backend can.
    """
    refuse_hopper_options(qv, sm_margin)
    require_tensors(q=q, k=k, v=v)
    require(q.dim() == 4, f"q must have shape (batch, seqlen, heads, head_dim), got {tuple(q.shape)}")
    batch, seqlen_q = q.shape[:2]
    require_shape("k", k, batch, -1, -1, q.shape[3])
    require_shape("v", v, *k.shape[:3], -1)
    if attention_chunk > 0:
        options: Any = {
            "softmax_scale": softmax_scale,
            "causal": causal,
            "window_size": window_size,
            "softcap": softcap,
        }
        options |= {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
        out, lse = _dense_chunks(q, k, v, {**options, "attention_chunk": attention_chunk})
        return (out, lse) if return_attn_probs else out
    mask = mask_options(q, causal, softmax_scale, window_size, softcap)
    q, k, v = (last_dense(x) for x in (q, k, v))
    descale = descale_of(q, k, batch, q_descale, k_descale, v_descale)
    sequence = _sequences(batch, seqlen_q, q) if descale.per_sequence else None
    q = descale.queries(ragged_queries(q), sequence).unflatten(0, (batch, seqlen_q))
    split = split_of(num_splits, k.shape[1])
    out, lse = attend_dense(q, k, v, split_size=split, scales=descale.scales, return_lse=return_attn_probs, **mask)
    if descale.per_sequence:
        out = descale.output(ragged_queries(out), sequence).unflatten(0, (batch, seqlen_q))
    return (out, batched_lse(lse, batch, seqlen_q, _UNSEEN)) if return_attn_probs else out


def _dense_chunks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]) -> Any:
    """Chunks are cut in rows of all sequences one after another; keys that do not lie so are copied."""
    batch, seqlen_q, seqlen_k = q.shape[0], q.shape[1], k.shape[1]
    rows: Any = {n: ragged_queries(x) for n, x in (("q", q), ("k", k), ("v", v))}
    lengths: Any = {"max_seqlen_q": seqlen_q, "max_seqlen_k": seqlen_k}
    for n, seqlen in (("q", seqlen_q), ("k", seqlen_k)):
        lengths[f"cu_seqlens_{n}"] = even_cu_seqlens(batch, seqlen, q.device)
    out, lse = flash_attn_varlen_func(**rows, **lengths, **options, return_attn_probs=True)
    return out.unflatten(0, (batch, seqlen_q)), batched_lse(lse, batch, seqlen_q, _UNSEEN)


def _sequences(batch: int, seqlen: int, q: torch.Tensor) -> torch.Tensor:
    return torch.arange(batch, device=q.device).repeat_interleave(seqlen)


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: Any = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of the slices of qkv, `[batch, seqlen, 3, num_heads, head_dim]`, or `[batch, seqlen,
    num_heads_q + 2 * num_kv_heads, head_dim]` with `num_heads_q`; nothing is copied."""
    if qkv.dim() == 5:
        require_shape("qkv", qkv, -1, -1, 3, -1, -1)
        require(num_heads_q is None or num_heads_q == qkv.shape[3], f"num_heads_q must be {qkv.shape[3]} with this qkv")
        q, k, v = qkv.unbind(2)
    else:
        require_shape("qkv", qkv, -1, -1, -1, -1)
        require(num_heads_q is not None, "num_heads_q must be given with a qkv of 4 dimensions")
        heads = int(num_heads_q or 0)
        kv_heads = (qkv.shape[2] - heads) // 2
        require(kv_heads * 2 + heads == qkv.shape[2], f"num_heads_q leaves {qkv.shape[2] - heads} heads for k and v")
        q, k, v = qkv.split([heads, kv_heads, kv_heads], 2)
    descales: Any = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    rest: Any = {"attention_chunk": attention_chunk, "softcap": softcap, "deterministic": deterministic}
    rest |= {"sm_margin": sm_margin, "return_attn_probs": return_attn_probs, "window_size": window_size}
    return flash_attn_func(q, k, v, softmax_scale, causal, **descales, **rest)


@raises_runtime_error
def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: Any = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of sequences packed one after another.

    Args:
        q: `[total_q, num_heads, head_dim]`; k, v: `[total_k, num_kv_heads, head_dim]`.
        cu_seqlens_q, cu_seqlens_k: int32 `[batch + 1]`; max_seqlen_q, max_seqlen_k: bounds of the lengths.
        seqused_q, seqused_k: int32 `[batch]`: of each sequence only so many tokens are used, the first ones.

    Returns:
        `out` like q, or `(out, lse)` with lse float32 `[num_heads, total_q]`.

    Raises:
        RuntimeError, NotImplementedError: as `flash_attn_func`.
    """
    refuse_hopper_options(qv, sm_margin)
    require_tensors(q=q, k=k, v=v)
    require_shape("q", q, -1, -1, -1)
    batch = cu_seqlens_q.shape[0] - 1
    mask = mask_options(q, causal, softmax_scale, window_size, softcap)
    mask["return_lse"] = return_attn_probs
    q, k, v = (last_dense(x) for x in (q, k, v))
    descale = descale_of(q, k, batch, q_descale, k_descale, v_descale)
    sequence = ragged_tokens(cu_seqlens_q, q.shape[0])[0] if descale.per_sequence else None
    q = descale.queries(q, sequence)
    bounds: Any = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    if seqused_q is not None or seqused_k is not None:
        require_shape("seqused_q", seqused_q, batch)
        require_shape("seqused_k", seqused_k, batch)
        cu_seqlens_q, cu_seqlens_k = used_segments(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    if attention_chunk > 0:
        cu_seqlens_q, cu_seqlens_k = chunk_segments(cu_seqlens_q, cu_seqlens_k, attention_chunk, max_seqlen_k)
        bounds["max_seqlen_k"] = max_seqlen_k = min(attention_chunk, max_seqlen_k)
    if descale.scales is None:
        out, lse = attend_ragged(q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, **bounds, **mask)
    else:
        table, lengths = token_pages(cu_seqlens_k, max_seqlen_k), torch.diff(cu_seqlens_k)
        pages: Any = {"block_table": table, "seqlens_k": lengths, "cu_seqlens_q": cu_seqlens_q, "one_each": False}
        pages |= descale.scales
        out, lse = attend_paged(q, k.unsqueeze(1), v.unsqueeze(1), **pages, **bounds, **mask)
    out = descale.output(out, sequence)
    return (out, lse) if return_attn_probs else out


@raises_runtime_error
def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: torch.Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Appends k and v to the caches in place (rotated where tables are given), then attends to the cache.

    Args:
        q: `[batch, seqlen_q, num_heads, head_dim]`, or with `cu_seqlens_q` and `max_seqlen_q` `[total_q, num_heads, head_dim]`.
        k_cache, v_cache: `[batch_cache, seqlen_cache, num_kv_heads, head_dim]` (v may have a head dim of its own), or with
            `page_table` (int32 `[batch, max_pages]`) `[num_pages, page_size, num_kv_heads, head_dim]`.
        k, v: `[batch, seqlen_new, num_kv_heads, head_dim]`, or with `cu_seqlens_k_new` `[total_new, num_kv_heads, head_dim]`.
        rotary_seqlens: int32 `[batch]`, the rotary position of the first new token instead of `cache_seqlens`.
        the rest: as in flash-attention 2 and `flash_attn_func`.

    Returns:
        `out` like q, or `(out, lse, out_accum, lse_accum)`: lse float32 `[batch, num_heads, seqlen_q]` or `[num_heads,
        total_q]`; the last two, upstream's partial results, are empty.

    Raises:
        RuntimeError, NotImplementedError: as `flash_attn_func`; nothing is written then.
    """
    refuse_hopper_options(qv, sm_margin, scheduler_metadata)
    require_tensors(("k", "v"), q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v)
    q, page_table, k, v = last_dense(q), dense_or_none(page_table), dense_or_none(k), dense_or_none(v)
    queries = _queries(q, cu_seqlens_q, max_seqlen_q)
    if page_table is not None and cache_batch_idx is not None:
        require_indices("cache_batch_idx", cache_batch_idx, queries.batch)
        page_table, cache_batch_idx = page_table.index_select(0, cache_batch_idx), None
    cache = open_cache(k_cache, v_cache, queries.batch, page_table, cache_batch_idx, "page_table")
    require((k is None) == (v is None), "k and v must be given together")
    require(k is None or cache_seqlens is not None, "cache_seqlens must be given with k and v")
    require(k is not None or cu_seqlens_k_new is None, "cu_seqlens_k_new needs k and v")
    mask = mask_options(q, causal, softmax_scale, window_size, softcap)
    require_attention(q, cache, queries.batch, mask)
    rotary = rotary_of(q, rotary_cos, rotary_sin, rotary_interleaved, cache.capacity, has_new=k is not None)
    descale = descale_of(q, k_cache, queries.batch, q_descale, k_descale, v_descale)
    lengths = cache_lengths(cache_seqlens, queries.batch, cache)
    if k is not None and v is not None:
        left, right = mask["window_size"]
        local = causal or 0 <= left < cache.capacity - 1 or 0 <= right < queries.seqlen - 1
        new = new_tokens(k, v, queries.batch, cache, cu_seqlens_k_new)
        lengths = append(new, lengths, cache, rotary, queries, local, rotary_seqlens)
    sequence = queries.sequences() if descale.per_sequence else None
    queries.rows = descale.queries(queries.rows, sequence)
    mask |= {"return_lse": return_softmax_lse, **(descale.scales or {})}
    out, lse = attend_cache(queries, cache, lengths, cache_leftpad, num_splits, attention_chunk, **mask)
    out = descale.output(out, sequence)
    if cu_seqlens_q is None:
        out = out.unflatten(0, q.shape[:2])
        lse = batched_lse(lse, q.shape[0], q.shape[1], _UNSEEN)
    none = out.new_empty(0, dtype=torch.float32)
    return (out, lse, none, none.clone()) if return_softmax_lse else out


def _queries(q: torch.Tensor, cu_seqlens_q: torch.Tensor | None, max_seqlen_q: int | None) -> Queries:
    if cu_seqlens_q is None:
        require(max_seqlen_q is None or max_seqlen_q == q.shape[1], f"max_seqlen_q must be that of q, {q.shape[1]}")
        require(q.dim() == 4, f"q must have shape (batch, seqlen, heads, head_dim), got {tuple(q.shape)}")
        return Queries(ragged_queries(q), q.shape[0], q.shape[1])
    require_shape("q", q, -1, -1, -1)
    require(max_seqlen_q is not None, "max_seqlen_q must be given with cu_seqlens_q")
    return Queries(q, cu_seqlens_q.shape[0] - 1, int(max_seqlen_q or 0), cu_seqlens_q)


@raises_runtime_error
def flash_attn_combine(
    out_partial: torch.Tensor,
    lse_partial: torch.Tensor,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of disjoint key sets from the results over each.

    Args:
        out_partial: float32 `[num_splits, batch, seqlen, num_heads, head_dim]`, or without batch; lse_partial: float32
            `[num_splits, batch, seqlen, num_heads]`, natural log.
        out, out_dtype: where to write, or the type of what is returned (float32 when None).

    Returns:
        `(out, lse)` of the same shapes without the first dimension.

    Raises:
        RuntimeError: shape or dtype.
    """
    require_tensors(out_partial=out_partial, lse_partial=lse_partial)
    require(out_partial.dim() in (4, 5), f"out_partial must have 4 or 5 dimensions, got {tuple(out_partial.shape)}")
    require_shape("lse_partial", lse_partial, *out_partial.shape[:-1])
    require(out_partial.shape[0] > 0, "out_partial must have at least one split")
    parts = out_partial.reshape(out_partial.shape[0], -1, *out_partial.shape[-2:])
    sums = lse_partial.reshape(lse_partial.shape[0], -1, lse_partial.shape[-1]).transpose(1, 2).contiguous()
    state = parts[0], sums[0]
    if parts.shape[0] == 1:  # nothing to merge with, but a part that saw nothing counts for nothing
        state = parts[0].masked_fill((sums[0] == -math.inf).t().unsqueeze(-1), 0.0), sums[0]
    for part, lse in zip(parts[1:], sums[1:], strict=True):
        state = merge_attention_states(*state, part, lse)
    merged, lse = state[0].view(out_partial.shape[1:]), state[1].t().reshape(lse_partial.shape[1:])
    if out is not None:
        require(out_dtype is None or out_dtype == out.dtype, f"out_dtype must be that of out, {out.dtype}")
        return out.copy_(merged), lse
    return merged.to(out_dtype or out_partial.dtype), lse


def get_scheduler_metadata(*args: Any, **kwargs: Any) -> None:
    """Nothing to hand on: these kernels plan for themselves, from shapes and lengths, in every call."""
