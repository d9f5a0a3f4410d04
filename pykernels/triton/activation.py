"""Gated activations: act(x[:, :width]) * x[:, width:].

silu(g) = g / (1 + e^-g); gelu_tanh(g) = g / 2 (1 + tanh u) = g / (1 + e^-2u), u = sqrt(2 / pi) (g + 0.044715 g^3): the second
form of gelu does not cancel for negative g.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import LOG2E, narrow


@triton.jit
def _gated_activation(X, Out, width, sx_row, so_row, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """grid = (tokens, width / BLOCK)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    gate = tl.load(X + row * sx_row + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(X + row * sx_row + width + column, mask=mask, other=0.0).to(tl.float32)
    if GELU:
        steep = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    else:
        steep = gate
    out = gate / (1.0 + tl.exp2(-steep * LOG2E)) * up
    tl.store(Out + row * so_row + column, narrow(out, Out.dtype.element_ty), mask=mask)


def gated_activation(*, x, kind, out):
    """x [tokens, 2 * width] -> out [tokens, width]."""
    tokens, width = out.shape
    if tokens == 0 or width == 0:
        return
    block = min(1024, triton.next_power_of_2(width))
    grid = (tokens, triton.cdiv(width, block))
    _gated_activation[grid](x, out, width, x.stride(0), out.stride(0), kind == "gelu_tanh", block, num_warps=4)
