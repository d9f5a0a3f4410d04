"""The emulation itself: CUDA's own functions, counters, sessions, builds."""

from __future__ import annotations

import ctypes
import re
from fractions import Fraction

import numpy as np
import pytest
import torch
from emulation_selftest import FOLDER, MODULE, library, line_of, pointer

from pykernels.testing import cuda_headers, emulation
from pykernels.testing.emulation_build import ROOT, available

pytestmark = pytest.mark.skipif(available() is not None, reason=str(available()))

WORD = 0xFFFFFFFF


@pytest.fixture
def lib() -> ctypes.CDLL:
    handle = library("race")
    handle.emu_free_all()
    return handle


def evaluate(lib: ctypes.CDLL, function: int, *operands: np.ndarray) -> np.ndarray:
    """The device function over arrays of 32-bit words, as words."""
    count = -(-operands[0].size // 32) * 32
    words = [np.zeros(count, np.uint32) for _ in range(3)]
    for target, operand in zip(words, operands, strict=False):
        target[: operand.size] = operand.view(np.uint32)
    placed = [emulation.place(lib, torch.from_numpy(w.view(np.int32)), "operand") for w in [*words, words[0]]]
    with emulation.session(lib) as report:
        assert lib.selftest_evaluate(function, count, *map(pointer, placed)) == 0
    assert not report.faults, report
    return placed[3].numpy().view(np.uint32)[: operands[0].size].copy()


def sign_extended(byte: int) -> int:
    return byte - 256 if byte & 0x80 else byte


def byte_perm(x: int, y: int, s: int) -> int:
    source = [x >> 8 * i & 0xFF for i in range(4)] + [y >> 8 * i & 0xFF for i in range(4)]
    out = 0
    for i in range(4):
        selector = s >> 4 * i & 0xF
        byte = source[selector & 7]
        out |= (0xFF * (byte >> 7) if selector & 8 else byte) << 8 * i
    return out


def dp4a(x: int, y: int, z: int) -> int:
    return z + sum(sign_extended(x >> 8 * i & 0xFF) * sign_extended(y >> 8 * i & 0xFF) for i in range(4))


INTEGER_FUNCTIONS = {
    0: byte_perm,
    1: lambda x, y, z: (y << 32 | x) << (z & 31) >> 32,
    2: lambda x, y, z: (y << 32 | x) >> (z & 31),
    3: lambda x, y, z: int(f"{x:032b}"[::-1], 2),
    4: lambda x, y, z: 32 - x.bit_length(),
    5: lambda x, y, z: x.bit_count(),
    6: lambda x, y, z: (x & -x).bit_length(),
    7: lambda x, y, z: x * y >> 32,
    8: dp4a,
}


@pytest.mark.parametrize("function", INTEGER_FUNCTIONS)
def test_integer_functions_equal_their_definition(lib, function):
    generator = np.random.default_rng(function)
    x, y, z = (generator.integers(0, 1 << 32, 512, dtype=np.uint32) for _ in range(3))
    x[:4] = [0, WORD, 1, 1 << 31]
    x[4:64] >>= generator.integers(0, 32, 60).astype(np.uint32)
    got = evaluate(lib, function, x, y, z)
    expected = [INTEGER_FUNCTIONS[function](*map(int, xyz)) & WORD for xyz in zip(x, y, z, strict=True)]
    assert got.tolist() == expected


@pytest.mark.parametrize(("function", "rounding"), [(9, np.rint), (10, np.trunc), (11, np.floor), (12, np.ceil)])
def test_float_to_integer_saturates_and_maps_nan_to_zero(lib, function, rounding):
    edge = [0.5, 1.5, 2.5, -0.5, -1.5, np.nan, np.inf, -np.inf, 3e9, -3e9, 2147483520.0, -2147483648.0]
    x = np.array([*edge, *(np.random.default_rng(1).normal(size=200) * 1e5)], np.float32)
    with np.errstate(invalid="ignore"):
        expected = np.nan_to_num(np.clip(rounding(x.astype(np.float64)), -(2**31), 2**31 - 1)).astype(np.int32)
    assert evaluate(lib, function, x).view(np.int32).tolist() == expected.tolist()


def nearest(exact: Fraction, dtype: torch.dtype) -> int:
    """Bits of the 16-bit float nearest to `exact`, ties to even."""
    guess = torch.tensor(float(exact), dtype=torch.float64).to(dtype).view(torch.int16).item() & 0xFFFF
    choices = [b for b in (guess - 1, guess, guess + 1) if 0 <= b <= 0xFFFF]
    value = {b: torch.tensor(b - (b >> 15 << 16), dtype=torch.int16).view(dtype).double().item() for b in choices}
    finite = [b for b in choices if np.isfinite(value[b])]
    return min(finite, key=lambda b: (abs(Fraction(value[b]) - exact), b & 1))


@pytest.mark.parametrize(("function", "dtype"), [(14, torch.float16), (15, torch.bfloat16)], ids=["f16", "bf16"])
def test_fused_multiply_add_rounds_once(lib, function, dtype):
    g = torch.Generator().manual_seed(function)
    a, b = (torch.randn(400, generator=g).to(dtype) for _ in range(2))
    c = (torch.randn(400, generator=g) * 10.0 ** torch.randint(-6, 3, (400,), generator=g)).to(dtype)
    if dtype == torch.bfloat16:  # a product halfway between two floats, and an addend that only decides the tie
        a[0], b[0], c[0] = 1 + 2**-7, 1 + 2**-1, 2.0**-60
        a[1], b[1], c[1] = 1 + 2**-7, 1 + 2**-1, -(2.0**-60)
    words = [t.view(torch.int16).numpy().view(np.uint16).astype(np.uint32) for t in (a, b, c)]
    got = evaluate(lib, function, *words)
    exact = [
        Fraction(x) * Fraction(y) + Fraction(z)
        for x, y, z in zip(*(t.double().tolist() for t in (a, b, c)), strict=True)
    ]
    assert got.tolist() == [nearest(e, dtype) for e in exact]


def test_minimum_and_maximum_ignore_nan_and_saturate_maps_it_to_zero(lib):
    x = np.array([1.0, np.nan, -2.0, 0.25, np.inf], np.float32)
    y = np.array([0.5, 3.0, np.nan, 0.75, 1.0], np.float32)
    assert evaluate(lib, 17, x, y).view(np.float32).tolist() == [0.5, 3.0, -2.0, 0.25, 1.0]
    assert evaluate(lib, 18, x, y).view(np.float32).tolist() == [1.0, 3.0, -2.0, 0.75, np.inf]
    assert evaluate(lib, 16, x).view(np.float32).tolist() == [1.0, 0.0, 0.0, 0.25, 1.0]


def expected_collectives(x: np.ndarray) -> list[list[int]]:
    """Rows as `collectives` in intrinsics.cu writes them, for one warp's values."""
    lanes = range(32)
    ballot = sum(1 << i for i in lanes if x[i] > 0)
    same = [sum(1 << j for j in lanes if x[j] & 3 == x[i] & 3) for i in lanes]
    uniform = len(set((x / 1000).astype(int).tolist())) == 1
    return [
        [x[5] for _ in lanes],
        [x[i // 8 * 8 + 3] for i in lanes],
        [x[i - 3] if i >= 3 else x[i] for i in lanes],
        [x[i - 3] if i % 16 >= 3 else x[i] for i in lanes],
        [x[i + 5] if i + 5 < 32 else x[i] for i in lanes],
        [x[i + 5] if i % 8 + 5 < 8 else x[i] for i in lanes],
        [x[i ^ 9] for i in lanes],
        [ballot] * 32,
        [int(1000 in x)] * 32,
        [int((x < 1000).all())] * 32,
        same,
        [WORD if uniform else 0] * 32,
        [int(uniform)] * 32,
        [int(x.sum())] * 32,
        [int(x.min())] * 32,
        [int(x.max())] * 32,
        [int(np.bitwise_xor.reduce(x))] * 32,
    ]


@pytest.mark.parametrize("schedule", emulation.SCHEDULES)
def test_collectives_equal_their_definition(lib, schedule):
    x = np.random.default_rng(3).integers(-50, 50, 64).astype(np.int32)
    x[40] = 1000
    source = emulation.place(lib, torch.from_numpy(x), "in")
    out = emulation.place(lib, torch.zeros(22, 64, dtype=torch.int32), "out")
    with emulation.session(lib, schedule=schedule) as report:
        assert lib.selftest_collectives(pointer(source), pointer(out)) == 0
    assert not report.faults, report
    got = out.numpy().view(np.uint32)
    for warp in range(2):
        part = x[warp * 32 : warp * 32 + 32]
        for row, expected in enumerate(expected_collectives(part)):
            assert got[row, warp * 32 : warp * 32 + 32].tolist() == [int(e) & WORD for e in expected], row
        assert out[20, warp * 32 : warp * 32 + 32].tolist() == [1] + [0] * 31
        halves = [part[i ^ 1] if i < 16 else part[i ^ 2] for i in range(32)]
        assert out[21, warp * 32 : warp * 32 + 32].tolist() == halves
    positive = int((x > 0).sum())
    assert out[17].tolist() == [positive] * 64
    assert out[18].tolist() == [0] * 64
    assert out[19].tolist() == [1] * 64


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("schedule", emulation.SCHEDULES)
def test_blocks_in_any_order_and_on_any_worker_can_count_themselves(lib, schedule, workers):
    values = np.random.default_rng(4).integers(-1000, 1000, (40, 32)).astype(np.int32)
    source = emulation.place(lib, torch.from_numpy(values), "in")
    partial = emulation.place(lib, torch.zeros(40, dtype=torch.int32), "partial")
    state = emulation.place(lib, torch.tensor([0, 0, -(2**31)], dtype=torch.int32), "state")
    with emulation.session(lib, schedule=schedule, seed=5, workers=workers) as report:
        assert lib.selftest_last_block(40, pointer(source), pointer(partial), pointer(state)) == 0
    assert not report.faults, report
    assert report.counters["blocks"] == 40
    assert state.tolist() == [40, int(values.sum()), int(values.sum(1).max())]


@pytest.mark.parametrize(("stride", "ways", "sectors"), [(1, 1, 4), (2, 2, 8), (8, 8, 32), (32, 32, 32), (33, 1, 32)])
def test_the_profile_counts_bank_conflicts_and_sectors(lib, stride, ways, sectors):
    source = emulation.place(lib, torch.ones(32 * stride), "in")
    out = emulation.place(lib, torch.zeros(32), "out")
    with emulation.session(lib, profile=True) as report:
        assert lib.selftest_strided(pointer(source), pointer(out), stride) == 0
    assert not report.faults, report
    line = line_of("intrinsics.cu", "strided_shared")
    (shared,) = [s for s in report.sites if s.line == line and s.space == "shared"]
    assert (shared.requests, shared.cost, shared.ideal) == (1, ways, 1)
    (loads,) = [s for s in report.sites if s.space == "global" and not s.write]
    assert (loads.requests, loads.cost, loads.ideal) == (1, sectors, 4)
    assert report.counters["shared_bank_conflicts"] == ways - 1


@pytest.mark.parametrize(("row_bytes", "extra"), [(128, 7), (64, 3), (144, 0), (16, 0)])
def test_ldmatrix_rows_in_the_same_banks_are_counted(lib, row_bytes, extra):
    out = emulation.place(lib, torch.zeros(32), "out")
    with emulation.session(lib) as report:
        assert lib.selftest_matrix_rows(pointer(out), row_bytes) == 0
    assert not report.faults, report
    assert report.counters["matrix_bank_conflicts"] == 4 * extra


@pytest.mark.parametrize(("blocks", "threads", "shared"), [(0, 32, 0), (1, 0, 0), (1, 1056, 0), (1, 32, 240_000)])
def test_a_launch_that_no_device_accepts_is_refused(lib, blocks, threads, shared):
    with emulation.session(lib) as report:
        assert lib.selftest_launch(blocks, threads, shared) != 0
    assert [f.kind for f in report.faults] == ["invalid_launch"]


def test_a_report_names_the_buffer_the_place_and_the_threads(lib):
    source = emulation.place(lib, torch.ones(31), "weights")
    out = emulation.place(lib, torch.zeros(32), "out")
    with emulation.session(lib) as report:
        lib.selftest_strided(pointer(source), pointer(out), 1)
    (fault,) = report.faults
    assert "4 bytes past the end of `weights` (124 bytes)" in fault.message
    assert fault.file == f"{FOLDER}/intrinsics.cu"
    assert fault.threads == (31,)
    assert f"{fault.file}:{fault.line}: global_out_of_bounds" in str(report)


def test_an_extension_module_runs_in_the_same_sessions():
    module, handle = emulation.load_module(MODULE)
    handle.emu_free_all()
    source, out = torch.ones(32), torch.zeros(32)
    emulation.register(handle, source, "in", writable=False)
    emulation.register(handle, out, "out", writable=True)
    with emulation.session(handle) as report:
        assert module.strided(source.data_ptr(), out.data_ptr(), 1) == 0
    assert not report.faults, report
    assert report.counters["launches"] == 1
    assert out.tolist() == [2.0] * 32


def test_headers_are_found_in_wheels_when_there_is_no_toolkit(tmp_path, monkeypatch):
    wheel = tmp_path / "nvidia" / "cu13" / "include"
    for name in cuda_headers.NEEDED:
        (wheel / name).parent.mkdir(parents=True, exist_ok=True)
        (wheel / name).touch()
    monkeypatch.setattr(cuda_headers, "_candidates", lambda: cuda_headers._in_wheels(tmp_path))
    assert cuda_headers.include_dirs() == [wheel]
    monkeypatch.setattr(cuda_headers, "_candidates", list)
    with pytest.raises(FileNotFoundError, match="pip install nvidia-cuda-runtime"):
        cuda_headers.include_dirs()


def test_inline_assembly_stays_in_the_facade():
    facade = {f"csrc/cuda/device/{name}.cuh" for name in ("platform", "mma", "async_copy", "hopper", "wgmma")}
    sources = [p for p in (ROOT / "csrc/cuda").rglob("*") if p.suffix in {".cuh", ".cu", ".h"}]
    with_assembly = {str(p.relative_to(ROOT)) for p in sources if re.search(r"\basm\b", p.read_text())}
    assert with_assembly
    assert with_assembly <= facade
