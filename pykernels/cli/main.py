"""The entry point: finds the command, runs it, turns its errors into one line and an exit code.

Exit codes: 0 success, 1 a failed check, 2 wrong usage or input.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any, Protocol

from .. import __version__
from . import check, doctor, generate, roofline


class Command(Protocol):
    """A command: its arguments, and what runs."""

    NAME: str
    HELP: str
    EXAMPLES: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...
    def run(self, args: argparse.Namespace) -> tuple[int, dict[str, Any] | None]: ...


COMMANDS: tuple[Any, ...] = (generate, roofline, check, doctor)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="pykernels", description="Kernels for LLM inference, and how close they are to the roof."
    )
    top.add_argument("--version", action="version", version=f"pykernels {__version__}")
    commands = top.add_subparsers(dest="command", metavar="command", required=True)
    for command in COMMANDS:
        sub = commands.add_parser(
            command.NAME,
            help=command.HELP,
            description=command.HELP,
            epilog="examples:\n" + command.EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.add_argument(
            "--json", action="store_true", help="one JSON document on standard output, messages on standard error"
        )
        command.add_arguments(sub)
        sub.set_defaults(run=command.run)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line; returns the exit code."""
    args = parser().parse_args(argv)
    try:
        code, document = args.run(args)
        if args.json and document is not None:
            print(json.dumps(document, allow_nan=False))
        sys.stdout.flush()
    except (ValueError, OSError, ImportError, NotImplementedError) as error:
        if isinstance(error, BrokenPipeError):  # the reader went away, as with `| head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        print(f"pykernels {args.command}: {_one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return code


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return " ".join(str(error).split())
