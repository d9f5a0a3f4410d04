"""What the generator writes down, and every metric that is derived from it.

Times are seconds of one monotonic clock (`time.perf_counter`), which all records of a run share.
"""

from __future__ import annotations

import hashlib
import statistics
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..contract import Cost
from .ceilings import Ceilings, Remeasure, percent_of_roof
from .points import PHASES


@dataclass
class StepRecord:
    """One model step. `tokens` are computed in it (prefill: prompt tokens, decode: tokens produced), `batch` requests took
    part, `context` is the longest of their contexts. `seconds` is the wall time from `start`,
    `kernel_seconds` the part inside ops; `flops` and `bytes` (weights and KV read, KV written) are the contract's."""

    phase: str
    tokens: int
    batch: int
    context: int
    start: float
    seconds: float
    kernel_seconds: float
    bytes: float
    flops: float

    def __post_init__(self) -> None:
        if self.phase not in PHASES:
            raise ValueError(f"phase must be one of {', '.join(PHASES)}, got {self.phase!r}")
        if not 0 <= self.kernel_seconds <= self.seconds or not self.seconds > 0:
            raise ValueError(
                f"a step needs 0 <= kernel_seconds <= seconds > 0, got {self.kernel_seconds} and {self.seconds}"
            )

    @property
    def cost(self) -> Cost:
        return Cost(self.flops, self.bytes)


@dataclass
class RequestRecord:
    """One request. `submitted` is before tokenisation; `first_token` when the first token could be read by the caller;
    `deliveries` when each piece was handed over (several tokens may share one), the first included. `cached_tokens` of
    the `prompt_tokens` came from the prefix cache and were not computed."""

    submitted: float
    first_token: float | None = None
    deliveries: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    finish_reason: str | None = None

    @property
    def ttft(self) -> float | None:
        """First token available minus submitted; undefined when none came."""
        return None if self.first_token is None else self.first_token - self.submitted

    @property
    def itl(self) -> float | None:
        """(t_last - t_first) / (n_out - 1); undefined for fewer than two tokens."""
        if self.output_tokens < 2 or self.first_token is None or not self.deliveries:
            return None
        return (self.deliveries[-1] - self.first_token) / (self.output_tokens - 1)

    @property
    def icl(self) -> list[float]:
        """Gaps between deliveries."""
        return [b - a for a, b in zip(self.deliveries, self.deliveries[1:], strict=False)]


def output_hash(token_ids: Iterable[Sequence[int]]) -> str:
    """16 hex digits over the token ids of every request, in order. Where one ends and the next begins counts."""
    digest = hashlib.sha256()
    for ids in token_ids:
        digest.update(struct.pack(f"<{len(ids) + 1}q", len(ids), *ids))
    return digest.hexdigest()[:16]


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between order statistics (numpy's default)."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("a percentile of nothing is undefined")
    position = (len(ordered) - 1) * percent / 100.0
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def _median(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.median(known) if known else None


def busy_seconds(steps: Sequence[StepRecord], requests: Sequence[RequestRecord]) -> float:
    """Wall time in which anything was asked for or done: the union of the requests' lives and of the steps."""
    spans = [(s.start, s.start + s.seconds) for s in steps]
    spans += [(r.submitted, r.deliveries[-1]) for r in requests if r.deliveries]
    total, end = 0.0, float("-inf")
    for first, last in sorted(spans):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total


def _phase_metrics(
    phase: str,
    steps: Sequence[StepRecord],
    ceilings: Ceilings | None,
    compute_kind: str,
    remeasure: Remeasure | None,
) -> dict[str, Any]:
    mine = [s for s in steps if s.phase == phase]
    names = ("tokens_per_s", "bytes_per_s", "flops_per_s", "roof_pct", "roof_bound", "overhead_pct", "seconds", "steps")
    out: dict[str, Any] = {f"{phase}_{name}": None for name in names}
    out[f"{phase}_steps"] = len(mine)
    if not mine:
        return out
    span = sum(s.seconds for s in mine)
    work = Cost(sum(s.flops for s in mine), sum(s.bytes for s in mine))
    out[f"{phase}_seconds"] = span
    out[f"{phase}_tokens_per_s"] = sum(s.tokens for s in mine) / span
    out[f"{phase}_bytes_per_s"] = work.bytes / span
    out[f"{phase}_flops_per_s"] = work.flops / span
    out[f"{phase}_overhead_pct"] = 100.0 * (span - sum(s.kernel_seconds for s in mine)) / span
    if ceilings is not None:
        working_set = statistics.median(s.bytes for s in mine)
        percent, limit = percent_of_roof(
            f"the {phase} phase", work, span, compute_kind, ceilings, working_set=working_set, remeasure=remeasure
        )
        out[f"{phase}_roof_pct"], out[f"{phase}_roof_bound"] = percent, limit.bound
    return out


def metrics(
    steps: Sequence[StepRecord],
    requests: Sequence[RequestRecord],
    *,
    token_ids: Iterable[Sequence[int]] = (),
    ceilings: Ceilings | None = None,
    compute_kind: str = "float32",
    remeasure: Remeasure | None = None,
) -> dict[str, Any]:
    """Every line of the metric table; None where one is undefined. Seconds, tokens/s, B/s, FLOP/s, percent.

    `ttft`, `itl`: medians over requests (`ttft_max`, `itl_max` beside them); `icl_p50` to `icl_max`: gaps of all
    requests together; `<phase>_tokens_per_s`: tokens computed / the phase's span, which is the sum of its steps;
    `<phase>_bytes_per_s`, `<phase>_flops_per_s`: the contract's work / span; `<phase>_roof_pct`: against
    min(peak, bandwidth x intensity) of the phase's whole work, with the peak of `compute_kind`, and its working set the
    median step's bytes; `overhead_pct`: (busy wall time - kernel spans) / busy wall time, gaps between steps included,
    `<phase>_overhead_pct`: the same inside the phase's steps; `cached_tokens`: found in the prefix cache, in no rate;
    `output_hash`: of `token_ids`, one sequence per request. `RoofError` for a phase above its roof.
    """
    if not steps or not requests:
        raise ValueError(f"metrics need at least one step and one request, got {len(steps)} and {len(requests)}")
    gaps = [gap for request in requests for gap in request.icl]
    firsts = [r.ttft for r in requests if r.ttft is not None]
    between = [r.itl for r in requests if r.itl is not None]
    wall = busy_seconds(steps, requests)
    out: dict[str, Any] = {
        "requests": len(requests),
        "prompt_tokens": sum(r.prompt_tokens for r in requests),
        "cached_tokens": sum(r.cached_tokens for r in requests),
        "output_tokens": sum(r.output_tokens for r in requests),
        "ttft": _median(firsts),
        "ttft_max": max(firsts, default=None),
        "itl": _median(between),
        "itl_max": max(between, default=None),
        "icl_p50": percentile(gaps, 50) if gaps else None,
        "icl_p90": percentile(gaps, 90) if gaps else None,
        "icl_p99": percentile(gaps, 99) if gaps else None,
        "icl_max": max(gaps, default=None),
    }
    for phase in PHASES:
        out.update(_phase_metrics(phase, steps, ceilings, compute_kind, remeasure))
    out["wall_seconds"] = wall
    out["overhead_pct"] = 100.0 * (wall - sum(s.kernel_seconds for s in steps)) / wall
    out["output_hash"] = output_hash(token_ids)
    return out
