"""Matrix instructions of the emulation against layouts written straight from the PTX manual's tables.

Every table here is a function of (lane, i): row and column of the i-th element of a fragment, elements counted from the
low bits of the first register. The emulation's own index arithmetic is not used.
"""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from emulation_selftest import library, pointer

from pykernels.testing import emulation
from pykernels.testing.emulation_build import available

pytestmark = pytest.mark.skipif(available() is not None, reason=str(available()))


def group_id(lane: int) -> int:
    return lane >> 2


def thread_in_group(lane: int) -> int:
    return lane % 4


def a_16bit_k16(lane: int, i: int) -> tuple[int, int]:
    row = group_id(lane) if 0 <= i < 2 or 4 <= i < 6 else group_id(lane) + 8
    return row, thread_in_group(lane) * 2 + (i & 1) + (0 if i < 4 else 8)


def b_16bit_k16(lane: int, i: int) -> tuple[int, int]:
    return thread_in_group(lane) * 2 + (i & 1) + (0 if i < 2 else 8), group_id(lane)


def a_16bit_k8(lane: int, i: int) -> tuple[int, int]:
    return (group_id(lane) if i < 2 else group_id(lane) + 8), thread_in_group(lane) * 2 + (i & 1)


def b_16bit_k8(lane: int, i: int) -> tuple[int, int]:
    return thread_in_group(lane) * 2 + i, group_id(lane)


def a_8bit_k32(lane: int, i: int) -> tuple[int, int]:
    row = group_id(lane) if 0 <= i < 4 or 8 <= i < 12 else group_id(lane) + 8
    return row, thread_in_group(lane) * 4 + (i & 3) + (0 if i < 8 else 16)


def b_8bit_k32(lane: int, i: int) -> tuple[int, int]:
    return thread_in_group(lane) * 4 + (i & 3) + (0 if i < 4 else 16), group_id(lane)


def c_16x8(lane: int, i: int) -> tuple[int, int]:
    return (group_id(lane) if i < 2 else group_id(lane) + 8), thread_in_group(lane) * 2 + (i & 1)


def wgmma_d(thread: int, i: int) -> tuple[int, int]:
    row = thread // 32 * 16 + group_id(thread % 32) + (8 if i % 4 >= 2 else 0)
    return row, i // 4 * 8 + thread_in_group(thread) * 2 + i % 2


def wgmma_a(thread: int, i: int) -> tuple[int, int]:
    row, column = a_16bit_k16(thread % 32, i)
    return thread // 32 * 16 + row, column


def fragments(matrix: torch.Tensor, table, threads: int, count: int) -> torch.Tensor:
    """[threads, count] elements of `matrix` as `table` distributes them."""
    rows = [[table(t, i)[0] for i in range(count)] for t in range(threads)]
    columns = [[table(t, i)[1] for i in range(count)] for t in range(threads)]
    return matrix[rows, columns].contiguous()


def gathered(values: torch.Tensor, table, shape: tuple[int, int]) -> torch.Tensor:
    """The matrix that [threads, count] fragments hold; the table must name every element exactly once."""
    out = torch.full(shape, torch.nan, dtype=torch.float64)
    for t, row_values in enumerate(values.tolist()):
        for i, value in enumerate(row_values):
            row, column = table(t, i)
            assert torch.isnan(out[row, column])
            out[row, column] = value
    assert not out.isnan().any()
    return out


@pytest.fixture
def lib() -> ctypes.CDLL:
    handle = library("race")
    handle.emu_free_all()
    return handle


def placed(lib: ctypes.CDLL, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return [emulation.place(lib, t, f"argument {i}") for i, t in enumerate(tensors)]


def integers(*shape: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(-8, 9, shape)).double()


MMA = [
    (0, torch.float16, 16, a_16bit_k16, 8, b_16bit_k16, 4),
    (1, torch.bfloat16, 16, a_16bit_k16, 8, b_16bit_k16, 4),
    (2, torch.float16, 8, a_16bit_k8, 4, b_16bit_k8, 2),
    (3, torch.bfloat16, 8, a_16bit_k8, 4, b_16bit_k8, 2),
    (4, torch.float8_e4m3fn, 32, a_8bit_k32, 16, b_8bit_k32, 8),
    (5, torch.int8, 32, a_8bit_k32, 16, b_8bit_k32, 8),
]


@pytest.mark.parametrize("shape", MMA, ids=[f"{m[1]}-k{m[2]}".removeprefix("torch.") for m in MMA])
def test_mma_fragments_follow_the_manual(lib, shape):
    kind, dtype, k, a_table, a_count, b_table, b_count = shape
    a, b, c = integers(16, k, seed=kind), integers(k, 8, seed=kind + 10), integers(16, 8, seed=kind + 20)
    fa, fb = fragments(a.to(dtype), a_table, 32, a_count), fragments(b.to(dtype), b_table, 32, b_count)
    fd = fragments(c.to(torch.int32 if dtype == torch.int8 else torch.float32), c_16x8, 32, 4)
    ta, tb, td = placed(lib, fa.view(torch.uint8), fb.view(torch.uint8), fd)
    with emulation.session(lib) as report:
        assert lib.selftest_mma(kind, pointer(ta), pointer(tb), pointer(td)) == 0
    assert not report.faults, report
    assert report.counters["mma"] == 1
    assert torch.equal(gathered(td, c_16x8, (16, 8)), a @ b + c)


def pair_of(thread: int, element: int, transposed: bool) -> tuple[int, int]:
    """Row and column of an 8x8 matrix whose element is the low or high half of the thread's register."""
    row, column = group_id(thread), 2 * thread_in_group(thread) + element
    return (column, row) if transposed else (row, column)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix_gives_each_thread_its_pair(lib, count, transposed):
    words = 1024
    generator = np.random.default_rng(count)
    address = generator.permutation(words * 4 // 16)[:32].astype(np.int32) * 16
    address[count * 8 :] = 1 << 20  # the addresses of the other lanes are ignored
    image = generator.integers(0, 1 << 16, words * 2).astype(np.uint16)
    ti, ta, tr = placed(
        lib, torch.from_numpy(image), torch.from_numpy(address), torch.zeros(32, count, dtype=torch.int32)
    )
    with emulation.session(lib) as report:
        assert lib.selftest_ldmatrix(count, int(transposed), pointer(ti), words, pointer(ta), pointer(tr)) == 0
    assert not report.faults, report
    halves = tr.numpy().view(np.uint16).reshape(32, count, 2)
    for thread, m, e in np.ndindex(32, count, 2):
        row, column = pair_of(thread, e, transposed)
        assert halves[thread, m, e] == image[address[m * 8 + row] // 2 + column]


@pytest.mark.parametrize("transposed", [False, True])
def test_stmatrix_stores_each_threads_pair(lib, transposed):
    words = 1024
    address = np.random.default_rng(5).permutation(words * 4 // 16)[:32].astype(np.int32) * 16
    registers = np.random.default_rng(6).integers(0, 1 << 16, (32, 4, 2)).astype(np.uint16)
    tr, ta, ti = placed(
        lib, torch.from_numpy(registers), torch.from_numpy(address), torch.zeros(words, dtype=torch.int32)
    )
    with emulation.session(lib) as report:
        assert lib.selftest_stmatrix(int(transposed), pointer(tr), pointer(ta), pointer(ti), words) == 0
    assert not report.faults, report
    expected = np.zeros(words * 2, np.uint16)
    for thread, m, e in np.ndindex(32, 4, 2):
        row, column = pair_of(thread, e, transposed)
        expected[address[m * 8 + row] // 2 + column] = registers[thread, m, e]
    assert np.array_equal(ti.numpy().view(np.uint16), expected)


# Shared-memory operands. `span`: bytes of a row of the swizzle pattern, 16 for none. In row r of the pattern the 16-byte
# chunk c lies at c XOR (the number of the 128-byte line that holds r, modulo the chunks of a row).
LAYOUT_BITS = {128: 1, 64: 2, 32: 3, 16: 0}


def swizzled_chunk(row: int, chunk: int, span: int) -> int:
    return chunk ^ (row * span // 128 % (span // 16))


def descriptor(start: int, leading: int, stride: int, span: int) -> int:
    return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | LAYOUT_BITS[span] << 62


def k_major(matrix: torch.Tensor, span: int, first_chunk: int, image: np.ndarray, base: int) -> int:
    """Writes [rows, 16] at byte `base`, its k at `first_chunk` of each row; gives the descriptor."""
    bits = matrix.view(torch.uint16).numpy()
    for r, chunk in np.ndindex(matrix.shape[0], 2):
        if span == 16:  # 8 x 16 byte core matrices: k chunks `leading` apart, groups of 8 rows `stride` apart
            at = base + r // 8 * 256 + chunk * 128 + r % 8 * 16
        else:
            at = base + r * span + swizzled_chunk(r, first_chunk + chunk, span) * 16
        image[at // 2 : at // 2 + 8] = bits[r, chunk * 8 : chunk * 8 + 8]
    leading, stride = (128, 256) if span == 16 else (16, 8 * span)
    return descriptor(base + first_chunk * 16, leading, stride, span)


def n_major(matrix: torch.Tensor, span: int, image: np.ndarray, base: int) -> int:
    """The same for [16, columns] with the columns contiguous: tiles `span` bytes wide, `leading` apart."""
    columns = matrix.shape[1]
    bits = matrix.view(torch.uint16).numpy()
    leading, stride = (16 * span, 8 * span) if span != 16 else (128 * (columns // 8), 128)
    for k, chunk in np.ndindex(16, columns // 8):
        if span == 16:  # core matrices of 8 k x 8 columns: groups of 8 k `leading` apart, of 8 columns `stride` apart
            at = base + k // 8 * leading + chunk * stride + k % 8 * 16
        else:
            tile, within = divmod(chunk, span // 16)
            at = base + tile * leading + k // 8 * stride + k % 8 * span + swizzled_chunk(k % 8, within, span) * 16
        image[at // 2 : at // 2 + 8] = bits[k, chunk * 8 : chunk * 8 + 8]
    return descriptor(base, leading, stride, span)


WGMMA = [
    (64, 128, False), (128, 128, True), (96, 64, False), (64, 64, True), (256, 128, True),
    (64, 32, False), (64, 32, True), (64, 16, False), (64, 16, True),
]  # fmt: skip


@pytest.mark.parametrize("a_registers", [False, True], ids=["ss", "rs"])
@pytest.mark.parametrize(("n", "span", "transposed"), WGMMA)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["f16", "bf16"])
def test_wgmma_operands_and_accumulators_follow_the_manual(lib, dtype, n, span, transposed, a_registers):
    a, b, d = integers(64, 16, seed=n), integers(16, n, seed=n + 1), integers(64, n, seed=n + 2)
    a_bytes, b_bytes = 64 * 128, max(n, 64) * 128
    image = np.full((a_bytes + b_bytes) // 2, 0x7FFF, np.uint16)  # NaN in both types wherever no operand lies
    a_at = k_major(a.to(dtype), 128, 4, image, 0)
    if transposed:
        b_at = n_major(b.to(dtype), span, image, a_bytes)
    else:
        b_at = k_major(b.T.contiguous().to(dtype), span, 0, image, a_bytes)
    fa, fd = fragments(a.to(dtype), wgmma_a, 128, 8), fragments(d.float(), wgmma_d, 128, n // 2)
    ti, ta, td = placed(lib, torch.from_numpy(image), fa, fd)
    flags = (int(dtype == torch.bfloat16), n, int(transposed), int(a_registers))
    at = (ctypes.c_uint64(a_at), ctypes.c_uint64(b_at))
    with emulation.session(lib) as report:
        assert lib.selftest_wgmma(*flags, pointer(ti), image.size // 2, *at, pointer(ta), pointer(td)) == 0
    assert not report.faults, report
    assert torch.equal(gathered(td, wgmma_d, (64, n)), a @ b + d)


@pytest.mark.parametrize("corner", [(0, 0, 0), (64, 3, 1), (-8, 2, 0), (88, -1, 1), (40, 9, 2), (200, 0, 0)])
@pytest.mark.parametrize("span", [128, 64, 32, 16])
def test_tma_tiles_are_swizzled_zero_filled_and_stored_back(lib, span, corner):
    size, box = (96, 10, 3), (span // 2, 8, 2)
    tensor = torch.from_numpy(np.random.default_rng(1).integers(1, 1 << 15, size[::-1]).astype(np.int16))
    words = box[0] * box[1] * box[2] // 2
    source, target, image = placed(lib, tensor, torch.zeros_like(tensor), torch.zeros(words, dtype=torch.int32))
    shape = (torch.tensor(size), torch.tensor(box, dtype=torch.int32))
    mode, at = {128: 3, 64: 2, 32: 1, 16: 0}[span], torch.tensor(corner, dtype=torch.int32)
    with emulation.session(lib) as report:
        arguments = (pointer(source), pointer(target), *map(pointer, shape), mode, pointer(at), pointer(image))
        assert lib.selftest_copy_tile(*arguments) == 0
    assert not report.faults, report
    got = image.numpy().view(np.int16).reshape(box[1] * box[2], span // 16, 8)
    back = torch.zeros_like(tensor)
    for z, y, x in np.ndindex(*box[::-1]):
        row = z * box[1] + y
        value = got[row, swizzled_chunk(row, x // 8, span), x % 8]
        gx, gy, gz = corner[0] + x, corner[1] + y, corner[2] + z
        if 0 <= gx < size[0] and 0 <= gy < size[1] and 0 <= gz < size[2]:
            assert value == tensor[gz, gy, gx]
            back[gz, gy, gx] = tensor[gz, gy, gx]
        else:
            assert value == 0
    assert torch.equal(target, back)


def test_tensor_maps_that_the_driver_would_refuse_are_refused(lib):
    tensor, image = placed(lib, torch.zeros(3, 10, 90, dtype=torch.int16), torch.zeros(64, dtype=torch.int32))
    sizes, box = torch.tensor([90, 10, 3]), torch.tensor([8, 8, 1], dtype=torch.int32)  # rows of 180 bytes
    at = torch.zeros(3, dtype=torch.int32)
    arguments = (pointer(tensor), pointer(tensor), pointer(sizes), pointer(box), 0, pointer(at), pointer(image))
    assert lib.selftest_copy_tile(*arguments) == -1
