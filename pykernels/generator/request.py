"""What a caller asks for, what it gets, and a request's state in between."""

from __future__ import annotations

import hashlib
import math
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..models.streaming import StopStrings, StreamDecoder
from ..models.tokenizer import Tokenizer
from ..roofline.records import RequestRecord


@dataclass(frozen=True)
class SamplingParams:
    """How to continue a prompt. Defaults are greedy.

    Args:
        max_new_tokens: at most this many tokens, at least 1.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: keep the k most probable tokens; 0 is off.
        top_p: keep the smallest set whose probability reaches p; 1 is off.
        min_p: keep tokens of at least min_p times the largest probability; 0 is off.
        repetition_penalty, presence_penalty, frequency_penalty: 1, 0 and 0 are off.
        stop: the text ends before the first of these strings.
        seed: fixes the random numbers; None takes one from the operating system.
        logprobs: None, or for every token its log-probability and those of this many most probable ones.
        ignore_eos: go on after an end token (for measuring).
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: Sequence[str] = ()
    seed: int | None = None
    logprobs: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        def need(ok: bool, name: str, what: str) -> None:
            if not ok:
                raise ValueError(f"{name} must be {what}, got {getattr(self, name)!r}")

        need(self.max_new_tokens >= 1, "max_new_tokens", "at least 1")
        need(self.temperature >= 0 and math.isfinite(self.temperature), "temperature", "0 or a positive number")
        need(0 < self.top_p <= 1, "top_p", "in (0, 1]")
        need(0 <= self.min_p <= 1, "min_p", "in [0, 1]")
        need(self.repetition_penalty > 0, "repetition_penalty", "positive")
        need(self.logprobs is None or self.logprobs >= 0, "logprobs", "None or at least 0")
        need(self.seed is None or 0 <= self.seed < 2**63, "seed", "None or in [0, 2**63)")
        StopStrings(self.stop)  # refuses a bare string and empty ones

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of a generated token, and the most probable ones at its position."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Completion:
    """A finished request. `finish_reason` is "stop" (end token or stop string) or "length"."""

    text: str
    token_ids: tuple[int, ...]
    prompt_ids: tuple[int, ...]
    finish_reason: str
    metrics: dict[str, Any]
    logprobs: tuple[TokenLogprob, ...] | None = None

    @property
    def output_hash(self) -> str:
        return hashlib.sha256(repr(self.token_ids).encode()).hexdigest()[:16]


@dataclass
class Request:
    """One prompt on its way: prompt tokens computed so far, tokens generated, text given out."""

    prompt_ids: list[int]
    params: SamplingParams
    tokenizer: Tokenizer
    eos_ids: tuple[int, ...]
    submitted: float = field(default_factory=time.perf_counter)
    sequence: int | None = None  # its id in the KV cache
    computed: int = 0  # prompt tokens whose keys and values are in the cache
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    deliveries: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    text: str = ""
    seed: int = field(init=False)

    def __post_init__(self) -> None:
        self.seed = secrets.randbits(63) if self.params.seed is None else self.params.seed
        self._decoder = StreamDecoder(self.tokenizer)
        self._stops = StopStrings(self.params.stop)

    @property
    def length(self) -> int:
        """Tokens of prompt and output."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def done(self) -> bool:
        return self.finish_reason is not None

    def accept(self, token: int, logprob: TokenLogprob | None = None) -> str:
        """Takes a sampled token; returns the text that can be given out now, often part of what is still held back."""
        self.deliveries.append(time.perf_counter())
        self.output_ids.append(token)
        if logprob is not None:
            self.logprobs.append(logprob)
        piece = ""
        if token in self.eos_ids and not self.params.ignore_eos:
            self.finish_reason = "stop"
        else:
            piece = self._stops.feed(self._decoder.feed(token))
            if self._stops.matched is not None:
                self.finish_reason = "stop"
            elif len(self.output_ids) == self.params.max_new_tokens:
                self.finish_reason = "length"
        if self.done and self._stops.matched is None:
            piece += self._stops.feed(self._decoder.flush())
            if self._stops.matched is None:
                piece += self._stops.flush()
        self.text += piece
        return piece

    def record(self) -> RequestRecord:
        return RequestRecord(
            submitted=self.submitted,
            first_token=self.deliveries[0] if self.deliveries else None,
            deliveries=list(self.deliveries),
            prompt_tokens=len(self.prompt_ids),
            cached_tokens=0,
            output_tokens=len(self.output_ids),
            finish_reason=self.finish_reason,
        )

    def completion(self) -> Completion:
        record = self.record()
        first = self.deliveries[0] if self.deliveries else None
        itl = (
            (self.deliveries[-1] - self.deliveries[0]) / (len(self.deliveries) - 1)
            if len(self.deliveries) > 1
            else None
        )
        return Completion(
            text=self.text,
            token_ids=tuple(self.output_ids),
            prompt_ids=tuple(self.prompt_ids),
            finish_reason=self.finish_reason or "length",
            metrics={
                "ttft_ms": None if first is None else 1e3 * (first - record.submitted),
                "itl_ms": None if itl is None else 1e3 * itl,
                "prompt_tokens": len(self.prompt_ids),
                "output_tokens": len(self.output_ids),
            },
            logprobs=tuple(self.logprobs) if self.params.logprobs is not None else None,
        )
