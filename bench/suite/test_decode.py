"""Decode attention over a paged cache, and the merge of partial results."""

from __future__ import annotations

from pykernels.bench.problems import problem
from pykernels.bench.suite.grids import Bench, grid, table
from pykernels.testing.factories import Case


@grid("paged_decode_attention")
def test_paged_decode_attention(
    bench: Bench, backend: str, model: str, dtype: str, kv: str, context: int, batch: int
) -> None:
    bench(problem("paged_decode_attention", model=model, dtype=dtype, kv=kv, context=context, batch=batch), backend)


@grid("merge_attention_states")
def test_merge_attention_states(bench: Bench, backend: str, model: str, dtype: str, batch: int) -> None:
    bench(problem("merge_attention_states", model=model, dtype=dtype, batch=batch), backend)


@table("decode")
def test_decode_tables(bench: Bench, backend: str, case: Case) -> None:
    bench(case, backend)
