"""Linear layers and embedding rows over dense and packed weights."""

from __future__ import annotations

from pykernels.bench.problems import problem
from pykernels.bench.suite.grids import Bench, grid, table
from pykernels.testing.factories import Case


@grid("linear")
def test_linear(bench: Bench, backend: str, model: str, matrix: str, format: str, dtype: str, tokens: int) -> None:
    bench(problem("linear", model=model, matrix=matrix, format=format, dtype=dtype, tokens=tokens), backend)


@grid("embedding")
def test_embedding(bench: Bench, backend: str, model: str, format: str, dtype: str, tokens: int) -> None:
    bench(problem("embedding", model=model, format=format, dtype=dtype, tokens=tokens), backend)


@table("linear")
def test_linear_tables(bench: Bench, backend: str, case: Case) -> None:
    bench(case, backend)
