"""Rotary embedding."""

from __future__ import annotations

from pykernels.bench.problems import problem
from pykernels.bench.suite.grids import Bench, grid, table
from pykernels.testing.factories import Case


@grid("rotary_embedding")
def test_rotary_embedding(bench: Bench, backend: str, model: str, dtype: str, tokens: int) -> None:
    bench(problem("rotary_embedding", model=model, dtype=dtype, tokens=tokens), backend)


@table("rope")
def test_rope_tables(bench: Bench, backend: str, case: Case) -> None:
    bench(case, backend)
