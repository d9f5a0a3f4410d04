"""The attention reference against second sources, and the edge lines of the contract one by one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from pykernels.reference.attention import attend
from pykernels.reference.decode import merge_attention_states, paged_decode_attention
from pykernels.reference.prefill import paged_prefill_attention, prefill_attention

F64 = torch.float64
OPEN: dict[str, Any] = {
    "causal": False,
    "softmax_scale": 0.3,
    "window_left": -1,
    "window_right": -1,
    "softcap": 0.0,
    "alibi_slopes": None,
    "sinks": None,
}
CAUSAL = {**OPEN, "causal": True}


def draw(*shape: int, seed: int = 0, std: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64) * std


def problem(
    q_len: int, k_len: int, heads: int = 4, kv_heads: int = 2
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return draw(q_len, heads, 16, seed=1, std=3), draw(k_len, kv_heads, 16, seed=2), draw(k_len, kv_heads, 24, seed=3)


def solve(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **mask: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return attend(q, k, v, **{**OPEN, **mask}, compute_dtype=F64)


def lengths(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def into_pages(x: torch.Tensor, page_size: int, pages: list[int], total: int) -> torch.Tensor:
    """x [tokens, heads, dim] in the given pages of a pool that is otherwise NaN."""
    pool = torch.full((total, page_size, *x.shape[1:]), torch.nan, dtype=x.dtype)
    for t in range(x.shape[0]):
        pool[pages[t // page_size], t % page_size] = x[t]
    return pool


@pytest.mark.parametrize(("q_len", "k_len"), [(1, 1), (7, 7), (5, 40), (40, 40), (33, 12)])
@pytest.mark.parametrize("window", [(-1, -1), (6, -1), (0, 0), (4, 3), (-1, 2)])
@pytest.mark.parametrize("causal", [True, False])
def test_masks_match_scaled_dot_product_attention(
    q_len: int, k_len: int, window: tuple[int, int], causal: bool
) -> None:
    q, k, v = problem(q_len, k_len)
    left, right = window[0], 0 if causal else window[1]
    mask = torch.zeros(q_len, k_len, dtype=torch.bool)
    for i in range(q_len):
        for j in range(k_len):
            at = i + k_len - q_len
            mask[i, j] = (left < 0 or j >= at - left) and (right < 0 or j <= at + right)
    out, lse = solve(q, k, v, causal=causal, window_left=window[0], window_right=window[1])
    batched = [x.transpose(0, 1)[None] for x in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*batched, attn_mask=mask, scale=0.3, enable_gqa=True)
    blind = ~mask.any(dim=1)
    torch.testing.assert_close(out[~blind], expected[0].transpose(0, 1)[~blind], rtol=0, atol=1e-12)
    assert (out[blind] == 0).all()
    assert (lse[:, blind] == -math.inf).all()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("alibi", [True, False])
def test_softcap_alibi_and_window_together_match_flex_attention(causal: bool, softcap: float, alibi: bool) -> None:
    q_len, k_len, heads = 12, 20, 4
    q, k, v = (x.to(torch.float32) for x in problem(q_len, k_len, heads=heads, kv_heads=heads))
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625]) if alibi else torch.zeros(heads)

    def score_mod(score, b, h, i, j):
        capped = softcap * torch.tanh(score / softcap) if softcap else score
        at = i + k_len - q_len
        seen = (j >= at - 6) & (j <= at + (0 if causal else k_len))
        return torch.where(seen, capped - slopes[h] * (at - j).abs(), -torch.inf)

    batched = [x.transpose(0, 1)[None] for x in (q, k, v)]
    expected = flex_attention(*batched, score_mod=score_mod, scale=0.3)
    out, _ = solve(q, k, v, causal=causal, window_left=6, softcap=softcap, alibi_slopes=slopes if alibi else None)
    torch.testing.assert_close(out.to(torch.float32), expected[0].transpose(0, 1), rtol=0, atol=2e-6)


def test_alibi_is_minus_slope_times_distance_of_absolute_positions() -> None:
    # flash-attention: bias -slope * |i + seqlen_k - seqlen_q - j|, symmetric, so it also acts to the right.
    q, k, v = problem(3, 5, heads=2, kv_heads=1)
    slopes = torch.tensor([0.7, 0.2])
    _, lse = solve(q, k, v, alibi_slopes=slopes)
    for h in range(2):
        for i in range(3):
            logits = [float(q[i, h] @ k[j, 0]) * 0.3 - float(slopes[h]) * abs(i + 5 - 3 - j) for j in range(5)]
            assert float(lse[h, i]) == pytest.approx(math.log(sum(map(math.exp, logits))), abs=1e-6)


def test_causal_is_aligned_to_the_bottom_right() -> None:
    q, k, v = problem(2, 5)
    out, _ = solve(q, k, v, causal=True)
    first, _ = solve(q[:1], k[:4], v[:4])
    last, _ = solve(q[1:], k, v)
    torch.testing.assert_close(out, torch.cat([first, last]), rtol=0, atol=1e-14)


def test_causal_forbids_the_right_whatever_the_window_says() -> None:
    q, k, v = problem(6, 6)
    torch.testing.assert_close(solve(q, k, v, causal=True, window_right=3)[0], solve(q, k, v, causal=True)[0])


@pytest.mark.parametrize("sinks", [None, torch.tensor([1.0, -3.0, 900.0, 0.0])])
def test_more_queries_than_keys_leaves_the_first_rows_empty(sinks: torch.Tensor | None) -> None:
    q, k, v = problem(5, 2)
    out, lse = solve(q, k, v, causal=True, sinks=sinks)
    assert (out[:3] == 0).all()
    assert (lse[:, :3] == -math.inf).all()
    assert torch.isfinite(out[3:]).all()
    assert torch.isfinite(lse[:, 3:]).all()


def test_sequences_of_length_zero_and_padded_rows_are_zero_and_minus_infinity() -> None:
    q = draw(6, 4, 16)
    k, v = draw(3, 2, 16), draw(3, 2, 24)
    q[4:] = torch.nan  # padding
    out, lse = prefill_attention(
        q=q,
        k=k,
        v=v,
        cu_seqlens_q=lengths(0, 2, 2, 4),
        cu_seqlens_k=lengths(0, 0, 3, 3),
        max_seqlen_q=2,
        max_seqlen_k=3,
        **OPEN,
    )
    assert (out == 0).all()
    assert (lse == -math.inf).all()


def test_lengths_above_the_given_maximum_are_refused() -> None:
    q, k, v = problem(4, 4)
    with pytest.raises(ValueError, match="max_seqlen_q is 3, but a sequence has length 4"):
        prefill_attention(
            q=q,
            k=k,
            v=v,
            cu_seqlens_q=lengths(0, 4),
            cu_seqlens_k=lengths(0, 4),
            max_seqlen_q=3,
            max_seqlen_k=4,
            **OPEN,
        )


def test_logits_of_1e5_pick_the_largest_and_stay_finite() -> None:
    q, k, v = problem(8, 30)
    out, lse = solve(q * 1e5, k, v)
    scores = torch.einsum("ihd,jhd->hij", q * 1e5, k.repeat_interleave(2, 1)) * 0.3
    winners = v.repeat_interleave(2, 1)[scores.argmax(-1), torch.arange(4)[:, None]].transpose(0, 1)
    torch.testing.assert_close(out, winners, rtol=0, atol=1e-9)
    torch.testing.assert_close(lse, scores.amax(-1), rtol=0, atol=1e-9)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_is_masked_never_reaches_the_result(poison: float) -> None:
    q, k, v = problem(4, 10)
    clean = solve(q, k, v, causal=True, window_left=2)
    k[:4], v[:4] = poison, poison  # row 0 stands at position 6 and sees keys 4, 5 and 6
    assert all(torch.equal(a, b) for a, b in zip(clean, solve(q, k, v, causal=True, window_left=2), strict=True))


def test_nan_in_a_visible_query_key_or_value_reaches_only_the_rows_that_see_it() -> None:
    for which in range(3):
        q, k, v = problem(6, 6, heads=2, kv_heads=2)
        (q, k, v)[which][3, 1, 2] = torch.nan
        out, lse = solve(q, k, v, causal=True)
        rows = torch.isnan(out).flatten(1).any(dim=1)
        assert rows.tolist() == [i == 3 if which == 0 else i >= 3 for i in range(6)]
        assert not torch.isnan(out[:, 0]).any()  # the other head
        assert torch.isnan(lse[1]).tolist() == ([False] * 6 if which == 2 else rows.tolist())
        if which == 2:  # one element of v spoils one element of out
            assert not torch.isnan(out[..., [0, 1, *range(3, 24)]]).any()


@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(1, 1), (2, 1), (9, 3), (4, 1), (7, 1), (28, 4), (8, 1), (12, 1), (71, 1)]
)
def test_every_head_of_a_group_reads_the_same_kv_head(heads: int, kv_heads: int) -> None:
    q, k, v = problem(3, 9, heads=heads, kv_heads=kv_heads)
    out, _ = solve(q, k, v)
    for h in range(heads):
        g = h // (heads // kv_heads)
        alone, _ = solve(q[:, h : h + 1], k[:, g : g + 1], v[:, g : g + 1])
        torch.testing.assert_close(out[:, h : h + 1], alone, rtol=0, atol=1e-14)


def test_softcap_is_applied_before_the_mask() -> None:
    # After it, tanh(-inf) would turn a hidden key into a logit of -cap.
    q, k, v = problem(4, 4)
    out, _ = solve(q, k, v, causal=True, softcap=2.0)
    torch.testing.assert_close(out[0], v[0].repeat_interleave(2, 0), rtol=0, atol=1e-14)


def test_a_sink_adds_to_the_denominator_and_not_to_lse() -> None:
    q, k, v = problem(3, 7)
    sinks = torch.tensor([0.0, 4.0, -200.0, 1e4])
    out, lse = solve(q, k, v, sinks=sinks)
    plain, plain_lse = solve(q, k, v)
    torch.testing.assert_close(lse, plain_lse, rtol=0, atol=1e-14)
    share = torch.sigmoid(lse - sinks[:, None]).T[..., None]  # exp(lse) / (exp(lse) + exp(sink))
    torch.testing.assert_close(out, plain * share, rtol=0, atol=1e-14)
    assert (out[:, 3] == 0).all()
    assert torch.equal(out[:, 2], plain[:, 2])


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("mask", [{}, {"window_left": 5, "softcap": 4.0, "sinks": torch.tensor([0.5, 2.0, -1.0, 0.0])}])
def test_pages_change_nothing_and_chunks_continue_where_they_stopped(page_size: int, mask: dict[str, Any]) -> None:
    tokens = 37
    q, k, v = problem(tokens, tokens)
    whole, whole_lse = solve(q, k, v, causal=True, **mask)
    count = -(-tokens // page_size)
    pages = (
        [(7 * i + 2) % (count + 5) for i in range(count)] if math.gcd(7, count + 5) == 1 else list(range(count))[::-1]
    )
    k_cache, v_cache = (into_pages(x, page_size, pages, count + 5) for x in (k, v))
    table = torch.tensor([[*pages, -1, -1]], dtype=torch.int32)
    common = {"k_cache": k_cache, "v_cache": v_cache, "block_table": table, "k_scale": None, "v_scale": None}
    start = 0
    for chunk in (1, 20, 5, 11):
        end = start + chunk
        out, lse = paged_prefill_attention(
            q=q[start:end],
            cu_seqlens_q=lengths(0, chunk),
            seqlens_k=lengths(end),
            max_seqlen_q=chunk,
            max_seqlen_k=end,
            **common,
            **{**CAUSAL, **mask},
        )
        torch.testing.assert_close(out, whole[start:end], rtol=0, atol=1e-13)
        torch.testing.assert_close(lse, whole_lse[:, start:end], rtol=0, atol=1e-13)
        start = end
    one, one_lse = paged_decode_attention(
        q=q[-1:], seqlens_k=lengths(tokens), split_size=0, workspace=None, **common, **{**CAUSAL, **mask}
    )
    torch.testing.assert_close(one, whole[-1:], rtol=0, atol=1e-13)
    torch.testing.assert_close(one_lse, whole_lse[:, -1:], rtol=0, atol=1e-13)


def test_a_page_of_minus_one_is_never_dereferenced() -> None:
    # Pages left of the window may have been given back: their entries are -1, which Python would read as the last page.
    q, k, v = problem(1, 12)
    expected, _ = solve(q, k, v, causal=True, window_left=3)
    k_cache, v_cache = (into_pages(x, 4, [1, 0, 2], 5) for x in (k, v))
    for table in ([[1, 0, 2, -1]], [[-1, -1, 2, -1]]):
        out, _ = paged_decode_attention(
            q=q,
            k_cache=k_cache,
            v_cache=v_cache,
            block_table=torch.tensor(table, dtype=torch.int32),
            seqlens_k=lengths(12),
            k_scale=None,
            v_scale=None,
            split_size=0,
            workspace=None,
            **{**CAUSAL, "window_left": 3},
        )
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("kind", ["token", "head", "tensor"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_real_is_stored_times_scale(kind: str, dtype: torch.dtype) -> None:
    q, k, v = problem(1, 10)
    codes = [(x * 20).round().to(dtype) for x in (k, v)]
    shape = {"token": (3, 4, 2), "head": (2,), "tensor": ()}[kind]
    scales = [torch.rand(shape, generator=torch.Generator().manual_seed(s)) + 0.5 for s in (5, 6)]
    real = []
    for x, scale in zip(codes, scales, strict=True):
        per_token = scale.flatten(0, 1)[:10] if kind == "token" else scale.expand(10, 2)
        real.append(x.to(F64) * per_token.to(F64)[..., None])
    k_cache, v_cache = (torch.zeros(3, 4, 2, x.shape[-1], dtype=dtype) for x in codes)
    for cache, x in ((k_cache, codes[0]), (v_cache, codes[1])):
        cache.view(12, 2, -1)[:10] = x
    out, _ = paged_decode_attention(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        block_table=torch.tensor([[0, 1, 2]], dtype=torch.int32),
        seqlens_k=lengths(10),
        k_scale=scales[0],
        v_scale=scales[1],
        split_size=0,
        workspace=None,
        **CAUSAL,
    )
    torch.testing.assert_close(out, solve(q, *real, causal=True)[0], rtol=0, atol=1e-13)


def test_slopes_may_differ_from_sequence_to_sequence() -> None:
    q, k, v = problem(8, 8)
    slopes = torch.rand(2, 4, generator=torch.Generator().manual_seed(0))
    cu = lengths(0, 4, 8)
    out, _ = prefill_attention(
        q=q,
        k=k,
        v=v,
        cu_seqlens_q=cu,
        cu_seqlens_k=cu,
        max_seqlen_q=4,
        max_seqlen_k=4,
        **{**CAUSAL, "alibi_slopes": slopes},
    )
    for b, rows in enumerate((slice(0, 4), slice(4, 8))):
        alone, _ = solve(q[rows], k[rows], v[rows], causal=True, alibi_slopes=slopes[b])
        torch.testing.assert_close(out[rows], alone, rtol=0, atol=1e-14)


def merged(
    a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    return merge_attention_states(out_a=a[0], lse_a=a[1], out_b=b[0], lse_b=b[1])


def test_merging_the_halves_gives_the_whole() -> None:
    q, k, v = problem(5, 20)
    out, lse = merged(solve(q, k[:7], v[:7]), solve(q, k[7:], v[7:]))
    whole, whole_lse = solve(q, k, v)
    torch.testing.assert_close(out, whole, rtol=0, atol=1e-14)
    torch.testing.assert_close(lse, whole_lse, rtol=0, atol=1e-14)


def test_merging_with_nothing_is_the_identity_and_two_nothings_stay_nothing() -> None:
    q, k, v = problem(3, 6)
    something, nothing = solve(q, k, v), solve(q, k[:0], v[:0])
    poisoned = (torch.full_like(nothing[0], torch.nan), nothing[1])
    for empty in (nothing, poisoned):
        for pair in ((something, empty), (empty, something)):
            assert all(torch.equal(a, b) for a, b in zip(merged(*pair), something, strict=True))
        out, lse = merged(empty, empty)
        assert (out == 0).all()
        assert (lse == -math.inf).all()


def test_half_types_round_weights_to_the_type_of_v_and_sum_in_float32() -> None:
    q, k, v = (x.to(torch.bfloat16) for x in problem(3, 50))
    out, lse = attend(q, k, v, **CAUSAL, compute_dtype=torch.bfloat16)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    scores = torch.einsum("ihd,jhd->hij", q.float(), k.float().repeat_interleave(2, 1)) * 0.3
    scores.masked_fill_(torch.ones(3, 50).tril(47) == 0, -torch.inf)
    p = torch.softmax(scores, -1).to(torch.bfloat16).float()
    expected = torch.einsum("hij,jhd->ihd", p, v.float().repeat_interleave(2, 1)).to(torch.bfloat16)
    assert (out.float() - expected.float()).abs().max() <= 2**-8 * expected.float().abs().max()
    torch.testing.assert_close(lse, torch.logsumexp(scores, -1), rtol=0, atol=1e-5)
