"""A against B: two revisions timed in turn on this machine, or two files of the suite.

Each repetition builds the inputs of both sides afresh and visits them `TURNS` times in the order A B B A, each visit
normalised by a control workload timed beside it; every three repetitions the processes are started anew, since the addresses
that a process gets are worth several per cent. A benchmark that is missing on one side, whose output hash changed, or an empty run is a
failure. Nothing here ever writes a baseline.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pykernels.roofline.ceilings import MARGIN as ROOF_MARGIN

from .verdict import MIN_REPETITIONS, SAME, SLOWER, Verdict, look, of_samples

MARGIN = 0.03
FILE_MARGIN = 0.10  # two files were not measured in turn
MARGINS: dict[str, float] = {}  # per benchmark, where the general one is not right; each with its reason
SAMPLES = 3  # of each visit to a side; the fastest counts, since what interrupts a sample only makes it longer
TURNS = 5  # of a repetition; their median counts, since one interrupted control makes any other estimate wild
RESTART = 3
MISSING, CHANGED, ABOVE_ROOF = "MISSING", "CHANGED OUTPUT", "ABOVE ROOF"
MORE, FEWER = "MORE INSTRUCTIONS", "FEWER INSTRUCTIONS"
FAILING = frozenset({SLOWER, MISSING, CHANGED, ABOVE_ROOF, MORE, FEWER})
Benchmark = tuple[str, str]  # op, case


@dataclass(frozen=True)
class Line:
    """What was found for one benchmark. `note` says why there is no ratio, or how many repetitions there were."""

    benchmark: str
    kind: str
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    margin: float | None = None
    note: str = ""

    @property
    def failed(self) -> bool:
        return self.kind in FAILING

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"failed": self.failed}


class GateError(ValueError):
    """The two sides cannot be compared at all."""


class Side:
    """A worker process of one revision."""

    def __init__(self, tree: Path, threads: int) -> None:
        here = Path(__file__).resolve().parent
        command = [sys.executable, str(here / "worker.py"), str(tree), str(here), str(threads)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, do: str, **words: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"do": do, **words}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise GateError(f"a worker ended with code {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self.process.communicate()


def open_sides(a: Path, b: Path, threads: int) -> tuple[Side, Side]:
    """Starts a worker for each. GateError when they do not run alike (another ISA level, another number of threads)."""
    sides = Side(a, threads), Side(b, threads)
    try:
        keys = [s.ask("hello") for s in sides]
        if keys[0] != keys[1]:
            raise GateError(f"the two sides run differently, nothing to compare: {keys[0]} and {keys[1]}")
    except BaseException:
        for side in sides:
            side.close()
        raise
    return sides


def normalised(answer: Mapping[str, Sequence[float]]) -> float:
    """Time of the fastest sample in units of the fastest control beside it."""
    return min(answer["times"]) / min(answer["controls"])


def repetition(a: Side, b: Side) -> float:
    """log(B / A) of one repetition: the median of its turns, each of which cancels a steady drift."""
    return statistics.median(turn(a, b) for _ in range(TURNS))


def turn(a: Side, b: Side) -> float:
    """log(B / A) of visits in the order A B B A: the mean of two pairs of neighbours."""
    before, first, second, after = (math.log(normalised(s.ask("sample", count=SAMPLES))) for s in (a, b, b, a))
    return (first - before + second - after) / 2


def compare_trees(
    a: Path,
    b: Path,
    benchmarks: Sequence[Benchmark],
    *,
    threads: int = 1,
    repetitions: int = MIN_REPETITIONS,
    margin: float = MARGIN,
    changed: Collection[str] = (),
    say: Callable[[str], None] = lambda text: None,
) -> list[Line]:
    """Times two built trees in turn. Benchmarks that are AMBIGUOUS after `repetitions` (rounded up to whole rounds) are judged
    again after twice, four and eight times as many.

    The outputs of both are compared with the reference, and with each other but for the ops in `changed`.

    GateError without a benchmark, or for fewer repetitions than a verdict needs.
    """
    if not benchmarks:
        raise GateError("there is no benchmark to compare: an empty run is a failure")
    if repetitions < MIN_REPETITIONS:
        raise GateError(f"a verdict needs at least {MIN_REPETITIONS} repetitions, got {repetitions}")
    least = -(-repetitions // RESTART) * RESTART
    ratios: dict[Benchmark, list[float]] = {each: [] for each in benchmarks}
    done: dict[Benchmark, Line] = {}
    rounds = 0
    while pending := [each for each in benchmarks if each not in done]:
        sides = open_sides(a, b, threads)
        say(f"round {rounds + 1}: {len(pending)} benchmarks")
        try:
            for each in pending:
                if failure := _round(sides, each, ratios[each], first=rounds == 0, changed=each[0] in changed):
                    done[each] = failure
        finally:
            for side in sides:
                side.close()
        rounds += 1
        for each in pending:
            limit = MARGINS.get(name_of(each), margin)
            if each not in done and (verdict := look(ratios[each], least, limit)):
                done[each] = line_of(name_of(each), verdict, limit, f"{len(ratios[each])} repetitions")
    return [done[each] for each in benchmarks]


def _round(
    sides: tuple[Side, Side], each: Benchmark, ratios: list[float], *, first: bool, changed: bool
) -> Line | None:
    """Three repetitions of one benchmark; a line when it fails."""
    op, case = each
    for number in range(RESTART):
        answers = [s.ask("prepare", op=op, case=case, check=first and number == 0) for s in sides]
        errors = [f"{n}: {x['error']}" for n, x in zip("AB", answers, strict=True) if "error" in x]
        if errors:
            return Line(name_of(each), MISSING, note="; ".join(errors))
        if answers[0]["hash"] != answers[1]["hash"] and not changed:
            return Line(name_of(each), CHANGED, note=f"{answers[0]['hash']} became {answers[1]['hash']}")
        ratios.append(repetition(*sides))
    return None


def name_of(each: Benchmark) -> str:
    return f"{each[0]}[{each[1]}]"


def line_of(name: str, verdict: Verdict, margin: float, note: str) -> Line:
    return Line(name, verdict.kind, verdict.ratio, verdict.low, verdict.high, margin, note)


# ---- two files --------------------------------------------------------------------------------------------------------
def table_of(document: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Benchmarks of a document of the suite by full name: `extra_info` and the raw `samples`."""
    return {b["fullname"]: {**b["extra_info"], "samples": b["stats"]["data"]} for b in document["benchmarks"]}


def entries(path: Path) -> dict[str, dict[str, Any]]:
    """Benchmarks of a file that the suite wrote with `--benchmark-json`, by full name. GateError for an empty one."""
    try:
        table = table_of(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise GateError(f"{path}: no file of the suite ({type(error).__name__}: {error})") from error
    if not table:
        raise GateError(f"{path}: no benchmarks: an empty run is a failure")
    return table


def compare_files(a: Path, b: Path, margin: float = FILE_MARGIN) -> list[Line]:
    """Compares two runs of the suite. GateError when they are from different machines or one is empty."""
    before, after = entries(a), entries(b)
    keys = [{e.get("machine_key") for e in table.values()} for table in (before, after)]
    if keys[0] != keys[1] or None in keys[0]:
        raise GateError(f"{a} and {b} are from different machines ({keys[0]} and {keys[1]}): nothing to compare")
    lines = []
    for name in sorted(before.keys() | after.keys()):
        lines.append(file_line(name, before.get(name), after.get(name), MARGINS.get(name, margin)))
    return lines


def file_line(name: str, old: dict[str, Any] | None, new: dict[str, Any] | None, margin: float) -> Line:
    """The verdict over a benchmark's entries in two runs (values of `entries`), each normalised by its control."""
    if old is None or new is None:
        return Line(name, MISSING, note=f"only in {'A' if new is None else 'B'}")
    if (new.get("roof_pct") or 0.0) > 100 * ROOF_MARGIN:
        return Line(name, ABOVE_ROOF, note=f"{new['roof_pct']:.0f} % of its roof: the time or the cost is wrong")
    if old["output_hash"] != new["output_hash"]:
        return Line(name, CHANGED, note=f"{old['output_hash']} became {new['output_hash']}")
    if old["temperature"] != new["temperature"] or old["entry"] != new["entry"]:
        return Line(name, MISSING, note="measured in another way")
    scaled = [[s / e["control_seconds"] for s in e["samples"]] for e in (old, new)]
    if min(len(s) for s in scaled) < MIN_REPETITIONS:
        return Line(name, MISSING, note=f"fewer than {MIN_REPETITIONS} samples")
    return line_of(name, of_samples(scaled[0], scaled[1], margin), margin, "two files")


def table(lines: Sequence[Line], markdown: bool = False) -> str:
    """The verdicts for a terminal, or for a pull request."""
    head = ("benchmark", "verdict", "B / A", "interval", "margin", "note")
    rows = [head]
    for line in sorted(lines, key=lambda x: (not x.failed, x.kind == SAME, x.benchmark)):
        numbers = ("–", "–") if line.ratio is None else (f"{line.ratio:.3f}", f"{line.low:.3f} to {line.high:.3f}")
        rows.append((line.benchmark, line.kind, *numbers, f"{100 * (line.margin or 0):.0f} %", line.note))
    if markdown:
        body = [f"| {' | '.join(row)} |" for row in rows]
        return "\n".join([body[0], "|---" * len(head) + "|", *body[1:]])
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join("  ".join(w.ljust(n) for w, n in zip(row, widths, strict=True)).rstrip() for row in rows)
