"""From requests to the sampling op's row tensors, and back from its rows to tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..ops.sampling import Sampled, sample
from ..roofline.points import Recorder
from .graph import Recorded
from .request import Request, TokenLogprob


class Sampler:
    """Samples for a fixed list of requests from one logits buffer; only positions and past ids change between steps."""

    def __init__(self, requests: Sequence[Request], logits: torch.Tensor, backend: str, use_plan: bool) -> None:
        self.requests = tuple(requests)
        self.logits = logits
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
        self._options["positions"] = torch.zeros(len(params), dtype=torch.int64)
        self._positions = self._options["positions"].numpy()
        self._output_ids: torch.Tensor | None = None
        if any(p.has_penalties for p in params):
            for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
                self._options[name] = floats(name)
            self._options["prompt_ids"] = _padded([r.prompt_ids for r in requests], 0)
            longest = max(p.max_new_tokens for p in params)
            self._options["output_ids"] = self._output_ids = _padded([r.output_ids for r in requests], longest)
        wanted = [p.logprobs for p in params if p.logprobs is not None]
        logprobs = max(wanted) if wanted else None
        rows = len(params)
        self._drawn = Sampled(torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.bool))
        if logprobs is not None:
            top = torch.empty(rows, logprobs, dtype=torch.int64), torch.empty(rows, logprobs)
            self._drawn = Sampled(self._drawn.ids, self._drawn.valid, torch.empty(rows), *top)

        def draw() -> None:
            sample(logits, **self._options, logprobs=logprobs, out=self._drawn, backend=backend)

        self._draw = Recorded(draw, use_plan)

    def run(self, recorder: Recorder | None = None) -> float:
        """Draws one token per request from what the logits buffer holds; returns the seconds spent in kernels."""
        for row, request in enumerate(self.requests):
            self._positions[row] = request.length
            if self._output_ids is not None and request.output_ids:
                self._output_ids[row, len(request.output_ids) - 1] = request.output_ids[-1]
        return self._draw.run(recorder)

    def tokens(self) -> list[tuple[int, TokenLogprob | None]]:
        """What was drawn. ValueError naming the request whose row is invalid."""
        drawn = self._drawn
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


def _padded(rows: Sequence[Sequence[int]], width: int) -> torch.Tensor:
    """Ragged id lists as one int64 tensor of at least `width` columns, padded with -1."""
    width = max(1, width, *(len(r) for r in rows))
    table = torch.full((len(rows), width), -1, dtype=torch.int64)
    for row, ids in enumerate(rows):
        table[row, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
    return table
