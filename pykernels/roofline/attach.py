"""What a report may hold besides its run: benchmarks of the suite, profiles, occupancy, and a comparison with before."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Json = Mapping[str, Any]
# Metrics that two runs are compared by, and whether more of it is better.
COMPARED = (
    ("ttft", "s", False),
    ("itl", "s", False),
    ("icl_p99", "s", False),
    ("prefill_tokens_per_s", "tok/s", True),
    ("decode_tokens_per_s", "tok/s", True),
    ("prefill_roof_pct", "%", True),
    ("decode_roof_pct", "%", True),
    ("overhead_pct", "%", False),
)


def bench_rows(suite: Json) -> list[dict[str, Any]]:
    """One row per benchmark of a pytest-benchmark file of the suite: op, backend, size, time in seconds (median and
    quartiles), percent of the roof (None where there is no ceiling), hash of the output, machine."""
    rows = []
    for entry in suite.get("benchmarks", ()):
        info, stats = entry["extra_info"], entry["stats"]
        if not info.get("op"):
            raise ValueError(f"{entry.get('name', 'a benchmark')} is not of this suite: it names no op")
        size = {n: v for n, v in (entry.get("params") or {}).items() if n not in ("backend", "case")}
        rows.append(
            {
                "op": info["op"],
                "case": info["case"],
                "backend": info["backend"],
                "temperature": info["temperature"],
                "size": " ".join(str(v) if isinstance(v, str) else f"{n} {v}" for n, v in size.items()) or info["case"],
                "shape": info["shape"],
                "time": stats["median"],
                "quartiles": [stats["q1"], stats["q3"]],
                "flops": info["flops"],
                "bytes": info["bytes"],
                "roof_pct": info["roof_pct"],
                "bound": info["bound"],
                "output_hash": info["output_hash"],
                "machine_key": info["machine_key"],
            }
        )
    if not rows:
        raise ValueError("the file holds no benchmark")
    return rows


def heat_table(rows: Sequence[Json]) -> list[dict[str, Any]]:
    """Rows of `bench_rows`, by op: its backends, and per size the index of each backend's row (None where it has none)."""
    ops: dict[str, dict[str, Any]] = {}
    for index, row in enumerate(rows):
        op = ops.setdefault(row["op"], {"op": row["op"], "backends": [], "sizes": {}})
        if row["backend"] not in op["backends"]:
            op["backends"].append(row["backend"])
        op["sizes"].setdefault((row["size"], row["temperature"]), {})[row["backend"]] = index
    return [
        {
            "op": op["op"],
            "backends": op["backends"],
            "sizes": [(size, [cells.get(b) for b in op["backends"]]) for (size, _), cells in op["sizes"].items()],
        }
        for op in ops.values()
    ]


def _machine(document: Json) -> dict[str, Any]:
    return {name: value for name, value in document["ceilings"]["machine"].items() if name != "version"}


def _ratio(before: float | None, after: float | None, more_is_better: bool) -> float | None:
    """How many times as good after is."""
    if not before or not after:
        return None
    return after / before if more_is_better else before / after


def compare(before: Json, after: Json) -> dict[str, Any]:
    """The comparison of two documents of `pykernels roofline`, and of the benchmarks attached to both.

    A ratio is how many times as fast `after` is. Where outputs differ nothing is compared; two machines are a ValueError.
    """
    if _machine(before) != _machine(after):
        raise ValueError("results of two machines, levels or thread counts are not compared")
    same = before["metrics"]["output_hash"] == after["metrics"]["output_hash"]
    rows = []
    for name, unit, more in COMPARED:
        old, new = before["metrics"].get(name), after["metrics"].get(name)
        ratio = _ratio(old, new, more) if same else None
        rows.append({"name": name, "unit": unit, "before": old, "after": new, "ratio": ratio})
    environment = before["environment"]
    return {
        "before": {k: environment[k] for k in ("pykernels", "git_revision", "load_at_start", "load_at_end")},
        "same_output": same,
        "metrics": rows,
        **_compare_bench(before.get("bench", ()), after.get("bench", ())),
    }


def _compare_bench(before: Sequence[Json], after: Sequence[Json]) -> dict[str, Any]:
    """Benchmarks in both, largest change first; `apart` says that the quartiles do not meet. What is missing is named."""

    def keyed(rows: Sequence[Json]) -> dict[tuple[str, ...], Json]:
        return {(r["op"], r["case"], r["backend"], r["temperature"], r["machine_key"]): r for r in rows}

    old, new = keyed(before), keyed(after)
    rows: list[dict[str, Any]] = []
    for key in [k for k in new if k in old]:
        a, b = old[key], new[key]
        row = {"op": b["op"], "size": b["size"], "backend": b["backend"], "before": a["time"], "after": b["time"]}
        equal = a["output_hash"] == b["output_hash"]
        row["ratio"] = a["time"] / b["time"] if equal else None
        row["apart"] = equal and (b["quartiles"][0] > a["quartiles"][1] or b["quartiles"][1] < a["quartiles"][0])
        rows.append(row)
    rows.sort(key=lambda r: -abs((r["ratio"] or 1.0) - 1.0))
    ratios = [r["ratio"] for r in rows if r["ratio"]]
    return {
        "bench": rows,
        "bench_median_ratio": statistics.median(ratios) if ratios else None,
        "only_before": [" ".join(k[:3]) for k in old if k not in new],
        "only_after": [" ".join(k[:3]) for k in new if k not in old],
    }


def attach(
    document: Json,
    *,
    bench: Sequence[Json] = (),
    profiles: Sequence[Json] = (),
    occupancy: Sequence[Json] = (),
    before: Json | None = None,
    command: str | None = None,
) -> dict[str, Any]:
    """The document with more to show. `bench`: files of the suite; `profiles`: documents of `pykernels profile`;
    `occupancy`: rows with equal keys, shown as a table; `before`: an earlier document, benchmarks attached."""
    out = dict(document)
    if bench:
        out["bench"] = [row for suite in bench for row in bench_rows(suite)]
    if profiles:
        out["profiles"] = [dict(p) for p in profiles]
    if occupancy:
        if any(list(row) != list(occupancy[0]) for row in occupancy):
            raise ValueError("the rows of the occupancy table have different columns")
        out["occupancy"] = [dict(row) for row in occupancy]
    if before is not None:
        out["comparison"] = compare(before, out)
    if command is not None:
        out["report_command"] = command
    return out
