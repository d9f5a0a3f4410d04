"""Every Triton kernel in every shipped configuration, compiled for every target without a GPU, against committed figures.

    compile_matrix.py            compile everything and compare with ci/compile_matrix.json (about three minutes on two cores)
    compile_matrix.py --quick    the configurations that the speed of a real model hangs on
    compile_matrix.py --write    replace the figures of this Triton version
    compile_matrix.py --table    print the figures, with an estimate of occupancy and issue slots, and compile nothing

It fails on a spill, on a tensor-core path that has vanished (wgmma on sm_90, mma.sync on sm_80, tcgen05 on sm_100, mfma on
gfx942), on asynchronous copies that have vanished from a main loop, on registers or a main loop that grew by more than a tenth,
and on a row that is missing from the table. Figures are kept per Triton version: they may differ between two.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import triton
from compile_cases import CASES, Expectation
from triton_aot import TARGETS, capture, compile_launch, read_machine_code

TABLE = Path(__file__).with_suffix(".json")
MARGIN = 1.1
TENSOR_CORES = {"sm80": ("HMMA", "IMMA"), "sm90": ("HGMMA",), "sm100": ("UTC",), "gfx942": ("v_mfma",)}
Row = dict[str, Any]


def version() -> str:
    return ".".join(triton.__version__.split(".")[:2])


def measure(job: tuple[str, str]) -> tuple[str, str, dict[str, Row]]:
    """(case, target, a row for each kernel that the case launches)."""
    name, target = job
    warnings.simplefilter("ignore")
    rows: dict[str, Row] = {}
    for launch in capture(TARGETS[target][0], CASES[name].call):
        kernel = launch.kernel.__name__.strip("_")
        if kernel not in CASES[name].kernels or kernel in rows:
            continue
        code = read_machine_code(compile_launch(launch, target), target)
        rows[kernel] = {**asdict(code), **launch.options}
    return name, target, rows


def complaints(label: str, target: str, row: Row, known: Row | None, expected: Expectation) -> list[str]:
    """What is wrong with one row."""
    found = []
    if row["spills"]:
        found.append(f"{row['spills']} spills")
    if expected.tensor:
        wanted = TENSOR_CORES[target] if target in expected.wide else (*TENSOR_CORES[target], "HMMA")
        ops = row["tensor_ops"]
        if not any(op.startswith(wanted) for op in ops):
            found.append(f"no {' or '.join(wanted)} in the main loop, but {ops or 'no tensor cores'}")
        if target in expected.wide and any(not op.startswith(wanted) for op in ops):
            found.append(f"a product of the main loop fell back to {ops}")
        if target.startswith("sm") and not row["loop"].get("async"):
            found.append("no asynchronous copy in the main loop")
    if row["loop_length"] > expected.longest.get(target, sys.maxsize):
        found.append(
            f"a main loop of {row['loop_length']} instructions, at most {expected.longest[target]} are allowed"
        )
    if known is None:
        found.append(f"no row for triton {version()}: run ci/compile_matrix.py --write")
    else:
        for figure in ("registers", "loop_length", "shared"):
            if row[figure] > known[figure] * MARGIN + 8:
                found.append(f"{figure} grew from {known[figure]} to {row[figure]}")
    return [f"{label}: {text}" for text in found]


def occupancy(row: Row) -> int:
    """Warps of this kernel that fit a multiprocessor of 64 K registers, 228 KiB of shared memory and 64 warps."""
    warps = row.get("num_warps", 4)
    by_registers = 65536 // (-(-max(row["registers"], 1) // 8) * 8 * 32 * warps)
    by_shared = 227 * 1024 // (row["shared"] + 1024)
    return max(0, min(by_registers, by_shared, 64 // warps)) * warps


def print_table(table: dict[str, Row]) -> None:
    """Figures of this version; issue slots are those of one turn of the main loop of a block on its scheduler."""
    print(f"{'kernel':58s} reg spill shared loop tensor async  ldg mufu warps/SM issue/turn")
    for label, row in sorted(table.items()):
        loop = row["loop"]
        issue = row["loop_length"] * row.get("num_warps", 4) // 4
        counts = " ".join(f"{loop.get(kind, 0):5d}" for kind in ("tensor", "async", "ldg", "mufu"))
        print(f"{label:58s} {row['registers']:3d} {row['spills']:5d} {row['shared']:6d} {row['loop_length']:4d} {counts} "
              f"{occupancy(row):8d} {issue:10d}")  # fmt: skip


def jobs(quick: bool) -> list[tuple[str, str]]:
    return [(n, t) for n, case in CASES.items() for t in (case.quick if quick else case.targets)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag in ("--quick", "--write", "--table"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    tables = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    known = tables.get(version(), {})
    if options.table:
        print_table(known)
        return 0
    wrong: list[str] = []
    measured: dict[str, Row] = {}
    with ProcessPoolExecutor(options.jobs) as pool:
        for name, target, rows in pool.map(measure, jobs(options.quick)):
            for kernel in CASES[name].kernels:
                label = f"{name}/{kernel}/{target}"
                if kernel not in rows:
                    wrong.append(f"{label}: the case launches no such kernel")
                    continue
                measured[label] = rows[kernel]
                before = rows[kernel] if options.write else known.get(label)
                wrong += complaints(label, target, rows[kernel], before, CASES[name].expected)
                print(f"compiled {label}", file=sys.stderr, flush=True)
    if options.write:
        tables[version()] = known | measured
        TABLE.write_text(json.dumps(tables, indent=1, sort_keys=True) + "\n")
    print_table(measured)
    print("\n".join(wrong) if wrong else f"compile matrix: {len(measured)} kernels, all as they should be")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
