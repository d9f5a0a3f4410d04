"""From requests to the sampling op's row tensors, and back from its rows to tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..ops.sampling import Sampled, sample
from .request import Request, TokenLogprob


class Sampler:
    """The sampling options of a fixed list of requests as tensors; only positions change from step to step."""

    def __init__(self, requests: Sequence[Request], backend: str) -> None:
        self.requests = tuple(requests)
        self.backend = backend
        params = [r.params for r in requests]

        def floats(name: str) -> torch.Tensor:
            return torch.tensor([getattr(p, name) for p in params], dtype=torch.float32)

        self._options: dict[str, Any] = {
            "temperature": floats("temperature"),
            "top_k": torch.tensor([p.top_k for p in params], dtype=torch.int32),
            "top_p": floats("top_p"),
            "min_p": floats("min_p"),
            "seeds": torch.tensor([r.seed for r in requests], dtype=torch.int64),
        }
        self._positions = torch.zeros(len(params), dtype=torch.int64)
        self._penalised = any(p.has_penalties for p in params)
        if self._penalised:
            for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
                self._options[name] = floats(name)
            self._options["prompt_ids"] = _padded([r.prompt_ids for r in requests])
        wanted = [p.logprobs for p in params if p.logprobs is not None]
        self._logprobs = max(wanted) if wanted else None

    def sample(self, logits: torch.Tensor) -> list[tuple[int, TokenLogprob | None]]:
        """One token per request from `[batch, vocab]` logits. ValueError naming the request whose row is invalid."""
        self._positions.copy_(torch.tensor([r.length for r in self.requests]))
        options = dict(self._options, positions=self._positions)
        if self._penalised:
            options["output_ids"] = _padded([r.output_ids for r in self.requests])
        drawn = sample(logits, **options, logprobs=self._logprobs, backend=self.backend)
        ids, valid = drawn.ids.tolist(), drawn.valid.tolist()
        if not all(valid):
            row = valid.index(False)
            raise ValueError(f"request {row}: the model gave logits that are all -inf or not a number")
        return [(token, self._logprob(drawn, row)) for row, token in enumerate(ids)]

    def _logprob(self, drawn: Sampled, row: int) -> TokenLogprob | None:
        wanted = self.requests[row].params.logprobs
        if wanted is None or drawn.logprob is None:
            return None
        top: tuple[tuple[int, float], ...] = ()
        if drawn.top_ids is not None and drawn.top_logprobs is not None:
            pairs = zip(drawn.top_ids[row].tolist(), drawn.top_logprobs[row].tolist(), strict=True)
            top = tuple(pairs)[:wanted]
        return TokenLogprob(float(drawn.logprob[row]), top)


def _padded(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """Ragged id lists as one int64 tensor, padded with -1."""
    width = max((len(r) for r in rows), default=0)
    table = torch.full((len(rows), max(width, 1)), -1, dtype=torch.int64)
    for row, ids in enumerate(rows):
        table[row, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
    return table
