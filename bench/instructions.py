"""How many instructions an op's kernel executes, counted by callgrind: as many on a busy machine as on an idle one.

    python -m pykernels.bench.instructions rms_norm ...

runs the ops under valgrind itself; `count` starts it there and reads what was counted. Each op is recorded once and twice,
and both plans are replayed inside a window of their own: the difference is one call, without Python and without the replay.
Valgrind knows no AVX-512, so it is the AVX2 build on one thread that is counted. The counts belong to the compiler that
built the module, and are only compared with those of the same one.
"""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from pykernels import native
from pykernels.contract import OPS, check

from .callgrind import Marks, under_callgrind
from .clocks import Call, clock_of
from .gate import FEWER, MISSING, MORE, SAME, GateError, Line, name_of
from .harness import Prepare, prepare
from .inputs import Args
from .problems import gated

LEVEL = "avx2"
MARGIN = 0.01  # of an op's instructions: what the replay's own bookkeeping may differ by in a short one
TURNS = 3  # each window is counted so often, and the fewest stand
ENVIRONMENT = {"PYKERNELS_CPU_ISA": LEVEL, "PYKERNELS_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}


def compiler() -> str:
    """The compiler of the module that is counted."""
    return compiler_of(Path(native.load(LEVEL).__file__ or ""))


def compiler_of(module: Path) -> str:
    """The compiler that built a native module, as it wrote its name into it: `GCC 12.2.0`."""
    found = re.search(rb"GCC: \([^)]*\) ([\d.]+)|(clang version [\d.]+)", module.read_bytes())
    if found is None:
        raise GateError(f"{module.name} does not tell its compiler: its counts cannot be compared with any")
    return f"GCC {found[1].decode()}" if found[1] else found[2].decode()


def count(ops: Sequence[str]) -> dict[str, int]:
    """Benchmark -> instructions of one call of its kernel. GateError when an op was not counted."""
    windows = under_callgrind([sys.executable, "-m", "pykernels.bench.instructions", *ops], ENVIRONMENT)
    counted = {}
    for label in sorted({label.rpartition("#")[0] for label in windows}):
        once, twice = windows.get(f"{label}#1"), windows.get(f"{label}#2")
        if once is None or twice is None or twice <= once:
            raise GateError(f"{label}: one call took {once} instructions and two {twice}: nothing was counted")
        counted[label] = twice - once
    if missing := [op for op in ops if not any(label.startswith(f"{op}[") for label in counted)]:
        raise GateError(f"callgrind did not count {', '.join(missing)}")
    return counted


def compare(counted: Mapping[str, int], table: Mapping[str, int], margin: float = MARGIN) -> list[Line]:
    """Two-sided: fewer instructions fail as well, until the table says so, or the next change could give them back unseen."""
    lines = []
    for name in sorted(counted.keys() | table.keys()):
        now, before = counted.get(name), table.get(name)
        if now is None or before is None:
            lines.append(
                Line(name, MISSING, note="not counted" if now is None else "not in the table: --update adds it")
            )
            continue
        ratio = now / before
        kind = MORE if ratio > 1 + margin else FEWER if ratio < 1 / (1 + margin) else SAME
        note = f"{before:,} -> {now:,}" + ("; --update keeps it" if kind == FEWER else "")
        lines.append(Line(name, kind, ratio, ratio, ratio, margin, note))
    return lines


def plan_of(times: int) -> Prepare:
    """Calls that replay the kernel so many times."""

    def prepare(op_name: str, args: Args) -> Call:
        check(OPS[op_name], args)
        with native.record() as plan:
            for _ in range(times):
                native.BACKEND.run(op_name, args)
        return plan.run

    return prepare


def main(ops: Sequence[str]) -> None:
    """Runs one problem of each op inside its windows; the outputs are compared with the reference afterwards."""
    torch.set_num_threads(1)
    device = torch.device("cpu")
    marks = Marks()
    for op in ops:
        case = gated(op)
        ready = prepare(case, "cpu", clock_of(device), device, cold=False, call=plan_of(1))
        twice = plan_of(2)(op, ready.copies[0])
        for plan in (twice, *ready.calls):
            plan()
        gc.collect()
        gc.disable()
        for _ in range(TURNS):
            for number, plan in enumerate((*ready.calls, twice), 1):
                with marks.window(f"{name_of((op, case.name))}#{number}"):
                    plan()
        gc.enable()
        ready.verify()


if __name__ == "__main__":
    main(sys.argv[1:])
