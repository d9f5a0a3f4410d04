"""The CUDA prefill kernels take 16-bit queries: every case whose numbers are float32 runs here with them rounded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pykernels.testing import Case, Snapshot, cases, judge
from pykernels.testing.emulated_cuda import EmulatedCuda
from pykernels.testing.emulation_build import available

pytestmark = pytest.mark.skipif(available() is not None, reason=str(available()))

OPS = ("prefill_attention", "paged_prefill_attention")
NUMBERS = ("q", "k", "v", "k_cache", "v_cache", "out")


def rounded(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    """The case's arguments with q, k, v and out in `dtype`, their strides kept."""
    args = case.args()
    for name in NUMBERS:
        value = args.get(name)
        if value is None or value.dtype != torch.float32:
            continue
        buffer = torch.full((value.untyped_storage().nbytes() // 4,), torch.nan, dtype=dtype)
        view = buffer.as_strided(value.shape, value.stride(), value.storage_offset())
        args[name] = view.copy_(value) if name != "out" else view
    return args


def table() -> list[Any]:
    """Each case in one of the two types, in turn."""
    names = [case for op in OPS for case in cases(op) if "vast" not in case.name]
    wide = [case for case in names if case.args()["q"].dtype == torch.float32]
    types = (torch.bfloat16, torch.float16)
    return [
        pytest.param(case, types[i % 2], id=f"{case}-{types[i % 2]}", marks=[] if case.smoke else [pytest.mark.slow])
        for i, case in enumerate(wide)
    ]


@pytest.mark.parametrize(("case", "dtype"), table())
def test_rounded_cases_agree_with_the_reference(case: Case, dtype: torch.dtype) -> None:
    backend = EmulatedCuda(schedule="random", seed=2)
    args = rounded(case, dtype)
    before = Snapshot(args)
    backend.run(case.op, args)
    wrong = [v.reason for v in judge(case.op, before, args) if not v.ok]
    assert not wrong
    assert backend.report.counters["matrix_bank_conflicts"] == 0


@pytest.mark.parametrize("op", OPS)
def test_float32_queries_are_refused_with_the_reason(op: str) -> None:
    case = next(c for c in cases(op) if c.args()["q"].dtype == torch.float32)
    assert "float16 and bfloat16" in EmulatedCuda().refuses(op, case.args())[0]
