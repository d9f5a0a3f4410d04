"""RMS normalisation, alone or after a residual addition."""

from __future__ import annotations

from .attention import tensor_bytes
from .schema import FLOATS, Args, Cost, Dims, Op, Rule, Scalar, Tensor


def _cost(dims: Dims, args: Args) -> Cost:
    names = ("x", "weight", "residual", "out", "residual_out")
    return Cost(4.0 * dims["tokens"] * dims["hidden"], tensor_bytes(args, names))


RMS_NORM = Op(
    name="rms_norm",
    family="norm",
    args=(
        Tensor("x", "tokens hidden", FLOATS),
        Tensor("weight", "hidden", FLOATS),
        Scalar("eps", float, minimum=0.0),
        Tensor("residual", "tokens hidden", "x", optional=True),
        Tensor("out", "tokens hidden", FLOATS, role="out", out_dtype="x"),
        Tensor("residual_out", "tokens hidden", "x", role="out", optional=True, allocate=False),
    ),
    rules=(
        Rule(lambda _, a: a["residual_out"] is None or a["residual"] is not None, "residual_out needs a residual"),
        Rule(lambda d, _: d["hidden"] > 0, "hidden must be at least 1, got {hidden}"),
    ),
    cost=_cost,
)
