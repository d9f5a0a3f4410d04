"""The sampling reference: the published random stream, kept sets, penalties, frequencies, edge rows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pykernels.reference.sampling import penalise, philox4x32, philox_uniform, sample, uniform, warp

WORD = 0xFFFFFFFF
INF = math.inf
NAMES = ("ids", "valid", "logprob", "top_ids", "top_logprobs")
OFF: dict[str, Any] = {
    "repetition_penalty": None,
    "presence_penalty": None,
    "frequency_penalty": None,
    "prompt_ids": None,
    "output_ids": None,
    "logit_bias": None,
    "allowed_mask": None,
    "logprobs_mode": "raw",
}


def column(value: Any, batch: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.as_tensor(value, dtype=dtype).expand(batch)


def run(logits: torch.Tensor, **options: Any) -> dict[str, torch.Tensor]:
    """`sample` with plain numbers for options; row b has seed b unless told otherwise."""
    n = logits.shape[0]
    args = {**OFF, **options}
    for name, off, dtype in (
        ("temperature", 1.0, torch.float32),
        ("top_k", 0, torch.int32),
        ("top_p", 1.0, torch.float32),
        ("min_p", 0.0, torch.float32),
        ("positions", 0, torch.int64),
    ):
        args[name] = column(options.get(name, off), n, dtype)
    args["seeds"] = torch.as_tensor(options.get("seeds", torch.arange(n)))
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        if options.get(name) is not None:
            args[name] = column(options[name], n, torch.float32)
    return dict(zip(NAMES, sample(logits=logits, **args), strict=True))


def kept(
    logits: torch.Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> list[int]:
    """The ids that one row of logits may return."""
    options = (
        torch.tensor([temperature]),
        torch.tensor([top_k], dtype=torch.int32),
        torch.tensor([top_p]),
        torch.tensor([min_p]),
    )
    log_p = warp(logits[None].float(), *options, torch.float64)[0]
    assert float(log_p.exp().sum()) == pytest.approx(1, abs=1e-12)
    return torch.nonzero(log_p > -INF).flatten().tolist()


def normal(*shape: int, seed: int = 0, std: float = 2.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * std


# Random numbers


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # Random123's kat_vectors, philox4x32 10
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((WORD,) * 4, (WORD,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_words(
    counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]
) -> None:
    assert tuple(philox4x32(torch.tensor(counter), torch.tensor(key)).tolist()) == words


def philox_words(counter: list[int], key: list[int]) -> list[int]:
    """The cipher in Python integers."""
    for _ in range(10):
        p0, p1 = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [(p1 >> 32) ^ counter[1] ^ key[0], p1 & WORD, (p0 >> 32) ^ counter[3] ^ key[1], p0 & WORD]
        key = [(key[0] + 0x9E3779B9) & WORD, (key[1] + 0xBB67AE85) & WORD]
    return counter


@pytest.mark.parametrize("purpose", [0, 1, 2])
def test_a_uniform_is_keyed_by_seed_position_purpose_and_index(purpose: int) -> None:
    seeds, positions = [0, -1, 2**40 + 17, -(2**63)], [0, 2**35 + 3, 511, 2**32 - 1]
    got = uniform(torch.tensor(seeds), torch.tensor(positions), 11, purpose)
    for b in range(4):
        seed, position = seeds[b] % 2**64, positions[b]
        for i in range(11):
            counter = [i // 4, purpose, position & WORD, position >> 32]
            word = philox_words(counter, [seed & WORD, seed >> 32])[i % 4]
            assert got[b, i].item() == ((word >> 9) + 0.5) / 2**23


def test_philox_uniform_is_the_sampling_stream_and_stays_inside_0_and_1() -> None:
    seeds, positions = torch.arange(50), torch.arange(50) * 3
    (u,) = philox_uniform(seeds=seeds, positions=positions, count=5000)
    assert torch.equal(u.float(), uniform(seeds, positions, 5000, 0))
    assert u.min() > 0
    assert u.max() < 1
    counts = torch.histc(u, 50, 0, 1)
    assert chisquare(counts.numpy()).pvalue > 1e-3
    words = torch.tensor([0, WORD])
    assert (((words >> 9).float() + 0.5) * 2**-23).tolist() == [2**-24, 1 - 2**-24]


# Kept sets


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(5, 1, 0), (0, 0.7, 0), (0, 1, 0.1), (20, 0.8, 0), (0, 0.6, 0.02), (9, 0.5, 0.3)]
)
def test_kept_sets_match_the_warpers_of_transformers(seed: int, top_k: int, top_p: float, min_p: float) -> None:
    logits = normal(100, seed=seed)
    scores = logits[None].double() / 0.8
    if min_p:
        scores = MinPLogitsWarper(min_p)(None, scores)
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    assert kept(logits, 0.8, top_k, top_p, min_p) == torch.nonzero(scores[0] > -INF).flatten().tolist()


def test_top_k_keeps_exactly_k_and_breaks_ties_by_id() -> None:
    logits = torch.tensor([1.0, 2.0, 2.0, 3.0, 2.0, 0.0])
    assert kept(logits, top_k=3) == [1, 2, 3]
    assert kept(logits, top_k=1) == [3]


@pytest.mark.parametrize("k", [0, -1, -7, 6, 7, 2**31 - 1])
def test_top_k_outside_the_vocabulary_is_off(k: int) -> None:
    assert kept(torch.tensor([1.0, 2.0, 2.0, 3.0, 2.0, 0.0]), top_k=k) == list(range(6))


def test_top_p_keeps_the_crossing_token() -> None:
    logits = torch.log(torch.tensor([0.5, 0.25, 0.125, 0.125]))
    assert kept(logits, top_p=0.5) == [0]  # reached exactly
    assert kept(logits, top_p=0.51) == [0, 1]
    assert kept(logits, top_p=0.75) == [0, 1]
    assert kept(logits, top_p=0.76) == [0, 1, 2]


@pytest.mark.parametrize("top_p", [0.0, -1.0, 1e-30])
def test_top_p_keeps_the_first_token_always(top_p: float) -> None:
    assert kept(torch.tensor([1.0, 3.0, 3.0]), top_p=top_p) == [1]


def test_top_p_of_one_keeps_every_token_of_the_support() -> None:
    logits = torch.cat((torch.zeros(1), torch.full((1000,), -17.0)))  # the tail is lost in a float32 sum
    assert len(kept(logits, top_p=1.0)) == 1001


def test_min_p_is_relative_to_the_largest_probability_after_temperature() -> None:
    logits = torch.log(torch.tensor([0.4, 0.3, 0.2, 0.1]))
    assert kept(logits, min_p=0.45) == [0, 1, 2]
    assert kept(logits, temperature=0.5, min_p=0.45) == [0, 1]  # squares: 0.16, 0.09, 0.04, 0.01
    assert kept(logits, min_p=5.0) == [0]


def test_probabilities_are_renormalised_after_top_k_before_top_p() -> None:
    logits = torch.log(torch.tensor([0.3, 0.2, 0.2, 0.15, 0.15]))
    assert kept(logits, top_p=0.55) == [0, 1, 2]
    assert kept(logits, top_k=2, top_p=0.55) == [0]  # 0.3 / 0.5 reaches it


def test_a_probability_that_is_zero_in_float32_is_outside_the_support() -> None:
    logits = torch.tensor([0.0, -103.0, -104.0, -1e4])
    assert kept(logits) == [0, 1]
    assert kept(logits, temperature=2.0) == [0, 1, 2]


# Draws


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 2.5},
        {"top_k": 6},
        {"top_p": 0.8},
        {"min_p": 0.2},
        {"temperature": 1.7, "top_k": 9, "top_p": 0.9},
    ],
)
def test_draws_are_distributed_as_the_warped_probabilities(options: dict[str, Any]) -> None:
    draws, logits = 8000, normal(13, seed=4, std=1.5)
    got = run(logits.expand(draws, -1), **options)["ids"]
    order = logits.argsort(descending=True)
    p = torch.softmax(logits.double() / options.get("temperature", 1.0), -1)
    limit = options.get("top_k", 13)
    p[order[limit:]] = 0
    p[p < options.get("min_p", 0.0) * p.max()] = 0
    p /= p.sum()
    if "top_p" in options:
        ahead = p[order].cumsum(-1) - p[order]
        p[order[ahead >= options["top_p"]]] = 0
    p /= p.sum()
    counts = torch.bincount(got, minlength=13)
    assert (counts[p == 0] == 0).all()
    assert chisquare(counts[p > 0].numpy(), (p[p > 0] * draws).numpy()).pvalue > 1e-3


def test_the_tail_of_a_large_vocabulary_is_drawn_as_often_as_it_should_be() -> None:
    draws, vocab = 2000, 500
    logits = torch.cat((torch.tensor([6.0, 5.0]), torch.zeros(vocab - 2)))
    got = run(logits.expand(draws, -1), positions=torch.arange(draws), seeds=torch.zeros(draws, dtype=torch.int64))[
        "ids"
    ]
    p = torch.softmax(logits.double(), -1)
    tail = torch.div(got[got >= 2] - 2, 125, rounding_mode="floor").clamp(max=3)
    observed = [int((got == 0).sum()), int((got == 1).sum()), *torch.bincount(tail, minlength=4).tolist()]
    expected = [p[0], p[1], p[2:127].sum(), p[127:252].sum(), p[252:377].sum(), p[377:].sum()]
    assert chisquare(observed, [float(e) * draws for e in expected]).pvalue > 1e-3


def test_the_winner_is_the_largest_log_p_plus_gumbel_noise() -> None:
    logits = normal(20, 300, seed=8)
    u = uniform(torch.arange(20), torch.full((20,), 9), 300, 0).double()
    assert torch.equal(run(logits, positions=9)["ids"], (logits.double() - torch.log(-torch.log(u))).argmax(-1))


def test_a_row_does_not_depend_on_its_neighbours_or_its_place() -> None:
    logits = normal(6, 50)
    options = {
        "temperature": [0.5, 0.0, 1.0, 2.0, 1e-3, 1.0],
        "top_k": [3, 0, 10, 1, 0, 50],
        "top_p": [0.9, 0.1, 1, 1, 0.5, 0.3],
    }
    seeds, positions = torch.tensor([5, 5, 7, -1, 2**50, 0]), torch.tensor([0, 1, 2, 3, 4, 5])
    whole = run(logits, seeds=seeds, positions=positions, **options)
    for b in range(6):
        alone = run(
            logits[b : b + 1],
            seeds=seeds[b : b + 1],
            positions=positions[b : b + 1],
            **{n: v[b : b + 1] for n, v in options.items()},
        )
        assert all(torch.equal(alone[n], whole[n][b : b + 1]) for n in NAMES)


# Greedy and temperature


def test_temperature_zero_is_the_first_largest_whatever_the_filters_say() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, 2.0]] * 3)
    got = run(logits, temperature=[0.0, 0.0, 1e-8], top_k=[0, 2, 1], top_p=[1.0, 0.01, 1.0], min_p=[1.0, 0.0, 0.0])
    assert got["ids"].tolist() == [1, 1, 1]


def test_temperature_zero_still_obeys_bias_mask_and_penalties() -> None:
    logits = torch.tensor([[1.0, 5.0, 4.5, 2.0]])
    assert run(logits, temperature=0, logit_bias=torch.tensor([9.0, 0, 0, 0]))["ids"].tolist() == [0]
    assert run(logits, temperature=0, allowed_mask=torch.tensor([True, False, False, True]))["ids"].tolist() == [3]
    assert run(logits, temperature=0, presence_penalty=1.0, output_ids=torch.tensor([[1, -1]]))["ids"].tolist() == [2]


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 1e-3])
def test_tiny_temperatures_do_not_overflow(temperature: float) -> None:
    got = run(torch.tensor([[-3e38, 1e5, 9.9e4, 3e4]]), temperature=temperature, logprobs_mode="processed")
    assert got["ids"].tolist() == [1]
    assert got["logprob"].tolist() == [0.0]


# Penalties


def test_repetition_matches_transformers_and_counts_each_token_once() -> None:
    logits = normal(1, 30)
    prompt, output = torch.tensor([[3, 3, 3, 8, -1]]), torch.tensor([[8, 1, 1, -1]])
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([[3, 8, 1]]), logits.clone())
    got = penalise(logits, torch.tensor([1.7]), None, None, prompt, output, None, None)
    assert torch.equal(got, expected)


def test_presence_and_frequency_count_the_output_alone() -> None:
    logits = torch.zeros(1, 6)
    prompt, output = torch.tensor([[0, 1, 5]]), torch.tensor([[1, 2, 2, 2, -1, -1]])
    got = penalise(logits, None, torch.tensor([0.5]), torch.tensor([0.25]), prompt, output, None, None)
    assert got.tolist() == [[0, -0.75, -1.25, 0, 0, 0]]


def test_penalties_follow_bias_and_mask() -> None:
    logits = torch.tensor([[1.0, 1.0, 1.0]])
    bias, allowed = torch.tensor([[-2.0, 1.0, 0.0]]), torch.tensor([True, True, False])
    got = penalise(logits, torch.tensor([2.0]), None, None, torch.tensor([[0, 1, 2]]), None, bias, allowed)
    assert got.tolist() == [[-2.0, 1.0, -INF]]  # (1 - 2) * 2 and (1 + 1) / 2


# Log-probabilities


def test_raw_logprobs_are_of_the_logits_as_given() -> None:
    logits = normal(8, 40)
    got = run(logits, temperature=0.3, top_k=4, logit_bias=normal(40, seed=5), num_logprobs=6)
    expected = torch.log_softmax(logits.double(), -1)
    torch.testing.assert_close(got["logprob"], expected.gather(1, got["ids"][:, None])[:, 0], rtol=0, atol=1e-12)
    values, ids = expected.topk(6)
    assert torch.equal(got["top_ids"], ids)
    torch.testing.assert_close(got["top_logprobs"], values, rtol=0, atol=1e-12)


def test_processed_logprobs_are_of_the_kept_distribution_and_end_with_it() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.4, 0.2, 0.3]]))
    got = run(logits, top_k=2, logprobs_mode="processed", num_logprobs=4)
    assert got["top_ids"].tolist() == [[1, 3, -1, -1]]
    torch.testing.assert_close(got["top_logprobs"].exp(), torch.tensor([[4 / 7, 3 / 7, 0, 0]], dtype=torch.float64))
    assert got["logprob"].item() in got["top_logprobs"][0].tolist()


def test_top_ids_are_ordered_by_probability_then_id() -> None:
    got = run(torch.tensor([[2.0, 3.0, 2.0, 3.0, -INF]]), num_logprobs=5)
    assert got["top_ids"].tolist() == [[1, 3, 0, 2, -1]]


# Rows that cannot be drawn from


def test_rows_of_nan_or_minus_infinity_are_flagged_and_spare_their_neighbours() -> None:
    logits = normal(5, 9)
    logits[1, 4], logits[3] = torch.nan, -INF
    for temperature in (0.0, 1.0):
        got = run(logits, temperature=temperature, num_logprobs=2)
        assert got["valid"].tolist() == [True, False, True, False, True]
        assert got["ids"][[1, 3]].tolist() == [-1, -1]
        assert torch.isnan(got["logprob"]).tolist() == [False, True, False, True, False]
        assert (got["top_ids"][[1, 3]] == -1).all()
        assert torch.isnan(got["top_logprobs"][[1, 3]]).all()
        assert torch.equal(
            got["ids"][[0, 2, 4]], run(logits[[0, 2, 4]], temperature=temperature, seeds=[0, 2, 4])["ids"]
        )


def test_a_mask_that_forbids_everything_makes_the_row_invalid() -> None:
    allowed = torch.ones(2, 5, dtype=torch.bool)
    allowed[0] = False
    assert run(normal(2, 5), allowed_mask=allowed)["valid"].tolist() == [False, True]


def test_a_nan_under_the_mask_still_makes_the_row_invalid() -> None:
    got = run(torch.tensor([[1.0, torch.nan, 2.0]]), allowed_mask=torch.tensor([True, False, True]))
    assert got["valid"].tolist() == [False]


def test_plus_infinity_is_certain_and_several_share() -> None:
    one = torch.tensor([[0.0, INF, 3.0]])
    got = run(one, num_logprobs=3)
    assert (got["ids"].item(), got["logprob"].item()) == (1, 0.0)
    assert got["top_ids"].tolist() == [[1, -1, -1]]
    two = torch.tensor([[INF, 0.0, INF]]).expand(200, -1)
    assert set(run(two)["ids"].tolist()) == {0, 2}
    assert run(two, temperature=0)["ids"].unique().tolist() == [0]


def test_one_token_vocabularies_return_it() -> None:
    got = run(torch.tensor([[-1e30]]), num_logprobs=1)
    assert (got["ids"].item(), got["logprob"].item(), got["top_ids"].item()) == (0, 0.0, 0)
