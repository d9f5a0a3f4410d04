"""Packed weights from explicit codes, each byte placed by its index: a second statement of the layouts.

The reference reads these layouts by views and permutations; here element (r, c) is put where the table in
`contract/linear.py` says, so that both would have to be wrong in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..contract import BLOCK, packed_bytes
from .build import Maker

FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
RANGES = {"int8": (-128, 128), "q4_0": (0, 16), "q4_1": (0, 16), "q8_0": (-128, 128)}


@dataclass(frozen=True)
class Codes:
    """A weight as stored: values [rows, columns], scales and minima [rows, groups]; q4_0's codes are 0 to 15."""

    values: torch.Tensor
    scales: torch.Tensor | None = None
    minima: torch.Tensor | None = None


def random_codes(make: Maker, weight_format: str, rows: int, columns: int) -> Codes:
    """Every code of the format with equal probability, under scales that keep products of order 1."""
    if weight_format in FLOATS:
        return Codes((torch.randn(rows, columns, generator=make.generator) * columns**-0.5).to(FLOATS[weight_format]))
    per_channel = weight_format in ("int8", "fp8_e4m3")
    groups = 1 if per_channel else columns // BLOCK
    uniform = torch.rand(rows, groups, generator=make.generator)
    if weight_format == "fp8_e4m3":
        values = (torch.randn(rows, columns, generator=make.generator) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
        return Codes(values, (0.5 + uniform) / 100 * columns**-0.5)
    low, high = RANGES[weight_format]
    values = torch.randint(low, high, (rows, columns), generator=make.generator)
    scales = (0.5 + uniform) * 4 / (high - low) * columns**-0.5
    if per_channel:
        return Codes(values.to(torch.int8), scales)
    scales = torch.where(torch.rand(rows, groups, generator=make.generator) < 0.3, -scales, scales).to(torch.float16)
    dtype = torch.int8 if weight_format == "q8_0" else torch.uint8
    minima = (torch.randn(rows, groups, generator=make.generator) * columns**-0.5).to(torch.float16)
    return Codes(values.to(dtype), scales, minima if weight_format == "q4_1" else None)


class Bytes:
    """A zeroed run of bytes into which numbers are put at byte offsets."""

    def __init__(self, count: int) -> None:
        self.data = torch.zeros(count, dtype=torch.uint8)

    def put(self, offsets: torch.Tensor, values: torch.Tensor) -> None:
        """values[i] at byte offsets[i], little-endian, or-ed into what is there."""
        raw = values.contiguous().view(torch.uint8).view(*values.shape, -1)
        for byte in range(raw.shape[-1]):
            self.data[offsets + byte] |= raw[..., byte]


def pack(codes: Codes, weight_format: str, layout: str) -> torch.Tensor:
    """The bytes of a weight, uint8 [packed_bytes]; rows16 pads the rows with zero bytes."""
    rows, columns = codes.values.shape
    padded = rows if layout == "plain" else -(-rows // 16) * 16
    target = Bytes(packed_bytes(weight_format, padded, columns))
    r, c = torch.arange(rows)[:, None], torch.arange(columns)[None, :]
    if weight_format in FLOATS:
        index = r * columns + c if layout == "plain" else _rows16_floats(weight_format, columns, r, c)
        target.put(index * codes.values.element_size(), codes.values)
    else:
        (_plain_codes if layout == "plain" else _rows16_codes)(target, codes, weight_format, r, c)
    return target.data


def _rows16_floats(weight_format: str, columns: int, r: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    block, lane = r // 16 * 16 * columns, r % 16
    if weight_format == "float32":
        return block + c * 16 + lane
    return block + torch.where(c < columns // 2 * 2, c // 2 * 32 + lane * 2 + c % 2, c * 16 + lane)


def _plain_codes(target: Bytes, codes: Codes, weight_format: str, r: torch.Tensor, c: torch.Tensor) -> None:
    rows, columns = codes.values.shape
    assert codes.scales is not None
    if weight_format in ("int8", "fp8_e4m3"):
        target.put(r * columns + c, codes.values)
        target.put(rows * columns + 4 * r, codes.scales)
        return
    size = {"q4_0": 18, "q4_1": 20, "q8_0": 34}[weight_format]
    group = torch.arange(columns // BLOCK)[None, :]
    block = (r * (columns // BLOCK) + group) * size
    target.put(block, codes.scales)
    head = 2
    if codes.minima is not None:
        target.put(block + 2, codes.minima)
        head = 4
    start = (r * (columns // BLOCK) + c // BLOCK) * size + head
    if weight_format == "q8_0":
        target.put(start + c % BLOCK, codes.values)
    else:
        _put_nibbles(target, start + c % 16, codes.values, c)


def _put_nibbles(target: Bytes, offsets: torch.Tensor, values: torch.Tensor, c: torch.Tensor) -> None:
    """Columns 0 to 15 of a group go to the low half of their byte, columns 16 to 31 to the high half."""
    low = (c % BLOCK < 16).flatten()
    target.put(offsets[:, low], values[:, low])
    target.put(offsets[:, ~low], values[:, ~low] << 4)


def _rows16_codes(target: Bytes, codes: Codes, weight_format: str, r: torch.Tensor, c: torch.Tensor) -> None:
    columns, lane = c.numel(), r % 16
    groups = columns // BLOCK
    base = r // 16 * packed_bytes(weight_format, 16, columns)
    assert codes.scales is not None
    if weight_format in ("int8", "fp8_e4m3"):
        target.put(base + 4 * lane, codes.scales)
        if weight_format == "fp8_e4m3":
            target.put(base + 64 + 16 * c + lane, codes.values)
            return
        quad = c // BLOCK * 512 + c % BLOCK // 4 * 64 + lane * 4 + c % 4
        target.put(base + 64 + torch.where(c < groups * BLOCK, quad, 16 * c + lane), _offset_by_128(codes.values))
        return
    g, group = c // BLOCK, torch.arange(groups)[None, :]
    if weight_format == "q8_0":
        paired = groups // 2 * 2
        scale_at = group // 2 * 1088 + torch.where(group < paired, group % 2 * 32, 0)
        target.put(base + scale_at + 2 * lane, codes.scales)
        code_at = g // 2 * 1088 + torch.where(g < paired, 64 + g % 2 * 512, 32)
        target.put(base + code_at + c % BLOCK // 4 * 64 + lane * 4 + c % 4, _offset_by_128(codes.values))
        return
    size, head = (288, 32) if weight_format == "q4_0" else (320, 64)
    target.put(base + group * size + 2 * lane, codes.scales)
    if codes.minima is not None:
        target.put(base + group * size + 32 + 2 * lane, codes.minima)
    _put_nibbles(target, base + g * size + head + c % 16 // 4 * 64 + lane * 4 + c % 4, codes.values, c)


def _offset_by_128(values: torch.Tensor) -> torch.Tensor:
    return (values.to(torch.int16) + 128).to(torch.uint8)
