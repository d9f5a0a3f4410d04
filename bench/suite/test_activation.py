"""Gated activations."""

from __future__ import annotations

from pykernels.bench.problems import problem
from pykernels.bench.suite.grids import Bench, grid, table
from pykernels.testing.factories import Case


@grid("gated_activation")
def test_gated_activation(bench: Bench, backend: str, model: str, dtype: str, tokens: int) -> None:
    bench(problem("gated_activation", model=model, dtype=dtype, tokens=tokens), backend)


@table("activation")
def test_activation_tables(bench: Bench, backend: str, case: Case) -> None:
    bench(case, backend)
