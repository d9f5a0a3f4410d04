"""What csrc/cuda/tiles.h chooses: tiles fit every architecture, and the choices depend on a request alone."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[1] / "csrc"
# Bytes of shared memory that a block may have, and that a multiprocessor has: the CUDA programming guide, compute capabilities.
LIMITS = {80: (163, 164), 86: (99, 100), 89: (99, 100), 90: (227, 228), 100: (227, 228), 120: (99, 100)}
RESERVED = 1 << 10  # of every block, for the system
REGISTERS, THREAD_REGISTERS, THREADS = 1 << 16, 256, 128  # at most 255 of a thread, allotted by eight

WRAPPERS = """
#include "cuda/tiles.h"
using namespace pk::cuda;
extern "C" {
int padded(int64_t dim) { return padded_head_dim(dim); }
int64_t prefill_bytes(int dim, int codes) { return prefill_shared_bytes(dim, codes); }
int rows(int dim) { return prefill_rows(dim); }
int box(int64_t page_size) { return prefill_sm90_box(page_size); }
int64_t split(int64_t requested, int64_t keys) { return split_keys(requested, keys); }
int64_t splits(int64_t requested, int64_t keys) { return most_splits(requested, keys); }
}
"""


@pytest.fixture(scope="module")
def tiles(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("tiles")
    (folder / "tiles.cpp").write_text(WRAPPERS)
    compiler = os.environ.get("CXX", "g++")
    command = [compiler, "-std=c++20", "-shared", "-fPIC", f"-I{CSRC}", str(folder / "tiles.cpp"), "-o", "tiles.so"]
    subprocess.run(command, cwd=folder, check=True)
    lib = ctypes.CDLL(str(folder / "tiles.so"))
    for name in ("prefill_bytes", "split", "splits"):
        getattr(lib, name).restype = ctypes.c_int64
    for name in ("padded", "box"):
        getattr(lib, name).argtypes = [ctypes.c_int64]
    lib.split.argtypes = lib.splits.argtypes = [ctypes.c_int64, ctypes.c_int64]
    return lib


def blocks(bytes_of_block: int, arch: int) -> int:
    """Blocks of prefill on a multiprocessor, as shared memory and registers allow."""
    by_memory = (LIMITS[arch][1] << 10) // (bytes_of_block + RESERVED)
    return min(by_memory, REGISTERS // (THREAD_REGISTERS * THREADS))


@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("arch", LIMITS)
def test_prefill_fits_and_two_blocks_share_a_multiprocessor_where_they_can(
    tiles: ctypes.CDLL, arch: int, dim: int, codes: bool
) -> None:
    size = tiles.prefill_bytes(dim, codes)
    assert size <= LIMITS[arch][0] << 10
    assert blocks(size, arch) == (1 if dim > 64 and LIMITS[arch][1] < 164 else 2)


def test_head_dims_are_padded_to_the_next_kernel(tiles: ctypes.CDLL) -> None:
    assert [tiles.padded(d) for d in (8, 64, 72, 128, 136, 192, 256)] == [64, 64, 128, 128, 256, 256, 256]
    assert [tiles.rows(d) for d in (64, 128, 256)] == [128, 128, 64]


def test_boxes_of_a_page_tile_it_and_the_key_tile(tiles: ctypes.CDLL) -> None:
    for page_size in range(1, 400):
        box = tiles.box(page_size)
        assert page_size % box == 0
        assert 128 % box == 0
        assert box == 128 or page_size % (2 * box)


def test_splits_cover_every_length_in_a_grid_that_depends_on_room_alone(tiles: ctypes.CDLL) -> None:
    for requested in (0, 1, 7, 256, 1000):
        for room in (1, 255, 256, 257, 16384, 16385, 100_000):
            most = tiles.splits(requested, room)
            assert 1 <= most <= max(64, -(-room // requested) if requested else 0)
            for keys in {1, room // 2, room - 1, room} - {0}:
                assert tiles.split(requested, keys) * most >= keys
