"""Weights in the packed byte formats of `contract/linear.py`: made from floats or GGUF blocks, permuted, widened again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..contract.linear import BLOCK, BLOCKED, LAYOUTS, ROW_BYTES, packed_bytes
from ..registry import load

FLOAT_FORMATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CHANNEL_FORMATS = {"int8": (torch.int8, 127.0), "fp8_e4m3": (torch.float8_e4m3fn, 448.0)}
ROWS = 16  # rows that rows16 interleaves


@dataclass(frozen=True)
class PackedWeight:
    """A weight `[out_features, in_features]` as bytes.

    `data` is a flat uint8 tensor whose byte order is given by `format` ("float32", "bfloat16", "float16", "int8",
    "fp8_e4m3", "q4_0", "q4_1", "q8_0") and `layout` ("plain": canonical; "rows16": for SIMD lanes).
    """

    format: str
    layout: str
    shape: tuple[int, int]
    data: torch.Tensor

    def __post_init__(self) -> None:
        rows, columns = self.shape
        if self.format not in ROW_BYTES:
            raise ValueError(f"PackedWeight: format must be one of {', '.join(ROW_BYTES)}, got {self.format!r}")
        if self.layout not in LAYOUTS:
            raise ValueError(f"PackedWeight: layout must be one of {', '.join(LAYOUTS)}, got {self.layout!r}")
        _check_columns("PackedWeight", self.format, columns)
        expected = packed_bytes(self.format, rows if self.layout == "plain" else _padded(rows), columns)
        if self.data.dtype != torch.uint8 or self.data.dim() != 1 or self.data.numel() != expected:
            raise ValueError(
                f"PackedWeight: data of a {self.layout} {self.format} weight [{rows}, {columns}] must be {expected} bytes "
                f"(flat uint8), got {list(self.data.shape)} {str(self.data.dtype).removeprefix('torch.')}"
            )

    @property
    def nbytes(self) -> int:
        return self.data.numel()

    @property
    def device(self) -> torch.device:
        return self.data.device

    @staticmethod
    def from_plain(raw: torch.Tensor, format: str, shape: tuple[int, int]) -> PackedWeight:
        """The bytes of a GGUF tensor (Q4_0, Q4_1, Q8_0, F32, F16 or BF16 under our name), taken as they are."""
        return PackedWeight(format, "plain", shape, raw.contiguous().view(torch.uint8).flatten())

    @staticmethod
    def concat(weights: Sequence[PackedWeight]) -> PackedWeight:
        """One matrix whose rows are those of all `weights` in turn (q, k and v; gate and up).

        Formats, layouts and columns must agree; in rows16 all but the last must have rows in multiples of 16.
        """
        first = weights[0]
        for w in weights[1:]:
            if (w.format, w.layout, w.shape[1]) != (first.format, first.layout, first.shape[1]):
                raise ValueError(
                    f"concat: weights must share format, layout and columns: {first.format} {first.layout} {first.shape[1]}, "
                    f"got {w.format} {w.layout} {w.shape[1]}"
                )
        for w in weights[:-1]:
            if first.layout == "rows16" and w.shape[0] % ROWS:
                raise ValueError(f"concat: rows of a rows16 weight must be a multiple of {ROWS}, got {w.shape[0]}")
        rows, columns = sum(w.shape[0] for w in weights), first.shape[1]
        parts = [w.data for w in weights]
        if first.layout == "plain" and first.format in CHANNEL_FORMATS:  # codes of all, then scales of all
            cuts = [w.shape[0] * columns for w in weights]
            parts = [w.data[:cut] for w, cut in zip(weights, cuts, strict=True)]
            parts += [w.data[cut:] for w, cut in zip(weights, cuts, strict=True)]
        return PackedWeight(first.format, first.layout, (rows, columns), torch.cat(parts))

    def to_layout(self, layout: str) -> PackedWeight:
        """The same weight in another byte order, without loss."""
        if layout not in LAYOUTS:
            raise ValueError(f"to_layout: layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
        if layout == self.layout:
            return self
        rows, columns = self.shape
        if layout == "plain":
            return PackedWeight(self.format, "plain", self.shape, _plain_from_rows16(self))
        cpu: Any = load("cpu")
        data = cpu.repack_rows16(self.data.cpu(), self.format, rows, columns)
        return PackedWeight(self.format, "rows16", self.shape, data.to(self.device))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The real values `[out_features, in_features]`, computed in float32."""
        rows, columns = self.shape
        data = self.to_layout("plain").data
        if self.format in FLOAT_FORMATS:
            return _typed(data, FLOAT_FORMATS[self.format]).view(rows, columns).to(dtype)
        if self.format in CHANNEL_FORMATS:
            codes = _typed(data[: rows * columns], CHANNEL_FORMATS[self.format][0]).view(rows, columns)
            return (codes.float() * _typed(data[rows * columns :], torch.float32).view(rows, 1)).to(dtype)
        blocks = data.view(rows, columns // BLOCK, -1)
        d = _typed(blocks[..., :2], torch.float16).float()
        if self.format == "q8_0":
            real = _typed(blocks[..., 2:], torch.int8).float() * d
        elif self.format == "q4_0":
            real = (_nibbles(blocks[..., 2:]) - 8) * d
        else:
            real = _nibbles(blocks[..., 4:]) * d + _typed(blocks[..., 2:4], torch.float16).float()
        return real.reshape(rows, columns).to(dtype)


def pack_weight(weight: torch.Tensor, format: str, *, layout: str | None = None) -> PackedWeight:
    """Quantises (or converts) a weight `[out_features, in_features]` to a packed format.

    Args:
        weight: any float type.
        format: "float32", "bfloat16", "float16"; "int8", "fp8_e4m3" (one scale per row); "q4_0", "q4_1", "q8_0"
            (GGUF's blocks of 32 columns, by llama.cpp's reference rounding); "int4" is q4_1.
        layout: "plain" or "rows16"; None is what the kernels of the weight's device read (rows16 in host memory).

    Raises:
        ValueError: not a matrix of floats, not finite, an unknown format, columns that are no multiple of the block.
    """
    format = "q4_1" if format == "int4" else format
    if format not in ROW_BYTES:
        raise ValueError(f"pack_weight: format must be one of int4, {', '.join(ROW_BYTES)}, got {format!r}")
    if not isinstance(weight, torch.Tensor):
        raise TypeError(f"pack_weight: weight must be a torch.Tensor, got {type(weight).__name__}")
    if weight.dim() != 2 or not weight.is_floating_point():
        raise ValueError(f"pack_weight: weight must be a matrix of floats, got {list(weight.shape)} {weight.dtype}")
    _check_columns("pack_weight", format, weight.shape[1])
    weight = weight.detach()
    if format not in FLOAT_FORMATS and not bool(torch.isfinite(weight).all()):
        raise ValueError(f"pack_weight: weight must be finite to be packed as {format}")
    data = _pack_plain(weight.float() if format not in FLOAT_FORMATS else weight, format)
    packed = PackedWeight(format, "plain", (weight.shape[0], weight.shape[1]), data)
    return packed.to_layout(layout or ("rows16" if weight.device.type == "cpu" else "plain"))


def _check_columns(who: str, format: str, columns: int) -> None:
    if format in BLOCKED and columns % BLOCK:
        raise ValueError(f"{who}: {format} needs columns in multiples of {BLOCK}, got {columns}")


def _padded(rows: int) -> int:
    return -(-rows // ROWS) * ROWS


def _typed(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return data.contiguous().clone().view(dtype)  # cloned: a view needs aligned bytes


def _bytes(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.uint8)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    return torch.cat((packed & 15, packed >> 4), dim=-1).float()


def _pack_plain(weight: torch.Tensor, format: str) -> torch.Tensor:
    """Plain bytes of a weight `[rows, columns]`."""
    if format in FLOAT_FORMATS:
        return _bytes(weight.to(FLOAT_FORMATS[format])).flatten()
    if format in CHANNEL_FORMATS:
        dtype, largest = CHANNEL_FORMATS[format]
        scale = weight.abs().amax(dim=1, keepdim=True) / largest
        scale = torch.where(scale == 0, 1.0, scale)
        ratio = (weight / scale).clamp(-largest, largest)
        codes = (ratio.round() if dtype == torch.int8 else ratio).to(dtype)
        return torch.cat((_bytes(codes).flatten(), _bytes(scale).flatten()))
    blocks = weight.reshape(weight.shape[0], -1, BLOCK)
    head, codes = {"q4_0": _q4_0, "q4_1": _q4_1, "q8_0": _q8_0}[format](blocks)
    return torch.cat((_bytes(head.to(torch.float16)), codes), dim=-1).flatten()


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale == 0, 0.0, 1.0 / scale)


def _join_nibbles(codes: torch.Tensor) -> torch.Tensor:
    low, high = codes.trunc().clamp(0, 15).to(torch.uint8).chunk(2, dim=-1)
    return low | high << 4


def _q4_0(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    extreme = blocks.gather(-1, blocks.abs().argmax(dim=-1, keepdim=True))
    d = extreme / -8
    return d, _join_nibbles(blocks * _inverse(d) + 8.5)


def _q4_1(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    low, high = blocks.amin(dim=-1, keepdim=True), blocks.amax(dim=-1, keepdim=True)
    d = (high - low) / 15
    return torch.cat((d, low), dim=-1), _join_nibbles((blocks - low) * _inverse(d) + 0.5)


def _q8_0(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    d = blocks.abs().amax(dim=-1, keepdim=True) / 127
    ratio = blocks * _inverse(d)
    codes = ratio.sign() * (ratio.abs() + 0.5).floor()  # half away from zero
    return d, _bytes(codes.to(torch.int8))


def _plain_from_rows16(weight: PackedWeight) -> torch.Tensor:
    """The inverse permutation, by reshaping."""
    rows, columns = weight.shape
    blocks = weight.data.view(_padded(rows) // ROWS, -1)
    if weight.format in FLOAT_FORMATS:
        return _unlane_floats(blocks, columns, ROW_BYTES[weight.format](1))[:rows].flatten()
    if weight.format in CHANNEL_FORMATS:
        scales, data = blocks[:, :64].reshape(-1, 4)[:rows], blocks[:, 64:]
        whole = columns // BLOCK * BLOCK if weight.format == "int8" else 0
        body = _unlane_quads(data[:, : ROWS * whole])
        tail = (
            data[:, ROWS * whole :]
            .reshape(len(blocks), columns - whole, ROWS)
            .transpose(1, 2)
            .reshape(len(blocks) * ROWS, columns - whole)
        )
        codes = torch.cat((body, tail), dim=1)[:rows]
        return torch.cat((codes.flatten() ^ (0x80 if weight.format == "int8" else 0), scales.flatten()))
    if weight.format == "q8_0":
        return _unlane_q8(blocks, columns // BLOCK)[:rows].flatten()
    heads = 1 if weight.format == "q4_0" else 2
    groups = blocks.view(len(blocks), columns // BLOCK, -1)
    head = groups[..., : 32 * heads].reshape(*groups.shape[:2], heads, ROWS, 2).permute(0, 3, 1, 2, 4).flatten(3)
    codes = groups[..., 32 * heads :].reshape(*groups.shape[:2], 4, ROWS, 4).permute(0, 3, 1, 2, 4).flatten(3)
    return torch.cat((head, codes), dim=-1).flatten(0, 1)[:rows].flatten()


def _unlane_quads(data: torch.Tensor) -> torch.Tensor:
    """`[blocks, bytes]` of `[...][16][4]` -> `[rows, columns]`."""
    return data.reshape(len(data), -1, ROWS, 4).transpose(1, 2).reshape(len(data) * ROWS, -1)


def _unlane_floats(blocks: torch.Tensor, columns: int, itemsize: int) -> torch.Tensor:
    paired = columns // 2 * 2 if itemsize == 2 else 0
    body = _unlane_quads(blocks[:, : ROWS * itemsize * paired])
    tail = blocks[:, ROWS * itemsize * paired :].reshape(len(blocks), columns - paired, ROWS, itemsize)
    return torch.cat((body, tail.transpose(1, 2).reshape(len(blocks) * ROWS, -1)), dim=1)


def _unlane_q8(blocks: torch.Tensor, groups: int) -> torch.Tensor:
    parts = []
    for first in range(0, groups, 2):
        count = min(2, groups - first)
        start = first // 2 * 1088
        scales = blocks[:, start : start + 32 * count].reshape(len(blocks), count, ROWS, 2)
        codes = blocks[:, start + 32 * count : start + 544 * count].reshape(len(blocks), count, 8, ROWS, 4) ^ 0x80
        parts.append(torch.cat((scales.permute(0, 2, 1, 3), codes.permute(0, 3, 1, 2, 4).flatten(3)), dim=-1))
    return torch.cat(parts, dim=2).flatten(0, 1).flatten(1)
