"""Tiles, warps and stages for each architecture: small pure functions, the reason beside each constant.

The figures named here are those of `ci/compile_matrix.json` (registers, spills and loop lengths read off machine code);
a table that `pykernels tune` measured on a GPU replaces a choice (`tuned.py`), not this file.
"""

from __future__ import annotations

from dataclasses import dataclass

from . import tuned
from .common import Target, padded


@dataclass(frozen=True)
class Tile:
    """Rows of packed queries x keys per step, and how many warps and pipeline stages serve it."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    tma: bool = False


@dataclass(frozen=True)
class AttentionShape:
    """What the choice of an attention tile depends on. `q_bytes` and `kv_bytes` are the sizes of one element.

    `masks`: how many of window, softcap and ALiBi there are; each holds more of a tile in registers.
    """

    head_dim: int
    head_dim_v: int
    group: int
    q_bytes: int = 2
    kv_bytes: int = 2
    paged: bool = False
    masks: int = 0

    @property
    def widest(self) -> int:
        return max(padded(self.head_dim), padded(self.head_dim_v))


def _holds_group(tile: Tile, group: int) -> Tile:
    # A tile holds whole groups of query heads, so it needs at least `group` rows.
    rows = max(tile.block_m, padded(group))
    warps = tile.num_warps if rows == tile.block_m or tile.num_warps == 1 else 8
    return Tile(rows, tile.block_n, warps, tile.num_stages, tile.tma)


def _measured(kind: str, target: Target, shape: AttentionShape, tma_ok: bool = False) -> Tile | None:
    found = tuned.lookup(kind, target.name, shape, tma_ok)
    return None if found is None else Tile(**found)


def prefill_tile(target: Target, shape: AttentionShape, tma_ok: bool = False) -> Tile:
    """The tile of (paged) prefill attention; `tma_ok`: strides and sizes allow descriptors."""
    tile = _measured("prefill", target, shape, tma_ok) or _prefill_tile(target, shape, tma_ok)
    return _holds_group(tile, shape.group)


def _prefill_tile(target: Target, shape: AttentionShape, tma_ok: bool) -> Tile:
    wide = shape.widest
    if target.backend == "interpreter":
        return Tile(32, 32, 1, 1, tma_ok)  # a step costs the same few milliseconds at any small size
    if shape.q_bytes == 4:
        # Exact float32 products run on the vector units and hold whole rows of q and k: few elements of a tile a thread.
        return Tile(64, 16, 8, 1) if wide <= 64 else Tile(32, 16, 8, 1)
    if target.backend == "hip":
        return Tile(128, 32, 4, 2) if wide <= 128 else Tile(64, 32, 4, 1)  # 235 VGPR; 64 KiB of LDS
    if target.arch >= 90 and target.arch < 120:
        if wide > 128:
            return Tile(64, 64, 8, 2)  # 128 rows, or 64 with 4 warps, spill
        if tma_ok and wide == 128 and not shape.masks:
            return Tile(128, 128, 8, 2, True)  # 498 instructions for 128 keys against 343 for 64; a window would spill
        return Tile(128, 64, 8, 3, tma_ok)
    # mma.sync keeps operands in registers: 128 x 64 with 8 warps is the largest that does not spill on sm_80.
    if wide > 128:
        if shape.masks > 2:
            return Tile(32, 64, 8, 2)  # 64 rows spill
        return Tile(64, 64, 8, 2) if target.shared_memory > 104 * 1024 else Tile(64, 32, 8, 2)  # 4 warps spill
    if shape.kv_bytes == 1:
        return Tile(64, 64, 8, 2)  # widened codes are operands too: 128 rows spill, and take as many instructions a row
    return Tile(128, 64, 8, 2)


def decode_tile(target: Target, shape: AttentionShape) -> Tile:
    """The tile of decode attention: the heads of a group are its rows."""
    return _holds_group(_measured("decode", target, shape) or _decode_tile(target, shape), shape.group)


def _decode_tile(target: Target, shape: AttentionShape) -> Tile:
    wide = shape.widest
    if target.backend == "interpreter":
        return Tile(16, 32, 1, 1)
    if shape.q_bytes == 4:
        return Tile(16, 32, 8, 1 if wide <= 64 else 2)  # see prefill: 4 warps spill, and the other number of stages
    if target.backend == "hip":
        return Tile(16, 64, 4, 1)
    if target.arch >= 90 and target.arch < 120 and shape.kv_bytes == 1:
        # There is no transposing 8-bit ldmatrix: 16 rows (mma.sync) fetch V by about 100 byte loads a step, 64 rows
        # (wgmma, converted before shared memory) take 447 instructions instead of 739. 256 columns spill with 4 warps.
        if wide > 128:
            return Tile(64, 64, 8, 2)
        if wide <= 64 and target.arch >= 100:
            # With scales per token 64 keys and 4 warps spill; 128 keys and 8 warps issue fewer instructions a key as well.
            return Tile(64, 128, 8, 2)
        return Tile(64, 64, 4, 3)
    # 64 columns: 128 keys are as many bytes, in 300 instructions instead of 2 x 222. With masks a third stage spills at 128.
    stages, block_n = (2, 128) if wide <= 64 else (3 if wide <= 128 and not shape.masks else 2, 64)
    while stages * block_n * 2 * wide * 2 > target.shared_memory:  # 99 KiB on sm_86, sm_89 and sm_120
        block_n //= 2
    return Tile(16, block_n, 4, stages)


SPLIT_TOKENS = 256  # the least a split reads: about 128 KiB of bfloat16 K and V, enough to hide its prologue
MAX_SPLITS = 64  # per sequence and kv head: with 8 kv heads one sequence fills a 132-SM device almost four times


def split_count(capacity: int, split_size: int) -> int:
    """Splits that a sequence of up to `capacity` tokens can have: the grid's third axis, known without the lengths."""
    if split_size > 0:
        return max(1, -(-capacity // split_size))
    return max(1, min(MAX_SPLITS, -(-capacity // SPLIT_TOKENS)))


MERGE_HEADS = 4  # heads and parts that a merge program holds at once: 4 x 4 x 128 floats are 16 registers a thread
MERGE_PARTS = 4

MAX_ROW = 65536  # elements of a normalised row that one block of 32 warps holds: 64 a thread
ROTATED_HEADS = 8  # heads that share one program's cos and sin


def row_tile(pad: int) -> tuple[int, int]:
    """(rows, warps) of a kernel that holds whole rows of `pad` elements: about 8 to 16 elements a thread."""
    rows = max(1, 1024 // pad)  # short rows (the norms of q and k) share a program
    return rows, max(1, min(32, rows * pad // 512))


GATHERED_TOKENS = 32  # rows of a gather's tile: 32 x 128 elements are 8 vector loads a thread


def scan_block(vocab: int) -> int:
    """Tokens per program of a pass over the vocabulary; a function of the vocabulary alone, so that bits do not change."""
    return max(128, min(4096, 1 << (max(vocab, 1) - 1).bit_length()))


def scan_warps(block: int) -> int:
    """16 tokens a thread: 4096 with 8 warps compiles to about 80 registers, 8192 to 210."""
    return max(1, min(8, block // 512))


GEMV_TOKENS = 8  # up to here reading the weight dominates; above, a vendor GEMM on a dequantised weight is faster
UNPACKED_COLUMNS = 1024


def gemv_tile(target: Target, x_bytes: int) -> Tile:
    """block_m rows of the weight x block_n columns a step. Few rows, so that narrow layers still fill the device."""
    if target.backend == "interpreter":
        return Tile(16, 64, 1, 1)
    if x_bytes == 4:
        return Tile(16, 64, 4, 2)  # exact float32 products keep both operands in registers
    return Tile(16, 256, 4, 4)  # 4 KiB of codes a stage, four in flight, several blocks on a multiprocessor
