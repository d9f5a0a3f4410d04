"""Memory in huge pages: a tensor like any other, aligned, and alive for as long as it is used."""

from __future__ import annotations

import gc

import pytest
import torch

from pykernels import memory


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("rows", [0, 1, 1000])
def test_empty_has_the_shape_and_dtype_that_were_asked_for(dtype: torch.dtype, rows: int) -> None:
    tensor = memory.empty(rows, 3, 512, dtype=dtype)
    assert tensor.shape == (rows, 3, 512)
    assert tensor.dtype == dtype
    assert tensor.is_contiguous()


def test_large_memory_is_aligned_to_huge_pages_and_outlives_its_maker() -> None:
    tensor = memory.empty(3 * memory.HUGE_PAGE + 5)
    assert tensor.data_ptr() % memory.HUGE_PAGE == 0
    tail = tensor.fill_(7)[-100:]
    del tensor
    gc.collect()
    assert (tail == 7).all()


def test_an_arena_holds_copies_one_after_another_on_lines_of_their_own() -> None:
    parts = [torch.arange(n, dtype=torch.int64).to(torch.uint8) for n in (1, 64, 65, 1000)]
    arena = memory.Arena(p.numel() for p in parts)
    held = [arena.hold(p) for p in parts]
    starts = [h.data_ptr() - held[0].data_ptr() for h in held]
    assert starts == [0, 64, 128, 256]
    for part, copy in zip(parts, held, strict=True):
        assert torch.equal(part, copy)
