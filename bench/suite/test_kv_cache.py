"""Writing, reading and copying the KV cache."""

from __future__ import annotations

from pykernels.bench.problems import problem
from pykernels.bench.suite.grids import Bench, grid, table
from pykernels.testing.factories import Case


@grid("append_kv")
def test_append_kv(bench: Bench, backend: str, model: str, dtype: str, kv: str, tokens: int) -> None:
    bench(problem("append_kv", model=model, dtype=dtype, kv=kv, tokens=tokens), backend)


@grid("rope_append_kv")
def test_rope_append_kv(bench: Bench, backend: str, model: str, dtype: str, kv: str, tokens: int) -> None:
    bench(problem("rope_append_kv", model=model, dtype=dtype, kv=kv, tokens=tokens), backend)


@grid("gather_kv")
def test_gather_kv(bench: Bench, backend: str, model: str, dtype: str, kv: str, context: int, batch: int) -> None:
    bench(problem("gather_kv", model=model, dtype=dtype, kv=kv, context=context, batch=batch), backend)


@grid("copy_pages")
def test_copy_pages(bench: Bench, backend: str, model: str, dtype: str, kv: str, context: int) -> None:
    bench(problem("copy_pages", model=model, dtype=dtype, kv=kv, context=context), backend)


@grid("swap_pages")
def test_swap_pages(bench: Bench, backend: str, model: str, dtype: str, kv: str, context: int) -> None:
    bench(problem("swap_pages", model=model, dtype=dtype, kv=kv, context=context), backend)


@table("kv_cache")
def test_kv_cache_tables(bench: Bench, backend: str, case: Case) -> None:
    bench(case, backend)
