"""How often the gate is right: a planted slowdown of rms_norm against an unchanged tree, and a tree against itself.

    taskset -c 0 planted.py BASE PLANTED --runs 20 --busy

Both are built trees (`setup.py build_ext --inplace`); PLANTED differs in one kernel, for example by normalising every tenth
row twice. `--busy` keeps the cores that `taskset` leaves out busy with traffic through the shared caches and the memory.
`--part planted` and `--part same` make one half of it. Prints per run what was called SLOWER or FASTER, then the counts.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from pykernels.bench.gate import compare_trees, name_of
from pykernels.bench.problems import SMOKE, problems

PLANTED = ("rms_norm", "smollm2-bfloat16-tokens_256")


BURN = "import numpy, os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nx = numpy.ones(1 << 22)\nwhile True: x = x * 1.01 % 2"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path)
    parser.add_argument("planted", type=Path)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--part", choices=("planted", "same"), help="default: both")
    parser.add_argument("--ops", nargs="*", default=list(SMOKE))
    options = parser.parse_args()
    others = sorted(set(range(os.cpu_count() or 1)) - os.sched_getaffinity(0)) if options.busy else []
    if options.busy and not others:
        parser.error("--busy needs cores that this process may not run on: start it with taskset")
    busy = [subprocess.Popen([sys.executable, "-c", BURN, str(core)]) for core in others]
    try:
        run_all(options)
    finally:
        for process in busy:
            process.kill()


def run_all(options: argparse.Namespace) -> None:
    benchmarks = [(op, problems(op, "smoke")[0].name) for op in options.ops]
    kinds: dict[str, list[str]] = {"planted": [], "same": []}
    for run in range(options.runs):
        start = time.perf_counter()
        said = []
        if options.part != "same":
            hit = compare_trees(options.base, options.planted, [PLANTED])[0]
            kinds["planted"].append(hit.kind)
            said.append(f"{name_of(PLANTED)} {hit.kind} {hit.ratio:.3f} ({hit.low:.3f} to {hit.high:.3f}, {hit.note})")
        if options.part != "planted":
            lines = compare_trees(options.base, options.base, benchmarks)
            kinds["same"] += [x.kind for x in lines]
            odd = [f"{x.benchmark} {x.kind} {x.ratio} ({x.note})" for x in lines if x.kind != "SAME"]
            said.append(f"against itself {len(lines) - len(odd)} of {len(lines)} SAME, else {odd}")
        print(f"run {run + 1}: {'; '.join(said)}; {time.perf_counter() - start:.0f} s", flush=True)
    for part, found in kinds.items():
        if found:
            print(f"{part}: {dict(Counter(found))} of {len(found)}")


if __name__ == "__main__":
    main()
