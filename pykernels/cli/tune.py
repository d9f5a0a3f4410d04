"""`pykernels tune`: searches tiles of the Triton kernels on this GPU and writes the table that they then use."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

EXAMPLES = """\
  pykernels tune
  pykernels tune --only decode --rounds 30
  pykernels tune --dry-run --arch 90
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default="", help="problems whose name contains this")
    parser.add_argument("--rounds", type=int, default=15, help="timed turns over all candidates (default: 15)")
    parser.add_argument("--out", type=Path, help="folder of the table (default: where the package reads it)")
    parser.add_argument("--dry-run", action="store_true", help="list the search space and what is pruned; needs no GPU")
    parser.add_argument(
        "--arch", type=int, default=90, help="with --dry-run: the architecture, such as 80 or 90 (default)"
    )


def run(args: argparse.Namespace) -> tuple[int, dict[str, Any] | None]:
    from ..bench import tune

    if args.rounds < 3:
        raise ValueError(f"--rounds must be at least 3, got {args.rounds}")
    chosen = [p for p in tune.problems() if args.only in p.name]
    if not chosen:
        raise ValueError(f"no problem's name contains {args.only!r}: {', '.join(p.name for p in tune.problems())}")
    if args.dry_run:
        return _list(chosen, args)
    if not torch.cuda.is_available():
        raise ValueError(
            "there is no GPU to tune on: kernels keep the analytic choice of pykernels/triton/configs.py (--dry-run lists the search space)"
        )
    return _tune(chosen, args)


def _tune(chosen: list[Any], args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    import triton

    from .. import __version__
    from ..bench import gpu, tune
    from ..bench.clocks import clock_of
    from ..triton import tuned

    device = torch.device("cuda", torch.cuda.current_device())
    found = []
    for problem in chosen:
        made = gpu.build(problem, device)
        found.append(
            tune.tune(problem, made, clock_of(device), rounds=args.rounds, progress=lambda t: print(t, file=sys.stderr))
        )
        last = found[-1]
        print(f"{problem.name}: {last['tried']} tried, {100 * last['gain']:.1f} % gained", file=sys.stderr)
    name = torch.cuda.get_device_name(device)
    facts = {"triton": triton.__version__, "torch": torch.__version__, "pykernels": __version__}
    facts["command"] = shlex.join(["pykernels", *sys.argv[1:]])
    table = tune.document(name, found, facts)
    folder = args.out or Path(tuned.__file__).parent / "tuned"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{tuned.slug(name)}.json"
    path.write_text(json.dumps(table, indent=1) + "\n")
    print(f"written: {path}", file=sys.stderr)
    if not args.json:
        for entry in found:
            print(f"{entry['problem']:26s} {entry['tile'] or 'analytic'} {100 * entry['gain']:.1f} %")
    return 0, table


def _list(chosen: list[Any], args: argparse.Namespace) -> tuple[int, dict[str, Any] | None]:
    from ..triton.candidates import search_space, why_not
    from ..triton.common import Target
    from ..triton.configs import AttentionShape

    target = Target("cuda", args.arch)
    rows = []
    for problem in chosen:
        shape = AttentionShape(**problem.shape)
        for tile in search_space(problem.kind, shape, problem.kind == "prefill" and args.arch >= 90):
            rows.append({"problem": problem.name, "tile": vars(tile), "pruned": why_not(target, shape, tile)})
    if args.json:
        return 0, {"arch": args.arch, "candidates": rows}
    for row in rows:
        text = " ".join(f"{n}={v}" for n, v in row["tile"].items())
        print(f"{row['problem']:24s} {text:62s} {row['pruned'] and 'pruned: ' + row['pruned']}")
    kept = sum(not row["pruned"] for row in rows)
    print(f"{len(rows)} candidates for sm_{args.arch}, {kept} are compiled, checked and timed")
    return 0, None
