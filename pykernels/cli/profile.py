"""`pykernels profile`: a benchmark's very call under a profiler, and what it counted as points under the roof."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from ..contract import FAMILIES, OPS
from ..registry import backends
from ..roofline.units import text
from .options import positive

EXAMPLES = """\
  pykernels profile --tool torch --op decode                     a Chrome trace, on any machine
  pykernels profile --tool perf --op linear --calls 200          counters of the CPU, where it lets them be read
  pykernels profile --tool ncu --op decode --backend cuda        DRAM, L2 and L1 traffic of every kernel
  pykernels profile --tool nsys --op prefill --backend triton    a timeline
  pykernels profile --tool ncu --op decode --backend cuda --dry-run
  pykernels profile --tool ncu --op decode --backend cuda --read profile/
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from ..bench.harness import ENTRIES
    from ..bench.profilers import TOOLS

    parser.add_argument("--tool", required=True, choices=TOOLS)
    parser.add_argument("--op", required=True, choices=sorted({*OPS, *FAMILIES}), help="an op, or a family's main op")
    parser.add_argument(
        "--case", help="a row of the suite's grid, as its test's name shows it (default: the smoke run's)"
    )
    parser.add_argument("--backend", help="default: cuda for ncu and nsys, else cpu")
    parser.add_argument(
        "--entry", choices=tuple(ENTRIES), default="kernel", help="kernel leaves out the op's own Python"
    )
    parser.add_argument("--warm", action="store_true", help="the same buffers in every call (default: cold)")
    parser.add_argument("--calls", type=positive, default=3, help="calls that are profiled (default: 3)")
    parser.add_argument("--metrics", default="", help="further metrics for ncu, separated by commas")
    parser.add_argument("--out", default="profile", help="folder for everything that is written (default: profile)")
    parser.add_argument("--dry-run", action="store_true", help="print the command and stop")
    parser.add_argument("--read", metavar="FOLDER", help="run nothing, read what an earlier run left in this folder")


def run(args: argparse.Namespace) -> tuple[int, dict[str, Any] | None]:
    from ..bench.profilers import Session
    from ..bench.replay import case_named

    gpu_tool = args.tool in ("ncu", "nsys")
    backend = args.backend or ("cuda" if gpu_tool else "cpu")
    if backend not in backends():
        raise ValueError(f"backend must be one of {', '.join(backends())}, got {backend!r}")
    if gpu_tool and backend not in ("cuda", "triton"):
        raise ValueError(f"{args.tool} sees GPUs alone: --backend cuda or triton, not {backend}")
    op = args.op if args.op in OPS else main_op(args.op)
    case = case_named(op, args.case)
    folder = Path(args.read or args.out).resolve()
    more = tuple(m for m in args.metrics.split(",") if m)
    session = Session(args.tool, op, case.name, backend, folder, args.entry, args.warm, args.calls, more)
    command = shlex.join(session.command())
    messages = sys.stderr if args.json else sys.stdout
    if not args.read:
        print(command, file=messages, flush=True)
        if args.dry_run:
            return 0, {"command": command}
        _check(session)
        session.run()
    facts = json.loads(session.file("facts.json").read_text())
    if (facts["op"], facts["case"], facts["backend"]) != (op, case.name, backend):
        raise ValueError(f"{folder} holds {facts['op']}[{facts['case']}] on {facts['backend']}: name that one")
    document = {"tool": args.tool, "command": command, **facts, **session.read(facts, _ceilings(args.tool))}
    document["file"] = session.output.name
    session.file("profile.json").write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
    if not args.json:
        _print(document, session.output)
    return 0, document


def main_op(family: str) -> str:
    """The op that a family is named for: the first of it in the bench's grids."""
    from ..bench.problems import GRIDS

    return next(op for op in GRIDS if OPS[op].family == family)


def _check(session: Any) -> None:
    """What is missing, in words, before anything is started."""
    if reason := session.missing():
        raise ValueError(f"{reason}. The command above is the one to run; --read reads its files")
    state = backends()[session.backend]
    if not state:
        raise ValueError(f"backend {session.backend} cannot run here: {'; '.join(getattr(state, 'reasons', ()))}")


def _ceilings(tool: str) -> Any:
    from ..roofline import measure

    return measure() if tool == "perf" else None


def _print(document: dict[str, Any], output: Path) -> None:
    where = f"{document['op']}[{document['case']}] on {document['backend']}, {document['temperature']}"
    print(f"\n{where}: {document['calls']} calls, outputs right (hash {document['output_hash']})")
    for point in document["points"]:
        name = point["name"] if len(point["name"]) < 60 else point["name"][:57] + "..."
        work = f", {text(point['flops'] / point['seconds'], 'FLOP/s')} {point['flops_from']}" if point["flops"] else ""
        print(f"  {name}: {text(point['seconds'], 's')}{work}")
        for level, moved in point["levels"].items():
            roof = f", {moved['roof_pct']:.1f} % of {text(moved['roof'], 'B/s')}" if moved["roof"] else ""
            intensity = f", {moved['intensity']:.3g} FLOP/byte" if moved["intensity"] else ""
            rate = text(moved["bytes"] / point["seconds"], "B/s")
            print(f"    {level:<5} {text(moved['bytes'], 'B'):>9}  {rate}{roof}{intensity}")
    absent = [name for name, count in document.get("counters", {}).items() if count is None]
    for name, count in document.get("counters", {}).items():
        if count is not None:
            print(f"  {name:<24} {text(count / document['calls'], 's' if name == 'task-clock' else '')} a call")
    if absent:
        print(f"  not counted on this machine: {', '.join(absent)}")
    print(f"written: {output}, {output.parent / 'profile.json'}")
