"""A decode step that is recorded once per batch size and replayed in one native call: the CPU's CUDA graph."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import native
from ..contract import Op
from ..kv_cache import PagedKVCache
from ..library import observed
from ..models.decoder import Buffers, Decoder, StepInputs
from ..roofline.points import Recorder


def plans_enabled() -> bool:
    """`PYKERNELS_PLAN=0` runs every op from Python instead, with the same bits."""
    return os.environ.get("PYKERNELS_PLAN", "1") != "0"


@dataclass
class DecodeStep:
    """One decode step of a fixed batch size: its input buffers, and how to run it."""

    decoder: Decoder
    cache: PagedKVCache
    batch: int
    max_pages: int
    use_plan: bool
    buffers: Buffers = field(init=False)
    inputs: StepInputs = field(init=False)
    calls: list[tuple[Op, Mapping[str, Any]]] = field(default_factory=list)
    plan: Any = None

    def __post_init__(self) -> None:
        batch = self.batch
        self.buffers = Buffers(self.decoder.config, self.decoder.precision, batch, batch)
        self.inputs = StepInputs(
            ids=torch.zeros(batch, dtype=torch.int64),
            positions=torch.zeros(batch, dtype=torch.int64),
            slot_mapping=torch.full((batch,), -1, dtype=torch.int64),
            block_table=torch.full((batch, self.max_pages), -1, dtype=torch.int32),
            seqlens_k=torch.zeros(batch, dtype=torch.int32),
        )
        if self.use_plan:
            self._record()

    def _record(self) -> None:
        def keep(op: Op, args: Mapping[str, Any], run: Any) -> None:
            self.calls.append((op, args))
            run()

        with native.record() as plan, observed(keep):
            self.decoder.forward(self.inputs, self.cache, self.buffers)
        self.plan = plan

    def run(self, recorder: Recorder | None = None) -> float:
        """Runs the step on what the input buffers hold; returns the seconds spent in kernels.

        With a recorder, the plan's ops are timed one by one (a plan's own time includes what is between them).
        """
        if self.plan is None:
            with recorded(recorder, "decode"), OpClock() as clock:
                self.decoder.forward(self.inputs, self.cache, self.buffers)
            return clock.seconds
        if recorder is not None:
            seconds = self.plan.run_timed()
            recorder.add_plan("decode", self.calls, seconds)
            return sum(seconds)
        start = time.perf_counter()
        self.plan.run()
        return time.perf_counter() - start


@contextmanager
def recorded(recorder: Recorder | None, phase: str) -> Iterator[None]:
    """Ops that run inside belong to one step of `phase` of the recorder, if there is one."""
    if recorder is None:
        yield
    else:
        with recorder.step(phase), observed(recorder):
            yield


class OpClock:
    """Seconds spent inside ops while it is entered: `with OpClock() as clock: ...; clock.seconds`."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._scope = observed(self._time)

    def _time(self, _: Op, __: Mapping[str, Any], run: Callable[[], None]) -> None:
        start = time.perf_counter()
        run()
        self.seconds += time.perf_counter() - start

    def __enter__(self) -> OpClock:
        self._scope.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._scope.__exit__(*error)
