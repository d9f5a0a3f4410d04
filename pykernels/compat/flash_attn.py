"""The interface of flash-attention 2 (`flash_attn.flash_attn_interface`), forward only.

Where its contract differs from the ops', this follows upstream: errors are RuntimeError; any negative window is unbounded
and a window may be a tensor; head dims that are no multiple of 8 are padded; `softcap` below 0 is off; a row that sees no
key has lse +inf (the ops and FA3 say -inf); `cache_leftpad` moves the mask's positions and not the rotary ones; without
causal and window, all rotary positions of the queries are that of the first. `lse` is the log-sum-exp of what is
documented, ALiBi included; upstream's kernels add a constant per row to it when ALiBi meets causal.

Refused: `dropout_p > 0`, tensors that require grad, `num_splits > 1` with more than one query per sequence. `deterministic`
changes the backward pass alone; the forward pass is deterministic.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from .cache import (
    Queries,
    append,
    attend_cache,
    cache_lengths,
    new_tokens,
    open_cache,
    require_attention,
    rotary_of,
)
from .layout import (
    attend_dense,
    attend_paged,
    attend_ragged,
    batched_lse,
    dense_or_none,
    last_dense,
    mask_options,
    ragged_queries,
    raises_runtime_error,
    refuse_given,
    require,
    require_shape,
    require_tensors,
    with_unseen,
)

__version__ = "2.8.3"
__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

_UNSEEN = math.inf
_NO_DROPOUT = "these kernels serve inference, which drops nothing"


def _with_probs(out: torch.Tensor, lse: torch.Tensor | None, return_attn_probs: bool) -> Any:
    """Upstream's return values: without dropout there are no probabilities, and S_dmask is empty."""
    return (out, lse, out.new_empty(0)) if return_attn_probs else out


@raises_runtime_error
def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of dense tensors; causal and windows are aligned to the bottom right.

    Args:
        q: `[batch, seqlen_q, num_heads, head_dim]` float16, bfloat16 or float32; k, v: `[batch, seqlen_k, num_kv_heads, head_dim]`.
        alibi_slopes: float32 `[num_heads]` or `[batch, num_heads]`.
        return_attn_probs: also return lse and S_dmask (empty without dropout).

    Returns:
        `out` like q, or `(out, lse, S_dmask)` with lse float32 `[batch, num_heads, seqlen_q]`.

    Raises:
        RuntimeError: an argument that cannot be or is refused; NotImplementedError: no backend can.
    """
    refuse_given(_NO_DROPOUT, dropout_p=dropout_p)
    require_tensors(q=q, k=k, v=v)
    require(q.dim() == 4, f"q must have shape (batch, seqlen, heads, head_dim), got {tuple(q.shape)}")
    require_shape("k", k, q.shape[0], -1, -1, q.shape[3])
    require_shape("v", v, *k.shape[:3], -1)
    mask = mask_options(q, causal, softmax_scale, window_size, softcap, alibi_slopes)
    q, k, v = (last_dense(x) for x in (q, k, v))
    out, lse = attend_dense(q, k, v, return_lse=return_attn_probs, **mask)
    return _with_probs(out, batched_lse(lse, q.shape[0], q.shape[1], _UNSEEN), return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of the slices of qkv `[batch, seqlen, 3, num_heads, head_dim]`; nothing is copied."""
    require_shape("qkv", qkv, -1, -1, 3, -1, -1)
    rest: Any = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    q, k, v = qkv.unbind(2)
    return flash_attn_func(q, k, v, *rest)


def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of q and the slices of kv `[batch, seqlen_k, 2, num_kv_heads, head_dim]`; nothing is copied."""
    require_shape("kv", kv, -1, -1, 2, -1, -1)
    rest: Any = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    k, v = kv.unbind(2)
    return flash_attn_func(q, k, v, *rest)


@raises_runtime_error
def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> Any:
    """Attention of sequences packed one after another.

    Args:
        q: `[total_q, num_heads, head_dim]`; k, v: `[total_k, num_kv_heads, head_dim]`, or with `block_table`
            `[num_blocks, page_size, num_kv_heads, head_dim]`, any page size.
        cu_seqlens_q, cu_seqlens_k: int32 `[batch + 1]`; max_seqlen_q, max_seqlen_k: bounds of the lengths.
        block_table: int32 `[batch, max_blocks]`; the keys of a sequence then have the length that cu_seqlens_k says.

    Returns:
        `out` like q, or `(out, lse, S_dmask)` with lse float32 `[num_heads, total_q]`.

    Raises:
        RuntimeError, NotImplementedError: as `flash_attn_func`.
    """
    refuse_given(_NO_DROPOUT, dropout_p=dropout_p)
    require_tensors(q=q, k=k, v=v)
    require_shape("q", q, -1, -1, -1)
    mask = mask_options(q, causal, softmax_scale, window_size, softcap, alibi_slopes)
    q, k, v = (last_dense(x) for x in (q, k, v))
    bounds: dict[str, Any] = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k, "cu_seqlens_q": cu_seqlens_q}
    mask["return_lse"] = return_attn_probs
    if block_table is None:
        out, lse = attend_ragged(q, k, v, cu_seqlens_k=cu_seqlens_k, **bounds, **mask)
    else:
        pages: dict[str, Any] = {"block_table": last_dense(block_table), "seqlens_k": torch.diff(cu_seqlens_k)}
        out, lse = attend_paged(q, k, v, one_each=False, **pages, **bounds, **mask)
    return _with_probs(out, with_unseen(lse, _UNSEEN), return_attn_probs)


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` of the slices of qkv `[total, 3, num_heads, head_dim]`; nothing is copied."""
    require_shape("qkv", qkv, -1, 3, -1, -1)
    rest: Any = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    q, k, v = qkv.unbind(1)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *rest)


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` of q and the slices of kv `[total_k, 2, num_kv_heads, head_dim]`; nothing is copied."""
    require_shape("kv", kv, -1, 2, -1, -1)
    rest: Any = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *rest)


@raises_runtime_error
def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Appends k and v to the caches in place (rotated where tables are given), then attends to the cache.

    Args:
        q: `[batch, seqlen_q, num_heads, head_dim]`.
        k_cache, v_cache: `[batch_cache, seqlen_cache, num_kv_heads, head_dim]`, or with `block_table`
            `[num_blocks, page_size, num_kv_heads, head_dim]`, any page size; used where they lie.
        k, v: `[batch, seqlen_new, num_kv_heads, head_dim]`, written behind `cache_seqlens`.
        rotary_cos, rotary_sin: `[seqlen_ro, rotary_dim / 2]`, q's dtype; rows are absolute positions in the cache.
        cache_seqlens: int or int32 `[batch]`, tokens in the cache before this call; all of it when None.
        cache_batch_idx: int32 `[batch]`, which row of the cache a sequence has.
        cache_leftpad: int32 `[batch]`, where a sequence begins in its row.
        block_table: int32 `[batch, max_blocks]`.
        num_splits: parts that one query's keys are cut in; 0 chooses.

    Returns:
        `out` like q, or `(out, lse)` with lse float32 `[batch, num_heads, seqlen_q]`.

    Raises:
        RuntimeError, NotImplementedError: as `flash_attn_func`; nothing is written then.
    """
    require_tensors(("k", "v"), q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v)
    require(q.dim() == 4, f"q must have shape (batch, seqlen, heads, head_dim), got {tuple(q.shape)}")
    batch, seqlen_q = q.shape[:2]
    q, block_table = last_dense(q), dense_or_none(block_table)
    k, v = dense_or_none(k), dense_or_none(v)
    cache = open_cache(k_cache, v_cache, batch, block_table, cache_batch_idx, "block_table")
    require(block_table is None or cache_leftpad is None, "cache_leftpad is not supported with a paged cache")
    require(
        num_splits <= 1 or seqlen_q == 1, "num_splits > 1 needs one query per sequence: prefill does not split keys"
    )
    require((k is None) == (v is None), "k and v must be given together")
    require(k is None or cache_seqlens is not None, "cache_seqlens must be given with k and v")
    mask = mask_options(q, causal, softmax_scale, window_size, softcap, alibi_slopes)
    require_attention(q, cache, batch, mask)
    rotary = rotary_of(q, rotary_cos, rotary_sin, rotary_interleaved, cache.capacity, has_new=k is not None)
    lengths = cache_lengths(cache_seqlens, batch, cache)
    queries = Queries(ragged_queries(q), batch, seqlen_q)
    if k is not None and v is not None:
        local = causal or any(0 <= w < cache.capacity for w in mask["window_size"])
        lengths = append(new_tokens(k, v, batch, cache, None), lengths, cache, rotary, queries, local)
    out, lse = attend_cache(queries, cache, lengths, cache_leftpad, num_splits, return_lse=return_softmax_lse, **mask)
    out = out.view(*q.shape[:3], out.shape[-1])
    return (out, batched_lse(lse, batch, seqlen_q, _UNSEEN)) if return_softmax_lse else out
