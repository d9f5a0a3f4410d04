"""A decode step that is recorded once per batch size and replayed in one native call: the CPU's CUDA graph."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import native
from ..contract import Op
from ..kv_cache import PagedKVCache
from ..library import observed
from ..models.decoder import Buffers, Decoder, StepInputs


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

    def run(self) -> float:
        """Runs the step on what the input buffers hold; returns the seconds spent in kernels."""
        if self.plan is None:
            return timed_forward(self.decoder, self.inputs, self.cache, self.buffers)
        start = time.perf_counter()
        self.plan.run()
        return time.perf_counter() - start


def timed_forward(decoder: Decoder, inputs: StepInputs, cache: PagedKVCache, buffers: Buffers) -> float:
    """A forward pass op by op; returns the seconds spent inside ops."""
    spent = 0.0

    def clock(_: Op, __: Mapping[str, Any], run: Any) -> None:
        nonlocal spent
        start = time.perf_counter()
        run()
        spent += time.perf_counter() - start

    with observed(clock):
        decoder.forward(inputs, cache, buffers)
    return spent
