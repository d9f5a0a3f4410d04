"""FA3's dense and ragged forms and vLLM's fork against float64: used lengths, float8 descales, sinks, `out=`, conventions."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
import torch
from compat_oracle import BF16, F32, FP8, OPTIONS, Sequence, attend_each, check, cumulative, int32, normal, options_for

import pykernels as pk
from pykernels import compat
from pykernels.compat import flash_attn_interface as fa3
from pykernels.compat import vllm_flash_attn as vllm

HEADS, KV_HEADS, DIM = 6, 2, 32
Q_LENS, K_LENS = (3, 0, 17, 1, 6), (9, 4, 17, 30, 2)


def ragged(dtype: torch.dtype = F32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q = normal(sum(Q_LENS), HEADS, DIM, seed=1, std=2.0, dtype=dtype)
    return q, *(normal(sum(K_LENS), KV_HEADS, DIM, seed=s, dtype=dtype) for s in (2, 3))


def split(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[Sequence]:
    return list(zip(q.split(Q_LENS), k.split(K_LENS), v.split(K_LENS), strict=True))


def fa3_lengths() -> dict[str, Any]:
    return {
        "cu_seqlens_q": cumulative(Q_LENS),
        "cu_seqlens_k": cumulative(K_LENS),
        "max_seqlen_q": max(Q_LENS),
        "max_seqlen_k": max(K_LENS),
    }


def pages(k: torch.Tensor, v: torch.Tensor, page_size: int = 8) -> dict[str, torch.Tensor]:
    """Pools in any order, NaN where nothing lies (largest codes in float8), unused entries -1."""
    table = torch.randperm(25, generator=torch.Generator().manual_seed(1)).view(5, 5).to(torch.int32)
    pools = [torch.full((25, page_size, KV_HEADS, DIM), torch.nan).to(x.dtype) for x in (k, v)]
    for b, own in enumerate(zip(k.split(K_LENS), v.split(K_LENS), strict=True)):
        for pool, x in zip(pools, own, strict=True):
            for t in range(x.shape[0]):
                pool[table[b, t // page_size], t % page_size] = x[t]
        table[b, -(-own[0].shape[0] // page_size) :] = -1
    return {"k": pools[0], "v": pools[1], "block_table": table}


FA3_OPTIONS = [n for n in OPTIONS if "alibi" not in n and n != "all"]


@pytest.mark.parametrize("name", FA3_OPTIONS)
@pytest.mark.parametrize("seqlens", [(1, 33), (5, 33), (33, 5)], ids=str)
def test_fa3_dense(name: str, seqlens: tuple[int, int]) -> None:
    """With a head dim of its own for v; a row that sees nothing has lse -inf."""
    q = normal(2, seqlens[0], HEADS, DIM, seed=1, std=2.0)
    k, v = (normal(2, seqlens[1], KV_HEADS, d, seed=s) for s, d in ((2, DIM), (3, 48)))
    options = options_for(name, 2, HEADS)
    out, lse = fa3.flash_attn_func(q, k, v, return_attn_probs=True, **options)
    assert lse.shape == (2, HEADS, seqlens[0])
    sequences = list(zip(q, k, v, strict=True))
    check(out.flatten(0, 1), lse.transpose(0, 1).flatten(1), sequences, options, unseen=-torch.inf)
    packed = (
        fa3.flash_attn_qkvpacked_func(torch.cat((q, k, k), 2), num_heads_q=HEADS) if seqlens[0] == seqlens[1] else None
    )
    assert packed is None or torch.equal(packed, fa3.flash_attn_func(q, k, k))


def test_fa3_packed() -> None:
    q, k, v = (normal(2, 9, h, DIM, seed=i) for i, h in enumerate((HEADS, KV_HEADS, KV_HEADS)))
    options: dict[str, Any] = {"softmax_scale": 0.4, "causal": True, "window_size": (4, 0), "softcap": 2.0}
    expected = fa3.flash_attn_func(q, k, v, return_attn_probs=True, **options)
    got = fa3.flash_attn_qkvpacked_func(torch.cat((q, k, v), 2), num_heads_q=HEADS, return_attn_probs=True, **options)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    same = fa3.flash_attn_qkvpacked_func(torch.stack((k, k, v), 2), **options)
    assert torch.equal(same, fa3.flash_attn_func(k, k, v, **options))


@pytest.mark.parametrize("used", ["neither", "q", "k", "both"])
@pytest.mark.parametrize("name", FA3_OPTIONS)
def test_fa3_ragged_and_the_part_that_is_used(name: str, used: str) -> None:
    """What is not used is NaN: it may not be read, and its rows are 0."""
    q, k, v = ragged()
    used_q, used_k = (2, 0, 16, 1, 0), (9, 1, 12, 0, 2)
    args: dict[str, Any] = fa3_lengths()
    sequences = split(q, k, v)
    if used in ("q", "both"):
        args["seqused_q"] = int32(*used_q)
        sequences = [(a[:n], b, c) for (a, b, c), n in zip(sequences, used_q, strict=True)]
        for x, n in zip(q.split(Q_LENS), used_q, strict=True):
            x[n:] = torch.nan
    if used in ("k", "both"):
        args["seqused_k"] = int32(*used_k)
        sequences = [(a, b[:n], c[:n]) for (a, b, c), n in zip(sequences, used_k, strict=True)]
        for x, n in zip((*k.split(K_LENS), *v.split(K_LENS)), used_k * 2, strict=True):
            x[n:] = torch.nan
    options = options_for(name, 5, HEADS)
    out, lse = fa3.flash_attn_varlen_func(q, k, v, return_attn_probs=True, **args, **options)
    rows = [torch.arange(n) < u for n, u in zip(Q_LENS, used_q, strict=True)]
    kept = torch.cat(rows) if "seqused_q" in args else torch.ones(q.shape[0], dtype=torch.bool)
    assert torch.equal(out[~kept], torch.zeros_like(out[~kept]))
    check(out[kept], lse[:, kept], sequences, options, unseen=-torch.inf)


@pytest.mark.parametrize("chunk", [1, 4, 7, 100])
@pytest.mark.parametrize(
    "mask", [{}, {"causal": True}, {"window_size": (5, 2)}, {"softmax_scale": 0.4, "softcap": 2.0}], ids=str
)
def test_fa3_chunks(chunk: int, mask: dict[str, Any]) -> None:
    """A query sees its own chunk of keys alone, in every form; before the first key it sees nothing."""
    options = {"attention_chunk": chunk, **mask}
    q, k, v = ragged()
    out, lse = fa3.flash_attn_varlen_func(q, k, v, return_attn_probs=True, **fa3_lengths(), **options)
    check(out, lse, split(q, k, v), options, unseen=-torch.inf)
    for seqlen_q, seqlen_k in ((1, 13), (9, 13), (13, 5)):
        q = normal(2, seqlen_q, HEADS, DIM, seed=1, std=2.0)
        k, v = (normal(2, 24, KV_HEADS, DIM, seed=s) for s in (2, 3))
        own = [x[:, :seqlen_k] for x in (k, v)]
        sequences = list(zip(q, *own, strict=True))
        table = torch.arange(12, dtype=torch.int32).view(2, 6).flip(0)
        pools = [x.unflatten(1, (6, 4)).flip(0).flatten(0, 1) for x in (k, v)]
        padded = [torch.cat((torch.full((2, 3, KV_HEADS, DIM), torch.nan), x), 1) for x in (k, v)]
        length: Any = {"cache_seqlens": seqlen_k, "return_softmax_lse": True, **options}
        for out, lse, *_ in (
            fa3.flash_attn_func(q, *own, return_attn_probs=True, **options),
            fa3.flash_attn_with_kvcache(q, k, v, **length),
            fa3.flash_attn_with_kvcache(q, *pools, page_table=table, **length),
            fa3.flash_attn_with_kvcache(
                q, *padded, cache_leftpad=int32(3, 3), **{**length, "cache_seqlens": seqlen_k + 3}
            ),
        ):
            check(out.flatten(0, 1), lse.transpose(0, 1).flatten(1), sequences, options, unseen=-torch.inf)


def descales(batch: int, shared: bool) -> dict[str, torch.Tensor]:
    made = {
        n: torch.rand(batch, KV_HEADS, generator=torch.Generator().manual_seed(i)) + 0.5 for i, n in enumerate("qkv")
    }
    return {f"{n}_descale": x[:1].expand(batch, -1) if shared else x for n, x in made.items()}


def real(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """x [tokens, heads, dim] times the factor of its kv head."""
    return x.double() * factor.double().repeat_interleave(x.shape[1] // KV_HEADS)[None, :, None]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    ("form", "chunk"),
    [(form, chunk) for form in ("dense", "ragged", "cache", "pages") for chunk in (0, 4)] + [("vllm", 0)],
)
def test_float8_descales(form: str, chunk: int, shared: bool) -> None:
    """Each of the three factors, other in every kv head, and in every sequence where they are not shared."""
    q, k, v = (x.to(FP8) for x in ragged())
    scales, options = descales(5, shared), {"causal": True, **({"attention_chunk": chunk} if chunk else {})}
    sequences = [
        (real(a, scales["q_descale"][i]), real(b, scales["k_descale"][i]), real(c, scales["v_descale"][i]))
        for i, (a, b, c) in enumerate(split(q, k, v))
    ]
    if form == "ragged":
        out = fa3.flash_attn_varlen_func(q, k, v, **fa3_lengths(), **scales, **options)
    elif form == "vllm":
        lengths = {n: x for n, x in fa3_lengths().items() if n != "cu_seqlens_k"}
        paged = pages(k, v) | {"seqused_k": int32(*K_LENS)}
        out = torch.full(q.shape, torch.nan, dtype=BF16)
        assert vllm.flash_attn_varlen_func(q, out=out, fa_version=3, **paged, **lengths, **scales, **options) is out
    else:
        dense = [torch.stack([x[:9] for x in y.split(K_LENS) if x.shape[0] >= 9]) for y in (k, v)]
        queries = torch.stack([q[:4], q[4:8], q[8:12]])
        scales = {n: x[:3] for n, x in scales.items()}
        factors = [[scales[f"{n}_descale"][i] for n in "qkv"] for i in range(3)]
        sequences = [tuple(real(x[i], f) for x, f in zip((queries, *dense), factors[i], strict=True)) for i in range(3)]  # type: ignore[misc]
        if form == "dense":
            out = fa3.flash_attn_func(queries, *dense, **scales, **options)
        elif form == "cache":
            caches = [torch.cat((x, x), 1) for x in dense]
            out = fa3.flash_attn_with_kvcache(queries, *caches, cache_seqlens=9, **scales, **options)
        else:
            pools = [x.unflatten(1, (3, 3)).flatten(0, 1) for x in dense]
            table = torch.arange(9, dtype=torch.int32).view(3, 3)
            out = fa3.flash_attn_with_kvcache(queries, *pools, cache_seqlens=9, page_table=table, **scales, **options)
        out = out.flatten(0, 1)
    assert out.dtype == BF16
    folded = 0.0 if shared else 2 * float(torch.finfo(BF16).eps) * 4
    check(out, None, sequences, options, extra=folded)


def test_float8_appends_codes_as_they_are() -> None:
    k_cache, v_cache = (normal(1, 16, KV_HEADS, DIM, seed=i).to(FP8) for i in (1, 2))
    q, k, v = (normal(1, 2, h, DIM, seed=3 + h).to(FP8) for h in (HEADS, KV_HEADS, KV_HEADS))
    fa3.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=5)
    for cache, new in ((k_cache, k), (v_cache, v)):
        assert torch.equal(cache[:, 5:7].view(torch.uint8), new.view(torch.uint8))


def test_fa3_combine_is_attention_over_the_union() -> None:
    q, k, v = (normal(1, n, h, DIM, seed=i) for i, (n, h) in enumerate(((4, HEADS), (30, KV_HEADS), (30, KV_HEADS))))
    parts = [fa3.flash_attn_func(q, k[:, s], v[:, s], return_attn_probs=True) for s in (slice(0, 7), slice(7, 30))]
    out_partial = torch.stack([p[0] for p in parts])
    lse_partial = torch.stack([p[1].transpose(1, 2) for p in parts])
    whole = fa3.flash_attn_func(q, k, v, return_attn_probs=True)
    out, lse = fa3.flash_attn_combine(out_partial, lse_partial)
    torch.testing.assert_close(out, whole[0])
    torch.testing.assert_close(lse, whole[1].transpose(1, 2))
    flat = fa3.flash_attn_combine(out_partial[:, 0], lse_partial[:, 0], out_dtype=BF16)[0]
    assert torch.equal(flat, out[0].to(BF16))
    into = torch.empty_like(out)
    assert fa3.flash_attn_combine(out_partial, lse_partial, out=into)[0] is into
    assert torch.equal(into, out)


@pytest.mark.parametrize("splits", [1, 3])
def test_fa3_combine_of_parts_that_saw_nothing(splits: int) -> None:
    """Whatever their out holds."""
    out_partial, lse_partial = normal(splits, 2, 5, HEADS, DIM, seed=1), normal(splits, 2, 5, HEADS, seed=2)
    lse_partial[:, 0] = -torch.inf
    lse_partial[splits // 2, 1, 2] = -torch.inf
    out, lse = fa3.flash_attn_combine(out_partial, lse_partial)
    expected = torch.logsumexp(lse_partial.double(), 0)
    weights = torch.exp(lse_partial.double() - expected).nan_to_num(0.0)
    torch.testing.assert_close(lse, expected.float())
    torch.testing.assert_close(out, (weights.unsqueeze(-1) * out_partial).sum(0).float())


def test_what_fa3_refuses_says_which_argument() -> None:
    q, k, v = (normal(2, 4, h, DIM, seed=h) for h in (HEADS, KV_HEADS, KV_HEADS))
    one = torch.ones(2, KV_HEADS)
    cases: list[tuple[str, dict[str, Any]]] = [
        ("qv is not supported", {"qv": q}),
        ("sm_margin is not supported", {"sm_margin": 2}),
        ("q_descale needs float8 tensors", {"q_descale": one}),
        ("k_descale needs float8 tensors", {"k_descale": one}),
        ("v_descale needs float8 tensors", {"v_descale": one}),
    ]
    for text, change in cases:
        with pytest.raises(RuntimeError, match=re.escape(text)):
            fa3.flash_attn_func(q, k, v, **change)
    with pytest.raises(RuntimeError, match="scheduler_metadata is not supported"):
        fa3.flash_attn_with_kvcache(q, k, v, scheduler_metadata=int32(0))
    with pytest.raises(RuntimeError, match=r"k_descale must have shape \(2, 2\)"):
        fa3.flash_attn_func(*(x.to(FP8) for x in (q, k, v)), k_descale=torch.ones(2))
    with pytest.raises(RuntimeError, match="num_heads_q must be given"):
        fa3.flash_attn_qkvpacked_func(torch.cat((q, k, v), 2))


def test_the_metadata_that_fa3_hands_on_is_none_and_taken() -> None:
    q, k, v = (normal(2, 4, h, DIM, seed=h) for h in (HEADS, KV_HEADS, KV_HEADS))
    metadata = fa3.get_scheduler_metadata(2, 4, 4, HEADS, KV_HEADS, DIM, int32(4, 4), q.dtype, num_splits=2)
    assert metadata is None
    planned = fa3.flash_attn_with_kvcache(q, k, v, scheduler_metadata=metadata)
    assert torch.equal(planned, fa3.flash_attn_with_kvcache(q, k, v))


# ---- vLLM ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", [*OPTIONS, "sinks"])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("version", [2, 3])
def test_vllm(name: str, paged: bool, version: int) -> None:
    """Arguments in vLLM's order, by position; lse of rows that see nothing by the version's convention."""
    q, k, v = ragged()
    options = (
        options_for(name, 5, HEADS) if name != "sinks" else {"causal": True, "s_aux": normal(HEADS, seed=9, std=4.0)}
    )
    sequences = split(q, k, v)
    call: dict[str, Any] = {"return_softmax_lse": True, "fa_version": version, **options}
    cu_q, cu_k, out = cumulative(Q_LENS), cumulative(K_LENS), torch.full_like(q, torch.nan)
    if paged:
        pool = pages(k, v)
        given = (q, pool["k"], pool["v"], 17, cu_q, 30, None, int32(*K_LENS))
        got, lse = vllm.flash_attn_varlen_func(*given, block_table=pool["block_table"], out=out, **call)
    else:
        got, lse = vllm.flash_attn_varlen_func(q, k, v, 17, cu_q, 30, cu_k, out=out, **call)
    assert got is out
    check(out, lse, sequences, options, unseen=torch.inf if version == 2 else -torch.inf)


def test_vllm_decode_steps() -> None:
    """One query each: the decode kernel, splits or not; and a batch of which some sequences have no query this time."""
    _, k, v = ragged()
    pool, q = pages(k, v), normal(5, HEADS, DIM, seed=7, std=2.0)
    lengths = (9, 4, 17, 30, 2)
    keys = [(b[:n], c[:n]) for (_, b, c), n in zip(split(ragged()[0], k, v), lengths, strict=True)]
    for num_splits in (0, 3):
        for cu in (int32(0, 1, 2, 3, 4, 5), int32(0, 1, 1, 2, 3, 4)):
            out, lse = vllm.flash_attn_varlen_func(
                q,
                **pool,
                max_seqlen_q=1,
                cu_seqlens_q=cu,
                max_seqlen_k=30,
                seqused_k=int32(*lengths),
                causal=True,
                num_splits=num_splits,
                return_softmax_lse=True,
            )
            sequences = [(q[cu[b] : cu[b + 1]], *keys[b]) for b in range(5)]
            used = int(cu[-1])
            check(out[:used], lse[:, :used], sequences, {"causal": True})
            assert torch.equal(out[used:], torch.zeros_like(out[used:]))


def test_vllm_padded_head_dims_reach_the_callers_out() -> None:
    q, k, v = normal(7, 2, 20, seed=1), normal(9, 2, 20, seed=2), normal(9, 2, 20, seed=3)
    out = torch.full_like(q, torch.nan)
    assert vllm.flash_attn_varlen_func(q, k, v, 7, int32(0, 7), 9, int32(0, 9), causal=True, out=out) is out
    check(out, None, [(q, k, v)], {"causal": True})


def test_what_vllm_refuses_says_which_argument() -> None:
    q, k, v = ragged()
    cu_q, cu_k = cumulative(Q_LENS), cumulative(K_LENS)
    one = torch.ones(5, KV_HEADS)
    cases: list[tuple[str, dict[str, Any]]] = [
        ("Unsupported FA version: 5", {"fa_version": 5}),
        ("one of cu_seqlens_k and seqused_k", {"seqused_k": int32(*K_LENS)}),
        ("one of cu_seqlens_k and seqused_k", {"cu_seqlens_k": None}),
        ("block_table or cu_seqlens_k must be given", {"cu_seqlens_k": None, "seqused_k": int32(*K_LENS)}),
        ("seqused_k must be given with block_table", {"block_table": int32(0).view(1, 1)}),
        ("q_v is not supported", {"q_v": q}),
        ("dropout_p is not supported", {"dropout_p": 0.5}),
        ("return_attn_probs is not supported", {"return_attn_probs": True}),
        ("scheduler_metadata is not supported", {"scheduler_metadata": int32(0)}),
        ("cp_world_size is not supported", {"cp_world_size": 2}),
        ("cp_rank is not supported", {"cp_rank": 1}),
        ("cp_tot_seqused_k is not supported", {"cp_tot_seqused_k": int32(1)}),
        ("k_descale must be 1", {"k_descale": one * 2}),
        ("q_descale must be 1", {"q_descale": one * 2}),
    ]
    for text, change in cases:
        with pytest.raises(RuntimeError, match=re.escape(text)):
            vllm.flash_attn_varlen_func(q, k, v, 17, cu_q, 30, **{"cu_seqlens_k": cu_k, **change})
    vllm.flash_attn_varlen_func(q, k, v, 17, cu_q, 30, cu_k, q_descale=one, k_descale=one, v_descale=one)
    assert vllm.is_fa_version_supported(3)
    assert vllm.fa_version_unsupported_reason(9) == "Unsupported FA version: 9"


# ---- install ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("package", ["flash_attn", "flash_attn_interface", "vllm_flash_attn"])
def test_install_puts_the_module_where_imports_find_it(package: str) -> None:
    import importlib
    import importlib.util

    module = compat.install(package)
    try:
        assert compat.install(package) is sys.modules[package]
        found = importlib.import_module(package)
        assert found.__version__.split(".")[0] in "23"
        assert importlib.util.find_spec(package) is not None
        q = normal(1, 3, 2, 16, seed=1)
        if package != "flash_attn_interface":
            inner = importlib.import_module(f"{package}.flash_attn_interface")
            assert inner.flash_attn_varlen_func is found.flash_attn_varlen_func
            assert getattr(found, "flash_attn_interface") is inner  # noqa: B009
        if package != "vllm_flash_attn":
            assert torch.equal(found.flash_attn_func(q, q, q), module.flash_attn_func(q, q, q))
    finally:
        compat.uninstall(package)
    assert not [n for n in sys.modules if n == package or n.startswith(package + ".")]
    compat.uninstall(package)


def test_install_does_not_replace_a_real_package_that_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", type(sys)("flash_attn"))
    with pytest.raises(RuntimeError, match="flash_attn has been imported"):
        compat.install("flash_attn")
    compat.uninstall("flash_attn")
    assert "flash_attn" in sys.modules
    with pytest.raises(ValueError, match="package must be one of flash_attn, "):
        compat.install("xformers")


def test_importing_pykernels_loads_no_adapter() -> None:
    import subprocess

    code = "import sys, pykernels; print([m for m in sys.modules if 'compat' in m and m.startswith('pykernels')])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )
    assert pk.__version__
    assert attend_each is not None
