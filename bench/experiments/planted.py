"""How often the gate is right: a planted slowdown of rms_norm against an unchanged tree, and a tree against itself.

    planted.py BASE PLANTED --runs 20 --busy

Both are built trees (`setup.py build_ext --inplace`); PLANTED differs in one kernel. `--busy` keeps the other cores busy.
Prints per run what was called SLOWER or FASTER, then the counts.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from pykernels.bench.gate import compare_trees, name_of
from pykernels.bench.problems import SMOKE, problems

PLANTED = ("rms_norm", "smollm2-bfloat16-tokens_256")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path)
    parser.add_argument("planted", type=Path)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--ops", nargs="*", default=list(SMOKE))
    options = parser.parse_args()
    benchmarks = [(op, problems(op, "smoke")[0].name) for op in options.ops]
    burn = "while True: pass"
    cores = len(os.sched_getaffinity(0)) - 1 if options.busy else 0
    busy = [subprocess.Popen([sys.executable, "-c", burn]) for _ in range(cores)]
    found = false = 0
    try:
        for run in range(options.runs):
            start = time.perf_counter()
            hit = compare_trees(options.base, options.planted, [PLANTED])[0]
            wrong = [
                x for x in compare_trees(options.base, options.base, benchmarks) if x.kind not in ("SAME", "AMBIGUOUS")
            ]
            found += hit.kind == "SLOWER"
            false += len(wrong)
            print(f"run {run + 1}: {name_of(PLANTED)} {hit.kind} {hit.ratio:.3f} ({hit.note}); "
                  f"A/A wrong: {[(x.benchmark, x.kind, x.ratio) for x in wrong]}; {time.perf_counter() - start:.0f} s",
                  flush=True)  # fmt: skip
    finally:
        for process in busy:
            process.kill()
    print(
        f"planted slowdown found {found} of {options.runs}; wrong verdicts {false} of {options.runs * len(benchmarks)}"
    )


if __name__ == "__main__":
    main()
