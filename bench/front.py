"""What `pykernels bench` shows: rows of the suite's grids, timed one after the other, beside an earlier run's file."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pykernels.contract import FAMILIES, OPS
from pykernels.roofline.charts import LEVEL_NAMES, PEAK_NAMES
from pykernels.roofline.units import UNDEFINED, digits, seconds, text

from . import gate, suite_records, torch_peer
from .control import Control
from .harness import StopRule, measure
from .problems import GRIDS, Case, columns_of, problems

Entry = Mapping[str, Any]  # a value of `gate.entries`
BAR = 20  # characters of a whole roof


def choose(names: Sequence[str], sizes: Sequence[str]) -> list[Case]:
    """Rows of the grids of `names` (families or ops; none means all). `sizes`: "smoke" is one row of each op, "full" all,
    other words keep the rows that have all of them in their name. ValueError for an unknown name or when nothing is left.
    """
    if unknown := [n for n in names if n not in FAMILIES and n not in OPS]:
        raise ValueError(
            f"no family and no op: {', '.join(unknown)}; families: {', '.join(FAMILIES)}; ops: {', '.join(OPS)}"
        )
    ops = [op for op in GRIDS if not names or op in names or OPS[op].family in names]
    words = [s for s in sizes if s not in ("smoke", "full")]
    subset = "smoke" if "smoke" in sizes else "full"
    found = [c for op in ops for c in problems(op, subset) if all(word in c.name.split("-") for word in words)]
    if not found:
        raise ValueError(
            f"no size of {', '.join(ops)} has {' and '.join(words)} in its name; sizes: {', '.join(_words(ops))}"
        )
    return found


def _words(ops: Sequence[str]) -> list[str]:
    """What the names of the ops' rows are made of."""
    return sorted({word for op in ops for c in problems(op) for word in c.name.split("-")})


def run(
    cases: Sequence[Case],
    backends: Sequence[str],
    rule: StopRule,
    *,
    limits: Any,
    say: Callable[[str], None],
    peer: str | None = None,
    **how: Any,
) -> Iterator[dict[str, Any]]:
    """Times every case on every backend; yields entries as the suite's file has them. `limits` is (ceilings, remeasure)
    of the CPU; `how` goes to `harness.measure`. `peer` is measured right after each. What is refused is told to `say`."""
    if peer not in (None, torch_peer.NAME):
        raise ValueError(f"peer must be {torch_peer.NAME}, got {peer!r}")
    torch.set_num_threads(1)  # torch's pool does not fight with ours
    control = Control()
    for case in cases:
        for backend in backends:
            cpu = backend == "cpu"
            setting = {
                "device": "cpu" if cpu else "cuda",
                "rule": rule,
                "ceilings": limits[0] if cpu else None,
                "remeasure": limits[1] if cpu else None,
                **how,
            }
            before = control.seconds()
            try:
                found = measure(case, backend, **setting)
            except NotImplementedError as error:
                say(f"{case.op}[{case.name}] on {backend}: {error}")
                continue
            each = suite_records.entry(found, columns_of(case), min(before, control.seconds()))
            if peer:
                each["extra_info"]["peer"] = beside = torch_peer.beside(case, **setting)
                if beside["reason"]:
                    say(f"{case.op}[{case.name}] on {peer}: {beside['reason']}")
            yield each


def check_machine(now: Mapping[str, Entry], baseline: Mapping[str, Entry]) -> None:
    """ValueError unless each backend ran on the machine, level and thread count that it has in the baseline."""
    for backend in sorted({e["backend"] for e in now.values()}):
        keys = [{e["machine_key"] for e in run.values() if e["backend"] == backend} for run in (now, baseline)]
        if keys[1] and keys[0] != keys[1]:
            raise ValueError(
                f"the baseline's results on {backend} are another machine's, level's or thread count's "
                f"({', '.join(sorted(keys[1]))}, here {', '.join(sorted(keys[0]))}): nothing to compare"
            )


@dataclass(frozen=True)
class Row:
    """A benchmark as it is shown. `ratio` is time now / time in the baseline, both normalised by their control; None with
    the reason in `verdict`."""

    op: str
    size: str
    backend: str
    median: float
    spread: float  # quartile range over the median
    speed: str
    roof_pct: float | None
    bound: str | None
    ratio: float | None
    verdict: str
    peer: str = ""  # who was measured beside it
    peer_median: float | None = None  # None with the reason in `peer_reason`
    peer_ratio: float | None = None  # time of the peer / ours
    peer_reason: str = ""

    @property
    def bar(self) -> str:
        filled = round(BAR * min(self.roof_pct or 0.0, 100.0) / 100)
        return "█" * filled + "·" * (BAR - filled) if self.roof_pct is not None else ""


def rows(now: Mapping[str, Entry], baseline: Mapping[str, Entry] | None = None) -> list[Row]:
    """One per entry, in order; with a baseline, beside its entry of the same name. ValueError for another machine's."""
    if baseline is not None:
        check_machine(now, baseline)
    return [_row(name, each, baseline) for name, each in now.items()]


def _row(name: str, each: Entry, baseline: Mapping[str, Entry] | None) -> Row:
    low, median, high = statistics.quantiles(each["samples"], n=4)
    ratio, verdict = None, ""
    if baseline is not None and name not in baseline:
        verdict = "not in the baseline"
    elif baseline is not None:
        line = gate.file_line(name, dict(baseline[name]), dict(each), gate.FILE_MARGIN)
        ratio, verdict = line.ratio, line.kind if line.ratio else f"{line.kind}: {line.note}"
    compute = each["bound"] in PEAK_NAMES
    peer = each.get("peer") or {"name": "", "median": None, "reason": ""}
    return Row(
        op=each["op"],
        size=each["case"],
        backend=each["backend"],
        median=median,
        spread=(high - low) / median,
        speed=text(each["flops" if compute else "bytes"] / median, "FLOP/s" if compute else "B/s"),
        roof_pct=each["roof_pct"],
        bound=each["bound"],
        ratio=ratio,
        verdict=verdict,
        peer=peer["name"],
        peer_median=peer["median"],
        peer_ratio=peer["median"] / median if peer["median"] else None,
        peer_reason=peer["reason"],
    )


def table(shown: Sequence[Row]) -> str:
    """The rows for a terminal: speed is bytes per second, or FLOP per second where arithmetic is the limit."""
    compared = any(row.ratio or row.verdict for row in shown)
    peer = next((row.peer for row in shown if row.peer), "")
    head = [
        "op",
        "size",
        "backend",
        "median",
        "spread",
        "speed",
        "roof",
        "",
        "limit",
        *([peer, f"x {peer}"] if peer else []),
        *(["ratio", ""] if compared else []),
    ]
    body = [head]
    names = {**LEVEL_NAMES, **PEAK_NAMES}
    for row in shown:
        cells = [row.op, row.size, row.backend, seconds(row.median), f"{100 * row.spread:.0f} %", row.speed]
        roof = UNDEFINED if row.roof_pct is None else f"{digits(row.roof_pct)} %"
        cells += [roof, row.bar, names.get(row.bound or "", row.bound or UNDEFINED)]
        if peer:
            cells += ["-", "-"] if row.peer_median is None else [seconds(row.peer_median), f"{row.peer_ratio:.2f}"]
        if compared:
            cells += [f"{row.ratio:.3f}" if row.ratio else UNDEFINED, row.verdict]
        body.append(cells)
    widths = [max(len(line[i]) for line in body) for i in range(len(head))]
    right = {3, 4, 5, 6, 9, *((10, 11) if peer else ())}
    return "\n".join(
        "  ".join(
            w.rjust(n) if i in right else w.ljust(n) for i, (w, n) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in body
    )
