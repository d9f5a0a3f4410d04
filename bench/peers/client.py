"""The driver's end of a worker: one process that is asked one thing at a time."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

WORKER = Path(__file__).parent / "worker"


class WorkerError(RuntimeError):
    """The engine answered with an error, in its own words; the worker goes on."""


class DeadWorker(WorkerError):
    """The process ended, or did not answer in time; with the last lines that it printed."""


def environment(threads: int) -> dict[str, str]:
    """What all engines get alike: the same number of threads, and no network."""
    settings = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**os.environ, **settings}


class Worker:
    """A started engine. `hello` is its first line: info, load time, memory."""

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str], *, patience: float = 900.0) -> None:
        self.name, self.patience = name, patience
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=dict(env), text=True
        )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self.hello = self._reply()
        except WorkerError:
            self.close()
            raise

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self._lines.put(line)
        self._lines.put("")

    def _reply(self) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=self.patience)
        except queue.Empty:
            self.process.kill()
            raise DeadWorker(f"{self.name} did not answer within {self.patience:g} s{self._last_words()}") from None
        if not line:
            code = self.process.wait()
            raise DeadWorker(f"{self.name} ended with exit code {code}{self._last_words()}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise WorkerError(f"{self.name}: {reply['error']}")
        return reply

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = [line for line in self._log.read().splitlines() if line.strip()]
        return ": " + " | ".join(lines[-3:]) if lines else ""

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """The reply. `WorkerError` with the engine's own words, `DeadWorker` when there is none any more."""
        try:
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self.process.stdin.flush()
        except OSError:
            raise DeadWorker(f"{self.name} ended with exit code {self.process.wait()}{self._last_words()}") from None
        return self._reply()

    def close(self) -> None:
        """Ends the process, by force when it does not follow."""
        if self.process.stdin and not self.process.stdin.closed:
            try:
                self.process.stdin.write('{"do": "quit"}\n')
                self.process.stdin.close()
            except OSError:
                pass  # it is gone already
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._log.close()
