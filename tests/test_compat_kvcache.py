"""`flash_attn_with_kvcache` of flash-attention 2 and FA3: append in place, rotate, attend, in every layout of the cache."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from compat_oracle import BF16, F16, F32, OPTIONS, check, int32, normal, options_for

from pykernels.compat import flash_attn as fa2
from pykernels.compat import flash_attn_interface as fa3

HEADS, KV_HEADS, SEQLEN, PAGE = 6, 2, 40, 8
KINDS = ("rows", "batch_idx", "leftpad", "batch_idx and leftpad", "paged", "slice of a longer cache")


@dataclass
class Problem:
    """A cache of 2 sequences with `before` tokens each, in one of the layouts, and what is expected of a call."""

    kind: str
    seqlen_q: int = 1
    seqlen_new: int = 0
    before: tuple[int, ...] = (23, 7)
    dim: int = 32
    dtype: torch.dtype = F32
    rotary_dim: int = 0
    interleaved: bool = True
    args: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.q = normal(2, self.seqlen_q, HEADS, self.dim, seed=1, std=2.0, dtype=self.dtype)
        new = [normal(2, self.seqlen_new, KV_HEADS, self.dim, seed=s, dtype=self.dtype) for s in (4, 5)]
        self.k_new, self.v_new = new
        rows, shape = 5, (KV_HEADS, self.dim)
        self.pad = (3, 7) if "leftpad" in self.kind else (0, 0)
        if self.kind == "paged":
            self.table = (
                torch.randperm(12, generator=torch.Generator().manual_seed(2)).view(2, 6)[:, :5].to(torch.int32)
            )
            self.caches = [normal(12, PAGE, *shape, seed=s, dtype=self.dtype) for s in (2, 3)]
            self.args["block_table"] = self.table
        elif self.kind == "slice of a longer cache":
            self.caches = [normal(2, SEQLEN + 9, *shape, seed=s, dtype=self.dtype)[:, 4 : 4 + SEQLEN] for s in (2, 3)]
        else:
            self.caches = [normal(rows, SEQLEN, *shape, seed=s, dtype=self.dtype) for s in (2, 3)]
            if "batch_idx" not in self.kind:
                self.caches = [x[:2] for x in self.caches]
        self.row = (4, 1) if "batch_idx" in self.kind else (0, 1)
        if "batch_idx" in self.kind:
            self.args["cache_batch_idx"] = int32(*self.row)
        if "leftpad" in self.kind:
            self.args["cache_leftpad"] = int32(*self.pad)
        self.args["cache_seqlens"] = int32(*self.before)
        if self.seqlen_new:
            self.args |= {"k": self.k_new, "v": self.v_new}
        if self.rotary_dim:
            angle = torch.rand(SEQLEN, self.rotary_dim // 2, generator=torch.Generator().manual_seed(6)) * 6.3
            self.args |= {"rotary_cos": angle.cos().to(self.dtype), "rotary_sin": angle.sin().to(self.dtype)}
            self.args["rotary_interleaved"] = self.interleaved

    def place(self, b: int, t: int) -> tuple[int, int]:
        return (int(self.table[b, t // PAGE]), t % PAGE) if self.kind == "paged" else (self.row[b], t)

    def turn(self, x: torch.Tensor, position: int) -> torch.Tensor:
        """x [heads, dim] turned, in float64 and rounded once."""
        if not self.rotary_dim:
            return x
        pairs = self.rotary_dim // 2
        c, s = (self.args[n][position].double() for n in ("rotary_cos", "rotary_sin"))
        out = x.clone()
        for p in range(pairs):
            i, j = (2 * p, 2 * p + 1) if self.interleaved else (p, p + pairs)
            a, b = x[:, i].double(), x[:, j].double()
            out[:, i], out[:, j] = (a * c[p] - b * s[p]).to(x.dtype), (b * c[p] + a * s[p]).to(x.dtype)
        return out

    def expected(self, local: bool, first: tuple[int, ...] | None = None) -> tuple[list[Any], list[torch.Tensor]]:
        """Sequences of queries, keys and values, and the caches afterwards."""
        caches, sequences = [x.clone() for x in self.caches], []
        first = first or self.before
        for b in range(2):
            for i in range(self.seqlen_new):
                at = self.place(b, self.before[b] + i)
                caches[0][at] = self.turn(self.k_new[b, i], first[b] + i)
                caches[1][at] = self.v_new[b, i]
            places = [self.place(b, t) for t in range(self.pad[b], self.before[b] + self.seqlen_new)]
            q = [self.turn(self.q[b, i], first[b] + (i if local else 0)) for i in range(self.seqlen_q)]
            sequences.append((torch.stack(q), *(tokens(x, places) for x in caches)))
        return sequences, caches


def tokens(cache: torch.Tensor, places: list[tuple[int, int]]) -> torch.Tensor:
    return torch.stack([cache[p] for p in places]) if places else cache.new_empty(0, *cache.shape[2:])


def run(problem: Problem, options: dict[str, Any], local: bool = True) -> None:
    sequences, caches = problem.expected(local)
    call = {"return_softmax_lse": True, **problem.args, **options}
    out, lse = fa2.flash_attn_with_kvcache(problem.q, *problem.caches, **call)
    assert out.shape == problem.q.shape
    assert lse.shape == (2, HEADS, problem.seqlen_q)
    eps = torch.finfo(problem.dtype).eps
    slack, last_bit = (0.0, 0.0) if not problem.rotary_dim else (4 * eps, eps if problem.dtype != F32 else 0.0)
    for got, expected in zip(problem.caches, caches, strict=True):  # turned in float32 and rounded once
        atol = 4 * torch.finfo(F32).eps if problem.rotary_dim else 0.0
        torch.testing.assert_close(got, expected, rtol=last_bit, atol=atol)
    check(out.flatten(0, 1), lse.transpose(0, 1).flatten(1), sequences, options, extra=20 * slack)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seqlens", [(1, 0), (1, 1), (5, 0), (5, 5), (6, 3)], ids=str)
def test_every_layout(kind: str, seqlens: tuple[int, int]) -> None:
    for name in ("plain", "causal", "window"):
        run(Problem(kind, *seqlens), options_for(name, 2, HEADS))


@pytest.mark.parametrize("kind", ["rows", "batch_idx and leftpad", "paged"])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option(kind: str, name: str) -> None:
    for seqlens in ((1, 1), (6, 6)):
        run(Problem(kind, *seqlens), options_for(name, 2, HEADS))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [16, 32])
@pytest.mark.parametrize("kind", ["rows", "batch_idx and leftpad", "paged"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_rotary(kind: str, rotary_dim: int, interleaved: bool, dtype: torch.dtype) -> None:
    """Positions are those in the cache, left padding included; without causal and window all queries stand at the first."""
    for seqlens in ((1, 1), (5, 5), (6, 2)):
        for options, local in (({"causal": True}, True), ({"window_size": (6, 3)}, True), ({}, False)):
            problem = Problem(kind, *seqlens, rotary_dim=rotary_dim, interleaved=interleaved, dtype=dtype)
            run(problem, dict(options), local)


def test_a_window_as_wide_as_the_cache_is_none_for_rotary() -> None:
    run(Problem("rows", 5, 5, rotary_dim=16), {"window_size": (SEQLEN, -1)}, local=False)


@pytest.mark.parametrize("kind", ["rows", "leftpad", "paged"])
def test_padded_head_dims_append_in_place(kind: str) -> None:
    run(Problem(kind, 4, 4, dim=59, dtype=F16, rotary_dim=16), {"causal": True})


def test_padding_beyond_the_length_leaves_nothing_to_see() -> None:
    problem = Problem("leftpad", 3, before=(23, 4))
    for module, unseen in ((fa2, torch.inf), (fa3, -torch.inf)):
        for seqlen_q in (1, 3):
            out, lse, *_ = module.flash_attn_with_kvcache(
                problem.q[:, :seqlen_q], *problem.caches, return_softmax_lse=True, **problem.args
            )
            assert torch.equal(out[1], torch.zeros_like(out[1]))
            assert torch.equal(lse[1], torch.full_like(lse[1], unseen))
            assert out[0].abs().min() > 0


def test_lengths_as_int_or_absent() -> None:
    problem = Problem("rows", 3, before=(23, 23))
    expected = fa2.flash_attn_with_kvcache(problem.q, *problem.caches, cache_seqlens=int32(23, 23))
    assert torch.equal(fa2.flash_attn_with_kvcache(problem.q, *problem.caches, cache_seqlens=23), expected)
    full = fa2.flash_attn_with_kvcache(problem.q, *problem.caches, cache_seqlens=SEQLEN)
    assert torch.equal(fa2.flash_attn_with_kvcache(problem.q, *problem.caches), full)
    assert not torch.equal(full, expected)


def test_the_number_of_splits_reaches_the_kernel() -> None:
    q, k, v = (normal(1, n, h, 64, seed=i) for i, (n, h) in enumerate(((1, 4), (900, 2), (900, 2))))
    results = [fa2.flash_attn_with_kvcache(q, k, v, num_splits=n) for n in (1, 7)]
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)
    assert not torch.equal(*results), "the order of the sum must have changed"
    again = fa3.flash_attn_with_kvcache(q, k, v, num_splits=7)
    assert torch.equal(again, results[1])


def test_nothing_is_written_when_a_call_is_refused() -> None:
    base = Problem("rows", 3, 3, before=(23, 38))
    paged = Problem("paged", 3, 3, before=(23, 38))
    hole = Problem("paged", 3, 3)
    hole.args["block_table"] = hole.table.clone().index_fill_(1, torch.tensor([3]), -1)
    fits = Problem("rows", 3, 3)
    cos = torch.ones(SEQLEN, 8)
    cases: list[tuple[Problem, dict[str, Any], str]] = [
        (base, {}, "cache_seqlens with the new tokens is 41, but the cache holds 40"),
        (paged, {}, "cache_seqlens with the new tokens is 41, but the cache holds 40"),
        (hole, {}, "block_table must name a page for every new token, got -1"),
        (fits, {"cache_batch_idx": int32(0, -1)}, "cache_batch_idx must name a page for every new token, got -1"),
        (fits, {"cache_batch_idx": int32(0, 9)}, "slot_mapping"),
        (fits, {"cache_seqlens": int32(-1, 3)}, "cache_seqlens must be at least 0"),
        (fits, {"v": None}, "k and v must be given together"),
        (fits, {"cache_seqlens": None}, "cache_seqlens must be given with k and v"),
        (fits, {"cache_seqlens": int32(1, 2, 3)}, "cache_seqlens must have shape (2)"),
        (fits, {"cache_seqlens": int32(1, 2).long()}, "cache_seqlens must have dtype int32"),
        (fits, {"cache_batch_idx": int32(1)}, "cache_batch_idx must have shape (2)"),
        (fits, {"num_splits": 2}, "num_splits > 1 needs one query per sequence"),
        (fits, {"rotary_cos": cos}, "rotary_cos and rotary_sin must be given together"),
        (fits, {"rotary_cos": cos[:9], "rotary_sin": cos[:9]}, "rotary_cos must have at least 40 rows"),
        (fits, {"rotary_cos": cos.half(), "rotary_sin": cos.half()}, "rotary_cos must have the dtype of q"),
        (fits, {"rotary_cos": cos, "rotary_sin": cos, "k": None, "v": None}, "rotary_cos needs new keys"),
        (fits, {"k": base.k_new[:1]}, "k must have shape"),
        (fits, {"v": base.v_new[:, :2]}, "v must have shape"),
        (fits, {"alibi_slopes": torch.ones(HEADS + 1)}, "alibi_slopes must have shape"),
        (fits, {"block_table": int32(0, 1).view(2, 1), "cache_leftpad": int32(0, 0)}, "cache_leftpad is not supported"),
        (fits, {"block_table": int32(0, 1).view(2, 1), "cache_batch_idx": int32(0, 0)}, "cache_batch_idx is not"),
        (fits, {"block_table": int32(0, 1).view(2, 1).long()}, "block_table must have dtype int32"),
    ]
    for problem, change, text in cases:
        before = [x.clone() for x in problem.caches]
        with pytest.raises(RuntimeError, match=re.escape(text)):
            fa2.flash_attn_with_kvcache(problem.q, *problem.caches, **{**problem.args, **change})
        assert all(torch.equal(a, b) for a, b in zip(problem.caches, before, strict=True)), text
    with pytest.raises(RuntimeError, match="q requires grad"):
        fa2.flash_attn_with_kvcache(fits.q.clone().requires_grad_(), *fits.caches, **fits.args)


NAN = float("nan")
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "head dim": ({"q": normal(2, 3, HEADS, 24, seed=1)}, "k_cache must have the head_dim of q, 24, got 32"),
    "heads": ({"q": normal(2, 3, 5, 32, seed=1)}, "k_cache has 2 heads, which must divide those of q (5)"),
    "dtype of q": ({"q": normal(2, 3, HEADS, 32, seed=1, dtype=F16)}, "k_cache must have the dtype of q"),
    "dtype of values": ({"v_cache": normal(2, SEQLEN, KV_HEADS, 32, seed=3, dtype=F16)}, "v_cache must have the dtype"),
    "shape of values": ({"v_cache": normal(2, SEQLEN + 1, KV_HEADS, 32, seed=3)}, "v_cache must have shape"),
    "rows": ({"k_cache": normal(3, SEQLEN, KV_HEADS, 32, seed=2)}, "v_cache must have shape"),
    "scale": ({"softmax_scale": NAN}, "softmax_scale must be a number"),
    "softcap": ({"softcap": NAN}, "softcap must be a number"),
    "window": ({"window_size": 3}, "window_size must be a pair"),
    "no tensor": ({"q": [[1.0]]}, "q must be a tensor, got list"),
    "no cache": ({"k_cache": None}, "k_cache must be a tensor, got NoneType"),
    "no new keys": ({"k": 1.0}, "k must be a tensor, got float"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("module", [fa2, fa3], ids=["fa2", "fa3"])
def test_nothing_is_written_when_the_attention_would_be_refused(module: Any, name: str) -> None:
    problem = Problem("rows", 3, 3)
    change, text = REFUSED[name]
    given = {"q": problem.q, "k_cache": problem.caches[0], "v_cache": problem.caches[1], **problem.args, **change}
    before = [x.clone() for x in problem.caches]
    with pytest.raises(TypeError if "a tensor" in text else RuntimeError, match=re.escape(text)):
        module.flash_attn_with_kvcache(**given)
    assert all(torch.equal(a, b) for a, b in zip(problem.caches, before, strict=True))


# ---- FA3 -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
def test_fa3_dense_queries(kind: str) -> None:
    for seqlens in ((1, 1), (5, 5), (6, 3)):
        problem = Problem(kind, *seqlens, rotary_dim=16)
        args = problem.args
        if kind == "paged":
            args["page_table"] = args.pop("block_table")
        args["rotary_seqlens"] = int32(2, 9)
        sequences, caches = problem.expected(local=True, first=(2, 9))
        result = fa3.flash_attn_with_kvcache(
            problem.q, *problem.caches, causal=True, softcap=3.0, softmax_scale=0.3, return_softmax_lse=True, **args
        )
        out, lse, partial_out, partial_lse = result
        assert (partial_out.numel(), partial_lse.numel()) == (0, 0)
        for got, expected in zip(problem.caches, caches, strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)
        options = {"causal": True, "softcap": 3.0, "softmax_scale": 0.3}
        check(out.flatten(0, 1), lse.transpose(0, 1).flatten(1), sequences, options, unseen=-torch.inf, extra=1e-5)


def test_fa3_pages_with_batch_idx_and_leftpad() -> None:
    """FA3 allows both: rows of the page table are those that cache_batch_idx names, and sequences begin at the padding."""
    for seqlens in ((1, 1), (5, 5)):
        problem = Problem("paged", *seqlens)
        problem.pad = (3, 7)
        sequences, caches = problem.expected(local=True)
        table = torch.full((5, 5), -1, dtype=torch.int32)
        table[4], table[1] = problem.table
        args = {n: x for n, x in problem.args.items() if n != "block_table"}
        args |= {"page_table": table, "cache_batch_idx": int32(4, 1), "cache_leftpad": int32(3, 7)}
        args["rotary_seqlens"] = int32(1, 2)  # of no rotary: means nothing, as upstream's tests have it
        out, lse, *_ = fa3.flash_attn_with_kvcache(
            problem.q, *problem.caches, causal=True, return_softmax_lse=True, **args
        )
        assert all(torch.equal(a, b) for a, b in zip(problem.caches, caches, strict=True))
        check(out.flatten(0, 1), lse.transpose(0, 1).flatten(1), sequences, {"causal": True}, unseen=-torch.inf)


@pytest.mark.parametrize("rotary_dim", [0, 16])
@pytest.mark.parametrize("options", [{"window_size": (8, 1)}, {"causal": True}, {}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_fa3_ragged_queries_and_ragged_new_keys(kind: str, options: dict[str, Any], rotary_dim: int) -> None:
    """Of 5 queries and 4 new keys of each sequence only some exist, another number in each."""
    problem = Problem(kind, 5, 4, rotary_dim=rotary_dim)
    sequences, caches = [], [x.clone() for x in problem.caches]
    queries, new = (5, 2), (1, 4)
    for b, before in enumerate(problem.before):
        for i in range(new[b]):
            at = problem.place(b, before + i)
            caches[0][at], caches[1][at] = problem.turn(problem.k_new[b, i], before + i), problem.v_new[b, i]
        places = [problem.place(b, t) for t in range(problem.pad[b], before + new[b])]
        q = [problem.turn(problem.q[b, i], before + (i if options else 0)) for i in range(queries[b])]
        sequences.append((torch.stack(q), *(tokens(x, places) for x in caches)))
    args = {n: x for n, x in problem.args.items() if n not in ("k", "v")}
    if kind == "paged":
        args["page_table"] = args.pop("block_table")
    out, lse, *_ = fa3.flash_attn_with_kvcache(
        torch.cat([problem.q[b, : queries[b]] for b in range(2)]),
        *problem.caches,
        k=torch.cat([problem.k_new[b, : new[b]] for b in range(2)]),
        v=torch.cat([problem.v_new[b, : new[b]] for b in range(2)]),
        cu_seqlens_q=int32(0, 5, 7),
        cu_seqlens_k_new=int32(0, 1, 5),
        max_seqlen_q=5,
        return_softmax_lse=True,
        **args,
        **options,
    )
    slack = 4 * torch.finfo(F32).eps if rotary_dim else 0.0
    for got, expected in zip(problem.caches, caches, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=slack)
    check(out, lse, sequences, options, unseen=-torch.inf, extra=20 * slack)


def test_fa3_starts_of_new_keys_that_cannot_be_are_refused() -> None:
    problem = Problem("rows", 2, 3)
    k, v = problem.k_new.flatten(0, 1), problem.v_new.flatten(0, 1)
    for starts, text in ((int32(0, 3, 6).long(), "must have dtype int32"), (int32(0, 6), "must have shape (3)")):
        given = {**problem.args, "k": k, "v": v, "cu_seqlens_k_new": starts}
        with pytest.raises(RuntimeError, match=re.escape(f"cu_seqlens_k_new {text}")):
            fa3.flash_attn_with_kvcache(problem.q, *problem.caches, **given)
