"""The entry point: finds the command, runs it, turns its errors into one line and an exit code.

Exit codes: 0 success, 1 a failed check, 2 wrong usage or input.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from .. import __version__
from ..roofline.ceilings import RoofError

# A command's module is imported when it is chosen, so that `doctor` and `check` need none of the extras.
COMMANDS = {
    "generate": "continue a prompt, or answer it through the model's chat template",
    "roofline": "generate text, and report how close each kernel came to this machine's limit",
    "check": "compare every op of the available backends with the reference on this machine",
    "report": "draw the page of a run, with benchmarks, profiles and an earlier run beside it",
    "profile": "run a benchmark's call under ncu, nsys, torch.profiler or perf, and read what it counted",
    "bench": "time ops on this machine, under their roofs and beside an earlier run",
    "gate": "compare two revisions, or two files of the suite, and fail when an op became slower",
    "baseline": "compare roofs, instructions or times with the committed baselines, or update those",
    "tune": "search tiles of the Triton kernels on this GPU, and write the table that they then use",
    "doctor": "show backends with the reasons why one is missing, ISA level, threads, versions",
}


def _parser(chosen: str | None) -> argparse.ArgumentParser:
    """The command line's parser, with the options of the chosen command."""
    top = argparse.ArgumentParser(
        prog="pykernels", description="Kernels for LLM inference, and how close they are to the machine's limit."
    )
    top.add_argument("--version", action="version", version=f"pykernels {__version__}")
    commands = top.add_subparsers(dest="command", metavar="command", required=True)
    for name, text in COMMANDS.items():
        command = importlib.import_module(f".{name}", __package__) if name == chosen else None
        sub = commands.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            epilog=f"examples:\n{command.EXAMPLES}" if command else None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.add_argument(
            "--json", action="store_true", help="one JSON document on standard output, messages on standard error"
        )
        if command:
            command.add_arguments(sub)
            sub.set_defaults(run=command.run)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    chosen = next((w for w in words if w in COMMANDS), None)
    try:
        args = _parser(chosen).parse_args(words)
        code, document = args.run(args)
        if args.json and document is not None:
            print(json.dumps(document, allow_nan=False))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader went away, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except RoofError as error:
        return _say(chosen, error, 1)
    except ModuleNotFoundError as error:
        return _say(
            chosen, ImportError(f"{error}; pip install 'pykernels[demo,report]' brings what the commands need"), 2
        )
    except (ValueError, OSError, ImportError, NotImplementedError) as error:
        return _say(chosen, error, 2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return int(code)


def _say(command: str | None, error: Any, code: int) -> int:
    """The error in one line on standard error."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    print(f"pykernels {command}: {' '.join(text.split())}", file=sys.stderr)
    return code
