"""Gated activations: the first half of the last dimension gates the second."""

from __future__ import annotations

from .attention import tensor_bytes
from .schema import FLOATS, Args, Cost, Dims, Op, Scalar, Tensor


def _cost(dims: Dims, args: Args) -> Cost:
    return Cost(6.0 * dims["tokens"] * dims["width"], tensor_bytes(args, ("x", "out")))


GATED_ACTIVATION = Op(
    name="gated_activation",
    family="activation",
    args=(
        Tensor("x", "tokens 2*width", FLOATS),
        Scalar("kind", str, choices=("silu", "gelu_tanh")),
        Tensor("out", "tokens width", FLOATS, role="out", out_dtype="x"),
    ),
    cost=_cost,
)
