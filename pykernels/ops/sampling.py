"""Sampling: penalties, temperature, min-p, top-k, top-p and the draw in one op; draft verification; the random stream."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..contract.sampling import PHILOX_UNIFORM, SAMPLE, VERIFY_DRAFT
from ..library import call

RowOption = float | torch.Tensor  # one number for all rows, or a tensor [batch]


class Sampled(NamedTuple):
    """What `sample` drew, one entry a row."""

    ids: torch.Tensor  # int64 [batch], -1 in an invalid row
    valid: torch.Tensor  # bool [batch]
    logprob: torch.Tensor | None = None  # float32 [batch], NaN in an invalid row
    top_ids: torch.Tensor | None = None  # int64 [batch, logprobs], -1 where the probability is 0
    top_logprobs: torch.Tensor | None = None  # float32 [batch, logprobs]


def _option(value: Any, batch: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A row option as a tensor [batch]. A seed of 64 unsigned bits becomes the int64 of the same bits."""
    if isinstance(value, torch.Tensor):
        return value
    if dtype == torch.int64 and isinstance(value, int) and 2**63 <= value < 2**64:
        value -= 2**64
    return torch.full((batch,), value, dtype=dtype, device=device)


def _penalty(value: Any, neutral: float, batch: int, device: torch.device) -> torch.Tensor | None:
    off = not isinstance(value, torch.Tensor) and value == neutral
    return None if off else _option(value, batch, torch.float32, device)


def _row_options(batch: int, device: torch.device, **values: Any) -> dict[str, torch.Tensor]:
    dtypes = {"top_k": torch.int32, "seeds": torch.int64, "positions": torch.int64}
    return {name: _option(v, batch, dtypes.get(name, torch.float32), device) for name, v in values.items()}


def _rows_of(name: str, t: torch.Tensor) -> tuple[int, torch.device]:
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(t).__name__}")
    return t.shape[0] if t.dim() else 0, t.device


def sample(
    logits: torch.Tensor,
    *,
    temperature: RowOption = 1.0,
    top_k: int | torch.Tensor = 0,
    top_p: RowOption = 1.0,
    min_p: RowOption = 0.0,
    seeds: int | torch.Tensor,
    positions: int | torch.Tensor,
    repetition_penalty: RowOption = 1.0,
    presence_penalty: RowOption = 0.0,
    frequency_penalty: RowOption = 0.0,
    prompt_ids: torch.Tensor | None = None,
    output_ids: torch.Tensor | None = None,
    logit_bias: torch.Tensor | None = None,
    allowed_mask: torch.Tensor | None = None,
    logprobs: int | None = None,
    logprobs_mode: str = "raw",
    out: Sampled | None = None,
    backend: str = "auto",
) -> Sampled:
    """Draws one token per row. A row never depends on its neighbours, its slot or the batch size.

    Order: bias and allowed tokens, repetition, presence and frequency penalties, temperature, min-p, top-k, top-p, draw.
    The draw is Gumbel-max, `argmax(log p_i - log(-log u_i))` over the kept tokens, with `u_i` the stream of
    `philox_uniform` at (seed, position). Ties go to the lowest id.

    Every row option is a number or a tensor `[batch]` (float32; int32 for top_k; int64 for seeds and positions).

    Args:
        logits: `[batch, vocab]` float32, float16 or bfloat16.
        temperature: at least 0; 0 takes the largest penalised logit, whatever the other options say.
        top_k: keeps exactly k tokens in the order (probability descending, id ascending); off when <= 0 or >= vocab.
        top_p: keeps the shortest prefix of that order whose mass, renormalised after top-k, reaches p; off when >= 1.
        min_p: keeps tokens of at least this share of the largest probability; from 0 to 1.
        seeds, positions: name the row's random stream; positions at least 0.
        repetition_penalty: above 0; `l / r` if `l > 0` else `l * r`, once per distinct token of prompt and output.
        presence_penalty, frequency_penalty: subtracted once, and once per occurrence, for tokens of the output.
        prompt_ids, output_ids: int32 or int64 `[batch, n]`, padded with -1.
        logit_bias: float32, allowed_mask: bool; `[vocab]` or `[batch, vocab]`.
        logprobs: None, or how many of the most probable tokens to report beside the drawn one (0: only that).
        logprobs_mode: "raw" (of the logits as given) or "processed" (of the kept, renormalised distribution).
        out: tensors to write into, as `sample` returned them.

    Returns:
        Sampled. A row that holds a NaN or nothing above -inf is invalid: `valid` False, id -1.

    Raises:
        ValueError: shape, dtype, device, or a value outside its range, before anything is written.
    """
    batch, device = _rows_of("sample: logits", logits)
    ids, valid, logprob, top_ids, top_logprobs = out or Sampled(None, None)  # type: ignore[arg-type]
    if logprobs is not None:
        if not isinstance(logprobs, int) or logprobs < 0:
            raise ValueError(f"sample: logprobs must be None or an integer of at least 0, got {logprobs!r}")
        if logprob is None:
            logprob = torch.empty(batch, dtype=torch.float32, device=device)
        if top_ids is None:
            top_ids = torch.empty((batch, logprobs), dtype=torch.int64, device=device)
            top_logprobs = torch.empty((batch, logprobs), dtype=torch.float32, device=device)
    args = call(
        SAMPLE,
        backend,
        logits=logits,
        **_row_options(
            batch,
            device,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seeds=seeds,
            positions=positions,
        ),
        repetition_penalty=_penalty(repetition_penalty, 1.0, batch, device),
        presence_penalty=_penalty(presence_penalty, 0.0, batch, device),
        frequency_penalty=_penalty(frequency_penalty, 0.0, batch, device),
        prompt_ids=prompt_ids,
        output_ids=output_ids,
        logit_bias=logit_bias,
        allowed_mask=allowed_mask,
        logprobs_mode=logprobs_mode,
        ids=ids,
        valid=valid,
        logprob=logprob,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
    )
    return Sampled(args["ids"], args["valid"], logprob, top_ids, top_logprobs)


def verify_draft(
    target_logits: torch.Tensor,
    draft_ids: torch.Tensor,
    *,
    draft_probs: torch.Tensor | None = None,
    cu_draft: torch.Tensor,
    temperature: RowOption = 1.0,
    top_k: int | torch.Tensor = 0,
    top_p: RowOption = 1.0,
    min_p: RowOption = 0.0,
    seeds: int | torch.Tensor,
    positions: int | torch.Tensor,
    ids: torch.Tensor | None = None,
    num_accepted: torch.Tensor | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chain rejection sampling of drafted tokens (Leviathan et al., 2023): the result is distributed as plain sampling.

    Draft token d at position t is accepted when an own uniform is below `min(1, p(d) / q(d))`. The first rejected one is
    replaced by a draw from `max(p - q, 0)`, renormalised, and ends the request. When all are accepted one more token is
    drawn from the last row, the same that `sample` would draw there. p is the target after temperature and filters.

    Args:
        target_logits: `[total_draft + batch, vocab]`; request b owns rows `cu_draft[b] + b` to `cu_draft[b + 1] + b`.
        draft_ids: int32 or int64 `[total_draft]`.
        draft_probs: float32 `[total_draft, vocab]`, the distribution that each draft token was drawn from; None when
            drafts were not drawn at all (prompt lookup): q is then one-hot.
        cu_draft: int32 `[batch + 1]`, where each request's drafts begin; the last entry is total_draft.
        temperature, top_k, top_p, min_p, seeds: as in `sample`.
        positions: position of each request's first target row.
        ids: where to write, int64 `[batch, n]`, n at least the longest draft + 1.
        num_accepted: where to write, int32 `[batch]`.

    Returns:
        (ids, num_accepted): the accepted tokens of each request, then one more, then -1. A target row that defines no
        distribution (a NaN, or nothing above -inf) ends its request with -1 in that place.

    Raises:
        ValueError: shape, dtype, device, or an index or value outside its range, before anything is written.
    """
    entries, device = _rows_of("verify_draft: cu_draft", cu_draft)
    batch = max(entries - 1, 0)
    if ids is None:
        longest = int(torch.diff(cu_draft).max()) if batch else 0
        ids = torch.empty((batch, max(longest, 0) + 1), dtype=torch.int64, device=device)
    args = call(
        VERIFY_DRAFT,
        backend,
        target_logits=target_logits,
        draft_ids=draft_ids,
        draft_probs=draft_probs,
        cu_draft=cu_draft,
        **_row_options(
            batch,
            device,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seeds=seeds,
            positions=positions,
        ),
        ids=ids,
        num_accepted=num_accepted,
    )
    return ids, args["num_accepted"]


def philox_uniform(
    seeds: torch.Tensor,
    positions: torch.Tensor,
    n: int,
    *,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """The random stream itself: Philox4x32-10 (Salmon et al., SC 2011) keyed by (seed, position), the same bits everywhere.

    Args:
        seeds, positions: int64 `[batch]`; positions at least 0.
        n: how many uniforms a row.
        out: where to write, float32 `[batch, n]`.

    Returns:
        Uniforms in (0, 1), float32 `[batch, n]`: element i is `((word >> 9) + 0.5) * 2^-23`, word i % 4 of counter
        `(i // 4, 0, position low, position high)` under key `(seed low, seed high)`.

    Raises:
        ValueError: shape, dtype or device, a negative position; TypeError: not a tensor.
    """
    batch, device = _rows_of("philox_uniform: seeds", seeds)
    if out is None:
        out = torch.empty((batch, n), dtype=torch.float32, device=device)
    elif out.shape[-1] != n:
        raise ValueError(f"philox_uniform: out must have n={n} columns, got {list(out.shape)}")
    return call(PHILOX_UNIFORM, backend, seeds=seeds, positions=positions, out=out)["out"]
