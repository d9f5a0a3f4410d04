"""Sampling, draft verification and the random stream."""

from __future__ import annotations

from pykernels.bench.problems import problem
from pykernels.bench.suite.grids import Bench, grid, table
from pykernels.testing.factories import Case


@grid("sample")
def test_sample(bench: Bench, backend: str, model: str, dtype: str, filters: str, batch: int) -> None:
    bench(problem("sample", model=model, dtype=dtype, filters=filters, batch=batch), backend)


@grid("verify_draft")
def test_verify_draft(bench: Bench, backend: str, model: str, dtype: str, drafted: int, batch: int) -> None:
    bench(problem("verify_draft", model=model, dtype=dtype, drafted=drafted, batch=batch), backend)


@grid("philox_uniform")
def test_philox_uniform(bench: Bench, backend: str, count: int, batch: int) -> None:
    bench(problem("philox_uniform", count=count, batch=batch), backend)


@table("sampling")
def test_sampling_tables(bench: Bench, backend: str, case: Case) -> None:
    bench(case, backend)
