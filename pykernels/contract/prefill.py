"""Prefill attention: many query tokens per sequence, over contiguous (ragged) or paged keys and values."""

from __future__ import annotations

from .attention import (
    CACHE_DTYPE,
    GROUPS,
    HEAD_DIMS,
    KV_SCALES,
    MASK,
    SCALES,
    attention_flops,
    kv_bytes,
    lengths,
    tensor_bytes,
    visible_keys,
    visible_pairs,
)
from .schema import CACHE, F32, FLOATS, I32, Args, Cost, Dims, Op, Scalar, Tensor

_OUTPUTS = (
    Tensor("out", "total_q num_heads head_dim_v", "q", role="out"),
    Tensor("lse", "num_heads total_q", F32, role="out", optional=True, allocate=False),
)


def _cost(dims: Dims, args: Args, q_lens: list[int], k_lens: list[int], k: str, v: str) -> Cost:
    left, right, causal = args["window_left"], args["window_right"], args["causal"]
    pairs = sum(visible_pairs(q, n, causal, left, right) for q, n in zip(q_lens, k_lens, strict=True))
    keys = sum(visible_keys(q, n, left) for q, n in zip(q_lens, k_lens, strict=True))
    traffic = tensor_bytes(args, ("q", "out", "lse")) + kv_bytes(keys, dims, args, k, v)
    return Cost(attention_flops(pairs, dims), traffic)


def _ragged_cost(dims: Dims, args: Args) -> Cost:
    return _cost(dims, args, lengths(args["cu_seqlens_q"]), lengths(args["cu_seqlens_k"]), "k", "v")


def _paged_cost(dims: Dims, args: Args) -> Cost:
    return _cost(dims, args, lengths(args["cu_seqlens_q"]), args["seqlens_k"].tolist(), "k_cache", "v_cache")


PREFILL_ATTENTION = Op(
    name="prefill_attention",
    family="prefill",
    args=(
        Tensor("q", "total_q num_heads head_dim", FLOATS),
        Tensor("k", "total_k num_kv_heads head_dim", "q"),
        Tensor("v", "total_k num_kv_heads head_dim_v", "q"),
        Tensor("cu_seqlens_q", "batch+1", I32),
        Tensor("cu_seqlens_k", "batch+1", I32),
        Scalar("max_seqlen_q", int, minimum=0),
        Scalar("max_seqlen_k", int, minimum=0),
        *MASK,
        *_OUTPUTS,
    ),
    rules=(GROUPS, HEAD_DIMS),
    cost=_ragged_cost,
)

PAGED_PREFILL_ATTENTION = Op(
    name="paged_prefill_attention",
    family="prefill",
    args=(
        Tensor("q", "total_q num_heads head_dim", FLOATS),
        Tensor("k_cache", "num_pages page_size num_kv_heads head_dim", CACHE),
        Tensor("v_cache", "num_pages page_size num_kv_heads head_dim_v", "k_cache"),
        Tensor("cu_seqlens_q", "batch+1", I32),
        Tensor("block_table", "batch max_pages_per_seq", I32),
        Tensor("seqlens_k", "batch", I32),
        Scalar("max_seqlen_q", int, minimum=0),
        Scalar("max_seqlen_k", int, minimum=0),
        *KV_SCALES,
        *MASK,
        *_OUTPUTS,
    ),
    rules=(GROUPS, HEAD_DIMS, CACHE_DTYPE, SCALES),
    cost=_paged_cost,
)
