"""Where a measurement was made: enough to judge and repeat it, nothing that names a person or a host."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from .. import native
from .machine import affinity, cache_totals, memory_bytes, ranges


def load_average() -> float | None:
    """Runnable processes over the last minute: above zero before a run starts, somebody else is measuring too."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def git_revision(folder: Path) -> str | None:
    """Short revision of the checkout that holds `folder`, with a `+` for local changes; None outside of one."""
    if not (folder / ".git").exists():
        return None

    def git(*words: str) -> str:
        run = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=True, timeout=10)
        return run.stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None


@dataclass
class Environment:
    """The `environment` of a report. Take it before the run with `here()`, call `finish()` after it."""

    cpu: str
    cores: int
    affinity: str
    isa_level: str
    isa_levels_usable: list[str]
    threads: int
    caches: dict[str, int]
    memory_bytes: int
    os: str
    architecture: str
    python: str
    torch: str
    pykernels: str
    git_revision: str | None
    load_at_start: float | None
    load_at_end: float | None = None

    @staticmethod
    def here() -> Environment:
        """This process on this machine, now."""
        from .. import __version__

        threads = native.module().num_threads()
        return Environment(
            cpu=native.cpu_name(),
            cores=os.cpu_count() or 1,
            affinity=ranges(affinity()),
            isa_level=native.chosen_level(),
            isa_levels_usable=native.usable_levels(),
            threads=threads,
            caches=cache_totals(threads),
            memory_bytes=memory_bytes(),
            os=f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}",
            architecture=platform.machine(),
            python=platform.python_version(),
            torch=torch.__version__,
            pykernels=__version__,
            git_revision=git_revision(Path(__file__).resolve().parents[2]),
            load_at_start=load_average(),
        )

    def finish(self) -> Environment:
        """Notes the load at the end; returns itself."""
        self.load_at_end = load_average()
        return self

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
