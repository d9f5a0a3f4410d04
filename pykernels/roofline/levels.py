"""Points of a hierarchical roofline: what one kernel moved at each memory level, under that level's roof."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .ceilings import MARGIN, RoofError

LEVELS = ("l1", "l2", "l3", "dram")


@dataclass(frozen=True)
class Traffic:
    """Bytes of one call at one level, and the level's bandwidth in bytes per second where it is known."""

    bytes: float
    roof: float | None = None


@dataclass(frozen=True)
class LevelPoint:
    """A kernel, or the `call` of all its kernels together: seconds and FLOPs of one, and its traffic per level.

    `flops_from` is "contract" (what the op must do) or "counted" (FP32 and FP16 instructions that ran; tensor cores are
    not among them); `peak` is in FLOP/s. `launches` were measured; a kernel's figures are their medians, a call's the sum over its kernels.
    """

    name: str
    launches: int
    seconds: float
    flops: float
    flops_from: str
    traffic: Mapping[str, Traffic]
    peak: float | None = None

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ValueError(f"{self.name}: seconds must be positive, got {self.seconds}")
        for level, moved in self.traffic.items():
            if level not in LEVELS:
                raise ValueError(f"{self.name}: a level must be one of {', '.join(LEVELS)}, got {level!r}")
            if moved.roof is not None and moved.bytes / self.seconds > MARGIN * moved.roof:
                raise RoofError(
                    f"{self.name}: {moved.bytes:.4g} bytes in {self.seconds:.4g} s are "
                    f"{100 * moved.bytes / self.seconds / moved.roof:.0f} % of what {level} can do ({moved.roof:.4g} B/s)"
                )

    def to_json(self) -> dict[str, Any]:
        """`levels` maps a level to bytes, intensity (FLOP per byte), roof (B/s) and the share of it in percent."""
        levels = {}
        for level in LEVELS:
            if level in self.traffic:
                moved = self.traffic[level]
                levels[level] = {
                    "bytes": moved.bytes,
                    "intensity": self.flops / moved.bytes if moved.bytes else None,
                    "roof": moved.roof,
                    "roof_pct": 100 * moved.bytes / self.seconds / moved.roof if moved.roof else None,
                }
        return {
            "name": self.name,
            "launches": self.launches,
            "seconds": self.seconds,
            "flops": self.flops,
            "flops_from": self.flops_from,
            "peak": self.peak,
            "levels": levels,
        }
