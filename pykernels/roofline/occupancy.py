"""What a compiled kernel's figures say about a GPU before it runs: blocks that fit a multiprocessor, and what a loop turn costs.

An estimate, for ranking variants of one kernel: it knows no memory latency, no L2 and no dependences between instructions.
Limits: CUDA C++ Programming Guide, tables "Technical Specifications per Compute Capability" and "Throughput of Native Arithmetic
Instructions"; AMD CDNA 3 ISA guide and LLVM's AMDGPU backend for gfx942.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Multiprocessor:
    """One multiprocessor (NVIDIA) or compute unit (AMD). Rates are per clock; a warp has `lanes` threads."""

    registers: int  # 32-bit, for all threads together; a quarter belongs to each of four schedulers (or SIMDs)
    register_unit: int  # registers a thread are rounded up to a multiple of this
    shared: int  # bytes for all blocks together
    block_overhead: int  # bytes of shared memory that the system adds to each block
    warps: int
    blocks: int
    macs: int  # 16-bit multiply-adds of the tensor cores
    special: int  # results of MUFU, or of the transcendental unit
    lanes: int = 32
    issue: int = 4  # warp instructions: one per scheduler


MULTIPROCESSORS = {
    "sm80": Multiprocessor(65536, 8, 164 * 1024, 1024, 64, 32, 1024, 16),
    "sm90": Multiprocessor(65536, 8, 228 * 1024, 1024, 64, 32, 2048, 16),
    "sm100": Multiprocessor(65536, 8, 228 * 1024, 1024, 64, 32, 4096, 16),  # tensor memory is not counted
    # 512 vector registers a lane in each of four SIMDs, of 16 lanes: a wave's instruction takes four clocks on one of them.
    "gfx942": Multiprocessor(4 * 512 * 64, 8, 64 * 1024, 0, 32, 16, 1024, 16, lanes=64, issue=1),
}


@dataclass(frozen=True)
class Estimate:
    """`limit` names what keeps another block out. Clocks are those of one loop turn of one block; None: no main loop."""

    blocks: int
    warps: int
    limit: str
    occupancy: float  # warps over those that a multiprocessor can hold
    issue_clocks: float | None
    special_clocks: float | None
    tensor_clocks: float | None

    @property
    def bound(self) -> str | None:
        """What a turn waits for longest when blocks overlap perfectly; None without a loop."""
        clocks = {"issue": self.issue_clocks, "special": self.special_clocks, "tensor": self.tensor_clocks}
        known = {name: value for name, value in clocks.items() if value is not None}
        return max(known, key=lambda name: known[name]) if known else None


def estimate(row: Mapping[str, Any], target: str) -> Estimate:
    """From a row of `ci/compile_matrix.json`: registers (a thread), shared (bytes a block), num_warps, loop_length, loop
    (instructions by kind), macs (of a turn of the loop). KeyError for a target that is not in `MULTIPROCESSORS`.
    """
    sm = MULTIPROCESSORS[target]
    warps = row["num_warps"]
    held = -(-max(row["registers"], 1) // sm.register_unit) * sm.register_unit
    fits = {
        "registers": 4 * (sm.registers // 4 // (held * sm.lanes)) // warps,
        "shared memory": sm.shared // max(row["shared"] + sm.block_overhead, 1),
        "warps": sm.warps // warps,
        "blocks": sm.blocks,
    }
    limit = min(fits, key=lambda name: fits[name])
    blocks = fits[limit]
    issue = special = tensor = None
    if row["loop_length"]:
        issue = row["loop_length"] * warps / sm.issue
        special = row["loop"].get("mufu", 0) * warps * sm.lanes / sm.special
        tensor = row["macs"] / sm.macs if row.get("macs") else None
    return Estimate(blocks, blocks * warps, limit, blocks * warps / sm.warps, issue, special, tensor)


def report_rows(table: Mapping[str, Mapping[str, Any]], target: str) -> list[dict[str, Any]]:
    """What `pykernels report --occupancy` shows: a row for each kernel of `table` (`case/kernel/target` -> row) made for a target.

    ValueError when the table has none for it, or its multiprocessor is not known.
    """
    made = {label: row for label, row in table.items() if label.endswith(f"/{target}")}
    if not made or target not in MULTIPROCESSORS:
        raise ValueError(f"no figures for {target}: there are {', '.join(sorted(MULTIPROCESSORS))}")
    found = []
    for label, row in sorted(made.items()):
        e = estimate(row, target)
        found.append(
            {
                "kernel": label,
                "registers": row["registers"],
                "shared": row["shared"],
                "blocks per SM": e.blocks,
                "warps per SM": e.warps,
                "occupancy %": 100 * e.occupancy,
                "limited by": e.limit,
                "loop bound by": e.bound or "no loop",
            }
        )
    return found
