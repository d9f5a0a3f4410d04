"""`pykernels check`: every op of every available backend against the reference, on this machine."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..contract import OPS
from ..library import call
from ..registry import ABSENT, backends, load
from ..testing.compare import Mismatch, check_case
from ..testing.factories import Case, cases

EXAMPLES = """\
  pykernels check
  pykernels check --backend cpu --op sample
  TRITON_INTERPRET=1 pykernels check --backend triton
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backend", help="only this backend (default: every available one but the reference)")
    parser.add_argument("--op", choices=sorted(OPS), help="only this op")
    parser.add_argument("--full", action="store_true", help="every case of the test suite instead of the smoke subset")


@dataclass
class Row:
    """What was found for one op of one backend."""

    backend: str
    op: str
    passed: int = 0
    refused: int = 0
    worst: float = 0.0  # largest error as a share of its budget
    failures: list[str] = field(default_factory=list)
    note: str = ""


def run_op(backend: str, op_name: str, chosen: Iterable[Case], device: str) -> Row:
    """Runs an op's cases; a case that the backend refuses is counted, not hidden."""
    row = Row(backend, op_name)
    for case in chosen:
        try:
            verdicts = check_case(case, lambda name, args: _run(backend, name, args), device)
        except NotImplementedError as error:
            row.refused += 1
            row.note = str(error)
        except Mismatch as error:
            row.failures.append(str(error))
        else:
            row.passed += 1
            shares = [v.error / v.budget for v in verdicts if v.budget > 0]
            row.worst = max([row.worst, *shares])
    return row


def _run(backend: str, op_name: str, args: dict[str, Any]) -> None:
    call(OPS[op_name], backend, **args)


def run(args: argparse.Namespace) -> tuple[int, dict[str, Any] | None]:
    found = backends()
    names = [args.backend] if args.backend else [n for n, state in found.items() if state and n != "reference"]
    rows: list[Row] = []
    for name in names:
        load(name)  # an unknown name is refused here
        state = found[name]
        if not state:
            raise ValueError(f"backend {name} is not available: {'; '.join(getattr(state, 'reasons', ()))}")
        device = "cuda" if name in ("cuda", "triton") and torch.cuda.is_available() else "cpu"
        for op_name in [args.op] if args.op else OPS:
            if (name, OPS[op_name].family) in ABSENT:
                rows.append(Row(name, op_name, note=ABSENT[name, OPS[op_name].family]))
                continue
            started = time.perf_counter()
            rows.append(run_op(name, op_name, cases(op_name, "full" if args.full else "smoke"), device))
            print(f"{name} {op_name}: {time.perf_counter() - started:.1f} s", file=sys.stderr)
    failed = any(row.failures for row in rows)
    if args.json:
        return int(failed), {"ok": not failed, "rows": [vars(row) for row in rows]}
    _print(rows)
    return int(failed), None


def _print(rows: list[Row]) -> None:
    print(f"{'backend':<10} {'op':<26} {'passed':>6} {'refused':>8} {'failed':>7}  worst error / budget")
    for row in rows:
        worst = f"{row.worst:.2f}" if row.worst else ("exact" if row.passed else row.note)
        print(f"{row.backend:<10} {row.op:<26} {row.passed:>6} {row.refused:>8} {len(row.failures):>7}  {worst}")
    for row in rows:
        for failure in row.failures[:3]:
            print(f"  {failure}")
