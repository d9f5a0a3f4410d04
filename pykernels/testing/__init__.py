"""Inputs that can fail and the comparison that judges: used by the tests, by the bench and by `pykernels check`.

For each case of `cases(op, "smoke")`, `check_case(case, run)` calls `run(op, args)`, which computes into `args`, and
raises `Mismatch` with the reasons when it disagrees with the reference.
"""

from __future__ import annotations

from .compare import Mismatch, Snapshot, Verdict, check_case, judge, oracle
from .factories import Case, cases

__all__ = ["Case", "Mismatch", "Snapshot", "Verdict", "cases", "check_case", "judge", "oracle"]
