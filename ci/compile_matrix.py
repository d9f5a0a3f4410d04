"""Every Triton kernel in every shipped configuration, compiled for every target without a GPU, against committed figures.

    compile_matrix.py            compile everything and compare with ci/compile_matrix.json (ten minutes of one core)
    compile_matrix.py --quick    the configurations that the speed of a real model hangs on
    compile_matrix.py --write    replace the figures of this Triton version
    compile_matrix.py --stale    compile nothing, and name the rows that were made from other code or another choice of tile
    compile_matrix.py --table    print the figures, with an estimate of occupancy and clocks, and compile nothing
    compile_matrix.py --occupancy sm90    print those of one target as JSON, for `pykernels report --occupancy`

It fails on a spill, on a product that has left the tensor cores (wgmma on sm_90, mma.sync on sm_80, tcgen05 on sm_100, mfma on
gfx942), on asynchronous copies that have vanished from a main loop, on a main loop longer than is allowed, on registers, shared
memory or a main loop that grew by more than a tenth, on a row that is missing or was made from other code, and on one that no
case makes: the rules are in `compile_gate.py`. Figures are kept per Triton version: they may differ between two.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path

import triton
from compile_cases import CASES, expectations, loop_work
from compile_gate import Row, audit, dump, stale
from triton_aot import TARGETS, Launch, capture, compile_launch, digest, read_machine_code

from pykernels.roofline.occupancy import MULTIPROCESSORS, estimate, report_rows

TABLE = Path(__file__).with_suffix(".json")


def version() -> str:
    return ".".join(triton.__version__.split(".")[:2])


def launches(name: str, target: str) -> Iterator[tuple[str, str, Launch]]:
    """(label, kernel, launch) of what is measured of a case on a target; the first launch of a kernel counts."""
    seen = set()
    for launch in capture(TARGETS[target][0], CASES[name].call):
        kernel = launch.kernel.__name__.strip("_")
        if kernel in CASES[name].kernels and kernel not in seen:
            seen.add(kernel)
            yield f"{name}/{kernel}/{target}", kernel, launch


def measure(job: tuple[str, str]) -> dict[str, Row]:
    """A row for each kernel that a (case, target) launches, by label."""
    name, target = job
    warnings.simplefilter("ignore")
    rows: dict[str, Row] = {}
    for label, kernel, launch in launches(name, target):
        code = read_machine_code(compile_launch(launch, target), target)
        macs, steps = loop_work(kernel, launch.arguments)
        row = {**asdict(code), **launch.options, "macs": macs, "steps": steps, "source": digest(launch)}
        if kernel == "attention":
            row["tile"] = [launch.arguments["BLOCK_M"], launch.arguments["BLOCK_N"]]
        rows[label] = row
    return rows


def print_table(rows: Mapping[str, Row]) -> None:
    """Clocks are those of one turn of the main loop of one block on its multiprocessor, when nothing waits."""
    print(
        f"{'kernel':50s}    tile reg spill shared loop tensor async | warps/SM limit          issue  mufu tensor clocks"
    )
    for label, row in sorted(rows.items()):
        e = estimate(row, label.rsplit("/", 1)[1])
        tile = "x".join(map(str, row.get("tile", ())))
        clocks = " ".join(f"{c or 0:6.0f}" for c in (e.issue_clocks, e.special_clocks, e.tensor_clocks))
        print(f"{label:50s} {tile:>7s} {row['registers']:3d} {row['spills']:5d} {row['shared']:6d} {row['loop_length']:4d} "
              f"{row['loop'].get('tensor', 0):6d} {row['loop'].get('async', 0):5d} | {e.warps:8d} {e.limit:13s} {clocks}")  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag in ("--quick", "--write", "--stale", "--table"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--occupancy", metavar="TARGET", choices=sorted(MULTIPROCESSORS))
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    tables = json.loads(TABLE.read_text())
    known = tables.get(version(), {})
    if options.table:
        print_table(known)
        return 0
    if options.occupancy:
        print(json.dumps(report_rows(known, options.occupancy), indent=1))
        return 0
    expected = expectations(options.quick)
    jobs = dict.fromkeys((label.split("/")[0], label.split("/")[2]) for label in expected)
    if options.stale:
        wrong = stale(known, {label: digest(launch) for job in jobs for label, _, launch in launches(*job)})
        print("\n".join(wrong) if wrong else f"compile matrix: all {len(known)} rows were made from this code")
        return 1 if wrong else 0
    rows: dict[str, Row] = {}
    with ProcessPoolExecutor(options.jobs) as pool:
        for made in pool.map(measure, jobs):
            rows |= made
            print(f"compiled {', '.join(made)}", file=sys.stderr, flush=True)
    if options.write:
        known = (known if options.quick else {}) | rows
        tables[version()] = known
        TABLE.write_text(dump(tables))
    known = {k: v for k, v in known.items() if k in expected or not options.quick}
    wrong = audit(rows, known, expected) + stale(known, {label: row["source"] for label, row in rows.items()})
    print_table(rows)
    print("\n".join(wrong) if wrong else f"compile matrix: {len(rows)} kernels, all as they should be")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
