"""One revision in a process of its own, told what to time line by line: `python worker.py TREE BENCH THREADS`.

`pykernels` and its reference come from TREE, the bench and its problems from BENCH, so that both sides of a comparison are
timed by the same code. Requests and answers are JSON lines; a request that fails is answered with its error.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import traceback
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any


class Finder:
    """Finds the packages of a revision in its folders, before any installed ones."""

    def __init__(self, folders: dict[str, Path]) -> None:
        self.folders = folders

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        folder = self.folders.get(name)
        if folder is None:
            return None
        places = [str(folder)]
        return importlib.util.spec_from_file_location(name, folder / "__init__.py", submodule_search_locations=places)


class Worker:
    """Holds one prepared case at a time."""

    def __init__(self, threads: int) -> None:
        import torch

        torch.set_num_threads(1)
        self.harness = importlib.import_module("pykernels.bench.harness")
        self.problems = importlib.import_module("pykernels.bench.problems")
        clocks = importlib.import_module("pykernels.bench.clocks")
        native = importlib.import_module("pykernels.native")
        native.module().set_num_threads(threads)
        self.control = importlib.import_module("pykernels.bench.control").Control()
        self.device = torch.device("cpu")
        self.clock = clocks.clock_of(self.device)
        self.machine = importlib.import_module("pykernels.bench.machine").machine(self.device)
        self.timer: Any = None
        self.ready: Any = None

    def hello(self) -> dict[str, Any]:
        return {"machine": self.machine}

    def prepare(self, op: str, case: str, check: bool) -> dict[str, Any]:
        """Builds the inputs afresh; with `check`, runs once and compares with the reference."""
        chosen = next(c for c in self.problems.problems(op) if c.name == case)
        self.ready = self.harness.prepare(chosen, "cpu", self.clock, self.device, cold=False)
        self.timer = self.harness.Timer(self.ready.calls, self.clock, shortest=3e-4)
        self.ready.poison()
        self.timer.sample()
        return {"hash": self.ready.verify() if check else ""}

    def sample(self, count: int) -> dict[str, Any]:
        """`count` samples, each with the control beside it."""
        times, controls = [], []
        for _ in range(count):
            controls.append(self.control.seconds())
            times.append(self.timer.sample())
        return {"times": times, "controls": controls}


def main() -> None:
    tree, bench, threads = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    folders = {"pykernels": tree / "pykernels", "pykernels.reference": tree / "reference", "pykernels.bench": bench}
    sys.meta_path.insert(0, Finder(folders))
    worker = Worker(threads)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(worker, request.pop("do"))(**request)
        except Exception as error:  # told to the other side, which fails with it
            answer = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
