"""What is timed, and the prompts for it: no window of tokens is ever used twice, because engines keep prefix caches."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """Prefill of one prompt, or `new` decode steps after prompts of these lengths (one sequence each)."""

    name: str
    phase: str
    contexts: tuple[int, ...]
    new: int = 0

    @property
    def batch(self) -> int:
        return len(self.contexts)

    def tokens_per_s(self, seconds: float) -> float:
        """Of a prefill that took `seconds`, or of decode steps of `seconds` each."""
        return (self.contexts[0] if self.phase == "prefill" else self.batch) / seconds


def spread_contexts(count: int, mean: int) -> tuple[int, ...]:
    """`count` different lengths from an eighth of `mean` to as far above it."""
    low, high = mean // 8, 2 * mean - mean // 8
    return tuple(low + (high - low) * i // (count - 1) for i in range(count))


def _prefill(tokens: int) -> Job:
    return Job(f"prefill-{tokens}", "prefill", (tokens,))


def _decode(context: int, new: int = 16) -> Job:
    return Job(f"decode-{context}", "decode", (context,), new)


def _batch(count: int, mean: int = 512, new: int = 8) -> Job:
    return Job(f"batch-{count}", "decode", spread_contexts(count, mean), new)


FULL = (
    *(_prefill(n) for n in (128, 512, 1024, 4096)),
    *(_decode(n) for n in (1, 512, 1024, 4096, 8000)),
    _batch(8),
    _batch(32, 256),
)
SMOKE = (_prefill(64), _decode(32, 4), _batch(3, 32, 2))
BY_NAME = {job.name: job for job in FULL}
GROUPS = {
    "prefill": [j.name for j in FULL if j.phase == "prefill" and j.contexts[0] <= 1024],
    "decode": [j.name for j in FULL if j.phase == "decode" and j.batch == 1],
    "batch": [j.name for j in FULL if j.batch > 1],
    "all": [j.name for j in FULL],
}


def chosen(words: str) -> tuple[Job, ...]:
    """Jobs by comma-separated names or groups. ValueError with the known ones."""
    names: list[str] = []
    for word in filter(None, words.split(",")):
        if word not in GROUPS and word not in BY_NAME:
            raise ValueError(f"unknown job {word!r}; jobs: {', '.join(BY_NAME)}; groups: {', '.join(GROUPS)}")
        names += GROUPS.get(word, [word])
    return tuple(job for job in FULL if job.name in names)


class Windows:
    """Prompts of ordinary token ids, each other than all before it from its first token on."""

    def __init__(self, seed: int, vocab: int) -> None:
        self._random, self._low, self._high = random.Random(seed), min(100, vocab // 4), vocab
        self._starts: set[tuple[int, ...]] = set()

    def window(self, tokens: int) -> list[int]:
        while True:
            ids = [self._random.randrange(self._low, self._high) for _ in range(tokens)]
            start = tuple(ids[:4])
            if start not in self._starts:
                self._starts.add(start)
                return ids

    def prompts(self, job: Job) -> list[list[int]]:
        return [self.window(n) for n in job.contexts]
