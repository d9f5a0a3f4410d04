"""A forward pass that is recorded once per shape and replayed in one native call: the CPU's CUDA graph."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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


class Recorded:
    """Ops over fixed buffers: recorded once as a native plan and replayed in one call, or run from Python each time."""

    def __init__(self, body: Callable[[], None], use_plan: bool) -> None:
        self._body = body
        self.calls: list[tuple[Op, Mapping[str, Any]]] = []
        self.plan = self._record() if use_plan else None

    def _record(self) -> Any:
        def keep(op: Op, args: Mapping[str, Any], run: Any) -> None:
            self.calls.append((op, args))
            run()

        with native.record() as plan, observed(keep):
            self._body()
        return plan

    def run(self, recorder: Recorder | None = None) -> float:
        """Runs on what the input buffers hold; returns the seconds spent in kernels.

        With a recorder, inside one of its steps, the ops are timed one by one.
        """
        if self.plan is None:
            with OpClock() as clock:
                self._body()
            return clock.seconds
        if recorder is None:
            start = time.perf_counter()
            self.plan.run()
            return time.perf_counter() - start
        seconds = self.plan.run_timed()
        for (op, args), spent in zip(self.calls, seconds, strict=True):
            recorder.add(op, args, spent)
        return sum(seconds)


class ModelStep:
    """A forward pass of one shape: `tokens` new tokens of `batch` sequences, with input buffers of its own.

    Decode computes the logits of every sequence; prefill stops in front of the head, since only a prompt's last token
    needs logits.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: PagedKVCache,
        buffers: Buffers,
        phase: str,
        shape: tuple[int, int],
        use_plan: bool,
    ) -> None:
        tokens, batch = shape
        self.buffers = buffers
        pages = -(-decoder.config.max_context // cache.page_size)
        self.inputs = inputs = StepInputs(
            ids=torch.zeros(tokens, dtype=torch.int64),
            positions=torch.zeros(tokens, dtype=torch.int64),
            slot_mapping=torch.full((tokens,), -1, dtype=torch.int64),
            block_table=torch.full((batch, pages), -1, dtype=torch.int32),
            seqlens_k=torch.zeros(batch, dtype=torch.int32),
            cu_seqlens_q=None if phase == "decode" else torch.zeros(batch + 1, dtype=torch.int32),
            max_seqlen_q=tokens,
        )
        # The same memory for cheap writes of single numbers.
        self.token_arrays = tuple(t.numpy() for t in (inputs.ids, inputs.positions, inputs.slot_mapping))

        def forward() -> None:
            if phase == "decode":
                decoder.forward(inputs, cache, buffers)
            else:
                decoder.layers_forward(inputs, cache, buffers)

        self._pass = Recorded(forward, use_plan)

    @property
    def plan(self) -> Any:
        return self._pass.plan

    def run(self, recorder: Recorder | None = None) -> float:
        """Computes what the input buffers describe; returns the seconds spent in kernels."""
        return self._pass.run(recorder)


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
