"""`pykernels report`: the page of a run, with benchmarks, profiles and an earlier run beside it."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from ..roofline.attach import attach
from ..roofline.report import render

EXAMPLES = """\
  pykernels report report/roofline.json --out page
  pykernels report report/roofline.json --bench now.json --before old/roofline.json --before-bench before.json
  pykernels report report/roofline.json --profile profile/profile.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("document", metavar="RUN", help="roofline.json of `pykernels roofline`")
    parser.add_argument("--bench", action="append", default=[], help="a file of `pytest bench/suite --benchmark-json`")
    parser.add_argument("--profile", action="append", default=[], help="profile.json of `pykernels profile`")
    parser.add_argument("--occupancy", help="a JSON list of rows: occupancy of GPU kernels")
    parser.add_argument("--before", help="roofline.json of an earlier run on the same machine, to compare with")
    parser.add_argument("--before-bench", action="append", default=[], help="the earlier run's file of the suite")
    parser.add_argument("--out", default="report", help="folder of index.html and roofline.json (default: report)")


def run(args: argparse.Namespace) -> tuple[int, dict[str, Any] | None]:
    if args.before_bench and not args.before:
        raise ValueError("--before-bench belongs to a run: name it with --before")
    before = _read(args.before) if args.before else None
    if before is not None and args.before_bench:
        before = attach(before, bench=[_read(path) for path in args.before_bench])
    document = attach(
        _read(args.document),
        bench=[_read(path) for path in args.bench],
        profiles=[_read(path) for path in args.profile],
        occupancy=_read(args.occupancy) if args.occupancy else (),
        before=before,
        command=shlex.join(["pykernels", *sys.argv[1:]]),
    )
    page = render(document, Path(args.out))
    print(f"report: {page}", file=sys.stderr if args.json else sys.stdout)
    return 0, document


def _read(path: str) -> Any:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
