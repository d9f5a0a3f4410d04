"""Linear layers over `plain` weights, and rows of an embedding.

Up to 8 tokens: one launch that reads each packed byte once and multiplies on tensor cores (a weight-only GEMV; codes of int8
and fp8_e4m3 are exact in 16-bit floats, their scale is applied to the sum). More tokens: the weight is dequantised by a kernel
and multiplied by `torch.matmul`, because a large float GEMM is the vendor library's, not ours. The `rows16` layout and int8
activations belong to the CPU backend and are refused.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import configs
from .common import INTERPRETED, TYPES, narrow, target_of
from .fp8 import widen_e4m3

FLOAT_FORMATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BLOCK_FORMATS = {"q4_0": 18, "q4_1": 20, "q8_0": 34}  # bytes of 32 columns


@triton.jit
def _half_at(W, at, mask):
    """float16 at byte offsets, as float32: blocks of 18 or 34 bytes put them at any even address."""
    low = tl.load(W + at, mask=mask, other=0).to(tl.uint16)
    high = tl.load(W + at + 1, mask=mask, other=0).to(tl.uint16)
    return (low | (high << 8)).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _block_halves(W, row, group, mask, row_bytes, FORMAT: tl.constexpr, BYTES: tl.constexpr):
    """Columns 0 to 15 and 16 to 31 of 32-column blocks, float32 [rows, groups, 16] each."""
    at = row[:, None] * row_bytes + group[None, :] * BYTES  # [rows, groups]
    j = tl.arange(0, 16)[None, None, :]
    d = _half_at(W, at, mask)[:, :, None]
    wide = mask[:, :, None]
    if FORMAT == "q8_0":
        low = tl.load(W + at[:, :, None] + 2 + j, mask=wide, other=0).to(tl.int8, bitcast=True).to(tl.float32) * d
        high = tl.load(W + at[:, :, None] + 18 + j, mask=wide, other=0).to(tl.int8, bitcast=True).to(tl.float32) * d
    elif FORMAT == "q4_0":
        q = tl.load(W + at[:, :, None] + 2 + j, mask=wide, other=0)
        low = ((q & 15).to(tl.float32) - 8.0) * d
        high = ((q >> 4).to(tl.float32) - 8.0) * d
    else:
        m = _half_at(W, at + 2, mask)[:, :, None]
        q = tl.load(W + at[:, :, None] + 4 + j, mask=wide, other=0)
        low = (q & 15).to(tl.float32) * d + m
        high = (q >> 4).to(tl.float32) * d + m
    return low, high


@triton.jit
def _store_rows(acc, Bias, Residual, Out, n, t, mask, s_residual, s_out):
    """acc [BLOCK_N, TOKENS] plus bias and residual, rounded once."""
    if Bias is not None:
        acc += tl.load(Bias + n[:, None] + 0 * t[None, :], mask=mask, other=0.0).to(tl.float32)
    if Residual is not None:
        acc += tl.load(Residual + t[None, :] * s_residual + n[:, None], mask=mask, other=0.0).to(tl.float32)
    tl.store(Out + t[None, :] * s_out + n[:, None], narrow(acc, Out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def _gemv_rows(
    X, W, Scales, Bias, Residual, Out, tokens, rows, s_x, s_w, s_residual, s_out, K: tl.constexpr, TYPE: tl.constexpr,
    E4M3_BITS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """grid = (rows / BLOCK_N,). W is [rows, K] of floats or codes; Scales, where there are any, one per row."""
    DOT: tl.constexpr = tl.float32 if INTERPRETED else TYPE
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    t = tl.arange(0, TOKENS)
    row = n.to(tl.int64) * s_w
    acc = tl.zeros([BLOCK_N, TOKENS], tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        w = tl.load(W + row[:, None] + k[None, :], mask=(n < rows)[:, None] & (k < K)[None, :], other=0.0)
        x = tl.load(X + t[None, :] * s_x + k[:, None], mask=(t < tokens)[None, :] & (k < K)[:, None], other=0.0)
        if W.dtype.element_ty == tl.float32:
            w = narrow(w, TYPE)
        acc = tl.dot(widen_e4m3(w, DOT, E4M3_BITS), x.to(DOT), acc, input_precision="ieee")
    if Scales is not None:
        acc = acc * tl.load(Scales + n, mask=n < rows, other=0.0)[:, None]
    if E4M3_BITS:
        acc = acc * 256.0
    mask = (n < rows)[:, None] & (t < tokens)[None, :]
    _store_rows(acc, Bias, Residual, Out, n, t, mask, s_residual, s_out)


@triton.jit(do_not_specialize=["tokens"])
def _gemv_blocks(
    X, W, Bias, Residual, Out, tokens, rows, s_x, s_residual, s_out, K: tl.constexpr, TYPE: tl.constexpr, FORMAT: tl.constexpr,
    BYTES: tl.constexpr, BLOCK_N: tl.constexpr, GROUPS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """grid = (rows / BLOCK_N,). W is bytes, K / 32 blocks of BYTES a row."""
    DOT: tl.constexpr = tl.float32 if INTERPRETED else TYPE
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    t = tl.arange(0, TOKENS)
    row = n.to(tl.int64)
    half = tl.arange(0, GROUPS * 16)
    acc = tl.zeros([BLOCK_N, TOKENS], tl.float32)
    for start in range(0, K // 32, GROUPS):
        group = start + tl.arange(0, GROUPS)
        mask = (n < rows)[:, None] & (group < K // 32)[None, :]
        low, high = _block_halves(W, row, group, mask, K // 32 * BYTES, FORMAT, BYTES)
        column = start * 32 + half // 16 * 32 + half % 16
        x_mask = (t < tokens)[None, :] & (column < K)[:, None]
        x_low = tl.load(X + t[None, :] * s_x + column[:, None], mask=x_mask, other=0.0)
        x_high = tl.load(X + t[None, :] * s_x + column[:, None] + 16, mask=x_mask, other=0.0)
        low = narrow(tl.reshape(low, [BLOCK_N, GROUPS * 16]), TYPE).to(DOT)
        high = narrow(tl.reshape(high, [BLOCK_N, GROUPS * 16]), TYPE).to(DOT)
        acc = tl.dot(low, x_low.to(DOT), acc, input_precision="ieee")
        acc = tl.dot(high, x_high.to(DOT), acc, input_precision="ieee")
    mask = (n < rows)[:, None] & (t < tokens)[None, :]
    _store_rows(acc, Bias, Residual, Out, n, t, mask, s_residual, s_out)


@triton.jit
def _unpack_rows(
    W, Scales, Ids, Out, rows, columns, s_w, s_out, E4M3_BITS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """grid = (output rows, columns / BLOCK). Ids None: row i is weight row i; an id outside the weight reads as NaN."""
    out_row = tl.program_id(0).to(tl.int64)
    row = out_row
    if Ids is not None:
        row = tl.load(Ids + out_row).to(tl.int64)
    inside = (row >= 0) & (row < rows)
    row = tl.where(inside, row, 0)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = k < columns
    x = widen_e4m3(tl.load(W + row * s_w + k, mask=mask, other=0.0), tl.float32, E4M3_BITS)
    if E4M3_BITS:
        x = x * 256.0
    if Scales is not None:
        x = x * tl.load(Scales + row)
    x = tl.where(inside, x, float("nan"))
    tl.store(Out + out_row * s_out + k, narrow(x, Out.dtype.element_ty), mask=mask)


@triton.jit
def _unpack_blocks(
    W, Ids, Out, rows, groups, s_out, FORMAT: tl.constexpr, BYTES: tl.constexpr, GROUPS: tl.constexpr
):  # fmt: skip
    """As `_unpack_rows`, for formats in blocks of 32 columns."""
    out_row = tl.program_id(0).to(tl.int64)
    row = out_row
    if Ids is not None:
        row = tl.load(Ids + out_row).to(tl.int64)
    inside = (row >= 0) & (row < rows)
    row = tl.where(inside, row, 0) + tl.arange(0, 1)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    mask = (row >= 0)[:, None] & (group < groups)[None, :]
    low, high = _block_halves(W, row, group, mask, groups * BYTES, FORMAT, BYTES)
    at = Out + out_row * s_out + group[None, :, None] * 32 + tl.arange(0, 16)[None, None, :]
    low = tl.where(inside, low, float("nan"))
    high = tl.where(inside, high, float("nan"))
    tl.store(at, narrow(low, Out.dtype.element_ty), mask=mask[:, :, None])
    tl.store(at + 16, narrow(high, Out.dtype.element_ty), mask=mask[:, :, None])


def _refuses(weight: torch.Tensor, weight_format: str, layout: str) -> list[str]:
    if weight_format != "dense" and layout != "plain":
        return [f"weights are read in the plain layout, got {layout} (it belongs to the CPU's vector lanes)"]
    size = FLOAT_FORMATS[weight_format].itemsize if weight_format in FLOAT_FORMATS else 1
    if weight.data_ptr() % size:
        return [f"a packed {weight_format} weight must start at a multiple of {size} bytes"]
    return []


def refuses_linear(*, weight, weight_format, layout, activations, **_) -> list[str]:
    """Layouts and activations that belong to the CPU backend."""
    reasons = _refuses(weight, weight_format, layout)
    if activations != "float":
        reasons.append(f"activations are used as floats, got {activations}")
    return reasons


def refuses_embedding(*, weight, weight_format, layout, **_) -> list[str]:
    """Layouts that belong to the CPU backend."""
    return _refuses(weight, weight_format, layout)


def _matrix(
    weight: torch.Tensor, weight_format: str, rows: int, columns: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """[rows, columns] of floats or codes, and their scales, out of a dense weight or packed bytes."""
    if weight_format == "dense":
        return weight, None
    if weight_format in FLOAT_FORMATS:
        return weight.view(FLOAT_FORMATS[weight_format]).view(rows, columns), None
    codes, scales = weight[: rows * columns].view(rows, columns), weight[rows * columns :]
    if scales.data_ptr() % 4:
        scales = scales.clone()
    if weight_format == "int8":
        codes = codes.view(torch.int8)
    elif target_of(weight).has_e4m3:
        codes = codes.view(torch.float8_e4m3fn)
    return codes, scales.view(torch.float32)


def _unpack(weight: torch.Tensor, weight_format: str, ids: torch.Tensor | None, rows: int, out: torch.Tensor) -> None:
    """Real values of rows `ids` (all rows when None) of a weight [rows, columns] -> out."""
    count, columns = out.shape
    if count * columns == 0:
        return
    block = configs.UNPACKED_COLUMNS
    grid = (count, triton.cdiv(columns, block))
    if weight_format in BLOCK_FORMATS:
        size = BLOCK_FORMATS[weight_format]
        _unpack_blocks[grid](
            weight, ids, out, rows, columns // 32, out.stride(0), weight_format, size, block // 32, num_warps=4
        )
        return
    matrix, scales = _matrix(weight, weight_format, rows, columns)
    bits = matrix.dtype == torch.uint8
    _unpack_rows[grid](
        matrix, scales, ids, out, rows, columns, matrix.stride(0), out.stride(0), bits, block, num_warps=4
    )


def linear(*, x, weight, weight_format, layout, activations, bias, residual, out):
    """x [tokens, in_features] times weight [out_features, in_features] transposed, plus bias, plus residual -> out."""
    del layout, activations  # `refuses_linear` has seen to it that they are plain and float
    tokens, columns = x.shape
    rows = out.shape[1]
    if tokens * rows == 0:
        return
    if tokens > configs.GEMV_TOKENS or columns == 0:
        _large(x, weight, weight_format, bias, residual, out)
        return
    tile = configs.gemv_tile(target_of(x), x.element_size())
    grid = (triton.cdiv(rows, tile.block_m),)
    tail = (0 if residual is None else residual.stride(0), out.stride(0), columns, TYPES[x.dtype])
    launch = dict(num_warps=tile.num_warps, num_stages=tile.num_stages)
    if weight_format in BLOCK_FORMATS:
        _gemv_blocks[grid](x, weight, bias, residual, out, tokens, rows, x.stride(0), *tail, weight_format,
                           BLOCK_FORMATS[weight_format], tile.block_m, tile.block_n // 32, 16, **launch)  # fmt: skip
        return
    matrix, scales = _matrix(weight, weight_format, rows, columns)
    _gemv_rows[grid](x, matrix, scales, bias, residual, out, tokens, rows, x.stride(0), matrix.stride(0), *tail,
                     matrix.dtype == torch.uint8, tile.block_m, tile.block_n, 16, **launch)  # fmt: skip


def _large(x, weight, weight_format, bias, residual, out) -> None:
    rows, columns = out.shape[1], x.shape[1]
    if weight_format == "dense":
        matrix = weight.to(x.dtype)
    else:
        matrix = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
        _unpack(weight, weight_format, None, rows, matrix)
    product = x @ matrix.T
    for term in (bias, residual):
        if term is not None:
            product = product.float() + term.float()
    out.copy_(product)


def embedding(*, ids, weight, num_embeddings, weight_format, layout, out):
    """Row ids[t] of the weight, dequantised -> out [tokens, hidden]."""
    del layout
    _unpack(weight, weight_format, ids, num_embeddings, out)
