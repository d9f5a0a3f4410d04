"""RMSNorm with residual."""

from __future__ import annotations

from pykernels.bench.problems import problem
from pykernels.bench.suite.grids import Bench, grid, table
from pykernels.testing.factories import Case


@grid("rms_norm")
def test_rms_norm(bench: Bench, backend: str, model: str, dtype: str, tokens: int) -> None:
    bench(problem("rms_norm", model=model, dtype=dtype, tokens=tokens), backend)


@table("norm")
def test_norm_tables(bench: Bench, backend: str, case: Case) -> None:
    bench(case, backend)
