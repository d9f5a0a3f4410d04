"""Sampling: penalties, temperature, min-p, top-k, top-p and the draw; draft verification; the random stream."""

from __future__ import annotations

import torch

from .attention import wide_dtype

SAMPLE_NOISE, ACCEPT, RESAMPLE_NOISE = 0, 1, 2  # purposes: independent streams at the same (seed, position)

_WORD = 0xFFFFFFFF


def philox4x32(counter: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Philox4x32-10 (Salmon et al., SC 2011): counter [..., 4], key [..., 2] -> words [..., 4]; uint32 in int64."""
    c0, c1, c2, c3 = counter.unbind(-1)
    k0, k1 = key.unbind(-1)
    for _ in range(10):
        # int64 products wrap, but their low 64 bits are right, which is all that is read.
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = ((p1 >> 32) & _WORD) ^ c1 ^ k0, p1 & _WORD, ((p0 >> 32) & _WORD) ^ c3 ^ k1, p0 & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return torch.stack(torch.broadcast_tensors(c0, c1, c2, c3), dim=-1)


def uniform(seeds: torch.Tensor, positions: torch.Tensor, count: int, purpose: int) -> torch.Tensor:
    """Uniforms in (0, 1), float32 [batch, count]: element i is a function of (seed, position, purpose, i) alone.

    key = (low, high word of the seed); counter = (i // 4, purpose, low, high word of the position); element i takes
    output word i % 4 and is ((word >> 9) + 0.5) * 2^-23: 23 bits, because 24 would round up to 1.
    """
    blocks = torch.arange((count + 3) // 4)
    low, high = positions & _WORD, (positions >> 32) & _WORD
    parts = (blocks[None, :], torch.tensor(purpose), low[:, None], high[:, None])
    counter = torch.stack(torch.broadcast_tensors(*parts), dim=-1)  # [batch, blocks, 4]
    key = torch.stack((seeds & _WORD, (seeds >> 32) & _WORD), dim=-1)[:, None, :]
    words = philox4x32(counter, key).flatten(1)[:, :count]
    return ((words >> 9).to(torch.float32) + 0.5) * 2.0**-23


def philox_uniform(
    *,
    seeds: torch.Tensor,  # [batch]
    positions: torch.Tensor,  # [batch]
    count: int,
    compute_dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor]:
    """The stream that `sample` draws its noise from, out [batch, count]; float32 values, exact in float64."""
    return (uniform(seeds, positions, count, SAMPLE_NOISE).to(compute_dtype),)


def sample(
    *,
    logits: torch.Tensor,  # [batch, vocab]
    temperature: torch.Tensor,  # [batch], 0 is greedy
    top_k: torch.Tensor,  # [batch], off when <= 0 or >= vocab
    top_p: torch.Tensor,  # [batch], off when >= 1
    min_p: torch.Tensor,  # [batch]
    seeds: torch.Tensor,  # [batch]
    positions: torch.Tensor,  # [batch]
    repetition_penalty: torch.Tensor | None,  # [batch]
    presence_penalty: torch.Tensor | None,  # [batch]
    frequency_penalty: torch.Tensor | None,  # [batch]
    prompt_ids: torch.Tensor | None,  # [batch, max_prompt], padded with -1
    output_ids: torch.Tensor | None,  # [batch, max_output], padded with -1
    logit_bias: torch.Tensor | None,  # [vocab] or [batch, vocab]
    allowed_mask: torch.Tensor | None,  # [vocab] or [batch, vocab]
    logprobs_mode: str,
    num_logprobs: int = 0,
    compute_dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draws one token per row -> ids, valid, logprob [batch], top_ids, top_logprobs [batch, num_logprobs].

    The draw is Gumbel-max: among the kept tokens the largest log p - log(-log u), lowest id on ties. Log-probabilities
    are of the logits as given ("raw") or of the kept, renormalised distribution ("processed", -inf outside it). The top
    entries are in the order (probability descending, id ascending); entries of probability zero are id -1, logprob
    -inf.

    A row is invalid when a logit is NaN, or when all are -inf after bias and mask: valid False, ids -1, logprobs NaN.
    """
    wide = wide_dtype(compute_dtype)
    adjusted = penalise(
        logits,
        repetition_penalty,
        presence_penalty,
        frequency_penalty,
        prompt_ids,
        output_ids,
        logit_bias,
        allowed_mask,
    )
    valid = usable(adjusted) & ~torch.isnan(logits).any(dim=-1)
    processed = warp(adjusted, temperature, top_k, top_p, min_p, compute_dtype)
    ids = draw(processed, uniform(seeds, positions, logits.shape[-1], SAMPLE_NOISE))

    reported = processed
    if logprobs_mode == "raw":
        reported = torch.log_softmax(settle(logits.to(torch.float32)).to(wide), dim=-1)
    logprob = reported.gather(-1, ids[:, None]).squeeze(-1)
    ranked, order = torch.sort(reported, dim=-1, descending=True, stable=True)
    top_logprobs, top_ids = ranked[:, :num_logprobs], order[:, :num_logprobs]
    top_ids = torch.where(top_logprobs == -torch.inf, -1, top_ids)

    row = valid[:, None]
    return (
        torch.where(valid, ids, -1),
        valid,
        torch.where(valid, logprob, torch.nan),
        torch.where(row, top_ids, -1),
        torch.where(row, top_logprobs, torch.nan),
    )


def penalise(
    logits: torch.Tensor,
    repetition_penalty: torch.Tensor | None,
    presence_penalty: torch.Tensor | None,
    frequency_penalty: torch.Tensor | None,
    prompt_ids: torch.Tensor | None,
    output_ids: torch.Tensor | None,
    logit_bias: torch.Tensor | None,
    allowed_mask: torch.Tensor | None,
) -> torch.Tensor:
    """Bias, mask, then the three penalties, in float32, each step rounded: [batch, vocab].

    Repetition divides a positive logit and multiplies another, once per distinct token of prompt and output. Presence
    is subtracted once, frequency once per occurrence, for tokens of the output alone.
    """
    x = logits.to(torch.float32)
    if logit_bias is not None:
        x = x + logit_bias
    if allowed_mask is not None:
        x = torch.where(allowed_mask, x, -torch.inf)
    in_output = occurrences(output_ids, x)
    if repetition_penalty is not None:
        seen = (occurrences(prompt_ids, x) + in_output) > 0
        penalty = repetition_penalty[:, None]
        x = torch.where(seen, torch.where(x > 0, x / penalty, x * penalty), x)
    if presence_penalty is not None:
        x = x - presence_penalty[:, None] * (in_output > 0)
    if frequency_penalty is not None:
        x = x - frequency_penalty[:, None] * in_output
    return x


def occurrences(ids: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """How often each token stands in its row of `ids`, float32 [batch, vocab]; ids outside it do not count."""
    counts = torch.zeros_like(like)
    if ids is not None:
        real = (ids >= 0) & (ids < like.shape[-1])
        counts.scatter_add_(-1, torch.where(real, ids, 0).long(), real.to(like.dtype))
    return counts


def usable(logits: torch.Tensor) -> torch.Tensor:
    """Rows [batch] that define a distribution: no NaN, and something above -inf."""
    return ~torch.isnan(logits).any(dim=-1) & (logits > -torch.inf).any(dim=-1)


def settle(logits: torch.Tensor) -> torch.Tensor:
    """Logits without +inf: where a row has some, they share its probability equally and the others get none."""
    infinite = logits == torch.inf
    return torch.where(infinite.any(dim=-1, keepdim=True), torch.where(infinite, 0.0, -torch.inf), logits)


def warp(
    logits: torch.Tensor,  # [batch, vocab] float32, penalised
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    compute_dtype: torch.dtype,
) -> torch.Tensor:
    """Temperature, min-p, top-k, top-p: log-probabilities [batch, vocab] of the kept tokens, -inf outside.

    All orders are (logit descending, id ascending). Temperature 0 keeps the first token alone. Unusable rows come back
    as uniform, for their caller to discard.
    """
    wide = wide_dtype(compute_dtype)
    vocab = logits.shape[-1]
    logits = settle(torch.where(usable(logits)[:, None], logits, 0.0))
    ordered, order = torch.sort(logits.to(wide), dim=-1, descending=True, stable=True)
    rank = torch.arange(vocab)[None, :]

    greedy = (temperature == 0)[:, None]
    heat = torch.where(greedy, 1.0, temperature[:, None]).to(wide)
    z = (ordered - ordered[:, :1]) / heat
    weight = torch.exp(z)
    keep = weight.to(torch.float32) > 0  # zero in float32 is outside the support
    keep &= ~greedy | (rank == 0)
    keep &= weight >= min_p[:, None]
    k = torch.where((top_k <= 0) | (top_k >= vocab), vocab, top_k)
    keep &= rank < k[:, None]

    kept = torch.where(keep, weight, 0.0)
    reached = torch.cumsum(kept, dim=-1)
    before = torch.cat((torch.zeros_like(reached[:, :1]), reached[:, :-1]), dim=-1)  # mass ahead of each token
    share = top_p[:, None].to(wide) * kept.sum(dim=-1, keepdim=True)
    keep &= (before < share) | (top_p[:, None] >= 1)
    keep |= rank == 0
    log_p = torch.log_softmax(torch.where(keep, z, -torch.inf), dim=-1)
    return torch.empty_like(log_p).scatter_(-1, order, log_p)


def draw(log_p: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Gumbel-max: the id [batch] of the largest log p - log(-log u); lowest on ties, never one of probability zero."""
    return torch.argmax(log_p - torch.log(-torch.log(u.to(log_p.dtype))), dim=-1)


def verify_draft(
    *,
    target_logits: torch.Tensor,  # [total_draft + batch, vocab]; b owns rows cu_draft[b] + b to cu_draft[b+1] + b
    draft_ids: torch.Tensor,  # [total_draft]
    draft_probs: torch.Tensor | None,  # [total_draft, vocab], the warped q that drew each draft; None: one-hot drafts
    cu_draft: torch.Tensor,  # [batch + 1]
    temperature: torch.Tensor,  # [batch], as top_k, top_p, min_p, seeds
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,  # [batch], position of the request's first target row
    max_tokens: int,
    compute_dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chain rejection sampling (Leviathan et al. 2023) -> ids [batch, max_tokens] (-1 after the end), num_accepted.

    Draft token d at position t is accepted when u < min(1, p(d) / q(d)). The first rejected one is replaced by a draw
    from max(p - q, 0), renormalised, and ends the request; when all are accepted one more token is drawn from the last
    row, as `sample` would at that position. p is the target's warped distribution. With `draft_probs=None` q is
    one-hot: accept with probability p(d), replace from p without d. Either way the tokens are distributed as plain
    sampling, and with temperature 0 they are the greedy ones. An unusable target row (a NaN, or all -inf) ends the
    request with -1; a draft id outside the vocabulary has probability zero. `max_tokens` is at least the longest draft
    + 1.
    """
    batch, vocab = temperature.shape[0], target_logits.shape[-1]
    starts, lengths = cu_draft[:-1].long(), torch.diff(cu_draft).long()
    owner = torch.repeat_interleave(torch.arange(batch), lengths + 1)
    logits = target_logits.to(torch.float32)
    good = usable(logits)
    log_p = warp(logits, temperature[owner], top_k[owner], top_p[owner], min_p[owner], compute_dtype)
    ids = torch.full((batch, max_tokens), -1, dtype=torch.int64)
    num_accepted = torch.zeros(batch, dtype=torch.int32)

    active = torch.arange(batch)
    for step in range(max(lengths.tolist(), default=-1) + 1):
        active = active[good[starts[active] + active + step]]
        finished, active = active[lengths[active] == step], active[lengths[active] > step]
        rows = starts[finished] + finished + step
        ids[finished, step] = draw(
            log_p[rows], uniform(seeds[finished], positions[finished] + step, vocab, SAMPLE_NOISE)
        )

        where = positions[active] + step
        p = torch.exp(log_p[starts[active] + active + step])
        drafted = draft_ids[starts[active] + step].long()
        q = one_hot(drafted, p) if draft_probs is None else draft_probs[starts[active] + step].to(p.dtype)
        accepted = accept(p, q, drafted, uniform(seeds[active], where, 1, ACCEPT).squeeze(-1))
        noise = uniform(seeds[active], where, vocab, RESAMPLE_NOISE)
        ids[active, step] = torch.where(accepted, drafted, draw(torch.log(residual(p, q)), noise))
        active = active[accepted]
        num_accepted[active] += 1
    return ids, num_accepted


def one_hot(ids: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Distributions [batch, vocab] that put everything on `ids`; an id outside the vocabulary puts it nowhere."""
    return (torch.arange(like.shape[-1]) == ids[:, None]).to(like.dtype)


def accept(p: torch.Tensor, q: torch.Tensor, drafted: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """u < min(1, p / q) at each drafted token, written u q < p so that q = 0 divides nothing: bool [batch]."""
    inside = (drafted >= 0) & (drafted < p.shape[-1])
    at = torch.where(inside, drafted, 0)[:, None]
    return inside & (u.to(p.dtype) * q.gather(-1, at).squeeze(-1) < p.gather(-1, at).squeeze(-1))


def residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """max(p - q, 0), not normalised; p itself where nothing is left, which only rounding can cause."""
    rest = torch.clamp(p - q, min=0.0)
    return torch.where((rest > 0).any(dim=-1, keepdim=True), rest, p)
