"""The KV cache ops on the CPU backend, and `PagedKVCache`: nothing is lost, shared by mistake, or written early."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, precondition, rule

import pykernels as pk
from pykernels import native
from pykernels.kv_cache import CacheFullError, bytes_per_token
from pykernels.testing import cases, check_case

LEVELS = [lv for lv in (*native.LEVELS, *native.TEST_LEVELS) if native.level_reason(lv) is None]
OPS = ("append_kv", "rope_append_kv", "gather_kv", "copy_pages", "swap_pages")


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PYKERNELS_CPU_ISA", request.param)
    return request.param


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("op", OPS)
def test_agrees_with_the_reference(op: str, level: str) -> None:
    for case in cases(op):
        check_case(case, lambda op, args: native.BACKEND.run(op, args))


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


def caches(dtype: torch.dtype, pages: int = 6, page_size: int = 4, heads: int = 3, dim: int = 32) -> dict[str, Any]:
    made: dict[str, Any] = {n: torch.zeros(pages, page_size, heads, dim).to(dtype) for n in ("k_cache", "v_cache")}
    quantised = dtype.itemsize == 1
    return made | {n: torch.zeros(pages, page_size, heads) if quantised else None for n in ("k_scale", "v_scale")}


@pytest.mark.parametrize("cache", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotating_append_has_the_bits_of_rotation_then_append(
    cache: torch.dtype, interleaved: bool, level: str
) -> None:
    if not hasattr(native.module(), "rotary_embedding"):
        pytest.skip("the rope kernel is not in this build")
    q, k, v = (normal(9, h, 32, seed=h) for h in (6, 3, 3))
    positions, inv_freq = torch.arange(9) * 701, 10000.0 ** (-torch.arange(14) / 14)
    slots = torch.randperm(24)[:9]
    fused, apart = caches(cache), caches(cache)
    turned = pk.rope_append_kv(
        q, k, v, positions, inv_freq, slot_mapping=slots, interleaved=interleaved, scale=1.2, **fused
    )
    q_out, k_out = pk.rotary_embedding(q, k, positions, inv_freq, interleaved=interleaved, scale=1.2)
    pk.append_kv(k_out, v, slot_mapping=slots, **apart)
    assert torch.equal(turned, q_out)
    for name, value in fused.items():
        assert value is None or torch.equal(bits(value), bits(apart[name])), name


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_round_trip_is_within_half_a_code(dtype: torch.dtype, level: str) -> None:
    k, v = normal(20, 3, 32) * 5, normal(20, 3, 32, seed=1)
    pool = caches(dtype)
    pk.append_kv(k, v, slot_mapping=torch.arange(20), **pool)
    table, lengths = torch.arange(6, dtype=torch.int32)[None], torch.tensor([20], dtype=torch.int32)
    got = pk.gather_kv(block_table=table, seqlens_k=lengths, dtype=torch.float32, **pool)
    for exact, back in zip((k, v), got, strict=True):
        largest = exact.abs().amax(-1, keepdim=True)
        step = largest / 127 if dtype == torch.int8 else torch.maximum(exact.abs() / 8, largest / 448 / 512)
        assert bool(((back - exact).abs() <= step / 2 * 1.0001).all())


@pytest.mark.parametrize("size", [2.0**-140, 2.0**-126, 1e30])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_codes_of_tiny_and_huge_rows_are_those_of_plain_rows(size: float, dtype: torch.dtype, level: str) -> None:
    from pykernels.reference.kv_cache import quantise

    k = normal(4, 3, 32) * size
    pool = caches(dtype)
    pk.append_kv(k, k, slot_mapping=torch.arange(4), **pool)
    codes, scale = quantise(k, dtype, None)
    assert torch.equal(bits(pool["k_cache"][0]), bits(codes))
    assert torch.equal(pool["k_scale"][0], scale)


def test_more_than_2_to_the_31_elements_are_reached(level: str) -> None:
    pages, page_size, heads, dim = (2**31 // (16 * 4 * 64)) + 2, 16, 4, 64
    k_cache, v_cache = (torch.empty(pages, page_size, heads, dim, dtype=torch.int8) for _ in range(2))  # untouched
    assert k_cache.numel() > 2**31
    scale, k = torch.tensor(0.05), normal(2, heads, dim)
    slots = torch.tensor([pages * page_size - 1, 0])
    pk.append_kv(k, k, k_cache, v_cache, slots, k_scale=scale, v_scale=scale)
    pk.copy_pages(k_cache, v_cache, torch.tensor([pages - 1]), torch.tensor([pages - 2]), k_scale=scale, v_scale=scale)
    expected = (k[0] / scale).round().clamp(-128, 127).to(torch.int8)
    assert torch.equal(k_cache[-1, -1], expected)
    assert torch.equal(v_cache[-2, -1], expected)


def test_threads_do_not_change_bits(level: str) -> None:
    k, v = normal(300, 4, 64), normal(300, 4, 64, seed=1)
    before, pools = native.module().num_threads(), []
    for count in (1, 3):
        native.module().set_num_threads(count)
        pools.append(caches(torch.int8, pages=100, heads=4, dim=64))
        pk.append_kv(
            k, v, slot_mapping=torch.randperm(400, generator=torch.Generator().manual_seed(0))[:300], **pools[-1]
        )
    native.module().set_num_threads(before)
    for name, value in pools[0].items():
        assert torch.equal(bits(value), bits(pools[1][name]))


def swap(target: dict[str, Any], src_pages: list[int], dst_pages: list[int]) -> None:
    """Pages of fresh int8 caches into `target`."""
    source = caches(torch.int8)
    pk.swap_pages(
        source["k_cache"], source["v_cache"], target["k_cache"], target["v_cache"], torch.tensor(src_pages),
        torch.tensor(dst_pages), k_scale_from=source["k_scale"], v_scale_from=source["v_scale"],
        k_scale_to=target["k_scale"], v_scale_to=target["v_scale"],
    )  # fmt: skip


I64 = torch.int64
I32 = torch.int32


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda p: pk.append_kv(normal(2, 3, 32), normal(2, 3, 32), slot_mapping=torch.tensor([0, 24]), **p),
         r"append_kv: slot_mapping\[1\] must be at least 0 and below num_pages \* page_size \(24\), got 24"),
        (lambda p: pk.append_kv(normal(2, 3, 32), normal(2, 3, 32), slot_mapping=torch.tensor([0, 1]), **{**p, "k_scale": None}),
         "k_scale and v_scale must be given"),
        (lambda p: pk.append_kv(normal(2, 3, 32), normal(2, 2, 32), slot_mapping=torch.tensor([0, 1]), **p),
         r"v must have shape .* got \[2, 2, 32\]"),
        (lambda p: pk.rope_append_kv(normal(1, 3, 32), normal(1, 3, 32), normal(1, 3, 32), torch.tensor([-1]), torch.ones(4),
                                     slot_mapping=torch.tensor([0]), **p),
         r"rope_append_kv: positions\[0\] must be at least 0 .* got -1"),
        (lambda p: pk.rope_append_kv(normal(1, 3, 32), normal(1, 3, 32), normal(1, 3, 32), torch.tensor([0]), torch.ones(17),
                                     slot_mapping=torch.tensor([0]), **p),
         "rotates 17 pairs, more than half of head_dim"),
        (lambda p: pk.gather_kv(block_table=torch.tensor([[0, 6]], dtype=I32), seqlens_k=torch.tensor([5], dtype=I32),
                                dtype=torch.float32, **p),
         r"gather_kv: block_table\[0, 1\] must be at least 0 and below num_pages \(6\), got 6"),
        (lambda p: pk.gather_kv(block_table=torch.tensor([[0, -1]], dtype=I32), seqlens_k=torch.tensor([5], dtype=I32),
                                dtype=torch.float32, **p),
         r"block_table\[0, 1\] must be at least 0 .* got -1"),
        (lambda p: pk.gather_kv(block_table=torch.tensor([[0]], dtype=I32), seqlens_k=torch.tensor([5], dtype=I32),
                                dtype=torch.float32, **p),
         r"seqlens_k\[0\] must be .* got 5"),
        (lambda p: pk.gather_kv(block_table=torch.tensor([[0]], dtype=I32), seqlens_k=torch.tensor([-1], dtype=I32),
                                dtype=torch.float32, **p),
         r"seqlens_k\[0\] must be at least 0 .* got -1"),
        (lambda p: pk.gather_kv(block_table=torch.tensor([[0]], dtype=I32), seqlens_k=torch.tensor([3], dtype=I32),
                                dtype=torch.float32, k=torch.zeros(2, 3, 32), v=torch.zeros(2, 3, 32), **p),
         r"must have sum\(seqlens_k\) rows \(3\), got 2"),
        (lambda p: pk.copy_pages(src_pages=torch.tensor([0]), dst_pages=torch.tensor([6]), **p),
         r"copy_pages: dst_pages\[0\] must be at least 0 and below num_pages \(6\), got 6"),
        (lambda p: pk.copy_pages(src_pages=torch.tensor([-1]), dst_pages=torch.tensor([1]), **p),
         r"src_pages\[0\] must be at least 0 .* got -1"),
        (lambda p: pk.copy_pages(src_pages=torch.tensor([0, 1]), dst_pages=torch.tensor([3, 3]), **p),
         "dst_pages must not repeat a page, got 3 more than once"),
        (lambda p: swap(p, [0, 6], [0, 1]), r"swap_pages: src_pages\[1\] must be at least 0 and below num_pages_from \(6\), got 6"),
        (lambda p: swap(p, [0, 1], [0, -1]), r"swap_pages: dst_pages\[1\] must be at least 0 and below num_pages_to \(6\), got -1"),
        (lambda p: swap(p, [0, 0], [4, 4]), "swap_pages: dst_pages must not repeat a page, got 4 more than once"),
    ],
)  # fmt: skip
def test_a_wrong_index_is_an_error_before_anything_is_written(call: Any, text: str) -> None:
    pool = caches(torch.int8)
    for value in pool.values():
        value.fill_(7)
    with pytest.raises(ValueError, match=text):
        call(pool)
    assert all(bool((value == 7).all()) for value in pool.values())


# PagedKVCache


def test_memory_is_what_the_formula_says() -> None:
    llama2_7b = bytes_per_token(32, 32, 128, torch.float16)
    assert llama2_7b * 4096 == 2 * 2**30
    assert bytes_per_token(32, 8, 128, torch.float16) * 4 == llama2_7b  # grouped queries
    assert bytes_per_token(30, 3, 64, torch.int8) == 2 * 30 * 3 * (64 + 4)
    for dtype in ("auto", "int8", "fp8_e4m3", torch.float32):
        cache = pk.PagedKVCache(5, 3, 2, 4, 16, dtype)
        tensors = [t for i in range(2) for t in vars(cache.layer(i)).values() if t is not None]
        assert cache.nbytes == sum(t.nbytes for t in tensors)


@pytest.mark.parametrize("dtype", ["auto", "int8"])
def test_a_plan_says_what_fits(dtype: str) -> None:
    plan = pk.PagedKVCache.plan(10_000_000, page_size=16, num_layers=30, num_kv_heads=3, head_dim=64, dtype=dtype)
    cache = pk.PagedKVCache(plan.num_pages, 16, 30, 3, 64, dtype)
    assert plan.nbytes == cache.nbytes <= 10_000_000 < plan.nbytes + 16 * plan.bytes_per_token
    assert plan.num_tokens == plan.num_pages * 16
    assert plan.bytes_per_token == cache.bytes_per_token
    with pytest.raises(ValueError, match="10 bytes do not hold one page"):
        pk.PagedKVCache.plan(10, page_size=16, num_layers=30, num_kv_heads=3, head_dim=64, dtype=dtype)


def test_a_full_cache_refuses_and_loses_nothing() -> None:
    cache = pk.PagedKVCache(3, 4, 1, 1, 8)
    first, second = cache.add_sequence(), cache.add_sequence()
    cache.append(first, 8)
    cache.append(second, 3)
    with pytest.raises(CacheFullError, match="2 more tokens need 1 pages of 4, 0 are free"):
        cache.append(second, 2)
    assert (cache.length(second), cache.free_pages) == (3, 0)
    assert cache.append(second, 1).tolist() == [cache.pages(second)[0] * 4 + 3]
    cache.free(first)
    assert len(cache.append(second, 5)) == 5


def test_tables_are_written_in_place() -> None:
    cache = pk.PagedKVCache(8, 2, 1, 1, 8)
    a, b = cache.add_sequence(), cache.add_sequence()
    cache.append(a, 3)
    cache.append(b, 1)
    table, lengths = torch.full((3, 4), 99, dtype=torch.int32), torch.full((3,), 99, dtype=torch.int32)
    where = (table.data_ptr(), lengths.data_ptr())
    cache.write_tables([a, b], table, lengths)
    assert table.tolist() == [[*cache.pages(a), -1, -1], [*cache.pages(b), -1, -1, -1], [-1] * 4]
    assert lengths.tolist() == [3, 1, 0]
    cache.append(b, 4)
    cache.write_tables([b], table, lengths)
    assert table.tolist() == [[*cache.pages(b), -1], [-1] * 4, [-1] * 4]
    assert lengths.tolist() == [5, 0, 0]
    assert where == (table.data_ptr(), lengths.data_ptr())
    with pytest.raises(ValueError, match="block_table has room for 3 sequences of 4 pages"):
        cache.write_tables([a, b, a, b], table, lengths)
    cache.append(b, 4)
    with pytest.raises(ValueError, match="block_table has room for 3 sequences of 4 pages"):
        cache.write_tables([b], table, lengths)
    assert lengths.tolist() == [5, 0, 0]


@pytest.mark.parametrize("dtype", ["auto", "int8", "fp8_e4m3"])
def test_writing_after_a_fork_leaves_the_other_alone(dtype: str) -> None:
    cache = pk.PagedKVCache(6, 4, 2, 2, 16, dtype)
    parent = cache.add_sequence()
    write(cache, parent, [1, 2, 3, 4, 5, 6])
    child = cache.fork(parent)
    assert cache.pages(child) == cache.pages(parent)
    assert cache.free_pages == 4
    write(cache, child, [7])
    assert cache.pages(child)[0] == cache.pages(parent)[0]
    assert cache.pages(child)[1] != cache.pages(parent)[1]
    write(cache, parent, [8, 9])
    assert read(cache, parent) == [1, 2, 3, 4, 5, 6, 8, 9]
    assert read(cache, child) == [1, 2, 3, 4, 5, 6, 7]
    cache.free(parent)
    assert read(cache, child) == [1, 2, 3, 4, 5, 6, 7]
    cache.free(child)
    assert cache.free_pages == 6


@pytest.mark.parametrize("dtype", ["auto", "int8", "fp8_e4m3"])
def test_a_sequence_that_went_to_the_host_reads_the_same_when_it_is_back(dtype: str) -> None:
    cache = pk.PagedKVCache(4, 4, 2, 2, 16, dtype, host_pages=3)
    waiting, other = cache.add_sequence(), cache.add_sequence()
    write(cache, waiting, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert cache.swap_out(waiting) == 3
    assert (cache.free_pages, cache.free_host_pages, cache.is_swapped(waiting)) == (4, 0, True)
    write(cache, other, [11, 12, 13, 14, 15])
    with pytest.raises(CacheFullError, match="swapping in sequence 0 needs 3 pages, 2 are free"):
        cache.swap_in(waiting)
    assert read(cache, other) == [11, 12, 13, 14, 15]
    cache.free(other)
    assert cache.swap_in(waiting) == 3
    assert read(cache, waiting) == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    write(cache, waiting, [10])
    assert read(cache, waiting) == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert (cache.free_pages, cache.free_host_pages, cache.is_swapped(waiting)) == (1, 3, False)


def test_shared_pages_stay_for_their_running_reader_and_exist_once() -> None:
    cache = pk.PagedKVCache(8, 2, 2, 1, 8, host_pages=8)
    parent = cache.add_sequence()
    write(cache, parent, [1, 2, 3, 4])
    child = cache.fork(parent)
    write(cache, child, [5, 6])
    assert cache.swap_out(child) == 1  # the two pages of the prefix are the parent's, too
    assert (cache.free_pages, cache.free_host_pages) == (6, 7)
    assert cache.swap_out(parent) == 2  # the last reader takes them along
    assert (cache.free_pages, cache.free_host_pages) == (8, 5)
    assert cache.swap_in(child) == 3
    assert read(cache, child) == [1, 2, 3, 4, 5, 6]
    assert cache.swap_in(parent) == 0
    assert cache.pages(parent) == cache.pages(child)[:2]
    assert read(cache, parent) == [1, 2, 3, 4]


def test_a_page_whose_last_running_reader_left_moves_when_asked_again() -> None:
    cache = pk.PagedKVCache(3, 2, 1, 1, 8, host_pages=3)
    parent = cache.add_sequence()
    write(cache, parent, [1, 2, 3])
    child = cache.fork(parent)
    assert cache.swap_out(child) == 0
    write(cache, parent, [4])  # copies the shared page before it writes
    cache.free(parent)
    assert cache.free_pages == 1
    assert cache.swap_out(child) == 2
    assert cache.free_pages == 3
    cache.swap_in(child)
    assert read(cache, child) == [1, 2, 3]


def test_readers_that_end_while_they_are_out_leave_the_pages_to_the_others() -> None:
    cache = pk.PagedKVCache(4, 2, 1, 1, 8, host_pages=4)
    first = cache.add_sequence()
    write(cache, first, [1, 2, 3])
    second, third = cache.fork(first), cache.fork(first)
    for sequence in (first, second):
        cache.swap_out(sequence)
    cache.free(first)  # while the pages are still on the device
    assert cache.swap_out(third) == 2
    cache.free(second)  # while they are in the host pool
    assert (cache.free_pages, cache.free_host_pages) == (4, 2)
    other = cache.add_sequence()
    write(cache, other, [7, 8, 9])
    assert cache.swap_out(other) == 2
    cache.swap_in(third)
    assert read(cache, third) == [1, 2, 3]
    cache.free(third)
    cache.swap_in(other)
    assert read(cache, other) == [7, 8, 9]
    assert (cache.free_pages, cache.free_host_pages) == (2, 4)


def test_what_does_not_fit_the_host_pool_stays() -> None:
    cache = pk.PagedKVCache(4, 2, 1, 1, 8, host_pages=1)
    sequence = cache.add_sequence()
    write(cache, sequence, [1, 2, 3])
    text = "swapping out sequence 0 needs 2 pages of the host pool, 1 of 1 are free"
    with pytest.raises(CacheFullError, match=text):
        cache.swap_out(sequence)
    assert (cache.free_pages, cache.free_host_pages, cache.is_swapped(sequence)) == (2, 1, False)
    assert read(cache, sequence) == [1, 2, 3]
    assert cache.host_nbytes == 2 * cache.bytes_per_token


def test_a_sequence_that_is_swapped_out_can_only_end_or_come_back() -> None:
    cache = pk.PagedKVCache(4, 2, 1, 1, 8, host_pages=4)
    sequence = cache.add_sequence()
    with pytest.raises(ValueError, match="sequence 0 is not swapped out"):
        cache.swap_in(sequence)
    write(cache, sequence, [1, 2, 3])
    cache.swap_out(sequence)
    calls: tuple[Any, ...] = (cache.pages, cache.fork, lambda s: cache.append(s, 1), cache.append_one)
    for call in (*calls, lambda s: cache.truncate(s, 0), lambda s: cache.tables([s])):
        with pytest.raises(ValueError, match="sequence 0 is swapped out: swap it in first"):
            call(sequence)
    assert cache.length(sequence) == 3
    cache.free(sequence)
    assert (cache.free_pages, cache.free_host_pages) == (4, 4)


def test_wrong_use_is_named() -> None:
    with pytest.raises(ValueError, match="page_size must be at least 1, got 0"):
        pk.PagedKVCache(2, 0, 1, 1, 8)
    with pytest.raises(ValueError, match=r"dtype must be auto or one of .*, got 'int4'"):
        pk.PagedKVCache(2, 4, 1, 1, 8, "int4")
    cache = pk.PagedKVCache(2, 4, 1, 1, 8)
    with pytest.raises(ValueError, match="host_pages must be at least 0, got -1"):
        pk.PagedKVCache(2, 4, 1, 1, 8, host_pages=-1)
    known: tuple[Any, ...] = (cache.length, cache.pages, cache.fork, cache.free, cache.swap_out, cache.swap_in)
    for call in (*known, lambda s: cache.append(s, 1)):
        with pytest.raises(ValueError, match="there is no sequence 5"):
            call(5)
    sequence = cache.add_sequence()
    with pytest.raises(ValueError, match="tokens must be at least 0, got -1"):
        cache.append(sequence, -1)
    with pytest.raises(ValueError, match=r"length must be in \[0, 0\], got 1"):
        cache.truncate(sequence, 1)


def write(cache: pk.PagedKVCache, sequence: int, values: list[int]) -> None:
    """Appends tokens whose keys are all `value + layer`, and whose values are the negative of that."""
    slots = cache.append(sequence, len(values))
    for index in range(cache.num_layers):
        layer = cache.layer(index)
        k = torch.tensor(values, dtype=torch.bfloat16)[:, None, None] + index
        k = k.repeat(1, cache.num_kv_heads, cache.head_dim)
        pk.append_kv(k, -k, layer.k_cache, layer.v_cache, slots, k_scale=layer.k_scale, v_scale=layer.v_scale)


def read(cache: pk.PagedKVCache, sequence: int) -> list[int]:
    """The values that `write` wrote, checked in every layer and every element."""
    table, lengths = cache.tables([sequence])
    rows: list[int] = []
    for index in range(cache.num_layers):
        layer = cache.layer(index)
        scales = {"k_scale": layer.k_scale, "v_scale": layer.v_scale}
        k, v = pk.gather_kv(layer.k_cache, layer.v_cache, table, lengths, dtype=torch.float32, **scales)
        assert torch.equal(k, -v)
        assert torch.equal(k, k[:, :1, :1].expand_as(k))
        values = (k[:, 0, 0].round() - index).int().tolist()
        assert index == 0 or values == rows
        rows = values
    return rows


class CacheMachine(RuleBasedStateMachine):
    """Any interleaving of appends, forks, truncations, swaps and frees: what is read is what a list would hold."""

    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.cache = pk.PagedKVCache(7, 3, 2, 1, 8, host_pages=4)
        self.held: dict[int, list[int]] = {}
        self.next = 0

    @rule(target=sequences)
    def add(self) -> int:
        sequence = self.cache.add_sequence()
        assert sequence not in self.held
        self.held[sequence] = []
        return sequence

    @rule(sequence=sequences, count=st.integers(0, 7))
    def append(self, sequence: int, count: int) -> None:
        if self.cache.is_swapped(sequence):
            return
        values = [(self.next + i) % 100 for i in range(count)]
        before = (self.cache.pages(sequence), self.cache.free_pages)
        try:
            write(self.cache, sequence, values)
        except CacheFullError:
            assert (self.cache.pages(sequence), self.cache.free_pages) == before
            return
        self.next += count
        self.held[sequence] += values

    @rule(sequence=sequences)
    def swap(self, sequence: int) -> None:
        away = self.cache.is_swapped(sequence)
        before = (self.cache.free_pages, self.cache.free_host_pages)
        try:
            moved = self.cache.swap_in(sequence) if away else self.cache.swap_out(sequence)
        except CacheFullError:
            assert (self.cache.free_pages, self.cache.free_host_pages) == before
            assert self.cache.is_swapped(sequence) == away
            return
        change = -moved if away else moved
        assert (self.cache.free_pages - change, self.cache.free_host_pages + change) == before

    @rule(target=sequences, sequence=sequences)
    def fork(self, sequence: int) -> Any:
        if self.cache.is_swapped(sequence):
            return multiple()
        copy = self.cache.fork(sequence)
        self.held[copy] = list(self.held[sequence])
        return copy

    @rule(sequence=sequences, share=st.floats(0, 1))
    def truncate(self, sequence: int, share: float) -> None:
        if self.cache.is_swapped(sequence):
            return
        length = int(share * len(self.held[sequence]))
        self.cache.truncate(sequence, length)
        del self.held[sequence][length:]

    @rule(sequence=consumes(sequences))
    def free(self, sequence: int) -> None:
        self.cache.free(sequence)
        del self.held[sequence]

    @precondition(lambda self: self.held)
    @invariant()
    def every_sequence_reads_what_was_written(self) -> None:
        for sequence, values in self.held.items():
            assert self.cache.length(sequence) == len(values)
            assert self.cache.is_swapped(sequence) or read(self.cache, sequence) == values

    @invariant()
    def no_page_is_lost(self) -> None:
        used = {page for state in self.cache._sequences.values() for page in state.pages}
        free = (self.cache.free_pages, self.cache.free_host_pages)
        assert len(used) + sum(free) == self.cache.num_pages + self.cache.host_pages
        running = {page for s in self.held if not self.cache.is_swapped(s) for page in self.cache.pages(s)}
        assert all(page < self.cache.num_pages for page in running)


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(
    max_examples=30, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
