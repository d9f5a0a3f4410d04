"""One run: every round visits every engine once for every job, so that the machine's moods hit all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .client import DeadWorker, Worker, WorkerError
from .engines import Engine
from .jobs import Job, Windows
from .weather import mean, others, usage

Probing = Callable[[], dict[str, float]]
WARM = 512  # tokens of a prefill that is not counted: every shape of a longer one is in it
PARTS = 1024  # longest prefill whose matrices are timed on their own as well


@dataclass
class Contest:
    """Workers that take turns. What leaves on the way is in `left`, with the reason; `cannot` has jobs that an engine
    does not offer."""

    engines: Sequence[Engine]
    workers: dict[str, Worker]
    jobs: Sequence[Job]
    windows: Windows
    probe: Probing
    say: Callable[[str], None]
    threads: int
    prepare_threads: int
    number: int = 0  # of this run among those of one document
    left: dict[str, str] = field(default_factory=dict)
    cannot: dict[str, dict[str, str]] = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)

    def _here(self) -> list[Engine]:
        return [e for e in self.engines if e.name in self.workers]

    def _leave(self, name: str, reason: str) -> None:
        self.say(f"{name} leaves: {reason}")
        self.left[name] = reason
        self.workers.pop(name).close()

    def prepare(self) -> None:
        """Computes the prompts that engines hold, the same for all, and runs every job once uncounted.

        Where other processes run, the barriers of several OpenMP threads take more time than the work: an engine that can
        is set to `prepare_threads` meanwhile.
        """
        self._threads(self.prepare_threads)
        for job in self.jobs:
            prompts = self.windows.prompts(job)
            for engine in self._here():
                try:
                    self._prepare(self.workers[engine.name], job, prompts)
                except DeadWorker as error:
                    self._leave(engine.name, str(error))
                except WorkerError as error:
                    self.say(f"{engine.name} does not do {job.name}: {error}")
                    self.cannot.setdefault(engine.name, {})[job.name] = str(error)
                else:
                    self.say(f"{engine.name} is ready for {job.name}")
        self._threads(self.threads)

    def _threads(self, count: int) -> None:
        for engine in self._here():
            if self.workers[engine.name].hello.get("threads"):
                self.workers[engine.name].ask("threads", count=count)

    def _prepare(self, worker: Worker, job: Job, prompts: list[list[int]]) -> None:
        if job.phase == "prefill":
            worker.ask("prefill", ids=self.windows.window(min(job.contexts[0], WARM)))
        elif worker.hello["holds"]:
            worker.ask("hold", name=job.name, prompts=prompts)
            worker.ask("decode", name=job.name, new=2)
        else:
            short = [prompt[:WARM] for prompt in self.windows.prompts(job)]
            worker.ask("decode", name=job.name, prompts=short, new=2)

    def round(self, number: int, jobs: Sequence[Job]) -> None:
        """One visit to everybody for each of these jobs; every second round in the opposite order."""
        begun = time.perf_counter()
        before = self.probe()
        for job in jobs:
            prompts = self.windows.prompts(job)
            order = self._here() if number % 2 == 0 else self._here()[::-1]
            for engine in order:
                if job.name in self.cannot.get(engine.name, {}):
                    continue
                try:
                    sample = self._sample(self.workers[engine.name], engine, job, prompts)
                except WorkerError as error:
                    self._leave(engine.name, str(error))
                    continue
                after = self.probe()
                where = {"engine": engine.name, "job": job.name, "slice": self.number, "round": number}
                self.samples.append({**where, **sample, "probe": _rounded(mean(before, after))})
                before = after
        self.say(f"round {number + 1}: {time.perf_counter() - begun:.1f} s")

    def _sample(self, worker: Worker, engine: Engine, job: Job, prompts: list[list[int]]) -> dict[str, Any]:
        pids = [w.process.pid for w in self.workers.values()]
        start = usage(pids)
        if job.phase == "prefill":
            reply = worker.ask("prefill", ids=prompts[0])
            timed = {"seconds": reply["seconds"]}
        else:
            given = {} if worker.hello["holds"] else {"prompts": prompts}
            reply = worker.ask("decode", name=job.name, new=job.new, **given)
            steps = reply["steps"]
            if len(steps) != job.new:
                raise WorkerError(f"{engine.name} timed {len(steps)} steps of {job.new}")
            timed = {"seconds": statistics.median(steps), "steps": [float(f"{s:.4g}") for s in steps]}
        busy = others(start, usage(pids))
        if not timed["seconds"] > 0:
            raise WorkerError(f"{engine.name} took {timed['seconds']} seconds for {job.name}")
        extra: dict[str, Any] = {name: reply[name] for name in ("flops", "bytes", "kernel_share") if name in reply}
        if engine.name == "pykernels" and job.phase == "prefill" and job.contexts[0] <= PARTS:
            extra["linear"] = worker.ask("parts", ids=self.windows.window(job.contexts[0]))["parts"]["linear"]
        return {**timed, "tokens_per_s": job.tokens_per_s(timed["seconds"]), **busy, **extra}

    def memory(self) -> dict[str, dict[str, int]]:
        """Resident bytes of every engine, now and at most."""
        found = {}
        for engine in self._here():
            try:
                found[engine.name] = self.workers[engine.name].ask("memory")
            except WorkerError as error:
                self._leave(engine.name, str(error))
        return found

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()


def _rounded(values: Mapping[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.4g}") for name, value in values.items()}
