"""Linear layers over dense or packed weights, rows of a packed embedding, and the formats themselves."""

from __future__ import annotations

import torch

from .attention import einsum, wide_dtype

FLOAT_FORMATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CODE_FORMATS = {"int8": (torch.int8, 127.0), "fp8_e4m3": (torch.float8_e4m3fn, 448.0)}
BLOCK = 32
LIMITS = {"int8": 127.0, "int16": 127.0 * 254.0}  # 16-bit codes are two of 8 bits: high x 254 + low


def linear(
    *,
    x: torch.Tensor,  # [tokens, in_features]
    weight: torch.Tensor,  # [out_features, in_features], or packed bytes
    weight_format: str,
    layout: str,
    activations: str,
    bias: torch.Tensor | None,  # [out_features]
    residual: torch.Tensor | None,  # [tokens, out_features]
    out_features: int,
    compute_dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor]:
    """x weight^T + bias + residual -> out [tokens, out_features].

    With activations "int8" or "int16" x is first quantised in groups of 32 columns; codes are exact, so no operand is rounded
    again.
    """
    wide = wide_dtype(compute_dtype)
    w = unpack(weight, weight_format, layout, out_features, x.shape[1], wide)
    if activations != "float":
        x = quantise_activations(x, LIMITS[activations]).to(wide)
    else:
        x, w = x.to(compute_dtype).to(wide), w.to(compute_dtype).to(wide)
    out = einsum("tk,nk->tn", x, w)
    if bias is not None:
        out = out + bias.to(wide)
    if residual is not None:
        out = out + residual.to(wide)
    return (out.to(compute_dtype),)


def embedding(
    *,
    ids: torch.Tensor,  # [tokens]
    weight: torch.Tensor,  # [num_embeddings, hidden], or packed bytes
    num_embeddings: int,
    weight_format: str,
    layout: str,
    hidden: int,
    compute_dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor]:
    """Row ids[t] of the weight, dequantised -> out [tokens, hidden]."""
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < num_embeddings:
        raise ValueError(f"ids must be in [0, {num_embeddings}), got {int(ids.min())} to {int(ids.max())}")
    rows = unpack(weight, weight_format, layout, num_embeddings, hidden, wide_dtype(compute_dtype))
    return (rows[ids.long()].to(compute_dtype),)


def quantise_activations(x: torch.Tensor, limit: float) -> torch.Tensor:
    """x with every group of 32 columns rounded to codes up to `limit`: code x scale, exact in float64, as x.

    scale = amax / limit, code = rint(x * (limit / amax)), in float32; a group of zeros has scale 0.
    """
    groups = x.to(torch.float32).unflatten(-1, (-1, BLOCK))
    peak = groups.abs().amax(dim=-1, keepdim=True)
    inverse = torch.where(peak == 0, 0.0, limit / peak)
    return (torch.round(groups * inverse).to(torch.float64) * (peak / limit).to(torch.float64)).flatten(-2)


def unpack(
    weight: torch.Tensor, weight_format: str, layout: str, rows: int, columns: int, dtype: torch.dtype
) -> torch.Tensor:
    """The real values [rows, columns] of a dense or packed weight, in `dtype`."""
    if weight_format == "dense":
        return weight.to(dtype)
    split = {"plain": split_plain, "rows16": split_rows16}[layout]
    codes, scale, minimum = split(weight, weight_format, rows, columns)
    real = codes.to(dtype)
    if scale is not None:
        repeats = columns if weight_format in CODE_FORMATS else BLOCK
        real = real * scale.to(dtype).repeat_interleave(repeats, dim=1)
        if minimum is not None:
            real = real + minimum.to(dtype).repeat_interleave(repeats, dim=1)
    return real


# A weight taken apart: codes (numbers, for float formats) [rows, columns], scales and minima [rows, groups].
Parts = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


def typed(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The bytes of the last dimension read as `dtype`, wherever they start."""
    return data.contiguous().clone().view(dtype)


def nibbles(data: torch.Tensor) -> torch.Tensor:
    """16 bytes [..., 16] -> 32 codes: low nibbles are columns 0 to 15, high nibbles columns 16 to 31."""
    return torch.cat((data & 0xF, data >> 4), dim=-1)


def split_plain(weight: torch.Tensor, weight_format: str, rows: int, columns: int) -> Parts:
    """Takes the canonical byte order apart (see the table in the op's declaration)."""
    if weight_format in FLOAT_FORMATS:
        return typed(weight, FLOAT_FORMATS[weight_format]).view(rows, columns), None, None
    if weight_format in CODE_FORMATS:
        codes, scales = weight[: rows * columns], weight[rows * columns :]
        return (
            typed(codes, CODE_FORMATS[weight_format][0]).view(rows, columns),
            typed(scales, torch.float32).view(rows, 1),
            None,
        )
    groups = columns // BLOCK
    blocks = weight.view(rows, groups, -1)  # bytes of one block last
    scale = typed(blocks[..., :2], torch.float16).squeeze(-1)
    if weight_format == "q4_0":
        return (nibbles(blocks[..., 2:]).to(torch.int8) - 8).flatten(1), scale, None
    if weight_format == "q4_1":
        return nibbles(blocks[..., 4:]).flatten(1), scale, typed(blocks[..., 2:4], torch.float16).squeeze(-1)
    return typed(blocks[..., 2:], torch.int8).flatten(1), scale, None


def split_rows16(weight: torch.Tensor, weight_format: str, rows: int, columns: int) -> Parts:
    """Takes the row-interleaved byte order apart: blocks of 16 rows in turn, rows padded to a multiple of 16."""
    blocks = weight.view((rows + 15) // 16, -1)
    if weight_format in FLOAT_FORMATS:
        return float_rows16(typed(blocks, FLOAT_FORMATS[weight_format]), weight_format, columns)[:rows], None, None
    if weight_format in CODE_FORMATS:
        scale = typed(blocks[:, :64], torch.float32).reshape(-1, 1)[:rows]
        data = blocks[:, 64:]
        if weight_format == "fp8_e4m3":
            codes = typed(data, torch.float8_e4m3fn).view(-1, columns, 16).transpose(1, 2)
        else:
            whole = columns // BLOCK * BLOCK
            body = lanes(data[:, : 16 * whole].reshape(blocks.shape[0], -1, 8, 16, 4))
            tail = data[:, 16 * whole :].reshape(blocks.shape[0], columns - whole, 16).transpose(1, 2)
            codes = torch.cat((body, tail), dim=-1).to(torch.int16) - 128
        return codes.reshape(-1, columns)[:rows], scale, None
    if weight_format == "q8_0":
        return q8_rows16(blocks, rows, columns)
    return q4_rows16(blocks, weight_format, rows, columns)


def lanes(data: torch.Tensor) -> torch.Tensor:
    """[blocks, groups, quads, 16, 4] -> [blocks, 16, columns]: four neighbouring columns of one row stand together."""
    return data.permute(0, 3, 1, 2, 4).flatten(2)


def float_rows16(data: torch.Tensor, weight_format: str, columns: int) -> torch.Tensor:
    """[k][16] for float32; pairs of columns `[k / 2][16][2]` for 16-bit floats, an odd last column alone as `[16]`."""
    if weight_format == "float32":
        return data.view(-1, columns, 16).transpose(1, 2).reshape(-1, columns)
    even = columns // 2 * 2
    body = data[:, : 16 * even].reshape(-1, columns // 2, 16, 2).transpose(1, 2).flatten(2)
    tail = data[:, 16 * even :].reshape(data.shape[0], columns - even, 16).transpose(1, 2)
    return torch.cat((body, tail), dim=-1).reshape(-1, columns)


def q4_rows16(blocks: torch.Tensor, weight_format: str, rows: int, columns: int) -> Parts:
    """Per 32 columns `[16]` d (and `[16]` m), then `[4][16][4]` bytes: column 4j + i low, 16 + 4j + i high."""
    groups = columns // BLOCK
    data = blocks.view(blocks.shape[0], groups, -1)
    heads = 1 if weight_format == "q4_0" else 2
    head = typed(data[..., : 32 * heads], torch.float16).view(blocks.shape[0], groups, heads, 16)
    head = head.permute(2, 0, 3, 1).reshape(heads, -1, groups)[:, :rows]
    packed = data[..., 32 * heads :].reshape(blocks.shape[0], groups, 4, 16, 4)
    by_row = packed.permute(0, 3, 1, 2, 4).flatten(3)  # [blocks, 16, groups, 16 bytes]
    codes = nibbles(by_row).reshape(-1, columns)[:rows]
    if weight_format == "q4_0":
        return codes.to(torch.int8) - 8, head[0], None
    return codes, head[0], head[1]


def q8_rows16(blocks: torch.Tensor, rows: int, columns: int) -> Parts:
    """Pairs of 32-column blocks: two `[16]` d, two `[8][16][4]` of code + 128; an odd last block has one of each."""
    pairs, odd = divmod(columns // BLOCK, 2)
    count = blocks.shape[0]
    cut = pairs * 1088
    paired = blocks[:, :cut].reshape(count, pairs, 1088)
    scales = [typed(paired[..., :64], torch.float16).view(count, 2 * pairs, 16)]
    codes = [paired[..., 64:].reshape(count, 2 * pairs, 8, 16, 4)]
    if odd:
        scales.append(typed(blocks[:, cut : cut + 32], torch.float16).view(count, 1, 16))
        codes.append(blocks[:, cut + 32 :].reshape(count, 1, 8, 16, 4))
    scale = torch.cat(scales, dim=1).transpose(1, 2).reshape(-1, columns // BLOCK)
    code = lanes(torch.cat(codes, dim=1)).reshape(-1, columns)
    return code[:rows].to(torch.int16) - 128, scale[:rows], None


def pack_plain(weight: torch.Tensor, weight_format: str) -> torch.Tensor:
    """Quantises a weight [rows, columns] to the canonical bytes of a packed format, uint8 [packed_bytes].

    int8 and fp8_e4m3: per row, scale = amax / 127 or / 448 (1 for a row of zeros), code = w / scale to the nearest
    even. q4_0, q4_1, q8_0: llama.cpp's reference quantisation of each block of 32 columns, bit for bit.
    """
    rows = weight.shape[0]
    if weight_format in FLOAT_FORMATS:
        return as_bytes(weight.to(FLOAT_FORMATS[weight_format])).flatten()
    weight = weight.to(torch.float32)
    if weight_format in CODE_FORMATS:
        dtype, largest = CODE_FORMATS[weight_format]
        scale = weight.abs().amax(dim=1, keepdim=True) / largest
        scale = torch.where(scale == 0, 1.0, scale)
        ratio = (weight / scale).clamp(-largest, largest)
        codes = (torch.round(ratio) if dtype == torch.int8 else ratio).to(dtype)
        return torch.cat((as_bytes(codes).flatten(), as_bytes(scale).flatten()))
    blocks = weight.reshape(rows, -1, BLOCK)
    pack = {"q4_0": pack_q4_0, "q4_1": pack_q4_1, "q8_0": pack_q8_0}[weight_format]
    return pack(blocks).flatten()


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def inverse_or_zero(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale == 0, 0.0, 1.0 / scale)


def join_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """32 codes below 16 -> 16 bytes, the first half in the low nibbles."""
    low, high = codes.clamp(0, 15).to(torch.uint8).chunk(2, dim=-1)
    return low | (high << 4)


def pack_q4_0(blocks: torch.Tensor) -> torch.Tensor:
    """d = (the value of largest magnitude) / -8, code = trunc(w / d + 8.5); d is rounded to float16 afterwards."""
    at = blocks.abs().argmax(dim=-1, keepdim=True)
    d = blocks.gather(-1, at) / -8
    codes = torch.trunc(blocks * inverse_or_zero(d) + 8.5)
    return torch.cat((as_bytes(d.to(torch.float16)), join_nibbles(codes)), dim=-1)


def pack_q4_1(blocks: torch.Tensor) -> torch.Tensor:
    """m = min, d = (max - min) / 15, code = trunc((w - m) / d + 0.5)."""
    low, high = blocks.amin(dim=-1, keepdim=True), blocks.amax(dim=-1, keepdim=True)
    d = (high - low) / 15
    codes = torch.trunc((blocks - low) * inverse_or_zero(d) + 0.5)
    head = [as_bytes(x.to(torch.float16)) for x in (d, low)]
    return torch.cat((*head, join_nibbles(codes)), dim=-1)


def pack_q8_0(blocks: torch.Tensor) -> torch.Tensor:
    """d = amax / 127, code = w / d rounded half away from zero."""
    d = blocks.abs().amax(dim=-1, keepdim=True) / 127
    ratio = blocks * inverse_or_zero(d)
    codes = torch.sign(ratio) * torch.floor(ratio.abs() + 0.5)
    return torch.cat((as_bytes(d.to(torch.float16)), as_bytes(codes.to(torch.int8))), dim=-1)
