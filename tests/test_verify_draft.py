"""Draft verification on the CPU backend: the marginal of plain sampling, greedy exactness, and the reference's cases."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scipy.stats import chisquare

import pykernels as pk
from pykernels import native
from pykernels.reference import sampling as ref
from pykernels.testing import cases, check_case

LEVELS = [lv for lv in (*native.LEVELS, *native.TEST_LEVELS) if native.level_reason(lv) is None]


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PYKERNELS_CPU_ISA", request.param)
    return request.param


def normal(*shape: int, seed: int = 0, std: float = 1.5) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * std


def test_agrees_with_the_reference(level: str) -> None:
    for case in cases("verify_draft"):
        check_case(case, lambda op, args: native.BACKEND.run(op, args))


def warped(logits: torch.Tensor, **options: float) -> torch.Tensor:
    """The reference's distribution of each row, float64."""
    n = logits.shape[0]
    columns = [
        torch.full((n,), options.get(name, off), dtype=dtype)
        for name, off, dtype in (
            ("temperature", 1.0, torch.float32),
            ("top_k", 0, torch.int32),
            ("top_p", 1.0, torch.float32),
            ("min_p", 0.0, torch.float32),
        )
    ]
    return ref.warp(logits, *columns, torch.float64).exp()


def p_value(cells: torch.Tensor, expected: torch.Tensor) -> float:
    """Chi-square of counts against a distribution over the same cells; cells of probability zero must be empty."""
    assert not bool(cells[expected == 0].any())
    wanted = expected * cells.sum()
    rare = wanted < 5
    counts, wanted = (torch.cat((x[~rare], x[rare].sum()[None])) for x in (cells.double(), wanted))
    live = wanted > 0
    return float(chisquare(counts[live].numpy(), wanted[live].numpy()).pvalue)


@pytest.mark.parametrize("one_hot", [False, True])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.6}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.2}], ids=str)
def test_two_tokens_are_distributed_as_plain_sampling(options: dict[str, Any], one_hot: bool, level: str) -> None:
    vocab, requests = 5, 40000
    target, draft = normal(3, vocab, seed=1), normal(2, vocab, seed=2)
    p, q = warped(target, **options), draft.softmax(-1)
    generator = torch.Generator().manual_seed(3)
    if one_hot:
        drafted = torch.tensor([1, 2]).expand(requests, 2)
    else:
        drafted = torch.stack([torch.multinomial(row, requests, True, generator=generator) for row in q], dim=1)
    ids, accepted = pk.verify_draft(
        target.expand(requests, 3, vocab).reshape(-1, vocab),
        drafted.reshape(-1),
        draft_probs=None if one_hot else q.expand(requests, 2, vocab).reshape(-1, vocab),
        cu_draft=torch.arange(requests + 1, dtype=torch.int32) * 2,
        seeds=torch.arange(requests),
        positions=17,
        **options,
    )
    first = torch.bincount(ids[:, 0], minlength=vocab)
    assert p_value(first, p[0]) > 1e-4
    # The second token exists where the first draft was accepted, and is independent of everything before it.
    more = ids[accepted >= 1]
    assert p_value(torch.bincount(more[:, 1], minlength=vocab), p[1]) > 1e-4
    last = ids[accepted == 2]
    assert p_value(torch.bincount(last[:, 2], minlength=vocab), p[2]) > 1e-4
    # As many are accepted as theory says: sum of min(p, q), or p of the one-hot draft.
    chance = p[0, 1] if one_hot else torch.minimum(p[0], q[0].double()).sum()
    share = (accepted >= 1).double().mean()
    assert abs(share - chance) < 5 * math.sqrt(float(chance * (1 - chance)) / requests) + 1e-9


def test_greedy_is_token_exact_whatever_the_draft(level: str) -> None:
    vocab, requests, length = 300, 40, 4
    target = normal(requests * (length + 1), vocab).round()
    best = target.view(requests, length + 1, vocab).argmax(-1)
    drafted = best[:, :length].clone()
    generator = torch.Generator().manual_seed(0)
    wrong = torch.rand(requests, length, generator=generator) < 0.3
    drafted[wrong] = torch.randint(0, vocab, (int(wrong.sum()),), generator=generator)
    q = normal(requests * length, vocab, seed=5).softmax(-1)
    cu = torch.arange(requests + 1, dtype=torch.int32) * length
    for probs in (None, q):
        ids, accepted = pk.verify_draft(
            target, drafted.reshape(-1), draft_probs=probs, cu_draft=cu, temperature=0.0, top_k=2, seeds=1, positions=0
        )
        for b in range(requests):
            right = (drafted[b] == best[b, :length]).int().cumprod(0).sum().item()
            assert accepted[b] == right
            assert ids[b].tolist() == best[b, : right + 1].tolist() + [-1] * (length - right)


def test_the_bonus_token_is_the_one_that_sampling_draws_there(level: str) -> None:
    target = normal(8, 3000)
    options = {"temperature": 0.9, "top_p": 0.8}
    ids, accepted = pk.verify_draft(
        target,
        torch.empty(0, dtype=torch.int64),
        cu_draft=torch.zeros(9, dtype=torch.int32),
        seeds=torch.arange(8),
        positions=torch.arange(8) + 4,
        **options,
    )
    drawn = pk.sample(target, seeds=torch.arange(8), positions=torch.arange(8) + 4, **options)
    assert torch.equal(ids[:, 0], drawn.ids)
    assert accepted.tolist() == [0] * 8


def test_a_draft_from_the_target_itself_is_always_accepted(level: str) -> None:
    requests, vocab = 500, 50
    target = normal(2, vocab)
    q = target[0].softmax(-1)
    drafted = torch.multinomial(q, requests, True, generator=torch.Generator().manual_seed(0))
    _, accepted = pk.verify_draft(
        target.expand(requests, 2, vocab).reshape(-1, vocab),
        drafted,
        draft_probs=q.expand(requests, vocab),
        cu_draft=torch.arange(requests + 1, dtype=torch.int32),
        seeds=torch.arange(requests),
        positions=0,
    )
    assert accepted.sum() >= requests - 1  # p and q differ by rounding


@pytest.mark.parametrize("one_hot", [False, True])
def test_bits_do_not_change_with_batch_or_threads(one_hot: bool, level: str) -> None:
    vocab, lengths = 20000, [3, 0, 2, 5]
    cu = torch.tensor([0, 3, 3, 5, 10], dtype=torch.int32)
    target, q = normal(14, vocab), normal(10, vocab, seed=1).softmax(-1)
    drafted = target[[0, 1, 2, 5, 6, 8, 9, 10, 11, 12]].argmax(-1)
    seeds, positions = torch.arange(4), torch.arange(4) * 9
    before = native.module().num_threads()
    results = []
    for count in (1, 2, 3):
        native.module().set_num_threads(count)
        probs = None if one_hot else q
        results.append(
            pk.verify_draft(
                target, drafted, draft_probs=probs, cu_draft=cu, seeds=seeds, positions=positions, top_p=0.9
            )
        )
        for b, n in enumerate(lengths):
            at, row = int(cu[b]), int(cu[b]) + b
            ids, accepted = pk.verify_draft(
                target[row : row + n + 1],
                drafted[at : at + n],
                draft_probs=None if one_hot else q[at : at + n],
                cu_draft=torch.tensor([0, n], dtype=torch.int32),
                seeds=seeds[b : b + 1],
                positions=positions[b : b + 1],
                top_p=0.9,
            )
            assert torch.equal(ids[0], results[-1][0][b, : n + 1])
            assert accepted[0] == results[-1][1][b]
    native.module().set_num_threads(before)
    for ids, accepted in results[1:]:
        assert torch.equal(ids, results[0][0])
        assert torch.equal(accepted, results[0][1])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"cu_draft": torch.tensor([0, 2, 1], dtype=torch.int32), "ids": torch.full((2, 3), -77)},
            r"cu_draft\[2\] must be at least 2",
        ),
        ({"cu_draft": torch.tensor([1, 1, 2], dtype=torch.int32)}, r"cu_draft\[0\] must be at least 0 and below 1"),
        ({"cu_draft": torch.tensor([0, 1, 1], dtype=torch.int32)}, r"cu_draft\[2\] must be at least 2"),
        ({"cu_draft": torch.tensor([0, 1, 3], dtype=torch.int32)}, r"cu_draft\[2\] must be .* below total_draft \+ 1"),
        ({"draft_ids": torch.tensor([1, 7])}, r"draft_ids\[1\] must be at least 0 and below vocab \(7\), got 7"),
        ({"draft_ids": torch.tensor([-1, 0])}, r"draft_ids\[0\] must be at least 0 .* got -1"),
        ({"ids": torch.full((2, 1), -77)}, r"room for the longest draft and one more token \(2\), got 1"),
        ({"target_logits": torch.zeros(5, 7)}, r"must have total_draft \+ batch rows \(2 \+ 2\), got 5"),
        ({"temperature": -1.0}, r"verify_draft: temperature\[0\] must be at least 0"),
        ({"positions": -1}, r"positions\[0\] must be at least 0"),
        ({"draft_probs": torch.zeros(2, 6)}, r"draft_probs must have shape"),
    ],
)
def test_wrong_drafts_are_an_error_before_anything_is_written(change: dict[str, Any], text: str) -> None:
    args: dict[str, Any] = {
        "target_logits": torch.zeros(4, 7),
        "draft_ids": torch.tensor([1, 2]),
        "cu_draft": torch.tensor([0, 1, 2], dtype=torch.int32),
        "ids": torch.full((2, 2), -77),
        "num_accepted": torch.full((2,), -77, dtype=torch.int32),
        "seeds": 0,
        "positions": 0,
        **change,
    }
    logits, drafted = args.pop("target_logits"), args.pop("draft_ids")
    with pytest.raises(ValueError, match=text):
        pk.verify_draft(logits, drafted, **args)
    assert bool((args["ids"] == -77).all())
    assert bool((args["num_accepted"] == -77).all())
