"""torch's scaled_dot_product_attention on our kernels: every kind of mask against torch in float64, and every small mask."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compat_oracle import BF16, F16, F32, keys_read, normal

from pykernels.compat import sdpa
from pykernels.compat.band import Band, band_of
from pykernels.testing.compare import largest, unit_in_last_place

SHAPES = [(7, 7), (5, 9), (9, 5), (1, 6), (16, 16)]


def make(
    seqlen_q: int,
    seqlen_k: int,
    batch: int = 3,
    heads: int = 4,
    kv_heads: int = 4,
    dtype: torch.dtype = F32,
    dim: int = 16,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q = normal(batch, heads, seqlen_q, dim, seed=1, std=2.0, dtype=dtype)
    return q, *(normal(batch, kv_heads, seqlen_k, dim, seed=s, dtype=dtype) for s in (2, 3))


def masks(seqlen_q: int, seqlen_k: int, batch: int = 3) -> dict[str, torch.Tensor | None]:
    i, j = torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)
    lengths = torch.tensor([seqlen_k, max(seqlen_k - 3, 1), 2][:batch])[:, None, None, None]
    starts = torch.tensor([1, 0, min(3, seqlen_k - 1)][:batch])[:, None, None, None]
    top, bottom = j <= i, j <= i + seqlen_k - seqlen_q
    return {
        "none": None,
        "full": torch.ones(seqlen_q, seqlen_k, dtype=torch.bool),
        "causal, top left": top,
        "causal, bottom right": bottom,
        "strictly causal": j < i,
        "anticausal": j > i,
        "window": top & (i - j <= 2),
        "window, bottom right": bottom & (i + seqlen_k - seqlen_q - j <= 3),
        "window on both sides": (j - i <= 1) & (i - j <= 2),
        "padding on the right": j < lengths,
        "padding on the left": j >= starts,
        "padding on both": (j < lengths) & (j >= starts),
        "causal and padding on the right": (j < lengths) & top,
        "causal and padding on the left": (j >= starts) & top,
        "window and padding on both": (j < lengths) & (j >= starts) & (j - i <= 1) & (i - j <= 3),
        "nothing is visible": torch.zeros(seqlen_q, seqlen_k, dtype=torch.bool),
        "nothing in one sequence": (torch.arange(batch) != 1)[:, None, None, None] & top,
        "one key": (j == 0).expand(seqlen_q, seqlen_k),
        "a column for all rows": (j < seqlen_k - 1)[None],
    }


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any = None, **options: Any) -> torch.Tensor:
    wide = mask.double() if mask is not None and mask.is_floating_point() else mask
    return F.scaled_dot_product_attention(q.double(), k.double(), v.double(), wide, **options)


def check(
    got: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any = None, **options: Any
) -> None:
    """Twice torch's own error in the input's type, and the rounding of the result."""
    expected = exact(q, k, v, mask, **options)
    assert got.shape == expected.shape
    assert got.dtype == q.dtype
    same = F.scaled_dot_product_attention(q, k, v, mask, **options).double()
    finite = torch.isfinite(same)
    error = largest((same - expected)[finite])
    rounding = unit_in_last_place(q.dtype, max(largest(expected), 0.5))
    assert not got.isnan().any()
    assert largest(got.double() - expected) <= 2 * error + rounding


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", masks(7, 7))
@pytest.mark.parametrize("additive", [False, True])
def test_every_kind_of_mask_runs_on_our_kernels(shape: tuple[int, int], name: str, additive: bool) -> None:
    q, k, v = make(*shape)
    mask = masks(*shape)[name]
    if additive and mask is not None:
        mask = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    assert sdpa.fallback_reason(q, k, v, mask) is None
    got = sdpa.scaled_dot_product_attention(q, k, v, mask)
    if mask is None or bool((mask if mask.dtype == torch.bool else mask == 0).any(-1).all()):
        return check(got, q, k, v, mask)
    # torch gives 0 for rows that see nothing with a bool mask; with an additive one it may give NaN
    return check(got, q, k, v, mask if mask.dtype == torch.bool else mask == 0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_is_causal_is_aligned_to_the_top_left(shape: tuple[int, int], dtype: torch.dtype) -> None:
    q, k, v = make(*shape, dtype=dtype)
    assert sdpa.fallback_reason(q, k, v, is_causal=True) is None
    check(sdpa.scaled_dot_product_attention(q, k, v, is_causal=True), q, k, v, is_causal=True)
    top_left = torch.arange(shape[1]) <= torch.arange(shape[0])[:, None]
    check(sdpa.scaled_dot_product_attention(q, k, v, is_causal=True), q, k, v, top_left)


def pairs_of(band: Band, b: int, seqlen_q: int, seqlen_k: int) -> list[list[bool]]:
    def sees(i: int, j: int) -> bool:
        inside = band.start[b] <= j < band.end[b]
        return inside and (band.right is None or j - i <= band.right) and (band.left is None or i - j <= band.left)

    return [[sees(i, j) for j in range(seqlen_k)] for i in range(seqlen_q)]


@pytest.mark.parametrize("shape", [(1, 4), (4, 1), (2, 4), (4, 2), (3, 3), (3, 4)], ids=str)
def test_of_all_small_masks_exactly_the_bands_are_recognised(shape: tuple[int, int]) -> None:
    seqlen_q, seqlen_k = shape
    spans = itertools.product(
        range(seqlen_k + 1), range(seqlen_k + 1), range(-seqlen_k, seqlen_q), range(-seqlen_q, seqlen_k)
    )
    bands = {str(pairs_of(Band([s], [e], left, right), 0, *shape)) for s, e, left, right in spans}
    for bits in itertools.product((False, True), repeat=seqlen_q * seqlen_k):
        mask = torch.tensor(bits).view(1, 1, *shape)
        found = band_of(mask, 1, *shape)
        rows = mask[0, 0].tolist()
        assert isinstance(found, Band) == (str(rows) in bands), rows
        if isinstance(found, Band):
            assert pairs_of(found, 0, *shape) == rows


def test_all_masks_of_two_small_sequences_give_torchs_result() -> None:
    q, k, v = make(2, 3, batch=2, heads=2, kv_heads=1, dim=8)
    family = set()
    for left, right in itertools.product(range(-3, 2), range(-2, 3)):
        ranges = itertools.product(range(4), repeat=4)
        family |= {
            str([pairs_of(Band([s, t], [e, f], left, right), b, 2, 3) for b in range(2)]) for s, e, t, f in ranges
        }
    for bits in itertools.product((False, True), repeat=12):
        mask = torch.tensor(bits).view(2, 1, 2, 3)
        found = band_of(mask, 2, 2, 3)
        assert isinstance(found, Band) == (str(mask[:, 0].tolist()) in family)
        if isinstance(found, Band):
            assert [pairs_of(found, b, 2, 3) for b in range(2)] == mask[:, 0].tolist()
        got = sdpa.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        torch.testing.assert_close(got, exact(q, k, v, mask, enable_gqa=True).float(), rtol=1e-5, atol=1e-5)


def test_one_pair_more_or_less_is_another_mask() -> None:
    q, k, v = make(40, 40, batch=1)
    generator = torch.Generator().manual_seed(3)
    for name, mask in masks(40, 40, 1).items():
        for _ in range(8):
            if mask is None:
                continue
            i, j = torch.randint(40, (2,), generator=generator).tolist()
            changed = mask.expand(1, 1, 40, 40).clone()
            changed[0, 0, i, j] ^= True
            torch.testing.assert_close(
                sdpa.scaled_dot_product_attention(q, k, v, changed),
                exact(q, k, v, changed).float(),
                rtol=1e-5,
                atol=1e-5,
                msg=name,
            )


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_grouped_heads(kv_heads: int) -> None:
    q, k, v = make(6, 9, kv_heads=kv_heads)
    for options in ({}, {"is_causal": True}):
        got = sdpa.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
        check(got, q, k, v, enable_gqa=True, **options)
        assert sdpa.fallback_reason(q, k, v, enable_gqa=True, **options) is None


def test_scales_of_any_sign() -> None:
    q, k, v = make(6, 9)
    for scale in (0.05, 1.3, -0.4):
        check(sdpa.scaled_dot_product_attention(q, k, v, scale=scale), q, k, v, scale=scale)
        assert sdpa.fallback_reason(q, k, v, scale=scale) is None


def test_shapes_that_broadcast() -> None:
    q, k, v = make(6, 9)
    i, j = torch.arange(6)[:, None], torch.arange(9)
    served: list[tuple[Any, ...]] = [
        (q[0], k[0], v[0]),  # [heads, seqlen, dim]
        (q, k[:1], v[:1]),
        (q[:1], k, v),
        (q, k[:, :1], v[:, :1]),
        (q[:, None].expand(3, 2, 4, 6, 16), k[:, None], v[:, None]),  # two leading dimensions
        (q, k, v, j <= i),
        (q, k, v, (j <= i)[None, None].expand(3, 4, 6, 9)),
        (q, k, v, (j <= i)[None, None].repeat(3, 4, 1, 1)),
        (q, k, v, torch.ones(1, 1, 1, 9, dtype=torch.bool)),
        (q, k, v, torch.ones(6, 1, dtype=torch.bool)),
    ]
    for args in served:
        assert sdpa.fallback_reason(*args) is None
        check(sdpa.scaled_dot_product_attention(*args), *args)


def test_memory_of_any_layout_and_keys_that_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = make(6, 9)
    seen = keys_read(monkeypatch, sdpa)
    for seqlen_q in (1, 6):
        for view in (lambda x: x, lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)):
            own = (view(q[:, :, :seqlen_q]), view(k), view(v))
            for mask in (None, masks(seqlen_q, 9)["padding on the right"]):
                check(sdpa.scaled_dot_product_attention(*own, mask), *own, mask)
                assert seen.pop() == (own[1].data_ptr(), own[2].data_ptr())


def test_a_reason_for_everything_else_and_torchs_result() -> None:
    q, k, v = make(6, 9)
    i, j = torch.arange(6)[:, None], torch.arange(9)
    differs = torch.stack([j <= i, j <= i + 1, j <= i, j <= i])[None]
    least = torch.zeros(6, 9).masked_fill(j > i - 1, torch.finfo(F32).min)
    half = torch.zeros(6, 9, dtype=F16).masked_fill(j > i, torch.finfo(F16).min)
    cases: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        ("attn_mask is no band", (q, k, v, (i + j) % 2 == 0), {}),
        ("attn_mask adds other values", (q, k, v, torch.randn(6, 9)), {}),
        ("attn_mask adds other values", (q, k, v, torch.randn(6, 9)), {"scale": -0.7}),
        ("attn_mask adds other values", (q, k[:, :2], v[:, :2], torch.randn(6, 9)), {"enable_gqa": True}),
        ("dropout_p is above 0", (q, k, v), {"dropout_p": 0.5, "is_causal": True}),
        ("attn_mask hides a whole row with a finite value", (q, k, v, least), {}),
        ("attn_mask adds other values", (q.half(), k.half(), v.half(), half), {}),
        ("attn_mask differs between heads", (q, k, v, differs), {}),
        ("requires grad", (q.clone().requires_grad_(), k, v), {}),
        ("requires grad", (q, k, v.clone().requires_grad_()), {}),
        ("requires grad", (q, k, v, torch.zeros(6, 9).requires_grad_()), {}),
        ("dtypes", (q.double(), k.double(), v.double()), {}),
        ("head dim", (q[..., :12], k[..., :12], v[..., :12]), {}),
        ("last dimension", (q.transpose(2, 3).contiguous().transpose(2, 3), k, v), {}),
        ("attn_mask and is_causal together", (q, k, v, i >= 0), {"is_causal": True}),
        ("empty", (q[:, :, :0], k, v), {}),
        ("no dimension of heads", (q[0, 0], k[0, 0], v[0, 0]), {}),
    ]
    for reason, args, options in cases:
        assert reason in (sdpa.fallback_reason(*args, **options) or ""), reason
        results = []
        for function in (F.scaled_dot_product_attention, sdpa.scaled_dot_product_attention):
            torch.manual_seed(5)
            results.append(function(*args, **options))
        torch.testing.assert_close(*results, rtol=0, atol=0, equal_nan=True)


def test_what_no_backend_can_goes_to_torch_with_the_backends_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_can(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("prefill_attention: cpu cannot do this here")

    q, k, v = make(6, 9)
    assert sdpa.fallback_reason(q, k, v) is None
    monkeypatch.setattr(sdpa, "prefill_attention", none_can)
    monkeypatch.setattr(sdpa, "paged_prefill_attention", none_can)
    assert sdpa.fallback_reason(q, k, v) == "prefill_attention: cpu cannot do this here"
    assert torch.equal(sdpa.scaled_dot_product_attention(q, k, v), F.scaled_dot_product_attention(q, k, v))


def test_what_torch_refuses_is_refused() -> None:
    q, k, v = make(6, 9)
    for args, options in (
        ((q, k[:, :3], v[:, :3]), {}),
        ((q, k, v, torch.ones(5, 9, dtype=torch.bool)), {}),
        ((q, k, v, torch.ones(6, 9, dtype=torch.int32)), {}),
    ):
        with pytest.raises(RuntimeError):
            F.scaled_dot_product_attention(*args, **options)
        with pytest.raises(RuntimeError):
            sdpa.scaled_dot_product_attention(*args, **options)
        assert sdpa.fallback_reason(*args, **options)


def test_values_shorter_than_keys_are_refused() -> None:
    q, k, v = make(6, 9)
    with pytest.raises(RuntimeError, match="key and value must have the same length, got 9 and 5"):
        sdpa.scaled_dot_product_attention(q, k, v[:, :, :5])


def test_finite_values_that_hide() -> None:
    """What transformers adds: the least number of the type, which hides as -inf does where a row sees something."""
    q, k, v = make(6, 9)
    for dtype in (F32, BF16):
        x, y, z = (t.to(dtype) for t in (q, k, v))
        mask = torch.zeros(6, 9, dtype=dtype).masked_fill(
            torch.arange(9) > torch.arange(6)[:, None], torch.finfo(dtype).min
        )
        assert sdpa.fallback_reason(x, y, z, mask) is None
        check(sdpa.scaled_dot_product_attention(x, y, z, mask), x, y, z, mask)


def test_replaced_swaps_torchs_function_and_puts_it_back() -> None:
    q, k, v = make(6, 9)
    before = F.scaled_dot_product_attention
    expected = before(q, k, v)
    with sdpa.replaced():
        assert F.scaled_dot_product_attention is sdpa.scaled_dot_product_attention
        torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v), expected)
        fallen = F.scaled_dot_product_attention(q, k, v, torch.randn(6, 9))
        assert fallen.shape == expected.shape
    assert F.scaled_dot_product_attention is before
    with pytest.raises(KeyError), sdpa.replaced():
        raise KeyError
    assert F.scaled_dot_product_attention is before


def test_the_signature_is_torchs() -> None:
    import inspect

    names = list(inspect.signature(sdpa.scaled_dot_product_attention).parameters)
    assert names == ["query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"]
