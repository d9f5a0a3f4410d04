"""`pykernels bench`: ops timed on this machine, under their roofs and beside an earlier run."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from .options import Progress

EXAMPLES = """\
  pykernels bench decode linear
  pykernels bench decode --sizes llama3_8b int8 --save before.json
  pykernels bench norm activation prefill --sizes full --peer torch
  pykernels bench decode --sizes llama3_8b int8 --baseline before.json --plot now.svg
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="FAMILY", help="families or ops (default: all)")
    parser.add_argument(
        "--backend", action="append", metavar="NAME", help="may be repeated (default: all that can be measured here)"
    )
    parser.add_argument(
        "--sizes",
        nargs="+",
        default=["smoke"],
        metavar="WORD",
        help="smoke: one problem of each op (default); full: all; else those with all these words in their name",
    )
    parser.add_argument("--warm", action="store_true", help="the same buffers in every call (default: cold)")
    parser.add_argument(
        "--entry", choices=("kernel", "op"), default="kernel", help="kernel leaves out the op's own Python"
    )
    parser.add_argument("--seconds", type=float, default=0.2, help="time of one benchmark (default: 0.2)")
    parser.add_argument(
        "--peer",
        choices=("torch",),
        help="also time one plain torch expression of each op, on the same inputs and as many threads (torch / ours in "
        "x torch; - where it has none or is wrong). Its keys and values are contiguous, not paged, its weights row-major; "
        "its time includes torch's dispatch, as ours does with --entry op",
    )
    parser.add_argument("--baseline", metavar="FILE", help="show ratios to this file of --save or of --benchmark-json")
    parser.add_argument("--save", metavar="FILE", help="write what the suite's --benchmark-json writes")
    parser.add_argument("--plot", metavar="FILE", help="write an SVG: each op's share of its roof, now and before")


def run(args: argparse.Namespace) -> tuple[int, dict[str, Any] | None]:
    from ..bench import front, gate, plot
    from ..bench.harness import StopRule
    from ..bench.machine import measurable
    from ..roofline import measure as measure_ceilings
    from ..roofline.ceilings import remeasurer

    backends = args.backend or measurable()
    if wrong := [n for n in backends if n not in measurable()]:
        raise ValueError(
            f"{', '.join(wrong)} cannot be measured here, but {', '.join(measurable())}; see pykernels doctor"
        )
    cases = front.choose(args.names, args.sizes)
    rule = StopRule(seconds=args.seconds, noise=0.01)
    baseline = gate.entries(Path(args.baseline)) if args.baseline else None
    found = []
    with Progress(total=len(cases) * len(backends)) as progress:
        progress.say("measuring the roofs")
        ceilings = measure_ceilings() if "cpu" in backends else None
        limits = (ceilings, remeasurer(ceilings) if ceilings else None)
        how = {"cold": not args.warm, "entry": args.entry, "peer": args.peer}
        progress.say("measuring")
        for entry in front.run(cases, backends, rule, limits=limits, say=_say, **how):
            found.append(entry)
            progress.tick()
    document = {"benchmarks": found}
    if not found:
        raise ValueError("every backend refused every problem: nothing was measured")
    shown = front.rows(gate.table_of(document), baseline)
    if args.save:
        Path(args.save).write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
    if args.plot:
        Path(args.plot).write_text(plot.svg(shown))
    if not args.json:
        print(front.table(shown))
    return 0, document | {"rows": [vars(row) for row in shown]}


def _say(text: str) -> None:
    print(text, file=sys.stderr)
