"""Counts the instructions of marked windows in a process that runs under callgrind. Needs valgrind, its headers and a C compiler."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

LIBRARY = "PYKERNELS_CALLGRIND_MARKS"  # variable that tells the counted process where its marks are
MARKS = """\
#include <valgrind/callgrind.h>
void begin(void) { CALLGRIND_START_INSTRUMENTATION; CALLGRIND_ZERO_STATS; }
void end(const char* label) { CALLGRIND_DUMP_STATS_AT(label); CALLGRIND_STOP_INSTRUMENTATION; }
"""


class CallgrindError(ValueError):
    """Nothing can be counted here, or nothing was."""


def build_marks(folder: Path) -> Path:
    """The library of `window`'s two calls. CallgrindError without valgrind, its headers or a compiler."""
    if shutil.which("valgrind") is None:
        raise CallgrindError("instructions are counted by valgrind, which is not on PATH: install the package valgrind")
    source, library = folder / "marks.c", folder / "marks.so"
    source.write_text(MARKS)
    compiler = os.environ.get("CC", "cc")
    command = [compiler, "-O2", "-shared", "-fPIC", str(source), "-o", str(library)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise CallgrindError(f"counting instructions needs a C compiler: {compiler}: {error}") from error
    if done.returncode:
        raise CallgrindError(f"the marks for callgrind do not compile: {done.stderr.strip().splitlines()[0]}")
    return library


def under_callgrind(
    command: Sequence[str], environment: Mapping[str, str] | None = None, limit: float = 1800.0
) -> dict[str, int]:
    """Instructions in each window of a command, by label. CallgrindError with its last words when it fails or marks nothing."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        full = {**os.environ, **(environment or {}), LIBRARY: str(build_marks(folder))}
        tool = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={folder / 'out'}"]
        try:
            done = subprocess.run(
                [*tool, *command], env=full, capture_output=True, text=True, timeout=limit, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise CallgrindError(f"counting instructions took longer than {limit:g} s") from error
        if done.returncode:
            raise CallgrindError(
                f"the run under callgrind ended with code {done.returncode}: {done.stderr.strip()[-400:]}"
            )
        return read_dumps(path.read_text() for path in folder.glob("out.*"))


def read_dumps(texts: Iterable[str]) -> dict[str, int]:
    """Label -> instructions of callgrind's dumps, the fewest of a label that comes several times: what an interpreter does
    for the first time is in the others. CallgrindError when there is none."""
    found: dict[str, int] = {}
    for text in texts:
        label = re.search(r"^desc: Trigger: Client Request: (.+)$", text, re.MULTILINE)
        total = re.search(r"^(?:totals|summary): (\d+)", text, re.MULTILINE)
        if label and total:
            found[label[1]] = min(int(total[1]), found.get(label[1], int(total[1])))
    if not found:
        raise CallgrindError("callgrind counted nothing: an empty run is a failure")
    return found


class Marks:
    """Windows in which callgrind counts; only in a process that `under_callgrind` started."""

    def __init__(self) -> None:
        library = ctypes.CDLL(os.environ[LIBRARY])
        self._begin, self._end = library.begin, library.end  # found now, not inside of a window

    @contextmanager
    def window(self, label: str) -> Iterator[None]:
        self._begin()
        yield
        self._end(label.encode())
