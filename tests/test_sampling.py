"""Sampling on the CPU backend: the reference's cases, kept sets, frequencies, and bits that nothing else may change."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from scipy.stats import chisquare

import pykernels as pk
from pykernels import native
from pykernels.reference import sampling as ref
from pykernels.testing import Case, cases, check_case

LEVELS = [lv for lv in (*native.LEVELS, *native.TEST_LEVELS) if native.level_reason(lv) is None]
INF = math.inf


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PYKERNELS_CPU_ISA", request.param)
    return request.param


@pytest.fixture
def threads() -> Iterator[Any]:
    """Sets the size of the team; puts it back."""
    before = native.module().num_threads()
    yield lambda n: native.module().set_num_threads(n)
    native.module().set_num_threads(before)


def run_cpu(op: str, args: dict[str, Any]) -> None:
    native.BACKEND.run(op, args)


def normal(*shape: int, seed: int = 0, std: float = 3.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * std


def rows(logits: torch.Tensor, count: int) -> torch.Tensor:
    """The same row many times, without the memory."""
    return logits.expand(count, -1)


def exact_log_p(logits: torch.Tensor, **options: Any) -> torch.Tensor:
    """The reference's kept, renormalised distribution of each row, float64 log-probabilities."""
    n = logits.shape[0]

    def column(name: str, off: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(options.get(name, off), dtype=dtype).expand(n)

    return ref.warp(
        logits.float(),
        column("temperature", 1.0, torch.float32),
        column("top_k", 0, torch.int32),
        column("top_p", 1.0, torch.float32),
        column("min_p", 0.0, torch.float32),
        torch.float64,
    )


@pytest.mark.parametrize("op", ["sample", "philox_uniform"])
def test_agrees_with_the_reference(op: str, level: str) -> None:
    for case in cases(op):
        check_case(case, run_cpu)


# The stream


def test_the_stream_is_philox4x32_10_bit_for_bit(level: str) -> None:
    first = pk.philox_uniform(torch.tensor([0]), torch.tensor([0]), 4)
    words = (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)  # Random123's kat_vectors, counter 0, key 0
    assert first.tolist() == [[((w >> 9) + 0.5) / 2**23 for w in words]]
    seeds = torch.randint(-(2**63), 2**63 - 1, (9,), generator=torch.Generator().manual_seed(1))
    positions = torch.tensor([0, 1, 2**31, 2**32 - 1, 2**32, 2**40 + 7, 5, 6, 7])
    for n in (1, 3, 4, 31, 64, 1001):
        assert torch.equal(pk.philox_uniform(seeds, positions, n), ref.uniform(seeds, positions, n, 0))


def test_an_unsigned_seed_is_the_signed_seed_of_the_same_bits() -> None:
    logits = normal(1, 500)
    drawn = [pk.sample(logits, seeds=s, positions=3).ids for s in (2**64 - 5, -5)]
    assert torch.equal(*drawn)


# Kept sets


def kept_tokens(logits: torch.Tensor, **options: Any) -> list[list[int]]:
    """The kept ids of each row in order, read off the processed log-probabilities."""
    drawn = pk.sample(logits, seeds=1, positions=0, logprobs=logits.shape[1], logprobs_mode="processed", **options)
    assert drawn.top_ids is not None
    assert drawn.top_logprobs is not None
    assert torch.equal(drawn.top_ids >= 0, drawn.top_logprobs > -INF)
    mass = drawn.top_logprobs.double().exp().sum(-1)
    assert torch.allclose(mass, torch.ones_like(mass), atol=1e-5)
    return [row[row >= 0].tolist() for row in drawn.top_ids]


FILTERS: dict[str, dict[str, Any]] = {
    "top_k": {"top_k": 7},
    "top_k_collected": {"top_k": 2048},
    "top_k_searched": {"top_k": 2049},
    "top_k_most": {"top_k": 4999},
    "top_p": {"top_p": 0.9},
    "top_p_little": {"top_p": 1e-6},
    "top_p_most": {"top_p": 0.9999},
    "top_k_top_p": {"top_k": 50, "top_p": 0.8},
    "top_k_top_p_searched": {"top_k": 3000, "top_p": 0.95},
    "min_p": {"min_p": 0.02},
    "min_p_top_p": {"min_p": 0.001, "top_p": 0.9},
    "min_p_top_k": {"min_p": 0.001, "top_k": 3000},
    "everything": {"min_p": 0.01, "top_k": 40, "top_p": 0.7, "temperature": 1.7},
    "cold": {"temperature": 0.05, "top_p": 0.9},
    "hot": {"temperature": 20.0, "top_p": 0.9},
}


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("std", [3.0, 0.01])
def test_keeps_the_tokens_that_the_reference_keeps(name: str, std: float, level: str) -> None:
    logits = normal(3, 5000, seed=len(name), std=std)
    kept = kept_tokens(logits, **FILTERS[name])
    for row, log_p in zip(kept, exact_log_p(logits, **FILTERS[name]), strict=True):
        expected = torch.nonzero(log_p > -INF).flatten().tolist()
        # A mass that meets the share of top-p to within float32 may fall on either side: one token more or less.
        odd = sorted(set(row) ^ set(expected), key=lambda i: -float(log_p[i]))
        assert len(odd) <= (1 if "top_p" in FILTERS[name] or "min_p" in FILTERS[name] else 0)
        if odd:
            assert log_p.exp().sum().item() * 2e-6 > 0
            share = FILTERS[name].get("top_p", 1.0)
            assert abs(_mass(logits, row, expected, share, FILTERS[name])) < 2e-6


def _mass(logits: torch.Tensor, row: list[int], expected: list[int], share: float, options: dict[str, Any]) -> float:
    """How far from the share of top-p the shorter of two prefixes ends, as a fraction of the whole."""
    before = exact_log_p(logits, **{**options, "top_p": 1.0}).exp()
    shorter = min(row, expected, key=len)
    return min(float(abs(p[shorter].sum() - share)) for p in before)


@pytest.mark.parametrize("k", [1, 3, 40, 2048, 3000, 5999])
def test_top_k_keeps_exactly_k_and_the_lowest_ids_of_a_tie(k: int, level: str) -> None:
    flat = torch.zeros(1, 6000)
    assert kept_tokens(flat, top_k=k) == [list(range(k))]
    steps = torch.arange(6000).remainder(3).float()[None]  # three levels of 2000 tokens each
    order = torch.argsort(steps[0], descending=True, stable=True).tolist()
    assert kept_tokens(steps, top_k=k) == [order[:k]]


def test_negative_zero_is_zero_in_the_order(level: str) -> None:
    logits = torch.tensor([[0.0, -0.0, 0.0, -0.0, -1.0]])
    assert kept_tokens(logits, top_k=3) == [[0, 1, 2]]
    assert pk.sample(torch.tensor([[-0.0, 0.0]]), temperature=0.0, seeds=0, positions=0).ids.tolist() == [0]


def test_top_p_keeps_the_crossing_token_and_the_first_always(level: str) -> None:
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    for share, count in ((0.0, 1), (0.3, 1), (0.51, 2), (0.74, 2), (0.76, 3), (0.874, 3), (0.88, 4), (1.0, 4)):
        assert kept_tokens(logits, top_p=share) == [list(range(count))]
    flat = torch.zeros(1, 6000)
    assert kept_tokens(flat, top_p=0.5001) == [list(range(3001))]


def test_top_p_counts_what_top_k_left(level: str) -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    assert kept_tokens(logits, top_k=2, top_p=0.56) == [[0]]  # 0.4 / 0.7 = 0.571
    assert kept_tokens(logits, top_p=0.56) == [[0, 1]]


def test_min_p_is_relative_to_the_largest_after_temperature(level: str) -> None:
    logits = torch.tensor([[0.0, -1.0, -2.0, -3.0]])
    assert kept_tokens(logits, min_p=0.1) == [[0, 1, 2]]
    assert kept_tokens(logits, min_p=0.1, temperature=0.5) == [[0, 1]]
    assert kept_tokens(logits, min_p=1.0) == [[0]]


def test_ascending_logits_are_the_worst_case_and_still_right(level: str) -> None:
    logits = torch.arange(20000.0)[None] / 1000
    assert kept_tokens(logits, top_k=50) == [list(range(19999, 19949, -1))]


# Frequencies


def pooled_p_value(ids: torch.Tensor, log_p: torch.Tensor) -> float:
    """Chi-square of ids against a distribution; tokens expected fewer than 5 times are one cell, so tails count."""
    p = log_p.exp()
    counts = torch.bincount(ids, minlength=len(p)).double()
    assert not bool(counts[p == 0].any()), "a token outside the support was drawn"
    expected = p * len(ids)
    rare = expected < 5
    cells, wanted = counts[~rare], expected[~rare]
    if float(expected[rare].sum()) >= 1:
        cells = torch.cat((cells, counts[rare].sum()[None]))
        wanted = torch.cat((wanted, expected[rare].sum()[None]))
    else:
        assert counts[rare].sum() <= 5
        wanted = wanted * (cells.sum() / wanted.sum())
    return (
        1.0
        if len(cells) < 2
        else float(chisquare(cells.numpy(), wanted.numpy() * float(cells.sum() / wanted.sum())).pvalue)
    )


DRAWS: dict[str, tuple[int, float, int, dict[str, Any]]] = {  # vocab, std, draws, options
    "plain": (50, 2.0, 40000, {}),
    "tail": (8, 3.0, 200000, {"temperature": 1.2}),
    "hot": (300, 2.0, 60000, {"temperature": 3.0}),
    "cold": (50, 2.0, 40000, {"temperature": 0.4}),
    "top_k": (1000, 1.0, 40000, {"top_k": 20}),
    "top_p": (300, 1.0, 40000, {"top_p": 0.7}),
    "min_p": (300, 1.0, 40000, {"min_p": 0.2}),
    "top_k_top_p": (1000, 2.0, 40000, {"top_k": 50, "top_p": 0.9, "temperature": 0.8}),
    "searched": (2500, 0.3, 6000, {"top_k": 2200, "top_p": 0.3}),
    "flat": (2500, 0.0, 6000, {"top_p": 0.1}),
}


@pytest.mark.parametrize("name", DRAWS)
def test_tokens_come_as_often_as_they_should(name: str, level: str) -> None:
    vocab, std, draws, options = DRAWS[name]
    logits = normal(1, vocab, seed=len(name), std=std)
    drawn = pk.sample(rows(logits, draws), seeds=11, positions=torch.arange(draws), **options)
    assert bool(drawn.valid.all())
    assert pooled_p_value(drawn.ids, exact_log_p(logits, **options)[0]) > 1e-4


def test_seeds_and_positions_both_give_fresh_draws(level: str) -> None:
    logits = normal(1, 50, std=1.0)
    log_p = exact_log_p(logits)[0]
    for seeds, positions in ((torch.arange(20000), 7), (5, torch.arange(20000) + 2**32)):
        ids = pk.sample(rows(logits, 20000), seeds=seeds, positions=positions).ids
        assert pooled_p_value(ids, log_p) > 1e-4


def test_the_draw_is_gumbel_max_over_the_stream(level: str) -> None:
    logits = normal(64, 9000, std=2.0)
    seeds, positions = torch.arange(64), torch.arange(64) * 5
    score = exact_log_p(logits, temperature=0.9) - (-ref.uniform(seeds, positions, 9000, 0).double().log()).log()
    best = score.max(-1).values
    ids = pk.sample(logits, temperature=0.9, seeds=seeds, positions=positions).ids
    # Two scores closer than float32 can tell apart may change places.
    assert bool((best - score.gather(1, ids[:, None])[:, 0] < 1e-5).all())


# Greedy and hard rows


def test_temperature_0_is_the_first_argmax_whatever_the_rest_says(level: str) -> None:
    logits = normal(40, 3001, std=2.0).round()
    temperature = torch.zeros(40)
    temperature[1::2] = 0.9
    drawn = pk.sample(
        logits, temperature=temperature, top_k=3, top_p=0.1, min_p=0.9, seeds=4, positions=torch.arange(40)
    )
    assert torch.equal(drawn.ids[::2], logits.argmax(-1)[::2])
    first = (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)
    assert torch.equal(drawn.ids[::2], first[::2])


def test_a_tiny_temperature_does_not_overflow(level: str) -> None:
    logits = normal(20, 5000, std=1e4)
    for temperature in (1e-30, 1e-38, 1e-4):
        drawn = pk.sample(logits, temperature=temperature, top_p=0.9, seeds=4, positions=1)
        assert torch.equal(drawn.ids, logits.argmax(-1))
    assert torch.equal(pk.sample(logits, temperature=1e-30, seeds=4, positions=1).ids, logits.argmax(-1))


def test_rows_without_a_distribution_are_flagged_and_hurt_nobody(level: str) -> None:
    logits = normal(6, 5000)
    logits[1, 4999], logits[3] = math.nan, -INF
    mask = torch.ones(6, 5000, dtype=torch.bool)
    mask[4] = False
    for options in ({}, {"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.5}, {"top_k": 4000}):
        drawn = pk.sample(logits, seeds=1, positions=2, allowed_mask=mask, logprobs=2, **options)
        assert drawn.valid.tolist() == [True, False, True, False, False, True]
        assert drawn.ids[~drawn.valid].tolist() == [-1, -1, -1]
        assert drawn.logprob is not None
        assert bool(drawn.logprob[~drawn.valid].isnan().all())
        alone = pk.sample(logits[5:], seeds=1, positions=2, allowed_mask=mask[5:], **options)
        assert torch.equal(drawn.ids[5:], alone.ids)


def test_a_nan_that_is_not_allowed_still_spoils_its_row(level: str) -> None:
    logits = normal(1, 100)
    logits[0, 3] = math.nan
    mask = torch.arange(100) > 50
    assert pk.sample(logits, seeds=0, positions=0, allowed_mask=mask).valid.tolist() == [False]


def test_infinite_logits_share_the_row(level: str) -> None:
    logits = normal(1, 5000)
    logits[0, [7, 4500]] = INF
    for options in ({}, {"top_k": 50}, {"top_p": 0.99}):
        ids = pk.sample(rows(logits, 400), seeds=1, positions=torch.arange(400), **options).ids
        assert set(ids.tolist()) == {7, 4500}


def test_what_lies_between_rows_is_not_read(level: str) -> None:
    room = torch.full((5, 1003), math.nan)
    room[:, :999] = normal(5, 999)
    for options in ({}, {"top_k": 9}, {"top_p": 0.5}, {"temperature": 0.0}):
        strided = pk.sample(room[:, :999], seeds=1, positions=0, **options)
        dense = pk.sample(room[:, :999].contiguous(), seeds=1, positions=0, **options)
        assert bool(strided.valid.all())
        assert torch.equal(strided.ids, dense.ids)


# Log-probabilities


def test_raw_log_probabilities_are_those_of_the_given_logits(level: str) -> None:
    logits = normal(7, 3000)
    drawn = pk.sample(
        logits, temperature=0.5, top_k=5, logit_bias=normal(3000, seed=2), seeds=0, positions=0, logprobs=9
    )
    expected = torch.log_softmax(logits.double(), -1)
    top = expected.sort(dim=-1, descending=True, stable=True)
    assert drawn.logprob is not None
    assert drawn.top_ids is not None
    assert torch.equal(drawn.top_ids, top.indices[:, :9])
    for got, want in (
        (drawn.logprob, expected.gather(1, drawn.ids[:, None])[:, 0]),
        (drawn.top_logprobs, top.values[:, :9]),
    ):
        budget = 2 * (torch.log_softmax(logits, -1) - expected).abs().max() + 2e-6
        assert (got.double() - want).abs().max() <= budget


def test_the_number_of_log_probabilities_does_not_change_the_draw(level: str) -> None:
    logits = normal(5, 3000)
    plain = pk.sample(logits, seeds=0, positions=0, top_p=0.9)
    assert (plain.logprob, plain.top_ids) == (None, None)
    for n in (0, 1, 3000):
        assert torch.equal(pk.sample(logits, seeds=0, positions=0, top_p=0.9, logprobs=n).ids, plain.ids)


# Bits


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 0.9},
    "top_k": {"top_k": 50, "top_p": 0.9, "temperature": 0.8},
    "top_k_searched": {"top_k": 5000},
    "top_p": {"top_p": 0.95, "temperature": 1.5},
    "min_p": {"min_p": 0.01, "temperature": 1.5},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_bits_do_not_change_with_batch_slot_or_threads(name: str, level: str, threads: Any) -> None:
    logits = normal(9, 50000)
    seeds, positions = torch.arange(9) + 5, torch.arange(9) * 3
    common = {**OPTIONS[name], "logprobs": 3, "logprobs_mode": "processed"}
    threads(1)
    alone = [
        pk.sample(logits[i : i + 1], seeds=seeds[i : i + 1], positions=positions[i : i + 1], **common) for i in range(9)
    ]
    for count in (1, 2, 3):
        threads(count)
        order = torch.randperm(9, generator=torch.Generator().manual_seed(count))
        batch = pk.sample(logits[order], seeds=seeds[order], positions=positions[order], **common)
        single = pk.sample(logits[:1], seeds=seeds[:1], positions=positions[:1], **common)
        for got, want in zip(single, alone[0], strict=True):
            assert torch.equal(got, want)
        for slot, row in enumerate(order.tolist()):
            for got, want in zip(batch, alone[row], strict=True):
                assert torch.equal(got[slot : slot + 1], want)


def test_a_plan_replays_with_fresh_positions(level: str) -> None:
    logits, positions = normal(3, 2000), torch.zeros(3, dtype=torch.int64)
    options = {
        "temperature": torch.full((3,), 0.8),
        "top_k": torch.full((3,), 20, dtype=torch.int32),
        "top_p": torch.full((3,), 0.9),
        "min_p": torch.zeros(3),
        "seeds": torch.arange(3),
        "positions": positions,
    }
    out = pk.Sampled(torch.empty(3, dtype=torch.int64), torch.empty(3, dtype=torch.bool))
    with native.record() as plan:
        pk.sample(logits, **options, out=out)
    for position in (0, 1, 2):
        positions.fill_(position)
        plan.run()
        assert torch.equal(out.ids, pk.sample(logits, **options).ids)


# Errors


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"temperature": -1.0}, r"temperature\[0\] must be at least 0 and finite, got -1"),
        ({"temperature": torch.tensor([1.0, math.nan])}, r"temperature\[1\] must be at least 0 and finite, got nan"),
        ({"temperature": INF}, r"temperature\[0\] must be at least 0 and finite, got inf"),
        ({"top_p": -0.5}, r"top_p\[0\] must be at least 0, got -0.5"),
        ({"min_p": 1.5}, r"min_p\[0\] must be from 0 to 1, got 1.5"),
        ({"positions": -3}, r"positions\[0\] must be at least 0 .* got -3"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty\[0\] must be above 0 and finite, got 0"),
        ({"presence_penalty": math.nan}, r"presence_penalty\[0\] must be finite, got nan"),
        ({"frequency_penalty": INF}, r"frequency_penalty\[0\] must be finite, got inf"),
        ({"prompt_ids": torch.tensor([[1, -1], [0, 50]])}, r"prompt_ids\[3\] must be .* below vocab \(50\), got 50"),
        ({"output_ids": torch.tensor([[-2], [0]])}, r"output_ids\[0\] must be at least -1 .* got -2"),
        ({"logprobs": -1}, r"logprobs must be None or an integer of at least 0, got -1"),
        ({"logprobs": 51}, r"at most vocab \(50\) entries"),
        ({"logprobs_mode": "cooked"}, r"logprobs_mode must be one of raw, processed, got 'cooked'"),
        ({"top_k": torch.ones(2)}, r"top_k must be int32, got float32"),
        ({"seeds": torch.zeros(3, dtype=torch.int64)}, r"seeds must have shape \[batch\] with batch=2"),
        ({"allowed_mask": torch.ones(2, 49, dtype=torch.bool)}, r"allowed_mask must have shape .*, got \[2, 49\]"),
    ],
)
def test_a_wrong_option_is_an_error_before_anything_is_written(options: dict[str, Any], text: str) -> None:
    out = pk.Sampled(torch.full((2,), -77), torch.zeros(2, dtype=torch.bool))
    with pytest.raises(ValueError, match=text):
        pk.sample(normal(2, 50), **{"seeds": 0, "positions": 0, "out": out, **options})
    assert out.ids.tolist() == [-77, -77]


def test_logits_must_be_a_tensor_with_a_vocabulary() -> None:
    with pytest.raises(TypeError, match=r"logits must be a torch\.Tensor, got list"):
        pk.sample([[1.0]], seeds=0, positions=0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="vocab must be at least 1, got 0"):
        pk.sample(torch.empty(2, 0), seeds=0, positions=0)
    assert pk.sample(torch.empty(0, 5), seeds=0, positions=0).ids.shape == (0,)


@pytest.mark.parametrize("case", list(cases("sample", "smoke")), ids=str)
def test_smoke_cases_pass_with_one_thread_and_with_three(case: Case, threads: Any) -> None:
    for count in (1, 3):
        threads(count)
        check_case(case, run_cpu)
