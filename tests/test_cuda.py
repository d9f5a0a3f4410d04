"""The CUDA backend in the emulation: every op against the reference, no fault, and the same bits whatever the schedule."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from pykernels.contract import OPS, native_arguments
from pykernels.cuda import CudaBackend
from pykernels.testing import Case, cases
from pykernels.testing.compare import Snapshot, judge, same_bits
from pykernels.testing.emulated_cuda import EmulatedCuda
from pykernels.testing.emulation_build import available
from pykernels.testing.factories import narrowed

pytestmark = pytest.mark.skipif(available() is not None, reason=str(available()))

OTHER_SCHEDULES = ({"schedule": "random", "seed": 2}, {"schedule": "random", "seed": 3})  # than forward
ATTENTION = ("prefill_attention", "paged_prefill_attention", "paged_decode_attention")
TENSOR_CORES = ATTENTION  # take 16-bit floats: cases in float32 are cast to both kinds
QUICK = ("mask_", "heads_71", "padded_rows", "long_window")  # of attention, beside the smoke subset; the rest is slow


def table() -> list[Any]:
    """Every case: (case, the dtype that its float32 tensors are cast to or None)."""
    found = []
    for op in OPS:
        for case in cases(op):
            dtypes = (torch.bfloat16, torch.float16) if op in TENSOR_CORES and is_float32(case) else (None,)
            slow = op in ATTENTION and not case.smoke and not case.name.startswith(QUICK)
            marks = [pytest.mark.slow] if slow else []
            found += [
                pytest.param(case, d, id=f"{case}-{d}" if d else str(case), marks=marks)
                for d in (dtypes if case.smoke or len(dtypes) == 1 else dtypes[:1])
            ]
    return found


def is_float32(case: Case) -> bool:
    return case.args()["q"].dtype == torch.float32


def arguments(case: Case, dtype: torch.dtype | None, device: str = "cpu") -> dict[str, Any]:
    """The case's arguments, numbers in float32 cast to `dtype`."""
    args = case.args(device)
    return args if dtype is None else narrowed(args, dtype)


def capabilities(op: str, args: dict[str, Any]) -> tuple[int, ...]:
    """Devices on which the call runs: two where it has a kernel of its own on sm_90."""
    on_wgmma = getattr(EmulatedCuda().native(), f"{op}_on_wgmma", None)
    return (90, 80) if on_wgmma is not None and on_wgmma(*native_arguments(OPS[op], args), 90) else (90,)


@pytest.mark.parametrize(("case", "dtype"), table())
def test_agrees_with_the_reference_under_every_schedule(case: Case, dtype: torch.dtype | None) -> None:
    if not hasattr(EmulatedCuda().native(), case.op):
        pytest.skip(f"{case.op} has no CUDA kernel")
    args = arguments(case, dtype)
    if reasons := EmulatedCuda().refuses(case.op, args):
        pytest.skip("; ".join(reasons))
    for capability in capabilities(case.op, args):
        backend, args = EmulatedCuda(capability=capability), arguments(case, dtype)
        before = Snapshot(args)
        backend.run(case.op, args)
        assert not [v.reason for v in judge(case.op, before, args) if not v.ok], capability
        assert backend.report.counters["matrix_bank_conflicts"] == 0
        for settings in OTHER_SCHEDULES:
            again = arguments(case, dtype)
            EmulatedCuda(capability=capability, **settings).run(case.op, again)
            for tensor in OPS[case.op].tensors:
                if tensor.mutated and args[tensor.name] is not None:
                    assert same_bits(again[tensor.name], args[tensor.name]).all(), (capability, settings, tensor.name)


def test_a_key_above_all_others_gives_its_value_exactly() -> None:
    """Its weight is 1 however large its logit: the maximum is subtracted before a product with the scale rounds."""
    case = next(c for c in cases("prefill_attention") if c.name == "huge_logits")
    for capability in (90, 80):
        args = arguments(case, torch.bfloat16) | {"causal": False}
        EmulatedCuda(races=False, capability=capability).run("prefill_attention", args)
        group = args["q"].shape[1] // args["k"].shape[1]
        q, k, v = args["q"].double(), *(args[n].repeat_interleave(group, 1) for n in "kv")
        found = 0
        ends = list(zip(args["cu_seqlens_q"].tolist(), args["cu_seqlens_k"].tolist(), strict=True))
        for (q0, k0), (q1, k1) in pairwise(ends):
            logits = torch.einsum("qhd,khd->qhk", q[q0:q1], k[k0:k1].double()) * args["softmax_scale"]
            best = logits.topk(2, dim=-1)
            clear = best.values[..., 0] - best.values[..., 1] > 200
            values = v[k0:k1].gather(0, best.indices[..., :1].expand(-1, -1, v.shape[-1]))
            assert torch.equal(args["out"][q0:q1][clear], values[clear]), capability
            found += int(clear.sum())
        assert found > 500


@pytest.mark.parametrize("op", ["copy_pages", "swap_pages"])
@pytest.mark.parametrize("name", ["src_pages", "dst_pages"])
def test_a_page_that_does_not_exist_is_neither_read_nor_written(op: str, name: str) -> None:
    case = next(c for c in cases(op) if c.name == "int8_token")
    args, whole = case.args(), case.args()
    EmulatedCuda().run(op, whole)
    pages = args["k_cache" if op == "copy_pages" else {"src_pages": "k_from", "dst_pages": "k_to"}[name]].shape[0]
    args[name][:3] = torch.tensor([-1, pages, 1 << 40])
    missed = case.args()["dst_pages"][:3]
    before = case.args()
    EmulatedCuda().run(op, args)  # reports a fault for any access outside of the tensors
    for tensor in OPS[op].tensors:
        if tensor.mutated:
            value = args[tensor.name]
            others = [p for p in range(value.shape[0]) if p not in missed]
            assert same_bits(value[others], whole[tensor.name][others]).all()
            if name == "dst_pages" or op == "swap_pages":
                assert same_bits(value[missed], before[tensor.name][missed]).all()


def decode_case(name: str) -> dict[str, Any]:
    case = next(c for c in cases("paged_decode_attention") if c.name == name)
    return arguments(case, torch.bfloat16)


def decoded(args: dict[str, Any], **changes: Any) -> dict[str, Any]:
    args = args | changes
    args |= {name: torch.full_like(args[name], torch.nan) for name in ("out", "lse") if args[name] is not None}
    EmulatedCuda(races=False).run("paged_decode_attention", args)
    return args


def test_a_request_has_the_same_bits_alone_in_a_batch_and_with_a_wider_table() -> None:
    args = decode_case("long")
    together = decoded(args, lse=None)
    # Room for 64 splits and more, of which the size of a split must not depend either.
    wide = torch.nn.functional.pad(args["block_table"], (0, 2000), value=-1)
    assert torch.equal(decoded(args, lse=None, block_table=wide)["out"], together["out"])
    for b in range(args["q"].shape[0]):
        rows = {n: args[n][b : b + 1] for n in ("q", "block_table", "seqlens_k", "out")}
        assert torch.equal(decoded(args, lse=None, **rows)["out"][0], together["out"][b])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("hidden", [96, 33])  # by 128-bit accesses, and one by one
def test_a_norm_is_of_the_rounded_sum_whether_it_is_kept_or_not(dtype: torch.dtype, hidden: int) -> None:
    case = next(c for c in cases("rms_norm") if c.args()["residual_out"] is not None)
    draw = torch.Generator().manual_seed(3)
    x, residual = (torch.randn(40, hidden, generator=draw).to(dtype) for _ in range(2))
    args = case.args() | {"x": x, "residual": residual, "weight": torch.ones(hidden)}
    outs = [torch.empty(40, hidden) for _ in range(2)]
    EmulatedCuda().run("rms_norm", args | {"out": outs[0], "residual_out": torch.empty_like(x)})
    EmulatedCuda().run("rms_norm", args | {"out": outs[1], "residual_out": None})
    assert torch.equal(*outs)


def test_angles_are_exact_at_positions_in_the_millions() -> None:
    case = next(c for c in cases("rotary_embedding") if c.name == "half_split")
    args = case.args()
    args["positions"] = torch.arange(len(args["positions"])) * 27_644_437 % 10_000_019
    EmulatedCuda().run("rotary_embedding", args)
    angle = args["positions"].double()[:, None, None] * args["inv_freq"].double()
    cosine, sine = angle.cos() * args["rope_scale"], angle.sin() * args["rope_scale"]
    a, b = args["q"].double().chunk(2, dim=-1)
    exact = torch.cat([a * cosine - b * sine, a * sine + b * cosine], dim=-1)
    torch.testing.assert_close(args["q_out"].double(), exact, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("split_size", [1, 7, 33, 100])
def test_any_split_size_changes_only_rounding(split_size: int) -> None:
    args = decode_case("ragged")
    whole, split = decoded(args), decoded(args, split_size=split_size)
    torch.testing.assert_close(split["out"], whole["out"], atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(split["lse"], whole["lse"], atol=2e-5, rtol=1e-5)


def test_decode_needs_exactly_the_workspace_that_it_asks_for() -> None:
    args, backend = decode_case("ragged"), EmulatedCuda()
    size = backend.scratch_bytes("paged_decode_attention", args)
    assert not backend.refuses("paged_decode_attention", args | {"workspace": torch.empty(size, dtype=torch.uint8)})
    (reason,) = backend.refuses(
        "paged_decode_attention", args | {"workspace": torch.empty(size - 1, dtype=torch.uint8)}
    )
    assert str(size) in reason
    askew = torch.empty(size + 1, dtype=torch.uint8)[1:]
    (reason,) = backend.refuses("paged_decode_attention", args | {"workspace": askew})
    assert "aligned" in reason


def test_what_the_kernels_do_not_take_is_refused_with_the_reason() -> None:
    backend = EmulatedCuda()
    for op in ATTENTION:
        case = next(c for c in cases(op) if is_float32(c))
        (reason,) = backend.refuses(op, case.args())
        assert "float16 and bfloat16" in reason
    refused = [c for c in cases("linear") if backend.refuses("linear", c.args())]
    for c in refused:
        args = c.args()
        assert args["layout"] == "rows16" or args["activations"] != "float" or args["x"].shape[0] > 8, c


def test_tensors_in_host_memory_are_refused_by_the_product() -> None:
    case = next(iter(cases("rms_norm")))
    if not CudaBackend().unavailable():
        (reason,) = CudaBackend().refuses("rms_norm", case.args())
        assert "not on a CUDA device" in reason


@pytest.mark.parametrize("op", ["paged_decode_attention", "paged_prefill_attention"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cache", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("scale", [1.0, 2.0**-20, 2.0**5])
def test_every_code_is_widened_exactly(op: str, dtype: torch.dtype, cache: torch.dtype, scale: float) -> None:
    """One key, which takes the whole weight: the output is the row of codes times its scale. Of float8 two are NaN."""
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(cache).view(1, 1, 1, 256)
    case = next(c for c in cases(op) if c.name == "int8")
    args = case.args() | {
        "q": torch.ones(1, 1, 256, dtype=dtype),
        "k_cache": torch.ones(1, 1, 1, 256).to(cache),
        "v_cache": codes,
        "k_scale": torch.full((1, 1, 1), 0.5),
        "v_scale": torch.full((1, 1, 1), scale),
        "block_table": torch.zeros(1, 1, dtype=torch.int32),
        "seqlens_k": torch.ones(1, dtype=torch.int32),
        "out": torch.full((1, 1, 256), 3.0, dtype=dtype),
        "lse": None,
    }
    if op == "paged_prefill_attention":
        args |= {"cu_seqlens_q": torch.tensor([0, 1], dtype=torch.int32), "max_seqlen_q": 1, "max_seqlen_k": 1}
    EmulatedCuda().run(op, args)
    exact = (codes.flatten().double() * scale).to(dtype)
    torch.testing.assert_close(args["out"].flatten(), exact, rtol=0, atol=0, equal_nan=True)
