"""The comparison must be able to fail, and the cases must be what they say."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pykernels.contract import OPS, check
from pykernels.testing import Case, Mismatch, cases, check_case, oracle
from pykernels.testing.compare import input_dtype, spread, within_budget

Args = dict[str, Any]


def compute(op: str, args: Args, dtype: torch.dtype | None = None) -> None:
    """A backend that is right: the reference, in the input's type unless told otherwise."""
    for name, value in oracle(op, args, dtype or input_dtype(OPS[op], args)).items():
        args[name].copy_(value)


def find(op: str, name: str) -> Case:
    return next(c for c in cases(op) if c.name == name)


@pytest.mark.parametrize("op", OPS)
def test_every_case_passes_the_contract_and_every_output_is_poisoned(op: str) -> None:
    names = [c.name for c in cases(op)]
    assert len(set(names)) == len(names)
    for case in cases(op):
        args = case.args()
        check(OPS[op], args)
        for out in OPS[op].outputs:
            value = args[out.name]
            if value is None or any(value is args[t.name] for t in OPS[op].tensors if not t.mutated):
                continue  # in place, or absent
            if value.dtype.is_floating_point:
                assert torch.isnan(value).all(), case
            elif value.dtype != torch.bool:
                assert (value == -77).all(), case


@pytest.mark.parametrize("op", OPS)
def test_a_right_backend_passes_and_one_that_does_nothing_fails(op: str) -> None:
    quick = list(cases(op, "smoke"))
    assert 2 <= len(quick) < len(list(cases(op)))
    for case in quick:
        assert all(v.ok for v in check_case(case, compute))
        with pytest.raises(Mismatch, match=op):
            check_case(case, lambda op, args: None)


def test_cases_are_the_same_every_time() -> None:
    case = find("paged_decode_attention", "int8_token")
    first, second = case.args(), case.args()
    for name, value in first.items():
        if isinstance(value, torch.Tensor):
            other = second[name]
            assert value.stride() == other.stride()
            assert torch.equal(
                value.nan_to_num(7.0) if value.is_floating_point() else value,
                other.nan_to_num(7.0) if other.is_floating_point() else other,
            )


def test_an_unknown_subset_is_refused() -> None:
    with pytest.raises(ValueError, match='subset must be "smoke" or "full"'):
        next(cases("sample", "some"))


def ignore(name: str, value: Any) -> Callable[[str, Args], None]:
    """A backend that is right but for one argument, which it takes to be `value`."""

    def run(op: str, args: Args) -> None:
        compute(op, {**args, name: value(args[name]) if callable(value) else value})

    return run


WRONG = {
    "causal": ("prefill_attention", "bfloat16", ignore("causal", False)),
    "window": ("paged_decode_attention", "mask_window_left", ignore("window_left", 21)),
    "softcap": ("prefill_attention", "mask_softcap", ignore("softcap", 5.01)),
    "alibi": ("paged_prefill_attention", "mask_alibi", ignore("alibi_slopes", None)),
    "sinks": ("paged_decode_attention", "bfloat16_all", ignore("sinks", None)),
    "scale": ("prefill_attention", "ragged", ignore("softmax_scale", lambda s: s * 1.0001)),
    "length": ("paged_decode_attention", "bfloat16", ignore("seqlens_k", lambda n: (n - 1).clamp(min=0))),
    "k_scale": ("paged_decode_attention", "int8_head_float16", ignore("k_scale", lambda s: s.flip(0))),
    "v_scale": ("paged_prefill_attention", "fp8_token", ignore("v_scale", lambda s: s.nan_to_num(1).clamp(max=0.006))),
    "pages": ("paged_decode_attention", "bfloat16", ignore("block_table", lambda t: t.flip(0))),
    "eps": ("rms_norm", "tiny", ignore("eps", 0.0)),
    "residual": ("rms_norm", "residual_kept", ignore("residual", None)),
    "interleaved": ("rotary_embedding", "rotary_bfloat16", ignore("interleaved", True)),
    "positions": ("rotary_embedding", "rotary_bfloat16", ignore("positions", lambda p: p + 1)),
    "kind": ("gated_activation", "silu_bfloat16", ignore("kind", "gelu_tanh")),
    "activations": ("linear", "q4_1_rows16_int8", ignore("activations", "float")),
    "bias": ("linear", "dense_bfloat16", ignore("bias", None)),
    "format": ("linear", "int8_plain", ignore("weight_format", "fp8_e4m3")),
    "row": ("embedding", "dense", ignore("ids", lambda i: i.flip(0))),
    "seed": ("sample", "plain", ignore("seeds", lambda s: s ^ (1 << 40))),
    "top_k": ("sample", "processed", ignore("top_k", lambda k: torch.where(k == 3, 4, k))),
    "logprobs": ("sample", "temperature", ignore("logprobs_mode", "processed")),
    "draft": ("verify_draft", "mixed", ignore("draft_probs", None)),
    "stream": ("philox_uniform", "odd", ignore("positions", lambda p: p & 0xFFFFFFFF)),
    "slot": ("append_kv", "halves", ignore("slot_mapping", lambda s: s.clamp(min=0))),
    "copy": ("copy_pages", "halves", ignore("dst_pages", lambda d: d.flip(0))),
    "swap": ("swap_pages", "int8_in", ignore("src_pages", lambda s: s.flip(0))),
    "merge": ("merge_attention_states", "bfloat16", ignore("lse_a", lambda x: x + 0.1)),
    "gather": ("gather_kv", "int8_token", ignore("k_scale", lambda s: s * 1.01)),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_backend_with_one_mistake_fails(mistake: str) -> None:
    op, name, run = WRONG[mistake]
    case = find(op, name)
    assert all(v.ok for v in check_case(case, compute))
    with pytest.raises(Mismatch, match=rf"{op}\[{name}\]"):
        check_case(case, run)


def flip_code(op: str, args: Args) -> None:
    compute(op, args)
    slot = int(args["slot_mapping"][0])
    page, offset = divmod(slot, args["k_cache"].shape[1])
    raw = args["k_cache"].view(torch.uint8)
    raw[page, offset, 0, 5] ^= 1


@pytest.mark.parametrize("name", ["int8_token", "fp8_tensor"])
def test_a_code_that_is_off_by_one_fails(name: str) -> None:
    with pytest.raises(Mismatch, match="k_cache: must be exact; 1 of"):
        check_case(find("append_kv", name), flip_code)


@pytest.mark.parametrize("name", ["int8_token", "fp8_token", "int8_head_float16"])
def test_a_rotated_code_may_not_leave_its_key_by_more_than_rounding(name: str) -> None:
    case = find("rope_append_kv", name)

    def shifted(op: str, args: Args) -> None:
        compute(op, args)
        page, offset = divmod(int(args["slot_mapping"][3]), args["k_cache"].shape[1])
        row = args["k_cache"][page, offset, 0].view(torch.uint8)
        row[int(args["k_cache"][page, offset, 0].float().abs().argmin())] ^= 2

    def rescaled(op: str, args: Args) -> None:
        compute(op, args)
        args["k_scale"] *= 1.001

    def strayed(op: str, args: Args) -> None:
        compute(op, args)
        used = set(args["slot_mapping"].tolist())
        free = next(s for s in range(args["k_cache"].shape[1]) if s not in used)
        args["k_cache"][0, free, 0, 0] = 3

    assert all(v.ok for v in check_case(case, compute))
    for wrong in (shifted, strayed, *([rescaled] if "token" in name else [])):
        with pytest.raises(Mismatch, match=r"k_cache|k_scale"):
            check_case(case, wrong)


def test_writing_around_an_output_fails() -> None:
    def run(op: str, args: Args) -> None:
        compute(op, args)
        args["out"]._base.view(-1)[0] = 0.0

    with pytest.raises(Mismatch, match="wrote 1 elements around its outputs"):
        check_case(find("rms_norm", "gaps"), run)


def test_writing_to_an_input_fails() -> None:
    def run(op: str, args: Args) -> None:
        compute(op, args)
        args["x"][0, 0] += 1

    with pytest.raises(Mismatch, match="wrote to its input x"):
        check_case(find("rms_norm", "width_129"), run)


def test_nan_and_infinity_must_stand_where_the_reference_has_them() -> None:
    exact = torch.tensor([1.0, math.nan, -math.inf], dtype=torch.float64)
    assert within_budget("x", exact.float(), exact, 0.0, 0.0).ok
    for wrong in (
        [math.nan, math.nan, -math.inf],
        [1.0, 0.0, -math.inf],
        [1.0, math.nan, math.inf],
        [math.inf, math.nan, -math.inf],
    ):
        assert not within_budget("x", torch.tensor(wrong), exact, 0.0, 1e9).ok


def test_a_same_dtype_result_that_overflows_grants_no_budget() -> None:
    exact = torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert spread(torch.tensor([1.0, math.inf]), exact) == 0.0
    verdict = within_budget("x", torch.tensor([1.0, 2.5]), exact, 0.0, 0.1)
    assert verdict.budget == pytest.approx(0.1)
    assert "error 0.5 exceeds budget 0.1" in verdict.reason
    assert "worst at (1,): got 2.5, expected 2" in verdict.reason


def test_the_cases_hold_what_the_contract_asks_of_them() -> None:
    made = [c.args() for c in cases("paged_decode_attention")]
    assert {a["k_cache"].shape[1] for a in made} >= {1, 3, 16, 64}
    assert {a["q"].shape[1] / a["k_cache"].shape[2] for a in made} >= {1, 2, 3, 4, 7, 8, 12, 71}
    assert {n for a in made for n in a["seqlens_k"].tolist()} >= {0, 1, 127, 128, 129, 239}
    assert {a["k_cache"].dtype for a in made} >= {
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int8,
        torch.float8_e4m3fn,
    }
    assert any(a["k_cache"]._base is not None and a["k_cache"]._base is a["v_cache"]._base for a in made)
    assert all((a["block_table"][:, -1] == -1).all() for a in made)
    for a in made:
        if a["k_cache"].is_floating_point() and a["k_scale"] is None:
            assert torch.isnan(a["k_cache"].float()).any()


def test_vast_caches_reach_past_two_to_the_31_elements() -> None:
    for op in ("paged_decode_attention", "paged_prefill_attention"):
        args = find(op, "int8_vast").args()
        reached = args["block_table"].max() * args["k_cache"].stride(0)
        assert reached > 2**31
    args = find("append_kv", "int8_vast").args()
    assert args["slot_mapping"].max() // 3 * args["k_cache"].stride(0) > 2**31


def test_softmax_inputs_are_sharp() -> None:
    args = find("prefill_attention", "length_239").args()
    q, k = args["q"][:, :1].double(), args["k"][:, :1].double()
    p = torch.softmax((q[:, 0] @ k[:, 0].T) * args["softmax_scale"], -1)
    assert p.amax(-1).median() > 0.3  # a uniform one would be 1 / 239
