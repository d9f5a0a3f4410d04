"""Prefill attention on the CPU backend: the reference's cases, bits that nothing may change, and contents that are refused."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attention_problems import BF16, F32, FP8, INT8, LEVELS, OPTIONS, Requests, bits, cumulative, same

import pykernels as pk
from pykernels import native
from pykernels.testing import cases, check_case

Result = tuple[torch.Tensor, ...]


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PYKERNELS_CPU_ISA", request.param)
    return request.param


@pytest.fixture
def threads(level: str) -> Iterator[Any]:
    """Sets the size of the level's team; puts it back."""
    module = native.load(level)
    before = module.num_threads()
    yield module.set_num_threads
    module.set_num_threads(before)


@pytest.mark.parametrize("op", ["prefill_attention", "paged_prefill_attention"])
def test_agrees_with_the_reference(op: str, level: str) -> None:
    for case in cases(op):
        check_case(case, lambda op, args: native.BACKEND.run(op, args))


def ragged(r: Requests, which: tuple[int, ...], **options: Any) -> Result:
    q, k, v = (torch.cat([x[r.starts[i] : r.starts[i + 1]] for i in which]) for x in (r.q, r.k, r.v))
    lengths = tuple(r.lengths[i] for i in which)
    cu, longest = cumulative(lengths), max(lengths)
    bounds = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": longest, "max_seqlen_k": longest}
    return pk.prefill_attention(q, k, v, **bounds, return_lse=True, backend="cpu", **options)


def paged(r: Requests, which: tuple[int, ...], page_size: int = 16, **options: Any) -> Result:
    lengths = tuple(r.lengths[i] for i in which)
    return chunk(r, which, lengths, lengths, page_size, **options)


def chunk(
    r: Requests,
    which: tuple[int, ...],
    new: tuple[int, ...],
    upto: tuple[int, ...],
    page_size: int = 16,
    **options: Any,
) -> Result:
    """Attention of the last `new` of the first `upto` tokens of each request."""
    rows = [r.q[r.starts[i] + end - n : r.starts[i] + end] for i, n, end in zip(which, new, upto, strict=True)]
    return pk.paged_prefill_attention(
        torch.cat(rows),
        **r.pool(which, upto, page_size),
        cu_seqlens_q=cumulative(new),
        max_seqlen_q=max(new),
        max_seqlen_k=max(upto),
        return_lse=True,
        backend="cpu",
        **options,
    )


def in_chunks(r: Requests, sizes: Iterator[int], **options: Any) -> Result:
    """Request 0 in pieces of the given sizes, as one result."""
    done, outs, lses = 0, [], []
    while done < r.lengths[0]:
        n = min(next(sizes), r.lengths[0] - done)
        out, lse = chunk(r, (0,), (n,), (done + n,), **options)
        outs, lses, done = [*outs, out], [*lses, lse], done + n
    return torch.cat(outs), torch.cat(lses, dim=1)


KINDS = {"float32": (F32, None), "bfloat16": (BF16, None), "int8": (F32, INT8), "fp8": (BF16, FP8)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [n for n in OPTIONS if OPTIONS[n].get("causal", True)])
@pytest.mark.parametrize("sizes", [(64,), (1, 100, 7)], ids=str)
def test_a_prompt_in_chunks_has_the_bits_of_the_whole(
    kind: str, options: str, sizes: tuple[int, ...], level: str
) -> None:
    dtype, cache = KINDS[kind]
    r = Requests((203,), heads=3, kv_heads=1, dtype=dtype, cache=cache)
    chosen = r.options(options)
    assert same(in_chunks(r, itertools.cycle(sizes), **chosen), paged(r, (0,), **chosen))


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("options", OPTIONS)
def test_ragged_and_paged_keys_give_the_same_bits(dtype: torch.dtype, options: str, level: str) -> None:
    r = Requests((130, 1, 65), dtype=dtype)
    chosen = r.options(options)
    expected = ragged(r, (0, 1, 2), **chosen)
    for page_size in (1, 3, 64):
        assert same(paged(r, (0, 1, 2), page_size, **chosen), expected), page_size


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", OPTIONS)
def test_a_request_has_the_same_bits_alone_and_in_any_batch(kind: str, options: str, level: str) -> None:
    dtype, cache = KINDS[kind]
    r = Requests((70, 129, 5), dtype=dtype, cache=cache)
    chosen = r.options(options)
    alone = [paged(r, (i,), **chosen) for i in range(3)]
    for order in ((0, 1, 2), (2, 1), (1, 0, 0)):
        out, lse = paged(r, order, **chosen)
        lengths = [r.lengths[i] for i in order]
        for i, part, part_lse in zip(order, out.split(lengths), lse.split(lengths, dim=1), strict=True):
            assert same((part, part_lse), alone[i]), (order, i)


@pytest.mark.parametrize("options", OPTIONS)
def test_the_number_of_threads_changes_no_bit(options: str, threads: Any) -> None:
    r = Requests((300, 40), heads=14, kv_heads=2)
    results = []
    for n in (1, 2, 3, 5, 2):
        threads(n)
        results.append(ragged(r, (0, 1), **r.options(options)))
    assert all(same(x, results[0]) for x in results)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_value_that_is_not_finite_reaches_the_rows_that_see_it_alone(
    bad: float, dtype: torch.dtype, level: str
) -> None:
    r = Requests((150,), heads=3, kv_heads=1, dtype=dtype)
    window = (30, 0)
    clean = ragged(r, (0,), window_size=window)[0]
    r.v[77, 0, 5] = bad
    out = ragged(r, (0,), window_size=window)[0]
    sees = torch.zeros(150, dtype=torch.bool)
    sees[77 : 77 + window[0] + 1] = True
    assert bool((~torch.isfinite(out[sees][..., 5])).all())
    out[sees, :, 5] = clean[sees, :, 5]
    assert torch.equal(bits(out), bits(clean))


def test_pages_outside_the_window_are_not_read(level: str) -> None:
    r = Requests((200,))
    pool = r.pool((0,))
    rows = {"cu_seqlens_q": cumulative((10,)), "max_seqlen_q": 10, "max_seqlen_k": 200, "window_size": (40, 0)}
    expected = pk.paged_prefill_attention(r.q[190:], **pool, **rows)
    pool["block_table"][0, : (190 - 40) // 16] = -1
    assert torch.equal(pk.paged_prefill_attention(r.q[190:], **pool, **rows), expected)


REFUSED = {
    "start": ({"cu_seqlens_q": [1, 3, 10]}, r"cu_seqlens_q\[0\] must be 0, got 1"),
    "decreasing": ({"cu_seqlens_q": [0, 7, 3]}, r"cu_seqlens_q\[2\] must be at least cu_seqlens_q\[1\] = 7, got 3"),
    "too many rows": (
        {"cu_seqlens_q": [0, 3, 11]},
        r"cu_seqlens_q\[2\] must be at most the number of rows, 10, got 11",
    ),
    "longest query": (
        {"max_seqlen_q": 6},
        r"max_seqlen_q must be at least the longest sequence, 7 \(cu_seqlens_q\), got 6",
    ),
    "longest keys": ({"max_seqlen_k": 30}, r"max_seqlen_k must be at least seqlens_k\[0\] = 40, got 30"),
    "negative length": (
        {"seqlens_k": [40, -1]},
        r"seqlens_k\[1\] must be in \[0, 64\] \(block_table has 4 pages of 16\), got -1",
    ),
    "no room": ({"seqlens_k": [65, 7]}, r"seqlens_k\[0\] must be in \[0, 64\].*, got 65"),
    "unused page": ({"seqlens_k": [49, 7]}, r"block_table\[0, 3\] must be a page in \[0, 6\), got -1"),
    "no such page": (
        {"block_table": [[0, 1, 6, -1], [3, 2, -1, -1]]},
        r"block_table\[0, 2\] must be a page in \[0, 6\), got 6",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_contents_are_refused_before_anything_is_written(name: str, level: str) -> None:
    changed, text = REFUSED[name]
    r = Requests((40, 7))
    args = r.pool((0, 1)) | {"cu_seqlens_q": [0, 3, 10], "max_seqlen_q": 100, "max_seqlen_k": 100} | changed
    args = {n: torch.tensor(x, dtype=torch.int32) if isinstance(x, list) else x for n, x in args.items()}
    out = torch.full((10, r.heads, r.dim), 7.0)
    with pytest.raises(ValueError, match="paged_prefill_attention: " + text):
        pk.paged_prefill_attention(r.q[:10], **args, out=out, backend="cpu")
    assert bool((out == 7.0).all())
