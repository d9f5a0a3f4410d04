"""Draft verification: its marginal is plain sampling, by algebra on every small distribution and by frequency."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scipy.stats import chisquare

from pykernels.reference.sampling import accept, one_hot, residual, sample, uniform, verify_draft, warp

VOCAB = 5


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def options(
    batch: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> dict[str, Any]:
    return {
        "temperature": torch.full((batch,), temperature),
        "top_k": torch.full((batch,), top_k, dtype=torch.int32),
        "top_p": torch.full((batch,), top_p),
        "min_p": torch.full((batch,), min_p),
        "seeds": torch.arange(batch) * 7919 + 3,
        "positions": torch.arange(batch) % 97,
    }


def verify(
    logits: torch.Tensor, drafts: torch.Tensor, q: torch.Tensor | None, **warping: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every request has the same number of drafts: logits [batch, drafts + 1, vocab], drafts [batch, drafts]."""
    batch, count = drafts.shape
    return verify_draft(
        target_logits=logits.flatten(0, 1),
        draft_ids=drafts.flatten(),
        draft_probs=None if q is None else q.flatten(0, 1),
        cu_draft=torch.arange(batch + 1, dtype=torch.int32) * count,
        max_tokens=count + 1,
        **options(batch, **warping),
    )


def warped(logits: torch.Tensor, **warping: Any) -> torch.Tensor:
    """Warped probabilities of logits [rows, vocab]."""
    o = options(logits.shape[0], **warping)
    return warp(logits, o["temperature"], o["top_k"], o["top_p"], o["min_p"], torch.float64).exp()


def simplex(parts: int, total: int) -> list[list[int]]:
    """Every way to write `total` as an ordered sum of `parts` numbers."""
    if parts == 1:
        return [[total]]
    return [[first, *rest] for first in range(total + 1) for rest in simplex(parts - 1, total - first)]


def acceptance(p: torch.Tensor, q: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """P(accept) of drafted tokens [n], read off `accept` by bisection over u."""
    low, high = torch.zeros(len(tokens), dtype=torch.float64), torch.ones(len(tokens), dtype=torch.float64)
    for _ in range(50):
        middle = (low + high) / 2
        taken = accept(p, q, tokens, middle)
        low, high = torch.where(taken, middle, low), torch.where(taken, high, middle)
    return low


def every_pair(ps: torch.Tensor, qs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return ps.repeat_interleave(len(qs), 0), qs.repeat(len(ps), 1)


def emitted(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """The distribution of the token that comes out when drafts are drawn from q."""
    rest = residual(p, q)
    rest = rest / rest.sum(-1, keepdim=True)
    total = torch.zeros_like(p)
    for d in range(p.shape[-1]):
        token = torch.full((len(p),), d)
        a = acceptance(p, q, token)[:, None]
        total += q[:, d : d + 1] * (a * one_hot(token, p) + (1 - a) * rest)
    return total


def test_accepting_and_resampling_together_give_p_for_every_small_p_and_q() -> None:
    grid = torch.tensor(simplex(3, 6), dtype=torch.float64) / 6
    p, q = every_pair(grid, grid)
    torch.testing.assert_close(emitted(p, q), p, rtol=0, atol=1e-12)


def test_one_hot_drafts_leave_the_marginal_exact() -> None:
    # Accept d with probability p(d), else draw from p without d: p(d) [x = d] + (1 - p(d)) p(x) / (1 - p(d)) = p(x).
    p, q = every_pair(torch.tensor(simplex(4, 6), dtype=torch.float64) / 6, torch.eye(4, dtype=torch.float64))
    torch.testing.assert_close(emitted(p, q), p, rtol=0, atol=1e-12)


@pytest.mark.parametrize("one_hot_drafts", [True, False])
@pytest.mark.parametrize("warping", [{}, {"temperature": 1.6, "top_k": 4, "top_p": 0.95}])
def test_the_first_and_the_second_token_are_distributed_as_plain_sampling(
    one_hot_drafts: bool, warping: dict[str, Any]
) -> None:
    batch = 8000
    generator = torch.Generator().manual_seed(5)
    table = torch.randn(VOCAB + 1, VOCAB, generator=generator) * 1.2  # logits after nothing (last row) or after token d
    q_rows = torch.softmax(torch.randn(VOCAB + 1, VOCAB, generator=generator), -1)
    first = torch.multinomial(q_rows[-1], batch, replacement=True, generator=generator)
    second = torch.multinomial(q_rows[first], 1, generator=generator)[:, 0]
    logits = torch.stack((table[-1].expand(batch, -1), table[first], table[second]), dim=1)
    q = torch.stack((q_rows[-1].expand(batch, -1), q_rows[first]), dim=1)
    ids, accepted = verify(logits, torch.stack((first, second), dim=1), None if one_hot_drafts else q, **warping)

    def agrees(drawn: torch.Tensor, row: torch.Tensor) -> None:
        p = warped(row[None], **warping)[0]
        counts = torch.bincount(drawn, minlength=VOCAB)
        assert (counts[p == 0] == 0).all()
        assert chisquare(counts[p > 0].numpy(), (p[p > 0] * len(drawn)).numpy()).pvalue > 1e-3

    agrees(ids[:, 0], table[-1])
    for token in range(VOCAB):
        after = ids[(accepted >= 1) & (ids[:, 0] == token), 1]
        if len(after) > 200:
            agrees(after, table[token])
        bonus = ids[(accepted == 2) & (ids[:, 1] == token), 2]
        if len(bonus) > 200:
            agrees(bonus, table[token])
    assert set(accepted.tolist()) == {0, 1, 2}


def test_a_draft_is_accepted_when_the_uniform_of_its_position_is_below_p_over_q() -> None:
    logits, q = torch.randn(300, 2, VOCAB), torch.softmax(torch.randn(300, 1, VOCAB), -1)
    drafts = torch.randint(0, VOCAB, (300, 1))
    _, accepted = verify(logits, drafts, q)
    o = options(300)
    u = uniform(o["seeds"], o["positions"], 1, 1)[:, 0].double()
    p = torch.softmax(logits[:, 0].double(), -1)
    ratio = (p / q[:, 0].double()).gather(1, drafts)[:, 0]
    assert torch.equal(accepted.bool(), u < ratio.clamp(max=1))


def test_greedy_verification_is_token_exact_and_the_bonus_is_the_argmax() -> None:
    logits = torch.randn(64, 4, VOCAB).round(decimals=0)  # with ties
    best = logits.argmax(-1)
    drafts = torch.where(torch.rand(64, 3) < 0.7, best[:, :3], torch.randint(0, VOCAB, (64, 3)))
    for q in (None, torch.softmax(torch.randn(64, 3, VOCAB), -1)):
        ids, accepted = verify(logits, drafts, q, temperature=0.0, top_k=2, top_p=0.5)
        for b in range(64):
            n = next((t for t in range(3) if drafts[b, t] != best[b, t]), 3)
            assert accepted[b] == n
            assert ids[b].tolist() == [*best[b, : n + 1].tolist(), *[-1] * (3 - n)]


def test_the_bonus_token_is_drawn_as_sample_would_at_its_position() -> None:
    batch, count = 40, 2
    logits = torch.randn(batch, count + 1, VOCAB)
    drafts = logits.argmax(-1)[:, :count]
    q = torch.full((batch, count, VOCAB), 1e-9)  # so small that everything is accepted
    ids, accepted = verify(logits, drafts, q, top_k=4)
    assert (accepted == count).all()
    o = options(batch, top_k=4)
    o["positions"] = o["positions"] + count
    off = dict.fromkeys(
        (
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "prompt_ids",
            "output_ids",
            "logit_bias",
            "allowed_mask",
        )
    )
    drawn = sample(logits=logits[:, -1], **o, **off, logprobs_mode="raw")[0]
    assert torch.equal(ids[:, -1], drawn)


def test_no_drafts_is_plain_sampling() -> None:
    ids, accepted = verify(torch.randn(9, 1, VOCAB), torch.zeros(9, 0, dtype=torch.int64), None)
    assert (accepted == 0).all()
    assert ((ids >= 0) & (ids < VOCAB)).all()


def test_equal_distributions_accept_everything() -> None:
    logits = torch.randn(500, 2, VOCAB)
    q = warped(logits[:, 0], top_k=3).float()
    drafts = torch.multinomial(q, 1)
    _, accepted = verify(logits, drafts, q[:, None] * (1 - 1e-6), top_k=3)
    assert (accepted == 1).all()


def test_a_draft_outside_the_kept_set_or_the_vocabulary_is_never_returned() -> None:
    logits = torch.tensor([0.0, 5.0, 4.0, 3.0, 2.0]).expand(200, 2, VOCAB)
    for bad in (0, -1, VOCAB, 10**6):
        for q in (None, torch.full((200, 1, VOCAB), 1 / VOCAB)):
            ids, accepted = verify(logits, torch.full((200, 1), bad), q, top_k=3)
            assert (accepted == 0).all()
            assert set(ids[:, 0].tolist()) <= {1, 2, 3}
            assert (ids[:, 1] == -1).all()


def test_an_unusable_row_ends_the_request_with_minus_one() -> None:
    logits = torch.zeros(3, 3, VOCAB)
    logits[..., 2] = 50.0
    logits[0, 0, 1], logits[1, 1] = torch.nan, -torch.inf
    ids, accepted = verify(logits, torch.full((3, 2), 2), None)
    assert accepted.tolist() == [0, 1, 2]
    assert ids.tolist() == [[-1, -1, -1], [2, -1, -1], [2, 2, 2]]


def test_a_request_does_not_depend_on_its_neighbours() -> None:
    lengths = [2, 0, 3, 1]
    cu = torch.tensor([0, 2, 2, 5, 6], dtype=torch.int32)
    logits, q = torch.randn(10, VOCAB), torch.softmax(torch.randn(6, VOCAB), -1)
    drafts, o = torch.randint(0, VOCAB, (6,)), options(4, temperature=1.3)
    common = {"max_tokens": 4}
    ids, accepted = verify_draft(target_logits=logits, draft_ids=drafts, draft_probs=q, cu_draft=cu, **o, **common)
    for b, n in enumerate(lengths):
        start = int(cu[b])
        alone = verify_draft(
            target_logits=logits[start + b : start + b + n + 1],
            draft_ids=drafts[start : start + n],
            draft_probs=q[start : start + n],
            cu_draft=torch.tensor([0, n], dtype=torch.int32),
            **{name: x[b : b + 1] for name, x in o.items()},
            **common,
        )
        assert torch.equal(alone[0][0], ids[b])
        assert alone[1][0] == accepted[b]
