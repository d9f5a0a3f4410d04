"""Sampling kernels in the emulation, beyond the case tables: bits, frequencies, bounded searches, untrusted indices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scipy.stats import chisquare

from pykernels.contract import OPS
from pykernels.testing import Case, cases, check_case
from pykernels.testing.compare import oracle, same_bits
from pykernels.testing.emulated_cuda import EmulatedCuda
from pykernels.testing.emulation_build import available

pytestmark = pytest.mark.skipif(available() is not None, reason=str(available()))

CHUNK = 2048  # csrc/cuda/token_scan.h: tokens of a block
LISTED = 4096  # csrc/cuda/device/token_select.cuh: candidates that are searched in shared memory


def sample_args(logits: torch.Tensor, logprobs: int | None = None, **options: Any) -> dict[str, Any]:
    """Arguments of `sample`; row options are numbers or lists, seeds 0, positions the row's index."""
    n = logits.shape[0]

    def column(name: str, off: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(options.pop(name, off), dtype=dtype).expand(n).contiguous()

    args: dict[str, Any] = {arg.name: None for arg in OPS["sample"].args} | {"logits": logits}
    args |= {name: column(name, off, torch.float32) for name, off in (("temperature", 1), ("top_p", 1), ("min_p", 0))}
    args["top_k"] = column("top_k", 0, torch.int32)
    args["seeds"] = column("seeds", 0, torch.int64)
    args["positions"] = torch.as_tensor(options.pop("positions", range(n)), dtype=torch.int64)
    args |= {"logprobs_mode": "raw", "ids": torch.full((n,), -7), "valid": torch.zeros(n, dtype=torch.bool)}
    if logprobs is not None:
        args["logprob"] = torch.empty(n)
        args["top_ids"] = torch.empty(n, logprobs, dtype=torch.int64)
        args["top_logprobs"] = torch.empty(n, logprobs)
    return args | options


def run(args: dict[str, Any], op: str = "sample") -> dict[str, Any]:
    EmulatedCuda().run(op, args)
    return args


def normal(*shape: int, seed: int = 0, std: float = 3.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * std


def assert_reference(args: dict[str, Any]) -> None:
    """Ids, validity and top ids exactly; log-probabilities to float32."""
    expected = oracle("sample", args)
    run(args)
    for name in ("ids", "valid", "top_ids"):
        if args[name] is not None:
            assert torch.equal(args[name], expected[name].to(args[name].dtype)), name
    for name in ("logprob", "top_logprobs"):
        if args[name] is not None:
            torch.testing.assert_close(args[name], expected[name].float(), rtol=1e-6, atol=2e-6, equal_nan=True)


def test_a_row_has_the_same_bits_alone_as_in_any_slot() -> None:
    logits = normal(5, CHUNK + 400)
    options = {
        "temperature": [1.0, 0.7, 0.0, 1.3, 1.0],
        "top_k": [0, 40, 0, 0, 2000],
        "top_p": [1.0, 0.9, 1.0, 0.95, 0.8],
    }
    together = run(sample_args(logits, 8, **options, logprobs_mode="processed"))
    for r in reversed(range(5)):
        own = {name: values[r] for name, values in options.items()}
        alone = run(sample_args(logits[r : r + 1], 8, **own, positions=[r], logprobs_mode="processed"))
        for name in ("ids", "logprob", "top_ids", "top_logprobs"):
            assert same_bits(alone[name][0], together[name][r]).all(), (r, name)


def test_greedy_takes_the_lowest_id_of_a_tie_across_chunks() -> None:
    logits = torch.zeros(3, 2 * CHUNK + 5)
    logits[0, CHUNK + 3] = logits[0, 2 * CHUNK + 1] = 4.0
    logits[1, CHUNK - 1] = logits[1, CHUNK] = 4.0
    assert run(sample_args(logits, temperature=0.0))["ids"].tolist() == [CHUNK + 3, CHUNK - 1, 0]


@pytest.mark.parametrize(("options", "draws"), [({}, 1000), ({"top_k": 6, "top_p": 0.9}, 300)], ids=str)
def test_draws_have_the_frequencies_of_the_kept_distribution(options: dict[str, Any], draws: int) -> None:
    logits = torch.tensor([1.5, 0.0, -0.7, 2.0, 0.4, -2.0, 1.0, 0.0]).expand(draws, -1)
    args = sample_args(logits, seeds=11, **options)
    from_reference = sample_args(logits[:1], 8, logprobs_mode="processed", **options)
    expected = oracle("sample", from_reference)
    p = torch.zeros(8, dtype=torch.float64)
    kept = expected["top_ids"][0] >= 0
    p[expected["top_ids"][0][kept]] = expected["top_logprobs"][0][kept].double().exp()
    seen = torch.bincount(run(args)["ids"], minlength=8).double()
    assert (seen[p == 0] == 0).all()
    assert chisquare(seen[p > 0], p[p > 0] / p.sum() * draws).pvalue > 1e-3


@pytest.mark.parametrize(
    "options",
    [{"top_k": LISTED + 400}, {"top_p": 0.95}, {"min_p": 0.2}, {"top_k": LISTED + 700, "top_p": 0.9}, {"top_k": 9}],
    ids=str,
)
@pytest.mark.parametrize("logits", ["flat", "ties", "equal"])
def test_more_candidates_than_the_list_holds(options: dict[str, Any], logits: str) -> None:
    rows = {"flat": normal(1, 6001, std=0.3), "ties": normal(1, 6001, std=0.4).round(), "equal": torch.ones(1, 6001)}
    assert_reference(sample_args(rows[logits], 30, logprobs_mode="processed", **options))


def test_a_thousand_top_logprobs() -> None:
    assert_reference(sample_args(normal(1, 5000).bfloat16(), 1000))


def test_history_outside_the_vocabulary_is_skipped() -> None:
    logits = normal(2, 50)
    history = torch.tensor([[3, 50, 1 << 40, -9, 3], [7, -1, -1, -1, 49]])
    penalty = torch.tensor([1.4, 0.6])
    assert_reference(sample_args(logits, 5, repetition_penalty=penalty, frequency_penalty=penalty, output_ids=history))


def test_invalid_rows_leave_their_neighbours_alone() -> None:
    logits = normal(4, CHUNK + 100)
    logits[0, CHUNK + 50] = torch.nan
    logits[2] = -torch.inf
    args = sample_args(logits, 3, top_k=[4, 4, 4, 0])
    assert_reference(args)
    assert args["valid"].tolist() == [False, True, False, True]


def verify_case() -> Case:
    return next(case for case in cases("verify_draft") if case.name == "one_hot_plain")


def test_the_bonus_token_is_what_sample_draws() -> None:
    args = verify_case().args()
    args["draft_ids"] = args["draft_ids"][:0]
    batch = args["temperature"].shape[0]
    args["cu_draft"] = torch.zeros(batch + 1, dtype=torch.int32)
    args["target_logits"] = args["target_logits"][:batch].contiguous()
    run(args, "verify_draft")
    drawn = run(sample_args(args["target_logits"], seeds=args["seeds"], positions=args["positions"]))
    assert torch.equal(args["ids"][:, 0], drawn["ids"])


@pytest.mark.parametrize("entry", [-(2**31), -5, 1 << 20, 2**31 - 1])
def test_draft_bounds_and_ids_that_are_wrong_touch_nothing_outside(entry: int) -> None:
    args = verify_case().args()
    args["draft_ids"][3] = entry
    args["cu_draft"][2] = entry
    run(args, "verify_draft")  # the emulation would report an access outside the tensors
    assert (args["num_accepted"] >= 0).all()
    assert (args["num_accepted"] < args["ids"].shape[1]).all()


def test_refuses_what_does_not_fit_and_says_so() -> None:
    wide = torch.zeros(1, (1 << 20) + 1)
    assert "vocabulary" in EmulatedCuda().refuses("sample", sample_args(wide))[0]
    assert "1024 top logprobs" in EmulatedCuda().refuses("sample", sample_args(torch.zeros(1, 2000), 1025))[0]


@pytest.mark.parametrize("order", ["forward", "reverse"])
def test_every_option_at_once_in_either_order(order: str) -> None:
    case = next(case for case in cases("sample") if case.name == "everything")
    check_case(case, EmulatedCuda(schedule=order).run)
