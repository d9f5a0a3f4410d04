"""The KV-cache reference: codes against an enumeration of the formats, slots, scales, gather and copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pykernels.reference.kv_cache import append_kv, copy_pages, gather_kv, quantise, rope_append_kv, swap_pages
from pykernels.reference.rope import rotary_embedding

INT8, FP8 = torch.int8, torch.float8_e4m3fn
FP8_VALUES = np.array([c.item() for c in torch.arange(256, dtype=torch.uint8).view(FP8).float()], dtype=np.float64)


def rows(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) * torch.exp2(
        torch.rand(*shape[:-1], 1, generator=generator) * 20 - 10
    )


def nearest_fp8(x: float) -> float:
    """The nearest of the format's 253 finite values; of two equally near ones that whose code is even."""
    finite = np.where(np.isnan(FP8_VALUES), np.inf, FP8_VALUES)
    distance = np.abs(finite - x)
    near = np.flatnonzero(distance == distance.min())
    return float(FP8_VALUES[min(near, key=lambda code: code % 2)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_int8_codes_are_float32_quotients_rounded_to_even(dtype: torch.dtype) -> None:
    x = rows(40, 64).to(dtype)
    codes, scale = quantise(x, INT8, None)
    own = x.float().numpy()
    expected_scale = np.abs(own).max(-1) / np.float32(127)
    assert expected_scale.dtype == np.float32
    np.testing.assert_array_equal(scale.numpy(), expected_scale)
    np.testing.assert_array_equal(codes.numpy(), np.rint(own / expected_scale[:, None]).astype(np.int8))
    assert codes.abs().amax(-1).eq(127).all()


def test_fp8_codes_are_the_nearest_values_of_the_format() -> None:
    x = rows(12, 64, seed=3)
    codes, scale = quantise(x, FP8, None)
    own = x.numpy()
    np.testing.assert_array_equal(scale.numpy(), np.abs(own).max(-1) / np.float32(448))
    quotient = own / scale.numpy()[:, None]
    expected = np.vectorize(nearest_fp8)(quotient.astype(np.float64))
    np.testing.assert_array_equal(codes.float().numpy(), expected)


@pytest.mark.parametrize(("dtype", "largest"), [(INT8, 127.0), (FP8, 448.0)])
def test_a_row_of_zeros_gets_scale_one(dtype: torch.dtype, largest: float) -> None:
    x = torch.zeros(3, 8)
    x[1, 2] = -largest
    codes, scale = quantise(x, dtype, None)
    assert scale.tolist() == [1.0, 1.0, 1.0]
    assert (codes[[0, 2]].float() == 0).all()
    assert codes[1, 2].item() == -largest


def test_ties_go_to_even_codes() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, -126.5]])
    codes, _ = quantise(x, INT8, None)
    assert codes.tolist() == [[127, 0, 2, 2, 0, -2, 126, -126]]
    x = torch.tensor([[448.0, 17.0, 19.0, -17.0, 432.0, 400.0]])  # neighbours of 17 are 16 and 18, of 432 416 and 448
    assert quantise(x, FP8, None)[0].float().tolist() == [[448.0, 16.0, 20.0, -16.0, 448.0, 384.0]]


def test_static_scales_are_taken_as_given_and_codes_saturate() -> None:
    x = torch.tensor([[[10.0, -10.0, 0.26, 1000.0], [1.0, -1.0, 0.5, -1000.0]]])  # [1, 2 heads, 4]
    scale = torch.tensor([0.1, 0.5])
    assert quantise(x, INT8, scale)[0].tolist() == [[[100, -100, 3, 127], [2, -2, 1, -128]]]
    assert quantise(x, INT8, torch.tensor(0.5))[0].tolist() == [[[20, -20, 1, 127], [2, -2, 1, -128]]]
    assert quantise(x, FP8, scale)[0].float()[..., 3].tolist() == [[448.0, -448.0]]


def test_a_nan_is_seen_again_when_the_row_is_read() -> None:
    x = rows(2, 8)
    x[0, 3] = torch.nan
    for dtype in (INT8, FP8):
        codes, scale = quantise(x, dtype, None)
        real = codes.float() * scale[:, None]
        assert torch.isnan(real[0]).all()
        assert torch.isfinite(real[1]).all()


def pool(dtype: torch.dtype, pages: int = 4, page_size: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (pages, page_size, 2, 8)
    k, v = (torch.full(shape, 7.0).to(dtype) for _ in range(2))
    return k, v


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, INT8, FP8])
def test_negative_slots_are_skipped_and_others_land_at_page_and_offset(dtype: torch.dtype) -> None:
    k_cache, v_cache = pool(dtype)
    scales = [torch.full((4, 3, 2), 9.0) if dtype.itemsize == 1 else None for _ in range(2)]
    k, v = rows(4, 2, 8, seed=1), rows(4, 2, 8, seed=2)
    slots = torch.tensor([7, -1, 0, -5])  # page 2 offset 1; page 0 offset 0
    append_kv(k=k, v=v, k_cache=k_cache, v_cache=v_cache, slot_mapping=slots, k_scale=scales[0], v_scale=scales[1])
    for cache, scale, new in ((k_cache, scales[0], k), (v_cache, scales[1], v)):
        stored, written = (quantise(new, dtype, None)) if scale is not None else (new.to(dtype), None)
        untouched = torch.ones(4, 3, dtype=torch.bool)
        for token, (page, offset) in ((0, (2, 1)), (2, (0, 0))):
            assert torch.equal(cache[page, offset].float(), stored[token].float())
            untouched[page, offset] = False
            if scale is not None:
                assert torch.equal(scale[page, offset], written[token])
        assert (cache.float()[untouched] == 7).all()
        if scale is not None:
            assert (scale[untouched] == 9).all()


def test_static_scales_are_not_written() -> None:
    k_cache, v_cache = pool(INT8)
    k_scale, v_scale = torch.tensor([0.5, 0.25]), torch.tensor(0.125)
    append_kv(
        k=torch.ones(1, 2, 8),
        v=torch.ones(1, 2, 8),
        k_cache=k_cache,
        v_cache=v_cache,
        slot_mapping=torch.tensor([4]),
        k_scale=k_scale,
        v_scale=v_scale,
    )
    assert k_scale.tolist() == [0.5, 0.25]
    assert v_scale.item() == 0.125
    assert k_cache[1, 1, :, 0].tolist() == [2, 4]
    assert (v_cache[1, 1] == 8).all()


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, INT8, FP8])
def test_rope_append_is_rotary_embedding_then_append(interleaved: bool, dtype: torch.dtype) -> None:
    q, k, v = rows(5, 4, 8), rows(5, 2, 8, seed=1), rows(5, 2, 8, seed=2)
    turn: dict[str, Any] = {
        "positions": torch.tensor([0, 3, 9, 1000, 2]),
        "inv_freq": torch.tensor([1.0, 0.1, 0.01]),
        "interleaved": interleaved,
        "rope_scale": 1.2,
    }
    slots = torch.tensor([11, 3, -1, 0, 5])
    results = []
    for fused in (True, False):
        k_cache, v_cache = pool(dtype)
        scales = [torch.zeros(4, 3, 2) if dtype.itemsize == 1 else None for _ in range(2)]
        into = {
            "k_cache": k_cache,
            "v_cache": v_cache,
            "slot_mapping": slots,
            "k_scale": scales[0],
            "v_scale": scales[1],
        }
        if fused:
            (q_out,) = rope_append_kv(q=q, k=k, v=v, **turn, **into)
        else:
            q_out, k_out = rotary_embedding(q=q, k=k, **turn)
            append_kv(k=k_out.float(), v=v, **into)
        results.append([q_out, k_cache.float(), v_cache.float(), *(s for s in scales if s is not None)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, INT8, FP8])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_gather_reads_back_what_append_wrote(dtype: torch.dtype, page_size: int) -> None:
    lens, tokens = [5, 0, 4], 9
    pages = 16
    k_cache, v_cache = (torch.full((pages, page_size, 2, 8), torch.nan).to(dtype) for _ in range(2))
    scales = [torch.full((pages, page_size, 2), torch.nan) if dtype.itemsize == 1 else None for _ in range(2)]
    table = torch.full((3, 6), -1, dtype=torch.int32)
    free, slots = [9, 2, 15, 0, 7, 11, 3, 5, 8, 1, 4], []
    for b, n in enumerate(lens):
        for i in range(-(-n // page_size)):
            table[b, i] = free.pop()
        slots += [int(table[b, t // page_size]) * page_size + t % page_size for t in range(n)]
    k, v = rows(tokens, 2, 8, seed=1), rows(tokens, 2, 8, seed=2)
    where = {"k_cache": k_cache, "v_cache": v_cache, "k_scale": scales[0], "v_scale": scales[1]}
    append_kv(k=k, v=v, slot_mapping=torch.tensor(slots), **where)
    got = gather_kv(block_table=table, seqlens_k=torch.tensor(lens, dtype=torch.int32), **where)
    for new, back in zip((k, v), got, strict=True):
        if dtype.itemsize == 1:
            codes, scale = quantise(new, dtype, None)
            expected = codes.double() * scale.double()[..., None]
        else:
            expected = new.to(dtype).double()
        assert torch.equal(back, expected)


def test_copy_moves_codes_and_dynamic_scales_and_nothing_else() -> None:
    k_cache, v_cache = (torch.randint(-100, 100, (5, 3, 2, 8), dtype=INT8) for _ in range(2))
    k_scale, v_scale = torch.rand(5, 3, 2), torch.tensor([0.5, 0.25])
    before = [x.clone() for x in (k_cache, v_cache, k_scale, v_scale)]
    copy_pages(
        k_cache=k_cache,
        v_cache=v_cache,
        src_pages=torch.tensor([0, 3]),
        dst_pages=torch.tensor([4, 1]),
        k_scale=k_scale,
        v_scale=v_scale,
    )
    source = [0, 3, 2, 3, 0]  # page i now holds what page source[i] held
    for now, then in zip((k_cache, v_cache, k_scale), before, strict=False):
        assert torch.equal(now, then[source])
    assert torch.equal(v_scale, before[3])


def test_swap_moves_codes_and_dynamic_scales_into_the_other_cache_and_nothing_else() -> None:
    k_from, v_from = (torch.randint(-100, 100, (5, 3, 2, 8), dtype=INT8) for _ in range(2))
    k_to, v_to = (torch.randint(-100, 100, (4, 3, 2, 8), dtype=INT8) for _ in range(2))
    scales = {"k_scale_from": torch.rand(5, 3, 2), "k_scale_to": torch.rand(4, 3, 2)}
    scales |= {f"v_scale_{side}": torch.tensor([0.5, 0.25]) for side in ("from", "to")}
    source, before = [x.clone() for x in (k_from, v_from)], [x.clone() for x in (k_to, v_to, scales["k_scale_to"])]
    pages = {"src_pages": torch.tensor([4, 0]), "dst_pages": torch.tensor([0, 3])}
    swap_pages(k_from=k_from, v_from=v_from, k_to=k_to, v_to=v_to, **pages, **scales)
    assert torch.equal(k_from, source[0])
    assert torch.equal(v_from, source[1])
    pools = ((k_to, k_from), (v_to, v_from), (scales["k_scale_to"], scales["k_scale_from"]))
    for (now, origin), then in zip(pools, before, strict=True):
        assert torch.equal(now, torch.stack((origin[4], then[1], then[2], origin[0])))
    assert torch.equal(scales["v_scale_to"], torch.tensor([0.5, 0.25]))
