"""Rotary position embedding of queries and keys."""

from __future__ import annotations

from .attention import tensor_bytes
from .kv_cache import ROTARY_FITS
from .schema import F32, FLOATS, INDICES, Args, Cost, Dims, Op, Scalar, Tensor


def _cost(dims: Dims, args: Args) -> Cost:
    rotated = dims["tokens"] * (dims["num_heads"] + dims["num_kv_heads"]) * 2 * dims["rotary_pairs"]
    return Cost(3.0 * rotated, tensor_bytes(args, ("q", "k", "positions", "inv_freq", "q_out", "k_out")))


ROTARY_EMBEDDING = Op(
    name="rotary_embedding",
    family="rope",
    args=(
        Tensor("q", "tokens num_heads head_dim", FLOATS),
        Tensor("k", "tokens num_kv_heads head_dim", "q"),
        Tensor("positions", "tokens", INDICES),
        Tensor("inv_freq", "rotary_pairs", F32),
        Scalar("interleaved", bool),
        Scalar("rope_scale", float),
        Tensor("q_out", "tokens num_heads head_dim", FLOATS, role="out", out_dtype="q"),
        Tensor("k_out", "tokens num_kv_heads head_dim", FLOATS, role="out", out_dtype="k"),
    ),
    rules=(ROTARY_FITS,),
    cost=_cost,
)
