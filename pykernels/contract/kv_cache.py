"""Paged KV cache: append (and quantise, and rotate), gather (and dequantise), copy pages, swap pages."""

from __future__ import annotations

from typing import Any

import torch

from .attention import tensor_bytes
from .schema import CACHE, F32, FLOATS, I32, I64, INDICES, Args, Cost, Dims, Op, Rule, Scalar, Tensor

_SCALE = "num_pages page_size num_kv_heads | num_kv_heads |"


def _caches(role: str) -> tuple[Tensor, ...]:
    return (
        Tensor("k_cache", "num_pages page_size num_kv_heads head_dim", CACHE, role=role),
        Tensor("v_cache", "num_pages page_size num_kv_heads head_dim_v", "k_cache", role=role),
    )


def _scales(role: str) -> tuple[Tensor, ...]:
    # A dynamic scale (three dimensions) is written by append, a static one (one or none) is read.
    return (
        Tensor("k_scale", _SCALE, F32, optional=True, role=role, layout="any"),
        Tensor("v_scale", _SCALE, F32, optional=True, role=role, layout="any"),
    )


def _scales_match(_: Dims, args: Args) -> bool:
    quantised = args["k_cache"].dtype.itemsize == 1
    return all((args[name] is not None) == quantised for name in ("k_scale", "v_scale"))


SCALES = Rule(_scales_match, "k_scale and v_scale must be given for an int8 or float8_e4m3fn cache, and only for one")


def _slot_bytes(tokens: int, dims: Dims, args: Args) -> float:
    per_head = (dims["head_dim"] + dims["head_dim_v"]) * args["k_cache"].element_size()
    if args["k_scale"] is not None and args["k_scale"].dim() == 3:
        per_head += 8
    return float(tokens) * dims["num_kv_heads"] * per_head


def _append_cost(dims: Dims, args: Args) -> Cost:
    elements = dims["tokens"] * dims["num_kv_heads"] * (dims["head_dim"] + dims["head_dim_v"])
    read = tensor_bytes(args, ("k", "v", "slot_mapping"))
    return Cost(2.0 * elements, read + _slot_bytes(dims["tokens"], dims, args))


def _rope_append_cost(dims: Dims, args: Args) -> Cost:
    rotated = dims["tokens"] * (dims["num_heads"] + dims["num_kv_heads"]) * 2 * dims["rotary_pairs"]
    extra = Cost(3.0 * rotated, tensor_bytes(args, ("q", "q_out", "positions", "inv_freq")))
    return _append_cost(dims, args) + extra


APPEND_KV = Op(
    name="append_kv",
    family="kv_cache",
    args=(
        Tensor("k", "tokens num_kv_heads head_dim", FLOATS),
        Tensor("v", "tokens num_kv_heads head_dim_v", "k"),
        *_caches("inout"),
        Tensor("slot_mapping", "tokens", I64),
        *_scales("inout"),
    ),
    rules=(SCALES,),
    cost=_append_cost,
)


def _rotary_fits(dims: Dims, _: Args) -> bool:
    return 2 * dims["rotary_pairs"] <= dims["head_dim"]


ROTARY_FITS = Rule(_rotary_fits, "inv_freq rotates {rotary_pairs} pairs, more than half of head_dim ({head_dim})")

ROPE_APPEND_KV = Op(
    name="rope_append_kv",
    family="kv_cache",
    args=(
        Tensor("q", "tokens num_heads head_dim", FLOATS),
        Tensor("k", "tokens num_kv_heads head_dim", "q"),
        Tensor("v", "tokens num_kv_heads head_dim_v", "q"),
        Tensor("positions", "tokens", INDICES),
        Tensor("inv_freq", "rotary_pairs", F32),
        Scalar("interleaved", bool),
        Scalar("rope_scale", float),
        *_caches("inout"),
        Tensor("slot_mapping", "tokens", I64),
        *_scales("inout"),
        Tensor("q_out", "tokens num_heads head_dim", FLOATS, role="out", out_dtype="q"),
    ),
    rules=(SCALES, ROTARY_FITS),
    cost=_rope_append_cost,
)


def _gather_cost(dims: Dims, args: Args) -> Cost:
    tokens = int(args["seqlens_k"].sum())
    elements = tokens * dims["num_kv_heads"] * (dims["head_dim"] + dims["head_dim_v"])
    return Cost(float(elements), tensor_bytes(args, ("k", "v")) + _slot_bytes(tokens, dims, args))


GATHER_KV = Op(
    name="gather_kv",
    family="kv_cache",
    args=(
        *_caches("in"),
        Tensor("block_table", "batch max_pages_per_seq", I32),
        Tensor("seqlens_k", "batch", I32),
        *_scales("in"),
        Tensor("k", "total_k num_kv_heads head_dim", FLOATS, role="out"),
        Tensor("v", "total_k num_kv_heads head_dim_v", "k", role="out"),
    ),
    rules=(SCALES,),
    cost=_gather_cost,
)


def _copy_cost(dims: Dims, args: Args) -> Cost:
    per_page = (args["k_cache"][:1].numel() + args["v_cache"][:1].numel()) * args["k_cache"].element_size()
    if args["k_scale"] is not None and args["k_scale"].dim() == 3:
        per_page += 8 * dims["page_size"] * dims["num_kv_heads"]
    return Cost(0.0, 2.0 * dims["num_copies"] * per_page)


COPY_PAGES = Op(
    name="copy_pages",
    family="kv_cache",
    args=(
        *_caches("inout"),
        Tensor("src_pages", "num_copies", I64),
        Tensor("dst_pages", "num_copies", I64),
        *_scales("inout"),
    ),
    rules=(SCALES,),
    cost=_copy_cost,
)


def _side(side: str, role: str) -> tuple[Tensor, ...]:
    """The caches of one side of a swap."""
    rows = f"num_pages_{side} page_size num_kv_heads"
    return (
        Tensor(f"k_{side}", f"{rows} head_dim", CACHE if side == "from" else "k_from", role=role, host=True),
        Tensor(f"v_{side}", f"{rows} head_dim_v", "k_from", role=role, host=True),
    )


def _side_scales(side: str, role: str) -> tuple[Tensor, ...]:
    shape = f"num_pages_{side} page_size num_kv_heads | num_kv_heads |"
    return tuple(
        Tensor(f"{name}_scale_{side}", shape, F32, optional=True, role=role, layout="any", host=True) for name in "kv"
    )


def _swap_scales_match(_: Dims, args: Args) -> bool:
    quantised = args["k_from"].dtype.itemsize == 1
    return all((args[f"{name}_scale_{side}"] is not None) == quantised for name in "kv" for side in ("from", "to"))


def _swap_scales_alike(_: Dims, args: Args) -> bool:
    pairs = ((args[f"{name}_scale_from"], args[f"{name}_scale_to"]) for name in "kv")
    return all(a is None or a.dim() == b.dim() for a, b in pairs)


def _memory(t: torch.Tensor) -> tuple[Any, Any, Any]:
    """The storage of a tensor, and its first and past-the-last element there."""
    first = t.storage_offset()
    span = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) + 1 if t.numel() else 0
    return t.untyped_storage()._cdata, first, first + span


def _apart(_: Dims, args: Args) -> bool:
    for name in "kv":
        (a, a0, a1), (b, b0, b1) = (_memory(args[f"{name}_{side}"]) for side in ("from", "to"))
        if a == b and a0 < b1 and b0 < a1:
            return False
    return True


def _swap_cost(dims: Dims, args: Args) -> Cost:
    per_page = (args["k_from"][:1].numel() + args["v_from"][:1].numel()) * args["k_from"].element_size()
    if args["k_scale_from"] is not None and args["k_scale_from"].dim() == 3:
        per_page += 8 * dims["page_size"] * dims["num_kv_heads"]
    return Cost(0.0, 2.0 * dims["num_copies"] * per_page)


SWAP_PAGES = Op(
    name="swap_pages",
    family="kv_cache",
    args=(
        *_side("from", "in"),
        *_side("to", "inout"),
        Tensor("src_pages", "num_copies", I64),
        Tensor("dst_pages", "num_copies", I64),
        *_side_scales("from", "in"),
        *_side_scales("to", "inout"),
    ),
    rules=(
        Rule(
            _swap_scales_match,
            "k_scale and v_scale of both sides must be given for int8 or float8_e4m3fn caches, and only for those",
        ),
        Rule(_swap_scales_alike, "scales of both sides must be of one kind: dynamic, per head, or one number"),
        Rule(
            _apart,
            "k_to and v_to must not share memory with k_from and v_from (copy_pages copies inside a cache)",
            of_memory=True,
        ),
    ),
    cost=_swap_cost,
)
