"""The CUDA backend in the emulation: every op against the reference, no fault, and the same bits whatever the schedule."""

from __future__ import annotations

from typing import Any

import pytest

from pykernels.contract import OPS
from pykernels.testing import Case, cases, check_case
from pykernels.testing.compare import same_bits
from pykernels.testing.emulated_cuda import EmulatedCuda
from pykernels.testing.emulation_build import available

pytestmark = pytest.mark.skipif(available() is not None, reason=str(available()))

SCHEDULES = ({"schedule": "forward"}, {"schedule": "random", "seed": 2}, {"schedule": "random", "seed": 3})


def table() -> list[Any]:
    return [pytest.param(case, id=str(case)) for op in OPS for case in cases(op) if "vast" not in case.name]


@pytest.mark.parametrize("case", table())
def test_agrees_with_the_reference_under_every_schedule(case: Case) -> None:
    backends = [EmulatedCuda(**settings) for settings in SCHEDULES]
    if not hasattr(backends[0].native(), case.op):
        pytest.skip(f"{case.op} has no CUDA kernel")
    if reasons := backends[0].refuses(case.op, case.args()):
        pytest.skip("; ".join(reasons))
    check_case(case, backends[0].run)
    outputs = []
    for backend in backends:
        args = case.args()
        backend.run(case.op, args)
        outputs.append([args[t.name].clone() for t in OPS[case.op].tensors if t.mutated and args[t.name] is not None])
    for other in outputs[1:]:
        assert all(same_bits(a, b).all() for a, b in zip(outputs[0], other, strict=True))
