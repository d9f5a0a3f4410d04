"""The tiles that are worth trying for a shape: all combinations, less those that the hardware has no room for."""

from __future__ import annotations

from itertools import product

from .common import Target, padded
from .configs import AttentionShape, Tile

ROWS = {"prefill": (64, 128), "decode": (16, 32, 64)}
KEYS = (16, 32, 64, 128)
WARPS = (4, 8)
STAGES = (1, 2, 3, 4)
REGISTERS = 224  # of a thread's 255 that scores and outputs may take; addresses and operands need the rest


def search_space(kind: str, shape: AttentionShape, tma_ok: bool = False) -> list[Tile]:
    """Every combination for "prefill" or "decode"; rows hold at least a group of query heads."""
    rows = sorted({max(m, padded(shape.group)) for m in ROWS[kind]})
    descriptors = (False, True) if tma_ok else (False,)
    return [Tile(*sizes) for sizes in product(rows, KEYS, WARPS, STAGES, descriptors)]


def shared_bytes(shape: AttentionShape, tile: Tile) -> int:
    """Shared memory that a tile takes at least: the stages in flight. Queries may stay in registers, as on sm_80 (the compile
    matrix has 64 KiB for 128 x 64 tiles of width 128 in two stages), and what does not fit after all is dropped when it runs."""
    d, dv = padded(shape.head_dim), padded(shape.head_dim_v)
    return max(1, tile.num_stages - 1) * tile.block_n * (d + dv) * shape.kv_bytes


def registers(shape: AttentionShape, tile: Tile) -> int:
    """Registers of a thread that hold scores and outputs, in float32."""
    return tile.block_m * (tile.block_n + padded(shape.head_dim_v)) // (32 * tile.num_warps)


def why_not(target: Target, shape: AttentionShape, tile: Tile) -> str:
    """Why a tile cannot run well on a target; empty when it may."""
    if (needed := shared_bytes(shape, tile)) > target.shared_memory:
        return f"{needed} bytes of shared memory, {target.shared_memory} are there"
    if (needed := registers(shape, tile)) > REGISTERS:
        return f"{needed} registers a thread for scores and outputs, at most {REGISTERS}"
    if (blocks := tile.block_m * tile.block_n // (16 * 8)) < tile.num_warps:
        return f"{tile.num_warps} warps share {blocks} products of 16 x 8"
    return ""
