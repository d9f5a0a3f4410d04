"""The command lines that look at a benchmark's call through a profiler, and what each one leaves behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pykernels.contract import OPS
from pykernels.ranges import DOMAIN
from pykernels.roofline import levels, ncu, nsys, perf
from pykernels.roofline.ceilings import Ceilings

TOOLS = ("ncu", "nsys", "torch", "perf")
WHERE = {
    "ncu": "Nsight Compute (`ncu`) is not on the PATH; it comes with the CUDA toolkit",
    "nsys": "Nsight Systems (`nsys`) is not on the PATH; it comes with the CUDA toolkit",
    "perf": "`perf` is not on the PATH; Debian and Ubuntu have it as linux-perf and linux-tools-generic",
}
# Kernels that each family's launchers start, so that a profile leaves out what torch starts in the same range.
CUDA_KERNELS = "pk::cuda::"  # the namespace of them all
TRITON_KERNELS = {
    "prefill": ("attention",),
    "decode": ("attention", "_merge_splits", "_merge_states"),
    "kv_cache": ("_append", "_gather", "_copy_rows"),
    "sampling": ("count_tokens", "scan", "_finish", "_top_logprobs", "_philox_uniform", "_prefixes", "_verify"),
    "linear": ("_unpack_blocks", "_unpack_rows", "_gemv_blocks", "_gemv_rows"),
    "norm": ("_rms_norm",),
    "rope": ("_rotary",),
    "activation": ("_gated_activation",),
}


def kernel_regex(op: str, backend: str) -> str:
    """Matches the (demangled) names of our kernels that an op may launch."""
    if backend == "cuda":
        return CUDA_KERNELS
    return f"^({'|'.join(TRITON_KERNELS[OPS[op].family])})$"


@dataclass(frozen=True)
class Session:
    """One look at one call. `folder` takes all files; `metrics` are further ones for ncu."""

    tool: str
    op: str
    case: str
    backend: str
    folder: Path
    entry: str = "kernel"
    warm: bool = False
    calls: int = 3
    metrics: tuple[str, ...] = ()

    def file(self, name: str) -> Path:
        return self.folder / name

    @property
    def output(self) -> Path:
        """What the tool writes, and `read` reads."""
        names = {"ncu": "ncu.csv", "nsys": "timeline.nsys-rep", "torch": "trace.json", "perf": "perf.csv"}
        return self.file(names[self.tool])

    def replay(self) -> list[str]:
        words = [sys.executable, "-m", "pykernels.bench.replay", self.op, "--case", self.case]
        words += ["--backend", self.backend, "--entry", self.entry, "--calls", str(self.calls)]
        words += ["--warm"] if self.warm else []
        if self.tool == "torch":
            words += ["--ranges", "torch", "--trace", str(self.output)]
        elif self.tool == "perf":
            words += ["--perf-control", str(self.file("perf.ctl")), str(self.file("perf.ack"))]
        else:
            words += ["--ranges", "nvtx"]
        return [*words, "--facts", str(self.file("facts.json"))]

    def command(self) -> list[str]:
        """The whole command line."""
        return [*getattr(self, f"_{self.tool}")(), *self.replay()]

    def _torch(self) -> list[str]:
        return []

    def _ncu(self) -> list[str]:
        """Only launches in the op's range, only our kernels. Clocks are locked to base by ncu's default, so that runs
        compare; caches are flushed before each pass unless the benchmark was warm."""
        words = ["ncu", "--nvtx", "--nvtx-include", f"{DOMAIN}@{self.op}/"]
        words += ["--kernel-name-base", "demangled" if self.backend == "cuda" else "function"]
        words += ["--kernel-name", f"regex:{kernel_regex(self.op, self.backend)}"]
        words += [
            "--cache-control",
            "none" if self.warm else "all",
            "--metrics",
            ",".join([*ncu.METRICS, *self.metrics]),
        ]
        return [*words, "--print-units", "base", "--csv", "--page", "raw", "--log-file", str(self.output)]

    def _nsys(self) -> list[str]:
        """From the first call in its range on; NVTX strings that are not registered count too."""
        words = ["nsys", "profile", "--trace=cuda,nvtx,osrt", "--capture-range=nvtx", "--capture-range-end=none"]
        words += [f"--nvtx-capture={self.op}@{DOMAIN}", "--env-var=NSYS_NVTX_PROFILER_REGISTER_ONLY=0"]
        return [*words, "--force-overwrite=true", "--output", str(self.output.with_suffix(""))]

    def _perf(self) -> list[str]:
        """Counts while a call runs and at no other time: the replay switches the counters through two pipes."""
        words = ["perf", "stat", "-x,", "-e", ",".join(f"{e}:u" if "-clock" not in e else e for e in perf.EVENTS)]
        return [
            *words,
            "--delay=-1",
            f"--control=fifo:{self.file('perf.ctl')},{self.file('perf.ack')}",
            "-o",
            str(self.output),
        ]

    def statistics(self) -> list[str]:
        """What makes a table of nsys's file."""
        return [
            "nsys",
            "stats",
            "--report",
            "cuda_gpu_kern_sum",
            "--format",
            "csv",
            "--force-export=true",
            str(self.output),
        ]

    def missing(self) -> str:
        """Why the tool cannot run here; empty when it can."""
        if self.tool in WHERE and shutil.which(self.tool) is None:
            return WHERE[self.tool]
        return ""

    def run(self) -> None:
        """Runs the command. OSError with the end of what it said when it fails."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.tool == "perf":
            for name in ("perf.ctl", "perf.ack"):
                self.file(name).unlink(missing_ok=True)
                os.mkfifo(self.file(name))
        self.file("facts.json").unlink(missing_ok=True)
        done = subprocess.run(self.command(), capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if done.returncode or not self.file("facts.json").exists():
            said = (
                (self.output.read_text() if self.tool == "ncu" and self.output.exists() else "")
                + done.stderr
                + done.stdout
            )
            raise OSError(f"{self.tool} ended with {done.returncode}: {' '.join(said.split())[-600:]}")

    def read(self, facts: dict[str, Any], ceilings: Ceilings | None) -> dict[str, Any]:
        """`points` of the hierarchical roofline, slowest kernel first after the whole `call`, and what else was counted."""
        flops, nbytes, calls = facts["flops"], facts["bytes"], facts["calls"]
        if self.tool == "ncu":
            found = ncu.inside(ncu.launches(_lines(self.output)), self.op)
            return _json(ncu.points(found, flops, calls))
        if self.tool == "nsys":
            done = subprocess.run(self.statistics(), capture_output=True, text=True, check=True)
            return _json(nsys.points(done.stdout.splitlines(), flops, nbytes, calls))
        if self.tool == "perf" and ceilings is not None:
            counted = perf.counters(_lines(self.output))
            whole = perf.point(counted, facts["seconds"], flops, nbytes, calls, ceilings)
            return {**_json([whole]), "counters": counted}
        call = levels.LevelPoint("call", calls, facts["seconds"], flops, "contract", {"dram": levels.Traffic(nbytes)})
        return _json([call])


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines(keepends=True)


def _json(points: Sequence[levels.LevelPoint]) -> dict[str, Any]:
    return {"points": [point.to_json() for point in points]}
