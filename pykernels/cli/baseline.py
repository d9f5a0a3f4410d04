"""`pykernels baseline`: this tree against the committed baselines; `--update` is the one way to change them."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import native
from ..contract import OPS
from .options import Progress

if TYPE_CHECKING:
    from ..bench.gate import Line

EXAMPLES = """\
  pykernels baseline                          # roofs and instructions, as ci/gate.sh does
  pykernels baseline instructions --op rms_norm
  pykernels baseline times --update           # shows the change, then writes this machine's file
"""
KINDS = ("roof", "instructions", "times")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "kinds",
        nargs="*",
        metavar="KIND",
        help="roof: percent of a roof that is probed beside each sample; instructions: counted by callgrind; times: of this "
        "very machine (default: roof instructions)",
    )
    parser.add_argument("--op", action="append", choices=sorted(OPS), help="only this op; may be repeated")
    parser.add_argument("--update", action="store_true", help="show what changes, and write it")
    parser.add_argument("--folder", type=Path, help="of the baselines (default: bench/baselines)")
    parser.add_argument("--margin", type=float, help="relative difference that is let pass (default: each kind's own)")
    parser.add_argument("--markdown", action="store_true", help="print the table for a pull request")


def run(args: argparse.Namespace) -> tuple[int, dict[str, Any] | None]:
    from ..bench import baseline, gate

    if wrong := [kind for kind in args.kinds if kind not in KINDS]:
        raise ValueError(f"no kind of baseline: {', '.join(wrong)}; kinds: {', '.join(KINDS)}")
    if args.margin is not None and not args.margin > 0:
        raise ValueError(f"--margin must be positive, got {args.margin}")
    folder = args.folder or baseline.FOLDER
    ops = args.op or list(OPS)
    lines: list[Line] = []
    written: dict[str, list[str]] = {}
    for kind in args.kinds or KINDS[:2]:
        found, change = {"roof": _roof, "instructions": _instructions, "times": _times}[kind](folder, ops, args)
        lines += found
        if args.update:
            written[kind] = change
            if not args.json:
                print("\n".join([f"{kind}:", *(change or ["nothing changed"])]))
    failed = any(line.failed for line in lines)
    if args.json:
        return int(failed), {"ok": not failed, "benchmarks": [x.to_json() for x in lines], "written": written}
    if lines:
        print(gate.table(lines, args.markdown))
    return int(failed), None


Outcome = tuple[list["Line"], list[str]]  # verdicts, or the change of an update


def _roof(folder: Path, ops: list[str], args: argparse.Namespace) -> Outcome:
    from ..bench import baseline, roof_share
    from ..roofline.ceilings import Prober
    from ..roofline.ceilings import measure as measure_ceilings

    level, path = native.chosen_level(), folder / "roof.json"
    table = {} if args.update else baseline.section(path, level)
    native.module().set_num_threads(1)
    prober = Prober(level, 1)
    ceilings = measure_ceilings(level, 1)
    with Progress(total=len(ops)) as progress:
        progress.say("measuring shares of the roof")
        if not args.update:
            lines = []
            for op in ops:
                lines.append(roof_share.compare(op, table, ceilings, prober, args.margin or roof_share.MARGIN))
                progress.tick()
            return lines, []
        figures = {}
        for op in ops:
            figures[roof_share.name(op)] = round(roof_share.measure(op, ceilings, prober).low, 1)
            progress.tick()
    change = baseline.changes(baseline.load(path).get(level, {}), figures, 1)
    baseline.write(path, level, figures)
    return [], change


def _instructions(folder: Path, ops: list[str], args: argparse.Namespace) -> Outcome:
    from ..bench import baseline, instructions

    compiler, path = instructions.compiler(), folder / "instructions.json"
    table = {} if args.update else baseline.section(path, compiler)
    with Progress() as progress:
        progress.say("counting instructions under callgrind")
        counted = instructions.count(ops)
    if not args.update:
        wanted = {name: n for name, n in table.items() if name.partition("[")[0] in ops}
        return instructions.compare(counted, wanted, args.margin or instructions.MARGIN), []
    change = baseline.changes(baseline.load(path).get(compiler, {}), counted, 0)
    baseline.write(path, compiler, counted)
    return [], change


def _times(folder: Path, ops: list[str], args: argparse.Namespace) -> Outcome:
    import torch

    from ..bench import baseline, front, gate
    from ..bench.harness import StopRule
    from ..bench.machine import machine
    from ..roofline.ceilings import measure as measure_ceilings
    from ..roofline.ceilings import remeasurer

    here = machine(torch.device("cpu"))
    path = folder / baseline.file_name(here) if args.update else baseline.of_machine(folder, here)
    ceilings = measure_ceilings()
    limits = (ceilings, remeasurer(ceilings))
    how: dict[str, Any] = {"cold": True, "entry": "kernel"}
    rows = front.run(
        front.choose(ops, ["smoke"]), ["cpu"], StopRule(), limits=limits, say=lambda t: print(t, file=sys.stderr), **how
    )
    document = baseline.trimmed({"benchmarks": list(rows)})
    old = baseline.load(path)
    if args.update:
        change = baseline.changes(baseline.medians(old), baseline.medians(document), 1)
        merged = {b["fullname"]: b for b in [*old.get("benchmarks", []), *document["benchmarks"]]}
        path.write_text(json.dumps({"benchmarks": list(merged.values())}, indent=1, allow_nan=False) + "\n")
        return [], change
    before, now = gate.table_of(old), gate.table_of(document)
    names = sorted({n for n, e in before.items() if e["op"] in ops} | now.keys())
    margin = args.margin or gate.FILE_MARGIN
    return [gate.file_line(name, before.get(name), now.get(name), margin) for name in names], []
