"""The engine: continuous batching over two visible phases, `prefill` and `decode`.

Requests wait until the cache has pages for their whole life (prompt and longest output), so that nothing that was begun
ever runs out of memory. Prompts are computed in chunks; every step leaves a record.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from operator import is_

import torch

from ..kv_cache import PagedKVCache
from ..models.decoder import Buffers, Decoder, StepInputs
from ..ranges import span
from ..roofline.points import Recorder
from ..roofline.records import StepRecord
from .costs import StepCost
from .graph import ModelStep, OpClock, plans_enabled, recorded
from .request import Request
from .sampler import Sampler

MAX_STEPS = 32  # shapes whose recorded passes are kept
CHUNK = 256  # prompt tokens a step: activations stay in the cache, and prefill speed is flat from 128 to 1024


class Engine:
    """Runs requests on one decoder and one paged KV cache."""

    def __init__(
        self, decoder: Decoder, cache: PagedKVCache, *, max_batch: int, chunk: int = CHUNK, use_plan: bool | None = None
    ) -> None:
        self.decoder, self.cache = decoder, cache
        self.max_batch, self.chunk = max_batch, chunk
        on_cpu = decoder.backend in ("auto", "cpu")
        self.use_plan = on_cpu and (plans_enabled() if use_plan is None else use_plan)
        self.cost = StepCost(decoder, cache)
        self.steps: list[StepRecord] = []
        self.recorder: Recorder | None = None  # when set, times every op of every step
        self._prefill_buffers: Buffers | None = None
        self._steps: dict[tuple[str, int, int], ModelStep] = {}
        self._sampler: Sampler | None = None
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    # ---- life of a request ------------------------------------------------------------------------------------
    def submit(self, request: Request) -> None:
        """Queues a request. ValueError when it can never fit."""
        limit, needed = self.decoder.config.max_context, len(request.prompt_ids)
        if needed == 0:
            raise ValueError("the prompt is empty: there is nothing to continue")
        if needed >= limit:
            raise ValueError(f"the prompt has {needed} tokens, the model's context is {limit}")
        pages = self._pages_for(request)
        if pages > self.cache.num_pages:
            raise ValueError(
                f"the request needs {pages} pages of {self.cache.page_size} tokens, "
                f"the KV cache has {self.cache.num_pages}"
            )
        self.waiting.append(request)

    def _budget(self, request: Request) -> int:
        """Tokens that the request may come to hold in the cache."""
        return min(len(request.prompt_ids) + request.params.max_new_tokens, self.decoder.config.max_context)

    def _pages_for(self, request: Request) -> int:
        return -(-self._budget(request) // self.cache.page_size)

    def _admit(self) -> list[Request]:
        """Moves waiting requests, in order, into the running batch as far as pages and rows allow."""
        admitted: list[Request] = []
        reserved = sum(self._pages_for(r) for r in self.running)
        while self.waiting and len(self.running) < self.max_batch:
            reserved += self._pages_for(self.waiting[0])
            if reserved > self.cache.num_pages:
                break
            request = self.waiting.popleft()
            request.sequence = self.cache.add_sequence()
            self.running.append(request)
            admitted.append(request)
        return admitted

    def _retire(self) -> None:
        for request in self.running:
            if request.done and request.sequence is not None:
                self.cache.free(request.sequence)
                request.sequence = None
        self.running = [r for r in self.running if not r.done]

    def cancel(self) -> None:
        """Drops everything that waits or runs and gives its pages back."""
        self.waiting.clear()
        for request in self.running:
            request.finish_reason = request.finish_reason or "cancelled"
        self._retire()

    def run(self) -> Iterator[tuple[Request, str]]:
        """Until nothing is left: yields each request's new text, once per token."""
        while self.waiting or self.running:
            admitted = self._admit()
            if admitted:
                yield from self.prefill(admitted)
            else:
                yield from self.decode(self.running)
            self._retire()

    # ---- the two phases -----------------------------------------------------------------------------------------
    def prefill(self, requests: Sequence[Request]) -> Iterator[tuple[Request, str]]:
        """Computes the prompts in chunks and samples each request's first token."""
        pending = list(requests)
        while pending:
            work = self._chunks(pending)
            with span("prefill"):
                events = self._prefill_step(work)
            yield from events
            pending = [r for r in pending if r.computed < len(r.prompt_ids)]

    def _chunks(self, pending: Sequence[Request]) -> list[tuple[Request, int]]:
        """Which requests advance in the next step, by how many tokens."""
        work, room = [], self.chunk
        for request in pending:
            count = min(room, len(request.prompt_ids) - request.computed)
            if count > 0:
                work.append((request, count))
                room -= count
        return work

    def _step(self, phase: str, tokens: int, batch: int) -> ModelStep:
        """The pass of this shape, recorded on first use. The least recently made ones are dropped."""
        key = (phase, tokens, batch)
        if key not in self._steps:
            if phase == "decode":
                buffers = Buffers(self.decoder.config, self.decoder.precision, batch, batch)
            else:
                rows = min(self.chunk, self.max_batch)
                self._prefill_buffers = self._prefill_buffers or Buffers(
                    self.decoder.config, self.decoder.precision, self.chunk, rows
                )
                buffers = self._prefill_buffers
            if len(self._steps) >= MAX_STEPS:
                del self._steps[next(iter(self._steps))]
            self._steps[key] = ModelStep(self.decoder, self.cache, buffers, phase, (tokens, batch), self.use_plan)
        return self._steps[key]

    def _prefill_step(self, work: Sequence[tuple[Request, int]]) -> list[tuple[Request, str]]:
        started = time.perf_counter()
        counts = [count for _, count in work]
        step = self._step("prefill", sum(counts), len(work))
        last_rows, finished = self._fill(step.inputs, work)
        buffers = step.buffers
        with recorded(self.recorder, "prefill"):
            kernels = step.run(self.recorder)
            if finished:
                with OpClock() as clock:
                    logits = self.decoder.head_forward(buffers.x[torch.tensor(last_rows)], buffers)
                sampler = self._sampler_for(finished, logits)
                kernels += clock.seconds + sampler.run(self.recorder)
        events = self._deliver(sampler) if finished else []
        self._record("prefill", started, kernels, counts, [r.computed for r, _ in work], len(finished))
        return events

    def _fill(self, inputs: StepInputs, work: Sequence[tuple[Request, int]]) -> tuple[list[int], list[Request]]:
        """Puts the next prompt tokens into a step's buffers; returns the rows that end a prompt, and whose they are."""
        end, rows, finished = 0, [], []
        for index, (request, count) in enumerate(work):
            part, first = slice(end, end + count), request.computed
            inputs.ids[part] = torch.tensor(request.prompt_ids[first : first + count])
            inputs.positions[part] = torch.arange(first, first + count)
            inputs.slot_mapping[part] = self.cache.append(self._sequence(request), count)
            request.computed, end = first + count, end + count
            if inputs.cu_seqlens_q is not None:
                inputs.cu_seqlens_q[index + 1] = end
            if request.computed == len(request.prompt_ids):
                rows.append(end - 1)
                finished.append(request)
        self.cache.write_tables([self._sequence(r) for r, _ in work], inputs.block_table, inputs.seqlens_k)
        return rows, finished

    def decode(self, requests: Sequence[Request]) -> Iterator[tuple[Request, str]]:
        """One more token for each request."""
        with span("decode"):
            events = self._decode_step(requests)
        yield from events

    def _decode_step(self, requests: Sequence[Request]) -> list[tuple[Request, str]]:
        started = time.perf_counter()
        batch = len(requests)
        step = self._step("decode", batch, batch)
        sampler = self._sampler_for(requests, step.buffers.logits)
        inputs = step.inputs
        ids, positions, slots = step.token_arrays
        for row, request in enumerate(requests):
            ids[row] = request.output_ids[-1]
            positions[row] = request.length - 1
            slots[row] = self.cache.append_one(self._sequence(request))
        self.cache.write_tables([self._sequence(r) for r in requests], inputs.block_table, inputs.seqlens_k)
        with recorded(self.recorder, "decode"):
            kernels = step.run(self.recorder) + sampler.run(self.recorder)
        contexts = [r.length for r in requests]
        events = self._deliver(sampler)
        self._record("decode", started, kernels, [1] * batch, contexts, batch)
        return events

    def _sequence(self, request: Request) -> int:
        if request.sequence is None:
            raise RuntimeError("the request has no sequence in the cache")
        return request.sequence

    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """Logits after every token of `ids`, float32 `[len(ids), vocab]`, through the prefill phase."""
        sequence = self.cache.add_sequence()
        buffers = Buffers(self.decoder.config, self.decoder.precision, self.chunk, self.chunk)
        rows = []
        try:
            for begin in range(0, len(ids), self.chunk):
                part = list(ids[begin : begin + self.chunk])
                slots = self.cache.append(sequence, len(part))
                table, lengths = self.cache.tables([sequence])
                inputs = StepInputs(
                    ids=torch.tensor(part),
                    positions=torch.arange(begin, begin + len(part)),
                    slot_mapping=slots,
                    block_table=table,
                    seqlens_k=lengths,
                    cu_seqlens_q=torch.tensor([0, len(part)], dtype=torch.int32),
                    max_seqlen_q=len(part),
                )
                rows.append(self.decoder.forward(inputs, self.cache, buffers).clone())
        finally:
            self.cache.free(sequence)
        return torch.cat(rows)

    # ---- after a step -------------------------------------------------------------------------------------------
    def _sampler_for(self, requests: Sequence[Request], logits: torch.Tensor) -> Sampler:
        """The sampler of these requests over this buffer, kept for as long as both stay the same."""
        kept = self._sampler
        same = kept is not None and len(kept.requests) == len(requests) and all(map(is_, kept.requests, requests))
        if kept is None or not same or kept.logits.data_ptr() != logits.data_ptr():
            kept = self._sampler = Sampler(requests, logits, self.decoder.backend, self.use_plan)
        return kept

    def _deliver(self, sampler: Sampler) -> list[tuple[Request, str]]:
        events = []
        for request, (token, logprob) in zip(sampler.requests, sampler.tokens(), strict=True):
            piece = request.accept(token, logprob)
            if request.length >= self.decoder.config.max_context and not request.done:
                request.finish_reason = "length"
            events.append((request, piece))
        return events

    def _record(
        self, phase: str, started: float, kernels: float, counts: list[int], contexts: list[int], logit_rows: int
    ) -> None:
        flops, nbytes = self.cost(counts, contexts, logit_rows)
        self.steps.append(
            StepRecord(
                phase=phase,
                tokens=sum(counts),
                batch=len(counts),
                context=max(contexts),
                start=started,
                seconds=time.perf_counter() - started,
                kernel_seconds=kernels,
                bytes=nbytes,
                flops=flops,
            )
        )
