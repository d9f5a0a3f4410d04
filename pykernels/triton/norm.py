"""RMS normalisation: h = x + residual, out = h / sqrt(mean(h^2) + eps) * weight, each row held in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from . import configs
from .common import narrow


@triton.jit(do_not_specialize=["tokens"])
def _rms_norm(
    X, Weight, Residual, Out, ResidualOut, tokens, eps, sx_row, sr_row, so_row, sro_row, WIDTH: tl.constexpr,
    PAD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """grid = (tokens / ROWS,). h is rounded to x's type before it is normalised: it is what the next layer adds to."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, PAD)
    mask = (row < tokens)[:, None] & (d < WIDTH)[None, :]
    h = tl.load(X + row[:, None] * sx_row + d[None, :], mask=mask, other=0.0).to(tl.float32)
    if Residual is not None:
        h += tl.load(Residual + row[:, None] * sr_row + d[None, :], mask=mask, other=0.0).to(tl.float32)
        stream = narrow(h, X.dtype.element_ty)
        h = stream.to(tl.float32)
    if ResidualOut is not None:
        tl.store(ResidualOut + row[:, None] * sro_row + d[None, :], narrow(h, X.dtype.element_ty), mask=mask)
    size = tl.sqrt_rn(tl.sum(h * h, 1) / WIDTH + eps)
    weight = tl.load(Weight + d, mask=d < WIDTH, other=0.0).to(tl.float32)
    out = tl.div_rn(h, size[:, None] + tl.zeros_like(h)) * weight[None, :]
    tl.store(Out + row[:, None] * so_row + d[None, :], narrow(out, Out.dtype.element_ty), mask=mask)


def refuses_rms_norm(*, x, **_) -> list[str]:
    """A row is held by one block."""
    hidden = x.shape[1]
    return (
        []
        if hidden <= configs.MAX_ROW
        else [f"a row is held in registers: hidden up to {configs.MAX_ROW}, got {hidden}"]
    )


def rms_norm(*, x, weight, eps, residual, out, residual_out):
    """x [tokens, hidden] -> out, and where asked x + residual -> residual_out. Outputs may alias inputs."""
    tokens, hidden = x.shape
    if tokens == 0 or hidden == 0:
        return
    pad = triton.next_power_of_2(hidden)
    rows, warps = configs.row_tile(pad)
    strides = [0 if t is None else t.stride(0) for t in (x, residual, out, residual_out)]
    grid = (triton.cdiv(tokens, rows),)
    _rms_norm[grid](
        x, weight, residual, out, residual_out, tokens, float(eps), *strides, hidden, pad, rows, num_warps=warps
    )
