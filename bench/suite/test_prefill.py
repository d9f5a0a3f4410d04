"""Prefill attention, ragged and over a paged cache."""

from __future__ import annotations

from pykernels.bench.problems import problem
from pykernels.bench.suite.grids import Bench, grid, table
from pykernels.testing.factories import Case


@grid("prefill_attention")
def test_prefill_attention(bench: Bench, backend: str, model: str, dtype: str, context: int, batch: int) -> None:
    bench(problem("prefill_attention", model=model, dtype=dtype, context=context, batch=batch), backend)


@grid("paged_prefill_attention")
def test_paged_prefill_attention(
    bench: Bench, backend: str, model: str, dtype: str, kv: str, chunk: int, context: int
) -> None:
    bench(problem("paged_prefill_attention", model=model, dtype=dtype, kv=kv, chunk=chunk, context=context), backend)


@table("prefill")
def test_prefill_tables(bench: Bench, backend: str, case: Case) -> None:
    bench(case, backend)
