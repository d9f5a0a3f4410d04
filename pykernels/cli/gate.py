"""`pykernels gate`: did a change make an op slower? Two revisions timed in turn, or two files of the suite."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from .. import native
from ..contract import OPS

EXAMPLES = """\
  pykernels gate HEAD~1 HEAD
  pykernels gate main . --op paged_decode_attention --op linear
  pykernels gate before.json after.json --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", help="A: a git revision, `.` for the working tree, or a file of --benchmark-json")
    parser.add_argument("after", help="B: the same kind of thing")
    parser.add_argument("--op", action="append", choices=sorted(OPS), help="only this op; may be repeated")
    parser.add_argument("--full", action="store_true", help="every problem of the ops instead of one each")
    parser.add_argument(
        "--repetitions",
        type=int,
        default=9,
        help="of each benchmark; up to eight times as many while undecided (default and least: 9)",
    )
    parser.add_argument("--margin", type=float, help="relative difference that is let pass (default: 0.03; files: 0.1)")
    parser.add_argument(
        "--changed",
        action="append",
        choices=sorted(OPS),
        default=[],
        metavar="OP",
        help="the outputs of this op may have other bits (both are compared with the reference); may be repeated",
    )
    parser.add_argument(
        "--strict", action="store_true", help="fail AMBIGUOUS too: for a machine with nobody else on it"
    )
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each side (default: 1)")
    parser.add_argument("--markdown", action="store_true", help="print the table for a pull request")


def run(args: argparse.Namespace) -> tuple[int, dict[str, Any] | None]:
    from ..bench import gate, problems
    from ..bench.verdict import AMBIGUOUS

    files = [name.endswith(".json") for name in (args.before, args.after)]
    if args.margin is not None and not args.margin > 0:
        raise ValueError(f"--margin must be positive, got {args.margin}")
    if any(files) != all(files):
        raise ValueError("a file can only be compared with a file, and a revision with a revision")
    if all(files):
        lines = gate.compare_files(Path(args.before), Path(args.after), args.margin or gate.FILE_MARGIN)
    else:
        subset = "full" if args.full else "smoke"
        chosen = [(op, c.name) for op in args.op or OPS for c in problems.problems(op, subset)]
        lines = gate.compare_trees(
            tree(args.before),
            tree(args.after),
            chosen,
            threads=args.threads,
            repetitions=args.repetitions,
            margin=args.margin or gate.MARGIN,
            changed=args.changed,
            say=lambda text: print(text, file=sys.stderr),
        )
    failed = any(line.failed or (args.strict and line.kind == AMBIGUOUS) for line in lines)
    if args.json:
        return int(failed), {"ok": not failed, "benchmarks": [line.to_json() for line in lines]}
    print(gate.table(lines, args.markdown))
    return int(failed), None


def tree(revision: str) -> Path:
    """The built tree of a revision, made below build/gate when it is not there yet; `.` is the working tree itself."""
    root = Path(_git("rev-parse", "--show-toplevel"))
    if revision == ".":
        _build(root)  # else it would be its last build that is timed
        return root
    commit = _git("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    folder = root / "build" / "gate" / commit
    if not (folder / "built").exists():
        print(f"building {revision} in {folder.relative_to(root)} (minutes the first time)", file=sys.stderr)
        folder.mkdir(parents=True, exist_ok=True)
        archive = subprocess.run(["git", "-C", str(root), "archive", commit], capture_output=True, check=True).stdout
        subprocess.run(["tar", "x", "-C", str(folder)], input=archive, check=True)
        _build(folder)
        (folder / "built").touch()
    return folder


def _build(folder: Path) -> None:
    """Builds the level in use, by the revision's own setup.py."""
    environment = os.environ | {"PYKERNELS_CUDA": "0", "PYKERNELS_CPU_LEVELS": native.chosen_level()}
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{folder.name[:12]} does not build: {(done.stderr or done.stdout).strip().splitlines()[-1]}")


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"git {' '.join(words)} failed: {done.stderr.strip() or 'no such revision'}")
    return done.stdout.strip()
