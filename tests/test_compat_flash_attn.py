"""flash-attention 2's interface against float64: dense, packed, ragged and paged forms, windows, scales, caps, ALiBi."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from compat_oracle import (
    BF16,
    F16,
    F32,
    OPTIONS,
    Sequence,
    check,
    cumulative,
    int32,
    keys_read,
    normal,
    options_for,
)

from pykernels.compat import flash_attn as fa
from pykernels.compat import flash_attn_interface as fa3
from pykernels.compat import vllm_flash_attn as vllm

HEADS, KV_HEADS = 6, 2


def dense(
    seqlen_q: int, seqlen_k: int, batch: int = 2, dim: int = 32, dtype: torch.dtype = F32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q = normal(batch, seqlen_q, HEADS, dim, seed=1, std=2.0, dtype=dtype)
    return q, *(normal(batch, seqlen_k, KV_HEADS, dim, seed=s, dtype=dtype) for s in (2, 3))


def sequences_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[Sequence]:
    return list(zip(q, k, v, strict=True))


def check_dense(result: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]) -> None:
    out, lse, probs = result
    assert out.shape == (*q.shape[:3], v.shape[3])
    assert out.dtype == q.dtype
    assert lse.shape == (q.shape[0], q.shape[2], q.shape[1])
    assert lse.dtype == F32
    assert lse.is_contiguous()
    assert probs.shape == (0,)
    check(out.flatten(0, 1), lse.transpose(0, 1).flatten(1), sequences_of(q, k, v), options)


@pytest.mark.parametrize("seqlens", [(1, 33), (5, 33), (33, 5), (17, 17), (3, 1), (0, 4), (4, 0)], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_dense(name: str, seqlens: tuple[int, int]) -> None:
    q, k, v = dense(*seqlens)
    options = options_for(name, 2, HEADS)
    check_dense(fa.flash_attn_func(q, k, v, return_attn_probs=True, **options), q, k, v, options)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("dim", [59, 64, 111])
@pytest.mark.parametrize("seqlens", [(1, 40), (13, 40)], ids=str)
def test_head_dims_that_are_padded(dim: int, dtype: torch.dtype, seqlens: tuple[int, int]) -> None:
    q, k, v = dense(*seqlens, dim=dim, dtype=dtype)
    for options in ({"causal": True}, {"softmax_scale": -0.1}):
        check_dense(fa.flash_attn_func(q, k, v, return_attn_probs=True, **options), q, k, v, options)


def test_a_window_may_be_a_list_or_a_tensor_and_any_negative_number_is_unbounded() -> None:
    q, k, v = dense(9, 12)
    expected = fa.flash_attn_func(q, k, v, window_size=(3, 1))
    assert torch.equal(fa.flash_attn_func(q, k, v, window_size=[3, 1]), expected)
    assert torch.equal(fa.flash_attn_func(q, k, v, window_size=torch.tensor([3, 1])), expected)
    assert torch.equal(fa.flash_attn_func(q, k, v, window_size=(-7, -3)), fa.flash_attn_func(q, k, v))


def test_a_soft_cap_below_zero_is_off() -> None:
    q, k, v = dense(9, 12)
    plain, cu_q, cu_k = fa.flash_attn_func(q, k, v), int32(0, 9, 18), int32(0, 12, 24)
    rows = [x.flatten(0, 1) for x in (q, k, v)]
    for module in (fa, fa3):
        assert torch.equal(module.flash_attn_func(q, k, v, softcap=-1.5), plain)
        assert torch.equal(module.flash_attn_with_kvcache(q, k, v, softcap=-1.5), plain)
    assert torch.equal(vllm.flash_attn_varlen_func(*rows, 9, cu_q, 12, cu_k, softcap=-1.5), plain.flatten(0, 1))


def test_strides_of_any_kind() -> None:
    """Transposed, sliced, fused, a last dimension that is not contiguous: numbers as of contiguous tensors."""
    q, k, v = dense(7, 11, batch=3)
    expected = fa.flash_attn_func(q, k, v, causal=True)
    across = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]  # [seqlen, batch, ...] in memory
    longer = [torch.cat((x, x), 1)[:, : x.shape[1]] for x in (q, k, v)]
    last = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v)]
    for views in (across, longer, last):
        assert torch.equal(fa.flash_attn_func(*views, causal=True), expected)


def test_keys_and_values_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    from pykernels.compat import layout

    q, k, v = dense(7, 11, batch=3)
    seen = keys_read(monkeypatch, layout)
    for seqlen_q in (1, 7):
        for keys, values in ((k, v), (torch.cat((k, k), 1)[:, 2:9], torch.cat((v, v), 1)[:, 2:9])):
            fa.flash_attn_func(q[:, :seqlen_q], keys, values)
            assert seen.pop() == (keys.data_ptr(), values.data_ptr())


def test_packed_forms_are_the_same_numbers() -> None:
    q, k, v = dense(9, 9)
    q = q[:, :, :KV_HEADS].contiguous()
    cu = int32(0, 9, 18)
    options: dict[str, Any] = {"causal": True, "softcap": 3.0, "softmax_scale": 0.3, "return_attn_probs": True}
    expected = fa.flash_attn_func(q, k, v, **options)
    qkv, kv = torch.stack((q, k, v), 2), torch.stack((k, v), 2)
    for got in (fa.flash_attn_qkvpacked_func(qkv, **options), fa.flash_attn_kvpacked_func(q, kv, **options)):
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    flat = fa.flash_attn_varlen_qkvpacked_func(qkv.flatten(0, 1), cu, 9, **options)
    also = fa.flash_attn_varlen_kvpacked_func(q.flatten(0, 1), kv.flatten(0, 1), cu, cu, 9, 9, **options)
    for out, lse, _ in (flat, also):
        assert torch.equal(out, expected[0].flatten(0, 1))
        assert torch.equal(lse, expected[1].transpose(0, 1).flatten(1))


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_ragged(name: str, paged: bool) -> None:
    """With empty sequences, a sequence longer in queries than keys, and pages in any order."""
    q_lens, k_lens, page_size = (3, 0, 17, 1, 6), (9, 4, 17, 30, 2), 8
    options = options_for(name, len(q_lens), HEADS)
    q = normal(sum(q_lens), HEADS, 32, seed=1, std=2.0)
    k, v = (normal(sum(k_lens), KV_HEADS, 32, seed=s) for s in (2, 3))
    cu_q, cu_k = cumulative(q_lens), cumulative(k_lens)
    sequences = list(zip(q.split(q_lens), k.split(k_lens), v.split(k_lens), strict=True))
    args: Any = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 17, "max_seqlen_k": 30}
    if paged:
        table = torch.randperm(20, generator=torch.Generator().manual_seed(1)).view(5, 4).to(torch.int32)
        pools = [torch.full((20, page_size, KV_HEADS, 32), torch.nan) for _ in range(2)]
        for b, (_, *own) in enumerate(sequences):
            for pool, x in zip(pools, own, strict=True):
                for t in range(x.shape[0]):
                    pool[table[b, t // page_size], t % page_size] = x[t]
        out, lse, _ = fa.flash_attn_varlen_func(q, *pools, block_table=table, return_attn_probs=True, **args, **options)
    else:
        out, lse, _ = fa.flash_attn_varlen_func(q, k, v, return_attn_probs=True, **args, **options)
    check(out, lse, sequences, options)


def test_a_block_table_of_any_strides() -> None:
    q, pools = normal(9, HEADS, 32, seed=1), [normal(8, 4, KV_HEADS, 32, seed=s) for s in (2, 3)]
    table = torch.tensor([[5, 0, 3], [2, 7, 1]], dtype=torch.int32)
    lengths = (int32(0, 4, 9), int32(0, 7, 18), 5, 11)
    expected = fa.flash_attn_varlen_func(q, *pools, *lengths, block_table=table)
    for strided in (table.t().contiguous().t(), torch.stack((table, table - 9), 2)[..., 0]):
        assert torch.equal(fa.flash_attn_varlen_func(q, *pools, *lengths, block_table=strided), expected)
        given = (q[:2].unsqueeze(1), *pools)
        plain = fa.flash_attn_with_kvcache(*given, cache_seqlens=9, block_table=table)
        assert torch.equal(fa.flash_attn_with_kvcache(*given, cache_seqlens=9, block_table=strided), plain)


def test_what_is_refused_says_which_argument() -> None:
    q, k, v = dense(4, 4)
    cases: list[tuple[str, Any]] = [
        ("dropout_p is not supported", lambda: fa.flash_attn_func(q, k, v, dropout_p=0.1)),
        ("q requires grad", lambda: fa.flash_attn_func(q.clone().requires_grad_(), k, v)),
        ("v requires grad", lambda: fa.flash_attn_func(q, k, v.clone().requires_grad_())),
        ("k must have shape", lambda: fa.flash_attn_func(q, k[:1], v)),
        ("v must have shape", lambda: fa.flash_attn_func(q, k, v[:, :3])),
        ("q must have shape", lambda: fa.flash_attn_func(q[0], k, v)),
        ("window_size must be a pair", lambda: fa.flash_attn_func(q, k, v, window_size=(1, 2, 3))),
        ("window_size must be a pair", lambda: fa.flash_attn_func(q, k, v, window_size=3)),
        ("alibi_slopes must", lambda: fa.flash_attn_func(q, k, v, alibi_slopes=torch.ones(5))),
        ("num_heads", lambda: fa.flash_attn_func(q[:, :, :5], k, v)),
        ("v must have the dtype", lambda: fa.flash_attn_func(q, k, v.half())),
        ("qkv must have shape", lambda: fa.flash_attn_qkvpacked_func(q)),
        (
            "max_seqlen_k must be",
            lambda: fa.flash_attn_varlen_func(q[0], k[0], v[0], int32(0, 4), int32(0, 4), 4, 3),
        ),
    ]
    for text, call in cases:
        with pytest.raises(RuntimeError, match=re.escape(text)):
            call()
    for name, call in (
        ("k", lambda: fa.flash_attn_func(q, k.numpy(), v)),
        ("v", lambda: fa.flash_attn_varlen_func(q[0], k[0], None, int32(0, 4), int32(0, 4), 4, 4)),
        ("kv", lambda: fa.flash_attn_kvpacked_func(q, [k, v])),
    ):
        with pytest.raises(TypeError, match=f"{name} must be a tensor"):
            call()
    with torch.no_grad():
        fa.flash_attn_func(q.clone().requires_grad_(), k, v)
