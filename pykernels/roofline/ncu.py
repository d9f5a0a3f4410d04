"""Reads Nsight Compute's CSV into points of a hierarchical roofline.

Both of its forms are read: `--page raw` (a column per metric, units in a second row) and the details page (a row per
metric). Names, formulas and units are those that NVIDIA documents for its own hierarchical roofline chart: bytes are
`dram__bytes`, `lts__t_bytes` and `l1tex__t_bytes`; a level's bandwidth is `<bytes>.peak_sustained` per cycle times the
cycles per second of that unit, so it is the roof at the clocks of that very launch.
"""

from __future__ import annotations

import csv
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ..ranges import DOMAIN
from .levels import LevelPoint, Traffic

TIME = "gpu__time_duration.sum"
BYTES = {"l1": "l1tex__t_bytes.sum", "l2": "lts__t_bytes.sum", "dram": "dram__bytes.sum"}
CYCLES = {name: f"{BYTES[name].split('__')[0]}__cycles_elapsed.avg.per_second" for name in BYTES}
SM_CYCLES = "sm__cycles_elapsed.avg.per_second"
FMA = "smsp__sass_thread_inst_executed_op_{}_pred_on.sum"
FLOPS = {FMA.format(f"{kind}{op}"): 2 if op == "fma" else 1 for kind in "fh" for op in ("add", "mul", "fma")}
FP32_PEAK = "sm__sass_thread_inst_executed_op_ffma_pred_on.sum.peak_sustained"
# What tensor cores do at most. Not asked for by default: its name changes with the architecture (`ncu --query-metrics`).
TENSOR_PEAK = re.compile(r"sm__ops_path_tensor_\w+\.sum\.peak_sustained")
METRICS = (
    TIME,
    *(metric for name in BYTES for metric in (BYTES[name], f"{BYTES[name]}.peak_sustained", CYCLES[name])),
    *FLOPS,
    FP32_PEAK,
    SM_CYCLES,
)
NVTX_COLUMN = "Push/Pop_Range"

_PREFIX = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}
_SECONDS = {
    "s": 1.0,
    "second": 1.0,
    "ms": 1e-3,
    "msecond": 1e-3,
    "us": 1e-6,
    "usecond": 1e-6,
    "ns": 1e-9,
    "nsecond": 1e-9,
}


def unit_scale(unit: str) -> float:
    """How many base units (bytes, seconds, hertz, instructions, cycles) one `unit` is; ValueError for one unknown."""
    scale = 1.0
    for place, part in enumerate(unit.lower().split("/")):
        if part in _SECONDS:
            factor = _SECONDS[part]
        else:
            found = re.fullmatch(r"([kmgtp]?)(byte|hz|inst|cycle|)s?", part)
            if found is None:
                raise ValueError(f"ncu: unknown unit {unit!r}")
            factor = _PREFIX[found[1]]
        scale = scale / factor if place else scale * factor
    return scale


def number(text: str) -> float:
    """`1,234.5` -> 1234.5."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        raise ValueError(f"ncu: {text!r} is no number (is it written for a locale? run ncu with LC_ALL=C)") from None


@dataclass
class Launch:
    """One profiled launch: base units."""

    kernel: str
    ranges: str | None
    values: dict[str, float] = field(default_factory=dict)


def _wanted(name: str) -> bool:
    return name in METRICS or TENSOR_PEAK.fullmatch(name) is not None


def launches(lines: Iterable[str]) -> list[Launch]:
    """The launches of ncu's output, in order. What ncu says around the table is skipped; its errors are a ValueError."""
    kept = list(lines)
    errors = [line.strip() for line in kept if line.startswith("==ERROR==")]
    if errors:
        raise ValueError(f"ncu failed: {' '.join(errors)}")
    rows = list(csv.reader(line for line in kept if line.startswith('"')))
    if len(rows) < 2 or "Kernel Name" not in rows[0]:
        raise ValueError("ncu: no table in its output (was any kernel profiled?)")
    names = rows[0]
    found = _long(names, rows[1:]) if "Metric Name" in names else _wide(names, rows[1:])
    if not found:
        raise ValueError("ncu: the table has no launch")
    return found


def _ranges_of(row: Mapping[str, str]) -> str | None:
    return next((value for name, value in row.items() if NVTX_COLUMN in name), None)


def _wide(names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[Launch]:
    units = dict(zip(names, rows[0], strict=True))
    if units["ID"]:
        raise ValueError("ncu: the raw page lacks its row of units")
    found = []
    for values in rows[1:]:
        row = dict(zip(names, values, strict=True))
        launch = Launch(row["Kernel Name"], _ranges_of(row))
        for name in filter(_wanted, names):
            if row[name] not in ("", "n/a"):
                launch.values[name] = number(row[name]) * unit_scale(units[name])
        found.append(launch)
    return found


def _long(names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[Launch]:
    found: dict[str, Launch] = {}
    for values in rows:
        row = dict(zip(names, values, strict=True))
        launch = found.setdefault(row["ID"], Launch(row["Kernel Name"], _ranges_of(row)))
        if _wanted(row["Metric Name"]) and row["Metric Value"] not in ("", "n/a"):
            launch.values[row["Metric Name"]] = number(row["Metric Value"]) * unit_scale(row["Metric Unit"])
    return list(found.values())


def inside(found: Sequence[Launch], op: str) -> list[Launch]:
    """The launches that lie in the range of an op, where ncu told ranges (`--nvtx`)."""
    mine = [launch for launch in found if launch.ranges is None or f"{DOMAIN}:{op}:" in launch.ranges]
    if not mine:
        raise ValueError(f"ncu: none of {len(found)} launches lies in the range {DOMAIN}:{op}")
    return mine


def _need(launch: Launch, name: str) -> float:
    if name not in launch.values:
        raise ValueError(f"ncu: {launch.kernel} has no {name}")
    return launch.values[name]


def _roof(group: Sequence[Launch], level: str) -> float | None:
    peaks = [
        launch.values[f"{BYTES[level]}.peak_sustained"] * launch.values[CYCLES[level]]
        for launch in group
        if f"{BYTES[level]}.peak_sustained" in launch.values and CYCLES[level] in launch.values
    ]
    return statistics.median(peaks) if peaks else None


def _peak(group: Sequence[Launch]) -> float | None:
    """FLOP/s of the tensor cores where that metric was asked for, else of float32 multiply-adds."""

    def peaks() -> Iterator[float]:
        for launch in group:
            cycles = launch.values.get(SM_CYCLES, 0.0)
            tensor = [v for name, v in launch.values.items() if TENSOR_PEAK.fullmatch(name)]
            yield max(tensor, default=2 * launch.values.get(FP32_PEAK, 0.0)) * cycles

    return max(peaks(), default=0.0) or None


def _counted(launch: Launch) -> float:
    return sum(weight * launch.values.get(name, 0.0) for name, weight in FLOPS.items())


def points(found: Sequence[Launch], flops: float, calls: int) -> list[LevelPoint]:
    """A point for the whole call, with the contract's `flops`, then one per kernel with counted FLOPs, slowest first.

    `calls` of the op made these launches; ValueError when they do not divide them.
    """
    if calls < 1 or len(found) % calls:
        raise ValueError(f"ncu: {len(found)} launches are not those of {calls} whole calls")
    groups: dict[str, list[Launch]] = {}
    for launch in found:
        groups.setdefault(launch.kernel, []).append(launch)

    def point(name: str, group: Sequence[Launch], calls: int | None) -> LevelPoint:
        def each(metric: str) -> float:
            values = [_need(launch, metric) for launch in group]
            return sum(values) / calls if calls else statistics.median(values)

        work = flops if calls else statistics.median(_counted(launch) for launch in group)
        traffic = {level: Traffic(each(BYTES[level]), _roof(group, level)) for level in BYTES}
        source = "contract" if calls else "counted"
        return LevelPoint(name, len(group), each(TIME), work, source, traffic, _peak(group))

    kernels = [point(name, group, None) for name, group in groups.items()]
    return [point("call", found, calls), *sorted(kernels, key=lambda p: -p.seconds)]
