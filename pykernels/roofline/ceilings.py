"""The limits of this machine, measured by the native module itself, and the roof that they put over one piece of work.

A ceiling's value is the upper quartile of short samples: noise only slows a probe down, and one lucky sample is not a
machine. Work that beats its roof by more than `MARGIN` makes the probe run again, right then; the ceiling rises to what
is measured, or to the best sample ever seen. If the work is still above, the numbers are wrong and `RoofError` says so.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .. import native
from ..contract import Cost
from .machine import affinity, cache_totals, key_hash, machine_key, memory_bytes, ranges

MARGIN = 1.05  # how far above its roof a point may read: what two runs of one probe differ by
CACHE_ASSISTED = "dram + cache"
SAMPLES, SECONDS = 40, 5e-4
ROUNDS = 3  # visits to every probe, in turn: one bad second must not decide one ceiling
DRIFT = 0.25  # a cached ceiling that differs by more than this from a spot check is measured anew
BANDWIDTHS = ("l1", "l2", "l3", "dram")
# Which peaks bound which kind of arithmetic, best available: codes multiply by any of the integer instructions, and
# bfloat16 without a dot product of its own is widened to float32.
PEAKS = {"float32": ("float32",), "bfloat16": ("bfloat16", "float32"), "int8": ("int8", "int8_pairs", "float32")}


class RoofError(RuntimeError):
    """A measured rate is above what the machine can do: the time, the FLOPs or the bytes are wrong."""


@dataclass
class Ceiling:
    """One limit. `value` in `unit` (B/s or FLOP/s); `samples` raw."""

    unit: str
    samples: list[float]
    value: float = 0.0
    median: float = 0.0
    quartiles: tuple[float, float] = (0.0, 0.0)

    def __post_init__(self) -> None:
        if not self.samples or not all(s > 0 for s in self.samples):
            raise ValueError("a ceiling needs positive samples")
        low, self.median, high = statistics.quantiles(self.samples, n=4) if len(self.samples) > 1 else self.samples * 3
        self.quartiles = (low, high)
        self.value = max(self.value, high)

    @property
    def best(self) -> float:
        return max(self.samples)


Remeasure = Callable[[str, float], Sequence[float]]  # (ceiling's name, working set in bytes) -> new samples


@dataclass
class Ceilings:
    """All limits of one machine, ISA level and thread count. `caches`: bytes of each level for these threads together."""

    machine: dict[str, Any]
    level: str
    threads: int
    affinity: str
    caches: dict[str, int]
    table: dict[str, Ceiling]
    cached: bool = False
    raised: list[str] = field(default_factory=list)

    def bandwidth(self, working_set: float) -> str:
        """Name of the memory level that serves a working set: the first that holds it."""
        fits = (n for n in BANDWIDTHS if n in self.table and working_set <= self.caches.get(n, 0))
        return next(fits, "dram")

    def cache_assisted(self, working_set: float) -> float:
        """Bytes per second when the last-level cache kept as much of a larger working set as it can since the last use."""
        last = max((n for n in BANDWIDTHS if n in self.table), key=lambda n: self.caches.get(n, 0))
        kept = min(float(self.caches.get(last, 0)), working_set)
        seconds = kept / self.table[last].value + (working_set - kept) / self.table["dram"].value
        return working_set / seconds

    def peak(self, kind: str) -> str:
        """Name of the compute ceiling of a kind of arithmetic."""
        if kind not in PEAKS:
            raise ValueError(f"compute kind must be one of {', '.join(PEAKS)}, got {kind!r}")
        return max((n for n in PEAKS[kind] if n in self.table), key=lambda n: self.table[n].value)

    def absorb(self, name: str, samples: Sequence[float]) -> None:
        """Adds new samples of a probe; the value never falls."""
        old = self.table[name]
        fresh = Ceiling(old.unit, list(samples))
        self.table[name] = Ceiling(old.unit, old.samples + fresh.samples, value=max(old.value, fresh.value))

    def raise_to_best(self, name: str) -> None:
        self.table[name].value = self.table[name].best
        if name not in self.raised:
            self.raised.append(name)

    def to_json(self) -> dict[str, Any]:
        """The document's `ceilings`: `table` maps a name to value, unit, median, quartiles and raw samples."""
        out = asdict(self)
        for entry in out["table"].values():
            entry["samples"] = [float(f"{s:.4g}") for s in entry["samples"]]
            entry["quartiles"] = list(entry["quartiles"])
        return out

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Ceilings:
        table = {
            name: Ceiling(c["unit"], [float(s) for s in c["samples"]], value=float(c["value"]))
            for name, c in data["table"].items()
        }
        caches = {name: int(size) for name, size in data["caches"].items()}
        return Ceilings(dict(data["machine"]), data["level"], data["threads"], data["affinity"], caches, table)


@dataclass(frozen=True)
class Roof:
    """The limit over one piece of work. `flops` is min(peak, bandwidth x intensity) in FLOP/s, `bytes` the same limit as
    bytes per second, `seconds` the least time; `bound` names the ceiling that sets it."""

    flops: float
    bytes: float
    seconds: float
    bound: str
    bandwidth: str
    peak: str


def roof(
    cost: Cost,
    compute_kind: str,
    ceilings: Ceilings,
    working_set: float | None = None,
    *,
    cache_assisted: bool = False,
) -> Roof:
    """The roof over `cost`. `working_set`: bytes touched between two uses of the same data (default: the cost's own).

    `cache_assisted` allows for what the last-level cache may have kept of a working set that it cannot hold.
    """
    if cost.flops < 0 or cost.bytes < 0 or cost.flops + cost.bytes <= 0:
        raise ValueError(f"a roof needs work, got {cost.flops} FLOPs and {cost.bytes} bytes")
    touched = cost.bytes if working_set is None else working_set
    bandwidth = ceilings.bandwidth(touched)
    peak = ceilings.peak(compute_kind)
    rate = ceilings.table[bandwidth].value
    if cache_assisted and bandwidth == "dram":
        rate, bandwidth = ceilings.cache_assisted(touched), CACHE_ASSISTED
    memory_seconds = cost.bytes / rate
    compute_seconds = cost.flops / ceilings.table[peak].value
    seconds = max(memory_seconds, compute_seconds)
    bound = bandwidth if memory_seconds >= compute_seconds else peak
    return Roof(cost.flops / seconds, cost.bytes / seconds, seconds, bound, bandwidth, peak)


def percent_of_roof(
    what: str,
    cost: Cost,
    seconds: float,
    compute_kind: str,
    ceilings: Ceilings,
    *,
    working_set: float | None = None,
    remeasure: Remeasure | None = None,
) -> tuple[float, Roof]:
    """How much of its roof `cost` done in `seconds` reached, and that roof. `what` names the work in the message.

    `remeasure` runs a probe again when the result is above. What stays above the DRAM roof is held to the bandwidth that
    the last-level cache can add to it (and says so); above that too it is a `RoofError`.
    """
    if not seconds > 0:
        raise ValueError(f"{what}: seconds must be positive, got {seconds}")
    limit = roof(cost, compute_kind, ceilings, working_set)
    above = seconds * MARGIN
    if remeasure is not None:
        for _ in range(3):
            if limit.seconds > above:
                ceilings.absorb(limit.bound, remeasure(limit.bound, cost.bytes if working_set is None else working_set))
                limit = roof(cost, compute_kind, ceilings, working_set)
    for _ in range(2):  # raised once, memory may hand the bound to arithmetic, or the other way round
        if limit.seconds > above:
            ceilings.raise_to_best(limit.bound)
            limit = roof(cost, compute_kind, ceilings, working_set)
    if limit.seconds > above and limit.bound == "dram":
        limit = roof(cost, compute_kind, ceilings, working_set, cache_assisted=True)
    if limit.seconds > above:
        top = ceilings.table.get(limit.bound, ceilings.table["dram"])
        raise RoofError(
            f"{what}: {cost.flops:.4g} FLOP and {cost.bytes:.4g} bytes in {seconds:.4g} s is "
            f"{100 * limit.seconds / seconds:.0f} % of its roof ({limit.bound}, best sample {top.best:.4g} {top.unit}): "
            "the time or the cost is wrong"
        )
    return 100.0 * limit.seconds / seconds, limit


# ---- measuring ------------------------------------------------------------------------------------------------------


class Prober:
    """Runs the native probes of one level on `threads` threads of its team."""

    def __init__(self, level: str, threads: int | None = None) -> None:
        self.module = native.module() if level == native.chosen_level() else native.load(level)
        team = self.module.num_threads()
        threads = team if threads is None else threads
        if not 1 <= threads <= team:
            raise ValueError(f"threads must be in [1, {team}] (the size of the {level} level's team), got {threads}")
        self.level, self.threads = level, threads
        self.caches = cache_totals(threads)

    def names(self) -> list[str]:
        levels = [n for n in BANDWIDTHS if n == "dram" or n in self.caches]
        return [*levels, "copy", *self.module.compute_kinds()]

    def bytes_per_thread(self, name: str) -> int:
        """Buffer of each thread's read probe: half of a private cache; a slice of the last level that is larger than the
        level below; and a buffer much larger than all caches for DRAM."""
        share = {level: size // self.threads for level, size in self.caches.items()}
        if name in ("l1", "l2"):
            return max(4096, share[name] // 2)
        if name == "l3":
            return max(2 * share.get("l2", 0), min(share[name] // 4, 8 << 20))
        total = max(256 << 20, 4 * max(self.caches.values()))
        free = memory_bytes("MemAvailable")
        return (min(total, free // 4) if free else total) // self.threads

    def samples(self, name: str, count: int = SAMPLES, working_set: float = 0.0) -> list[float]:
        """Raw samples of a ceiling. A DRAM probe for a given working set reads exactly that much again and again, so
        that whatever the last-level cache keeps of it counts."""
        if name in self.module.compute_kinds():
            return list(self.module.probe_compute(name, self.threads, count, SECONDS))
        size = self.bytes_per_thread("dram" if name == "copy" else name)
        if name == "copy":
            return list(self.module.probe_copy(size // 2, self.threads, count, SECONDS))
        if name == "dram" and working_set:
            size = min(size, max(int(working_set) // self.threads, 1 << 20))
        return list(self.module.probe_read(size, name in ("l3", "dram"), self.threads, count, SECONDS))

    def remeasure(self, name: str, working_set: float) -> list[float]:
        return self.samples(name, 2 * SAMPLES, working_set)

    def measure(self, key: dict[str, Any]) -> Ceilings:
        raw: dict[str, list[float]] = {name: [] for name in self.names()}
        for _ in range(ROUNDS):
            for name, samples in raw.items():
                samples += self.samples(name)
        compute = set(self.module.compute_kinds())
        table = {name: Ceiling("FLOP/s" if name in compute else "B/s", samples) for name, samples in raw.items()}
        return Ceilings(key, self.level, self.threads, ranges(affinity()), dict(self.caches), table)

    def drifted(self, ceilings: Ceilings) -> bool:
        """Whether a quick look at memory and arithmetic disagrees with the ceilings."""
        for name in ("dram", "float32"):
            now = Ceiling(ceilings.table[name].unit, self.samples(name)).value
            if not 1 - DRIFT <= now / ceilings.table[name].value <= 1 + DRIFT:
                return True
        return False


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pykernels"


def _load(path: Path, key: dict[str, Any]) -> Ceilings | None:
    """Cached ceilings of this very machine; None when there are none, or when the file is not ours to trust."""
    try:
        data = json.loads(path.read_text())
        return Ceilings.from_json(data) if data["machine"] == key else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _save(path: Path, ceilings: Ceilings) -> None:
    """Keeps ceilings for the next run. A read-only home costs that run two seconds, nothing else."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(ceilings.to_json()))
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()


def measure(level: str | None = None, threads: int | None = None, *, fresh: bool = False) -> Ceilings:
    """The ceilings of this machine for an ISA level and a thread count (defaults: those in use).

    Taken from the user's cache when the machine, affinity, threads, level and version are the same and a spot check
    agrees; `fresh` measures in any case (about three seconds). ImportError when the level cannot run here, ValueError
    when its team has fewer threads.
    """
    from .. import __version__

    level = level or native.chosen_level()
    prober = Prober(level, threads)
    key = machine_key(level, prober.threads, __version__)
    path = cache_folder() / f"ceilings-{key_hash(key)}.json"
    known = None if fresh else _load(path, key)
    if known is not None and set(known.table) == set(prober.names()) and not prober.drifted(known):
        known.cached = True
        return known
    measured = prober.measure(key)
    _save(path, measured)
    return measured


def remeasurer(ceilings: Ceilings) -> Remeasure:
    """Runs a probe of `ceilings` again on the same level and threads."""
    return Prober(ceilings.level, ceilings.threads).remeasure
