"""Decode attention: one query token per sequence over a paged cache, and the merge of two partial results."""

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
    tensor_bytes,
    visible_keys,
    visible_pairs,
)
from .schema import CACHE, F32, FLOATS, I32, U8, Args, Cost, Dims, Op, Scalar, Tensor


def _decode_cost(dims: Dims, args: Args) -> Cost:
    left, right = args["window_left"], args["window_right"]
    lens = args["seqlens_k"].tolist()
    pairs = sum(visible_pairs(1, n, args["causal"], left, right) for n in lens)
    keys = sum(visible_keys(1, n, left) for n in lens)
    traffic = tensor_bytes(args, ("q", "out", "lse")) + kv_bytes(keys, dims, args, "k_cache", "v_cache")
    return Cost(attention_flops(pairs, dims), traffic)


PAGED_DECODE_ATTENTION = Op(
    name="paged_decode_attention",
    family="decode",
    args=(
        Tensor("q", "batch num_heads head_dim", FLOATS),
        Tensor("k_cache", "num_pages page_size num_kv_heads head_dim", CACHE),
        Tensor("v_cache", "num_pages page_size num_kv_heads head_dim_v", "k_cache"),
        Tensor("block_table", "batch max_pages_per_seq", I32),
        Tensor("seqlens_k", "batch", I32),
        *KV_SCALES,
        *MASK,
        Scalar("split_size", int, minimum=0),  # tokens per split; 0 lets the backend choose from the length alone
        Tensor("workspace", "workspace_bytes", U8, role="inout", optional=True),
        Tensor("out", "batch num_heads head_dim_v", "q", role="out"),
        Tensor("lse", "num_heads batch", F32, role="out", optional=True, allocate=False),
    ),
    rules=(GROUPS, HEAD_DIMS, CACHE_DTYPE, SCALES),
    cost=_decode_cost,
)


def _merge_cost(dims: Dims, args: Args) -> Cost:
    elements = dims["tokens"] * dims["num_heads"] * dims["head_dim_v"]
    names = ("out_a", "lse_a", "out_b", "lse_b", "out", "lse")
    return Cost(3.0 * elements, tensor_bytes(args, names))


MERGE_ATTENTION_STATES = Op(
    name="merge_attention_states",
    family="decode",
    args=(
        Tensor("out_a", "tokens num_heads head_dim_v", FLOATS),
        Tensor("lse_a", "num_heads tokens", F32),
        Tensor("out_b", "tokens num_heads head_dim_v", "out_a"),
        Tensor("lse_b", "num_heads tokens", F32),
        Tensor("out", "tokens num_heads head_dim_v", "out_a", role="out"),
        Tensor("lse", "num_heads tokens", F32, role="out"),
    ),
    cost=_merge_cost,
)
