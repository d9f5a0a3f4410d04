"""Decode attention and state merge on the CPU backend: the reference's cases, bits, splits, workspace, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attention_problems import BF16, F32, FP8, INT8, LEVELS, OPTIONS, Requests, normal, same

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


@pytest.mark.parametrize("op", ["paged_decode_attention", "merge_attention_states"])
def test_agrees_with_the_reference(op: str, level: str) -> None:
    for case in cases(op):
        check_case(case, lambda op, args: native.BACKEND.run(op, args))


def decode(r: Requests, which: tuple[int, ...], page_size: int = 16, **options: Any) -> Result:
    q = torch.stack([r.q[r.starts[i]] for i in which])
    pool = r.pool(which, page_size=page_size)
    return pk.paged_decode_attention(q, **pool, return_lse=True, backend="cpu", **options)


KINDS = {"float32": (F32, None), "bfloat16": (BF16, None), "int8": (F32, INT8), "fp8": (BF16, FP8)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", OPTIONS)
def test_a_request_has_the_same_bits_alone_and_in_any_batch(kind: str, options: str, level: str) -> None:
    dtype, cache = KINDS[kind]
    r = Requests((700, 129, 1, 4500), dtype=dtype, cache=cache)
    chosen = r.options(options)
    alone = [decode(r, (i,), **chosen) for i in range(4)]
    for order in ((0, 1, 2, 3), (3, 1), (2, 0, 0)):
        out, lse = decode(r, order, **chosen)
        for row, i in enumerate(order):
            assert same((out[row : row + 1], lse[:, row : row + 1]), alone[i]), (order, i)


@pytest.mark.parametrize("kind", KINDS)
def test_threads_and_page_size_change_no_bit(kind: str, threads: Any) -> None:
    dtype, cache = KINDS[kind]
    r = Requests((1000, 77, 300), heads=14, kv_heads=2, dtype=dtype, cache=cache)
    results = []
    for n, page_size in ((1, 16), (2, 1), (3, 3), (5, 64), (2, 100)):
        threads(n)
        results.append(decode(r, (0, 1, 2), page_size, **r.options("all")))
    assert all(same(x, results[0]) for x in results)


def test_results_are_the_same_in_every_run(level: str) -> None:
    r = Requests((2000, 500))
    first = decode(r, (0, 1))
    assert all(same(decode(r, (0, 1)), first) for _ in range(20))


@pytest.mark.parametrize("split", [1, 7, 64, 100, 5000])
def test_splits_change_rounding_only(split: int, level: str) -> None:
    r = Requests((1000, 3, 129))
    whole, parts = decode(r, (0, 1, 2), split_size=1000), decode(r, (0, 1, 2), split_size=split)
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=float(a.abs().max()) * 2e-6)


def test_merging_the_two_halves_of_a_context_is_attention_over_all_of_it(level: str) -> None:
    r = Requests((256, 256))
    r.q[256:] = r.q[:256]
    both = Requests((512,))
    both.k, both.v, both.q[0] = r.k, r.v, r.q[0]
    (out, lse), expected = decode(r, (0, 1)), decode(both, (0,), split_size=256)
    merged = pk.merge_attention_states(
        out[:1], lse[:, :1].contiguous(), out[1:], lse[:, 1:].contiguous(), backend="cpu"
    )
    for a, b in zip(merged, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=float(a.abs().max()) * 2e-6)


def test_merging_with_what_saw_nothing_is_the_identity(level: str) -> None:
    out, lse = normal(5, 3, 64, seed=0), normal(3, 5, seed=1)
    nothing, never = torch.full_like(out, torch.nan), torch.full_like(lse, -torch.inf)
    assert same(pk.merge_attention_states(out, lse, nothing, never, backend="cpu"), (out, lse))
    assert same(pk.merge_attention_states(nothing, never, out, lse, backend="cpu"), (out, lse))
    empty = pk.merge_attention_states(nothing, never, nothing, never, backend="cpu")
    assert same(empty, (torch.zeros_like(out), never))


def test_a_workspace_holds_partial_results_whatever_it_held(level: str) -> None:
    r = Requests((700, 20))
    expected = decode(r, (0, 1))
    workspace = torch.full((1 << 18,), 255, dtype=torch.uint8)  # NaN as float32
    assert same(decode(r, (0, 1), workspace=workspace), expected)
    assert bool((workspace[: 4 * r.dim] != 255).any())


def test_a_workspace_that_is_too_small_is_refused(level: str) -> None:
    r = Requests((700,))
    needed = 7 * r.heads * (r.dim + 2) * 4
    text = rf"paged_decode_attention: workspace must be at least {needed} bytes \(7 splits\), got {needed - 1}"
    with pytest.raises(ValueError, match=text):
        decode(r, (0,), split_size=100, workspace=torch.empty(needed - 1, dtype=torch.uint8))
    decode(r, (0,), split_size=100, workspace=torch.empty(needed, dtype=torch.uint8))


def test_pages_outside_the_window_are_not_read(level: str) -> None:
    r = Requests((1000,))
    pool = r.pool((0,))
    expected = pk.paged_decode_attention(r.q[:1], **pool, window_size=(40, 0))
    pool["block_table"][0, : (999 - 40) // 16] = -1
    assert torch.equal(pk.paged_decode_attention(r.q[:1], **pool, window_size=(40, 0)), expected)


REFUSED = {
    "negative length": (
        {"seqlens_k": [40, -1]},
        r"seqlens_k\[1\] must be in \[0, 64\] \(block_table has 4 pages of 16\), got -1",
    ),
    "no room": ({"seqlens_k": [65, 7]}, r"seqlens_k\[0\] must be in \[0, 64\].*, got 65"),
    "unused page": ({"seqlens_k": [49, 7]}, r"block_table\[0, 3\] must be a page in \[0, 6\), got -1"),
    "no such page": (
        {"block_table": [[0, 1, 2, -1], [9, 2, -1, -1]]},
        r"block_table\[1, 0\] must be a page in \[0, 6\), got 9",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_contents_are_refused_before_anything_is_written(name: str, level: str) -> None:
    changed, text = REFUSED[name]
    r = Requests((40, 7))
    args = r.pool((0, 1)) | {n: torch.tensor(x, dtype=torch.int32) for n, x in changed.items()}
    out = torch.full((2, r.heads, r.dim), 7.0)
    with pytest.raises(ValueError, match="paged_decode_attention: " + text):
        pk.paged_decode_attention(r.q[:2], **args, out=out, backend="cpu")
    assert bool((out == 7.0).all())
