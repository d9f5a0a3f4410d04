"""What several Triton families share: the one constexpr between hardware and interpreter, rounding, types, the target.

`INTERPRETED` is that constexpr. Triton's interpreter multiplies the raw bits of bfloat16 in `tl.dot` and truncates casts
to bfloat16, and it fuses no multiplication with the addition after it; so under it products are fed float32, casts are rounded
in integers, and the fused step of the softmax is computed in float64. No kernel differs in any other way.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NEG_INF = tl.constexpr(float("-inf"))

TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@dataclass(frozen=True)
class Target:
    """What a kernel is compiled for: "cuda" with arch 80, 90, ...; "hip" with arch 942; "interpreter". `name`: the GPU's."""

    backend: str
    arch: int = 0
    name: str = ""

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory that one block may use."""
        if self.backend == "hip":
            return 64 * 1024
        return {80: 163, 87: 163, 90: 227, 100: 227, 103: 227}.get(self.arch, 99) * 1024

    @property
    def has_e4m3(self) -> bool:
        """Whether Triton can load float8_e4m3fn here; elsewhere codes are read as bytes and widened by hand."""
        return self.backend != "cuda" or self.arch >= 89


@cache
def _device_target(index: int) -> Target:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        digits = properties.gcnArchName.removeprefix("gfx").split(":")[0]
        return Target("hip", int(digits) if digits.isdigit() else 0, properties.name)
    return Target("cuda", properties.major * 10 + properties.minor, properties.name)


def target_of(tensor: torch.Tensor) -> Target:
    """The target of a launch on the device of `tensor`."""
    if INTERPRETED.value:
        return Target("interpreter")
    return _device_target(tensor.device.index or 0)


def padded(size: int, least: int = 16) -> int:
    """The power of two that holds `size`; `tl.dot` wants at least 16."""
    return triton.next_power_of_2(max(size, least))


@triton.jit
def narrow(x, TYPE: tl.constexpr):
    """float32 to TYPE, rounded to nearest even in both worlds."""
    if INTERPRETED and tl.bfloat16 == TYPE:
        bits = x.to(tl.int32, bitcast=True)
        bits = tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), bits | 0x400000)
        x = bits.to(tl.float32, bitcast=True)
    return x.to(TYPE)


@triton.jit
def multiply_subtract(x, y, z):
    """x * y - z rounded once, as the hardware's fused instruction does."""
    if INTERPRETED:
        out = (x.to(tl.float64) * y.to(tl.float64) - z.to(tl.float64)).to(tl.float32)
    else:
        out = x * y - z
    return out


@triton.jit
def power_of_two(x):
    """The largest power of two at or below |x|; 2^-126 for anything smaller."""
    bits = tl.maximum(tl.abs(x), 1.1754943508222875e-38).to(tl.int32, bitcast=True) & 0x7F800000
    return bits.to(tl.float32, bitcast=True)
