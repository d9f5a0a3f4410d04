"""Prefill attention in the emulation, for the tests of its two kernels: problems, calls, and that schedules change no bit."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from pykernels.testing import Case, Snapshot, judge
from pykernels.testing.attention_cases import Attention, paged_prefill, prefill
from pykernels.testing.compare import same_bits
from pykernels.testing.emulated_cuda import EmulatedCuda

RAGGED, PAGED = "prefill_attention", "paged_prefill_attention"
SCHEDULES = ({}, {"schedule": "random", "seed": 2}, {"schedule": "random", "seed": 3, "async_copies": "lazy"})
Problems = dict[str, tuple[str, Attention]]


def table(quick: Problems, slow: Problems) -> list[Any]:
    marked = [pytest.param(*p, id=name, marks=pytest.mark.slow) for name, p in slow.items()]
    return [pytest.param(*p, id=name) for name, p in quick.items()] + marked


def problem(op: str, spec: Attention) -> dict[str, Any]:
    return Case(op, "long", partial(prefill if op == RAGGED else paged_prefill, spec), False).args()


def lengths(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def run(op: str, args: dict[str, Any], capability: int, **changes: Any) -> dict[str, Any]:
    """The call with some arguments replaced, into fresh outputs."""
    args = args | changes
    rows, heads = args["q"].shape[:2]
    args["out"] = torch.full((rows, heads, args["out"].shape[2]), torch.nan, dtype=args["out"].dtype)
    args["lse"] = torch.full((heads, rows), torch.nan)
    EmulatedCuda(races=False, capability=capability).run(op, args)
    return args


def assert_agrees_under_every_schedule(op: str, spec: Attention, capability: int) -> None:
    """Within the budget, without bank conflicts, with the same bits, by wgmma on sm_90 alone."""
    first: dict[str, Any] | None = None
    for settings in SCHEDULES:
        args = problem(op, spec)
        backend = EmulatedCuda(capability=capability, profile=not settings, **settings)
        before = Snapshot(args)
        backend.run(op, args)
        assert (backend.report.counters["wgmma"] > 0) == (capability == 90)
        if first is None:
            first = args
            assert not [v.reason for v in judge(op, before, args) if not v.ok]
            assert backend.report.counters["matrix_bank_conflicts"] == 0
            assert backend.report.counters["shared_bank_conflicts"] == 0
        for name in ("out", "lse"):
            assert same_bits(args[name], first[name]).all(), (settings, name)
