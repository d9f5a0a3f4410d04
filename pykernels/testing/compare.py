"""The error budget: max|out - ref64| <= 2 x max|same_dtype - ref64| + rounding, and bits for codes and ids.

`ref64` is the reference in float64, `same_dtype` the same formula with operands in the input's type and sums in
float32, `rounding` half a unit in the last place of the output's type at the reference's magnitude. Nothing is tuned by
hand.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..contract import OPS, Op, Tensor, bind_dims
from ..contract.schema import FLOATS

if TYPE_CHECKING:
    from .factories import Case

Results = dict[str, torch.Tensor]
Run = Callable[[str, dict[str, Any]], None]

# Outputs that are compared bit for bit: codes and their scales, token ids, random numbers, copies.
EXACT: dict[str, tuple[str, ...]] = {
    "append_kv": ("k_cache", "v_cache", "k_scale", "v_scale"),
    "rope_append_kv": ("v_cache", "v_scale"),
    "copy_pages": ("k_cache", "v_cache", "k_scale", "v_scale"),
    "swap_pages": ("k_to", "v_to", "k_scale_to", "v_scale_to"),
    "sample": ("ids", "valid", "top_ids"),
    "verify_draft": ("ids", "num_accepted"),
    "philox_uniform": ("out",),
}
SCRATCH = ("workspace",)
CODES = (torch.int8, torch.float8_e4m3fn)


class Mismatch(AssertionError):
    """An output differs from the reference by more than its budget, or memory around it was written."""


@dataclass(frozen=True)
class Verdict:
    """What was found for one output: the largest error, what was allowed, and the reason where it fails."""

    name: str
    error: float
    budget: float
    reason: str = ""

    @property
    def ok(self) -> bool:
        return not self.reason


class Snapshot:
    """Arguments as they were before the call: inputs for the reference, and the memory around every written tensor."""

    def __init__(self, args: Mapping[str, Any]) -> None:
        self.args = {n: v.detach().cpu().clone() if isinstance(v, torch.Tensor) else v for n, v in args.items()}
        bases = [v._base for v in args.values() if isinstance(v, torch.Tensor) and v._base is not None]
        self.buffers = {id(base): (base, base.clone()) for base in bases}

    def trampled(self, op: Op, args: Mapping[str, Any]) -> str:
        """A sentence when an input that is no output changed, or an element of a buffer that none covers; otherwise empty."""
        outputs = [args[arg.name] for arg in op.tensors if arg.mutated]
        for arg in op.tensors:
            if (
                arg.role == "in"
                and args[arg.name] is not None
                and not any(args[arg.name] is output for output in outputs)
                and not same_bits(args[arg.name].cpu(), self.args[arg.name]).all()
            ):
                return f"wrote to its input {arg.name}"
        for buffer, before in self.buffers.values():
            own = torch.ones(buffer.shape, dtype=torch.bool, device=buffer.device)
            for arg in op.tensors:
                value = args[arg.name]
                if arg.mutated and value is not None and value._base is buffer:
                    own.as_strided(value.shape, value.stride(), value.storage_offset()).fill_(False)
            changed = own & ~same_bits(buffer, before)
            if changed.any():
                where = tuple(torch.nonzero(changed)[0].tolist())
                return f"wrote {int(changed.sum())} elements around its outputs, first {where} of {list(buffer.shape)}"
        return ""


def same_bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Elementwise equality of bits, any two NaN being equal."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    raw = kinds[a.element_size()]
    equal = a.contiguous().view(raw) == b.contiguous().view(raw)
    if a.is_floating_point():
        equal |= torch.isnan(a.to(torch.float64)) & torch.isnan(b.to(torch.float64))
    return equal


def oracle(op_name: str, args: Mapping[str, Any], compute_dtype: torch.dtype = torch.float64) -> Results:
    """Every written argument as the reference computes it, by name. `args` is left alone."""
    op = OPS[op_name]
    package = __package__.rpartition(".")[0]
    function = getattr(importlib.import_module(f"{package}.reference.{op.family}"), op_name)
    own = {n: v.detach().cpu().clone() if isinstance(v, torch.Tensor) else v for n, v in args.items()}
    inputs = {a.name: own[a.name] for a in op.args if not (isinstance(a, Tensor) and a.role == "out")}
    dims = bind_dims(op, args)
    sizes = [n for n in inspect.signature(function).parameters if n not in inputs and n != "compute_dtype"]
    returned = function(**inputs, **{n: dims.get(n, 0) for n in sizes}, compute_dtype=compute_dtype)
    results = dict(zip((t.name for t in op.outputs), returned, strict=True))
    results |= {t.name: own[t.name] for t in op.tensors if t.role == "inout"}
    return {n: r for n, r in results.items() if args[n] is not None and n not in SCRATCH}


def input_dtype(op: Op, args: Mapping[str, Any]) -> torch.dtype:
    """The type in which `same_dtype` computes: that of the activations; float32 where probabilities are computed."""
    if op.family == "sampling":
        return torch.float32
    floats = [args[t.name] for t in op.tensors if t.role == "in" and args[t.name] is not None]
    first = next((x.dtype for x in floats if x.dtype in FLOATS), torch.float32)
    out = op.outputs[0].name if op.outputs else ""
    return args[out].dtype if op.name in ("gather_kv", "embedding") else first


def unit_in_last_place(dtype: torch.dtype, magnitude: float) -> float:
    """The distance between neighbours of `dtype` at `magnitude`."""
    info = torch.finfo(dtype)
    exponent = math.floor(math.log2(magnitude)) if magnitude > 0 else -1074
    return max(info.eps * 2.0**exponent, info.eps * info.tiny)


def largest(x: torch.Tensor) -> float:
    """max|x| over finite elements, 0 when there are none."""
    x = x[torch.isfinite(x)]
    return float(x.abs().max()) if x.numel() else 0.0


def spread(same: torch.Tensor, exact: torch.Tensor) -> float:
    """max|same_dtype - ref64| where both are finite: a form that overflows grants nothing."""
    return largest((same.double() - exact.double())[torch.isfinite(exact)])


def within_budget(name: str, got: torch.Tensor, exact: torch.Tensor, same_error: float, rounding: float) -> Verdict:
    """Judges numbers. NaN and infinities must stand where the reference has them; the rest obeys the budget."""
    got, exact = got.to(torch.float64), exact.to(torch.float64)
    finite = torch.isfinite(exact)
    special = torch.where(torch.isnan(exact), torch.isnan(got), got == exact)
    wrong = ~torch.where(finite, torch.isfinite(got), special)
    budget = 2 * same_error + rounding
    error = torch.where(finite & torch.isfinite(got), (got - exact).abs(), 0.0)
    worst = largest(error)
    if wrong.any():
        return Verdict(name, math.inf, budget, f"{name}: {describe(wrong, got, exact)}")
    if worst > budget:
        allowed = f"budget {budget:.3g} = 2 x {same_error:.3g} (same dtype) + {rounding:.3g} (rounding)"
        where = describe(error > budget, got, exact, error)
        return Verdict(name, worst, budget, f"{name}: error {worst:.3g} exceeds {allowed}; {where}")
    return Verdict(name, worst, budget)


def identical(name: str, got: torch.Tensor, expected: torch.Tensor) -> Verdict:
    """Judges codes, ids and copies: bit for bit, NaN equal to NaN."""
    wrong = ~same_bits(got, expected.to(got.dtype))
    if not wrong.any():
        return Verdict(name, 0.0, 0.0)
    return Verdict(name, math.inf, 0.0, f"{name}: must be exact; {describe(wrong, got, expected)}")


def describe(wrong: torch.Tensor, got: torch.Tensor, expected: torch.Tensor, error: torch.Tensor | None = None) -> str:
    """How many elements are wrong, and the worst (or first) of them."""
    flat = int(error.flatten().argmax()) if error is not None else int(wrong.flatten().int().argmax())
    where = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), wrong.shape))
    which = "worst" if error is not None else "first"
    return (
        f"{int(wrong.sum())} of {wrong.numel()} elements wrong, {which} at {where}: "
        f"got {got[where].item():.9g}, expected {expected[where].item():.9g}"
    )


def judge_rotated_codes(before: Snapshot, after: Mapping[str, Any]) -> Verdict:
    """Keys that were rotated and then quantised: the last bit of a cosine may move a code to its neighbour.

    So codes are held against the rotated key before it is rounded, in units of its scale: half the distance between
    codes is rounding, and the rest of the error obeys the budget of the rotation. Slots that no token names keep their
    bits.
    """
    args = before.args
    turn = {n: args[n] for n in ("q", "k", "positions", "inv_freq", "interleaved", "rope_scale")}
    turn |= {"q_out": args["q"], "k_out": args["k"]}
    kept = args["slot_mapping"] >= 0
    cache, page_size = after["k_cache"], args["k_cache"].shape[1]
    page, offset = args["slot_mapping"][kept] // page_size, args["slot_mapping"][kept] % page_size
    exact, same = (
        oracle("rotary_embedding", turn, d)["k_out"][kept].double() for d in (torch.float64, args["k"].dtype)
    )

    limit = 127.0 if cache.dtype == torch.int8 else 448.0
    stored = cache.view(torch.uint8)  # older torch cannot index 8-bit floats
    codes, scale = stored[page, offset].view(cache.dtype).double(), args["k_scale"].double()
    if scale.dim() == 3:
        scale = exact.abs().amax(-1) / limit
        scale = torch.where(scale == 0, 1.0, scale)
        codes = codes * (after["k_scale"][page, offset].double() / scale)[..., None]
    lowest = -128.0 if cache.dtype == torch.int8 else -limit
    ratio, close = ((x / scale[..., None]).clamp(lowest, limit) for x in (exact, same))
    step = torch.ones_like(ratio)
    if cache.dtype == torch.float8_e4m3fn:
        step = torch.exp2(torch.floor(torch.log2(ratio.abs())).clamp(min=-6) - 3)
    error = torch.where(ratio.isnan() & codes.isnan(), 0.0, (codes - ratio).abs() - step / 2)
    excess = float(error.nan_to_num(math.inf).max().clamp(min=0)) if error.numel() else 0.0
    budget = 2 * largest(close - ratio) + torch.finfo(torch.float32).eps * limit
    if excess > budget:
        over = describe(error > budget, codes, ratio, error)
        return Verdict("k_cache", excess, budget, f"k_cache: codes {excess:.3g} off, budget {budget:.3g}; {over}")
    untouched = torch.ones(cache.shape[:2], dtype=torch.bool)
    untouched[page, offset] = False
    bits = identical("k_cache outside the new slots", stored[untouched], args["k_cache"].view(torch.uint8)[untouched])
    return Verdict("k_cache", excess, budget, bits.reason)


def judge_scales(name: str, got: torch.Tensor, exact: torch.Tensor, same: torch.Tensor) -> Verdict:
    """Scales of rotated keys, relative to their own size: rows differ in magnitude."""
    unit = exact.double()
    relative = (same / unit, exact / unit)
    return within_budget(name, got / unit, relative[1], spread(*relative), torch.finfo(torch.float32).eps)


def logprob_spread(args: Mapping[str, Any]) -> float:
    """The same-dtype error of every log-probability of the rows: the few that are reported would be too small a sample."""
    logits = args["logits"]
    every = {
        **args,
        "logprob": torch.empty(logits.shape[0]),
        "top_ids": torch.empty(logits.shape, dtype=torch.int64),
        "top_logprobs": torch.empty(logits.shape),
    }
    exact, same = (oracle("sample", every, d)["top_logprobs"] for d in (torch.float64, torch.float32))
    return spread(same, exact)


def judge(op_name: str, before: Snapshot, after: Mapping[str, Any]) -> list[Verdict]:
    """Compares every written argument of a finished call with the reference."""
    op = OPS[op_name]
    dtype = input_dtype(op, before.args)
    exact = oracle(op_name, before.args)
    same = oracle(op_name, before.args, dtype)
    results = {n: after[n].detach().cpu() for n in exact}
    verdicts = []
    for name, expected in exact.items():
        got = results[name]
        if got.shape != expected.shape:
            verdicts.append(
                Verdict(name, math.inf, 0.0, f"{name}: shape {list(got.shape)}, expected {list(expected.shape)}")
            )
        elif name in EXACT.get(op_name, ()):
            verdicts.append(identical(name, got, expected))
        elif got.dtype in CODES:
            verdicts.append(judge_rotated_codes(before, results))
        elif name == "k_scale":
            verdicts.append(judge_scales(name, got, expected, same[name]))
        else:
            rounding = unit_in_last_place(got.dtype, largest(expected)) / 2
            same_error = logprob_spread(before.args) if op_name == "sample" else spread(same[name], expected)
            verdicts.append(within_budget(name, got, expected, same_error, rounding))
    if trampled := before.trampled(op, after):
        verdicts.append(Verdict("memory", math.inf, 0.0, trampled))
    return verdicts


def check_case(case: Case, run: Run, device: str = "cpu") -> list[Verdict]:
    """Builds a case, runs `run(op_name, args)` on it, and raises `Mismatch` with every reason if outputs disagree."""
    args = case.args(device)
    before = Snapshot(args)
    run(case.op, args)
    verdicts = judge(case.op, before, args)
    reasons = [v.reason for v in verdicts if not v.ok]
    if reasons:
        raise Mismatch(f"{case.op}[{case.name}]: " + "; ".join(reasons))
    return verdicts
