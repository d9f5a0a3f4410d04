"""Launches small cases of every op on the GPU, for compute-sanitizer to watch. tests/test_cuda_device.py judges results.

    compute-sanitizer --tool racecheck --error-exitcode 9 python -m pykernels.bench.sanitize --backend cuda

The smoke cases of every op come first, then the others until the time is spent: a tool slows launches down by 10 to 100.
Exit codes: 0 done, 1 an op was never launched or failed, 2 no GPU or wrong usage; the tool adds its own.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from pykernels.contract import OPS
from pykernels.registry import Backend, backends, load
from pykernels.testing.factories import Case, cases, narrowed


@dataclass
class Launched:
    """What was done: launches by op, cases that the time did not allow, errors."""

    count: Counter[str] = field(default_factory=Counter)
    left_out: int = 0
    errors: list[str] = field(default_factory=list)


def order() -> list[Case]:
    """Every op's smoke cases, then the rest of each in turn. Caches of gigabytes are left to the tests."""
    quick = [case for op in OPS for case in cases(op, "smoke")]
    rest = [[c for c in cases(op) if not c.smoke and "vast" not in c.name] for op in OPS]
    return quick + [row[i] for i in range(max(map(len, rest))) for row in rest if i < len(row)]


def accepted(backend: Backend, case: Case, device: str) -> dict[str, Any] | None:
    """The case's arguments if the backend takes them; attention in float32 as bfloat16, where it wants tensor cores."""
    args = case.args(device)
    for made in (args, narrowed(args, torch.bfloat16)):
        if not backend.refuses(case.op, made):
            return made
    return None


def launch(backend: Backend, device: str, deadline: float) -> Launched:
    """Runs the cases once each, smoke cases whatever the time."""
    done = Launched()
    for case in order():
        if not case.smoke and time.monotonic() > deadline:
            done.left_out += 1
            continue
        if (args := accepted(backend, case, device)) is None:
            continue
        try:
            backend.run(case.op, args)
            if device != "cpu":
                torch.cuda.synchronize()
        except (RuntimeError, AssertionError) as error:
            done.errors.append(f"{case}: {error}")
        else:
            done.count[case.op] += 1
    done.errors += [f"{op}: no case was launched" for op in OPS if not done.count[op]]
    return done


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="pykernels.bench.sanitize", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--backend", choices=("cuda", "triton"), default="cuda")
    parser.add_argument("--seconds", type=float, default=30.0, help="time after which no further case is begun")
    options = parser.parse_args(argv)
    state = backends()[options.backend]
    if not state or not torch.cuda.is_available():
        reasons = [*getattr(state, "reasons", ()), *([] if torch.cuda.is_available() else ["there is no GPU"])]
        print(f"pykernels.bench.sanitize: {'; '.join(reasons)}", file=sys.stderr)
        return 2
    done = launch(load(options.backend), "cuda", time.monotonic() + options.seconds)
    print(f"{options.backend}: {done.count.total()} launches of {len(done.count)} ops, {done.left_out} cases left out")
    for error in done.errors:
        print(f"  {error}", file=sys.stderr)
    return 1 if done.errors else 0


if __name__ == "__main__":
    sys.exit(main())
