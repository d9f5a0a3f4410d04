"""Decode attention: split-KV over a paged cache on tensor cores, the merge of its parts, and the merge of two states.

Flash-decoding (Dao et al. 2023): each split writes a normalised part and its log-sum-exp; parts i are merged as
`out = sum_i exp(lse_i - lse) out_i`, `lse = log sum_i exp(lse_i)`, always in the order of the splits. The grid comes from
shapes alone and the splits from each sequence's own length, so a captured CUDA graph stays right while sequences grow,
and a request's bits do not depend on its batch.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from . import configs
from .attention import attention, sink_share, split_tokens
from .common import LN2, LOG2E, NEG_INF, narrow, padded, target_of
from .launch import AttentionCall, attention_arguments


@triton.jit(do_not_specialize=["split_size", "sp_part", "sl_part", "sl_row", "sl_head"])
def _merge_splits(
    Parts, PartLse, Sinks, SeqK, Out, Lse, split_size, num_heads, sp_part, sp_row, so_row, so_head, sl_part, sl_row, sl_head,
    DV: tl.constexpr, DV_PAD: tl.constexpr, HEADS: tl.constexpr, PARTS: tl.constexpr, SPLIT_TOKENS: tl.constexpr, MAX_SPLITS: tl.constexpr,
):  # fmt: skip
    """grid = (batch, heads / HEADS). Only the splits that a sequence of this length has are read."""
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    head_ok = heads < num_heads
    d = tl.arange(0, DV_PAD)
    mask = head_ok[:, None] & (d < DV)[None, :]
    length = tl.load(SeqK + row)
    size = split_tokens(length, split_size, SPLIT_TOKENS, MAX_SPLITS)
    count = (length + size - 1) // size
    top = tl.full([HEADS], NEG_INF, tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, DV_PAD], tl.float32)
    for first in range(0, count, PARTS):
        part = first + tl.arange(0, PARTS).to(tl.int64)
        lse_mask = (part < count)[:, None] & head_ok[None, :]
        lse = tl.load(PartLse + part[:, None] * sl_part + heads[None, :] * sl_row + row, mask=lse_mask, other=NEG_INF)
        at = Parts + part[:, None, None] * sp_part + row * sp_row + heads[None, :, None] * DV + d[None, None, :]
        x = tl.load(at, mask=(part < count)[:, None, None] & mask[None, :, :], other=0.0)
        new = tl.maximum(top, tl.max(lse, 0))
        base = tl.where(new == NEG_INF, 0.0, new)
        old = tl.exp2((top - base) * LOG2E)
        weight = tl.exp2((lse - base[None, :]) * LOG2E)
        total = total * old + tl.sum(weight, 0)
        acc = acc * old[:, None] + tl.sum(x * weight[:, :, None], 0)
        top = new
    norm = tl.where(total == 0, 0.0, 1.0 / tl.where(total == 0, 1.0, total))
    lse = tl.where(total == 0, NEG_INF, top + tl.log2(tl.where(total == 0, 1.0, total)) * LN2)
    if Sinks is not None:
        norm = norm * sink_share(lse, tl.load(Sinks + heads, mask=head_ok, other=0.0))
    out = narrow(acc * norm[:, None], Out.dtype.element_ty)
    tl.store(Out + row * so_row + heads[:, None] * so_head + d[None, :], out, mask=mask)
    if Lse is not None:
        tl.store(Lse + heads * sl_head + row, lse, mask=head_ok)


@triton.jit(do_not_specialize=["tokens", "sla_head", "slb_head", "sl_head"])
def _merge_states(
    OutA, LseA, OutB, LseB, Out, Lse, tokens, sa_row, sa_head, sla_head, sb_row, sb_head, slb_head, so_row, so_head, sl_head,
    DV: tl.constexpr, DV_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """grid = (tokens / BLOCK, heads). A side that saw nothing (lse = -inf) counts for nothing, whatever its out holds."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    head = tl.program_id(1)
    row_ok = row < tokens
    d = tl.arange(0, DV_PAD)
    lse_a = tl.load(LseA + head * sla_head + row, mask=row_ok, other=NEG_INF)
    lse_b = tl.load(LseB + head * slb_head + row, mask=row_ok, other=NEG_INF)
    top = tl.where(lse_a == lse_a, tl.maximum(lse_a, lse_b), lse_a)
    base = tl.where(top == NEG_INF, 0.0, top)
    share_a = tl.exp2((lse_a - base) * LOG2E)
    share_b = tl.exp2((lse_b - base) * LOG2E)
    total = share_a + share_b
    some = tl.where(total == 0, 1.0, total)
    seen = (d < DV)[None, :]
    a = tl.load(
        OutA + row[:, None] * sa_row + head * sa_head + d[None, :], mask=(share_a != 0)[:, None] & seen, other=0.0
    )
    b = tl.load(
        OutB + row[:, None] * sb_row + head * sb_head + d[None, :], mask=(share_b != 0)[:, None] & seen, other=0.0
    )
    out = a.to(tl.float32) * (share_a / some)[:, None] + b.to(tl.float32) * (share_b / some)[:, None]
    at = Out + row[:, None] * so_row + head * so_head + d[None, :]
    tl.store(at, narrow(out, Out.dtype.element_ty), mask=row_ok[:, None] & seen)
    lse = tl.where(total == 0, NEG_INF, base + tl.log2(some) * LN2)
    tl.store(Lse + head * sl_head + row, lse, mask=row_ok)


def workspace_bytes(splits: int, batch: int, num_heads: int, head_dim_v: int) -> int:
    """Bytes that the parts of a split decode take: float32 outputs and log-sum-exps, one plane per split."""
    return 4 * splits * batch * num_heads * (head_dim_v + 1)


def refuses_paged_decode_attention(*, q, k_cache, v_cache, block_table, split_size, workspace, **_) -> list[str]:
    """A workspace that is too small, and more splits than a grid has room for."""
    splits = configs.split_count(block_table.shape[1] * k_cache.shape[1], split_size)
    needed = workspace_bytes(splits, q.shape[0], q.shape[1], v_cache.shape[3])
    if workspace is not None and (workspace.numel() < needed or workspace.data_ptr() % 4):
        return [f"the workspace must hold {needed} bytes, 4-byte aligned, for {splits} splits; got {workspace.numel()}"]
    return [] if splits < 65536 else [f"at most 65535 splits fit a grid, split_size {split_size} makes {splits}"]


def paged_decode_attention(
    *, q, k_cache, v_cache, block_table, seqlens_k, k_scale, v_scale, causal, softmax_scale, window_left, window_right,
    softcap, alibi_slopes, sinks, split_size, workspace, out, lse,
):  # fmt: skip
    """One query [batch, num_heads, head_dim] per sequence, at its last position: nothing stands to the right of it."""
    del causal, window_right
    batch, num_heads, _ = q.shape
    num_kv_heads, head_dim_v = v_cache.shape[2:]
    if batch == 0 or num_heads == 0:
        return
    splits = configs.split_count(block_table.shape[1] * k_cache.shape[1], split_size)
    call = AttentionCall(
        q=q, k=k_cache, v=v_cache, block_table=block_table, seqlens_k=seqlens_k, k_scale=k_scale, v_scale=v_scale,
        softmax_scale=softmax_scale, window_left=window_left, window_right=-1, softcap=softcap, alibi_slopes=alibi_slopes,
        sinks=sinks, split_size=split_size, out=out, lse=lse,
    )  # fmt: skip
    tile = configs.decode_tile(target_of(q), call.shape)
    # One split goes through the merge too: a table that grows past it must not compile another kernel.
    parts, part_lse = _parts(workspace, splits, q, head_dim_v)
    arguments = attention_arguments(replace(call, out=parts, lse=part_lse), tile)
    attention[batch, num_kv_heads, splits](**arguments, num_warps=tile.num_warps, num_stages=tile.num_stages)
    heads = configs.MERGE_HEADS
    _merge_splits[batch, triton.cdiv(num_heads, heads)](
        parts, part_lse, sinks, seqlens_k, out, lse, split_size, num_heads, parts.stride(0), parts.stride(1), out.stride(0),
        out.stride(1), part_lse.stride(0), part_lse.stride(1), 0 if lse is None else lse.stride(0), head_dim_v,
        padded(head_dim_v), heads, configs.MERGE_PARTS, configs.SPLIT_TOKENS, configs.MAX_SPLITS, num_warps=4,
    )  # fmt: skip


def _parts(
    workspace: torch.Tensor | None, splits: int, q: torch.Tensor, head_dim_v: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Parts [splits, batch, heads, head_dim_v] and their lse [splits, heads, batch], in the workspace where there is one."""
    batch, num_heads, _ = q.shape
    size = workspace_bytes(splits, batch, num_heads, head_dim_v)
    if workspace is None:
        flat = torch.empty(size // 4, dtype=torch.float32, device=q.device)
    else:
        flat = workspace[:size].view(torch.float32)
    rows = splits * batch * num_heads
    parts = flat[: rows * head_dim_v].view(splits, batch, num_heads, head_dim_v)
    return parts, flat[rows * head_dim_v :].view(splits, num_heads, batch)


def merge_attention_states(*, out_a, lse_a, out_b, lse_b, out, lse):
    """Attention over the union of two disjoint sets of keys, from out [tokens, heads, head_dim_v] and lse over each."""
    tokens, num_heads, head_dim_v = out_a.shape
    if tokens == 0 or num_heads == 0:
        return
    _merge_states[triton.cdiv(tokens, 16), num_heads](
        out_a, lse_a, out_b, lse_b, out, lse, tokens, out_a.stride(0), out_a.stride(1), lse_a.stride(0), out_b.stride(0),
        out_b.stride(1), lse_b.stride(0), out.stride(0), out.stride(1), lse.stride(0), head_dim_v, padded(head_dim_v), 16,
        num_warps=4,
    )  # fmt: skip
