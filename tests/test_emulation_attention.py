"""Whole attention kernels in the emulation: right numbers, no faults, the same bits whatever the schedule."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch
from emulation_selftest import library

from pykernels.testing import emulation
from pykernels.testing.emulation_build import available

pytestmark = pytest.mark.skipif(available() is not None, reason=str(available()))


class Problem(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("q", "k", "v", "out")],
        *[(name, ctypes.c_int) for name in ("batch", "heads", "kv_heads", "seqlen_q", "seqlen_k")],
        ("scale_log2", ctypes.c_float),
        ("causal", ctypes.c_int),
    ]


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """[batch, seqlen, heads, head_dim] in the inputs' type; rows that see nothing are zero."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[3])
    if causal:
        rows, columns = torch.arange(q.shape[1]).unsqueeze(1), torch.arange(k.shape[1])
        scores = scores.masked_fill(columns > rows + k.shape[1] - q.shape[1], -math.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1).nan_to_num(0.0), v)


def attend(lib, kernel: str, q, k, v, causal: bool, **settings):
    lib.emu_free_all()
    inputs = [emulation.place(lib, t, name) for t, name in ((q, "q"), (k, "k"), (v, "v"))]
    for t, name in zip(inputs, "qkv", strict=True):
        emulation.register(lib, t, name, writable=False)
    out = emulation.place(lib, torch.full_like(q, torch.nan), "out")
    sizes = (q.shape[0], q.shape[2], k.shape[2], q.shape[1], k.shape[1])
    pointers = [t.data_ptr() for t in (*inputs, out)]
    problem = Problem(*pointers, *sizes, 1 / math.sqrt(q.shape[3]) / math.log(2), int(causal))
    with emulation.session(lib, **settings) as report:
        status = getattr(lib, f"selftest_attention_{kernel}")(
            ctypes.byref(problem), int(q.dtype == torch.bfloat16), q.shape[3]
        )
    assert status == 0
    return out.clone(), report


def problem(dtype, head_dim, seqlen_q, seqlen_k, heads=2, kv_heads=1, batch=1):
    g = torch.Generator().manual_seed(seqlen_q * 1000 + seqlen_k)
    q = torch.randn(batch, seqlen_q, heads, head_dim, generator=g) * 2
    k, v = (torch.randn(batch, seqlen_k, kv_heads, head_dim, generator=g) for _ in range(2))
    return q.to(dtype), k.to(dtype), v.to(dtype)


CASES = [
    ("sm80", torch.bfloat16, 64, 77, 131, True),
    ("sm80", torch.float16, 128, 65, 63, False),
    ("sm80", torch.bfloat16, 128, 130, 70, True),
    ("sm80", torch.float16, 64, 1, 333, False),
    ("sm90", torch.bfloat16, 64, 200, 200, True),
    ("sm90", torch.float16, 128, 129, 239, False),
    ("sm90", torch.bfloat16, 128, 130, 70, True),
]


@pytest.mark.parametrize(("kernel", "dtype", "head_dim", "seqlen_q", "seqlen_k", "causal"), CASES)
def test_attention_agrees_and_is_clean(kernel, dtype, head_dim, seqlen_q, seqlen_k, causal):
    q, k, v = problem(dtype, head_dim, seqlen_q, seqlen_k)
    out, report = attend(library(), kernel, q, k, v, causal)
    assert not report.faults, report
    assert report.counters["matrix_bank_conflicts"] == 0
    exact = reference(q.double(), k.double(), v.double(), causal)
    same_type = reference(q, k, v, causal).double()
    budget = 2 * (same_type - exact).abs().max() + torch.finfo(dtype).eps * exact.abs().max()
    assert (out.double() - exact).abs().max() <= budget


@pytest.mark.parametrize("kernel", ["sm80", "sm90"])
def test_bits_do_not_depend_on_schedule_timing_workers_or_build(kernel):
    q, k, v = problem(torch.float16, 64, 150, 200)
    settings = [
        {"schedule": schedule, "seed": seed, "async_copies": mode, "workers": 1 + seed % 2}
        for schedule, seed in (("forward", 1), ("reverse", 1), ("random", 2), ("random", 3))
        for mode in emulation.ASYNC_MODES
    ]
    first, _ = attend(library(), kernel, q, k, v, True)
    for setting in settings:
        out, report = attend(library(), kernel, q, k, v, True, **setting)
        assert not report.faults, f"{setting}: {report}"
        assert torch.equal(out.view(torch.int16), first.view(torch.int16)), setting
    for lib in (library("plain"), library("race", portable=True)):
        out, report = attend(lib, kernel, q, k, v, True)
        assert not report.faults, report
        assert torch.equal(out.view(torch.int16), first.view(torch.int16))


def test_counters_count_the_algorithms_work():
    q, k, v = problem(torch.float16, 64, 64, 128, heads=1)
    _, report = attend(library(), "sm80", q, k, v, False)
    assert report.counters["mma"] == 2 * (64 * 128 * 64) // (16 * 8 * 16)  # Q K^T and P V
    assert report.counters["async_copy_bytes"] == (64 + 2 * 128) * 64 * 2
    _, report = attend(library(), "sm90", *problem(torch.float16, 64, 128, 128, heads=1), False)
    assert report.counters["wgmma"] == 2 * (128 * 128 * 64) // (64 * 64 * 16)
    assert report.counters["tma_bytes"] == (128 + 2 * 128) * 64 * 2


def test_the_profile_finds_what_a_swizzle_prevents():
    q, k, v = problem(torch.float16, 64, 64, 128, heads=1)
    _, report = attend(library(), "sm80", q, k, v, False, profile=True)
    copies = [s for s in report.sites if s.space == "shared" and s.bytes_per_thread == 16]
    assert copies
    assert all(s.cost == s.ideal for s in copies)
    loads = [s for s in report.sites if s.space == "global" and not s.write]
    assert loads
    assert all(s.cost == s.ideal for s in loads)
