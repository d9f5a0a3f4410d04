"""How many times a stream of decode and prefill steps compiles each kernel, counted without a GPU.  recompiles.py STEPS

Drives the launchers through `triton_aot.capture` and asks Triton's own specialisation rules (value 1, multiple of 16, 32 or 64
bits, alignment) for the signature of every launch. A kernel that is specialised on something that changes from step to step
would be compiled again in the middle of a user's text.
"""

from __future__ import annotations

import collections
import sys

import torch
from triton_aot import TARGETS, capture, signature

from pykernels.triton import decode, kv_cache, prefill, rope, sampling

MASK = dict(
    causal=True, softmax_scale=0.09, window_left=-1, window_right=-1, softcap=0.0, alibi_slopes=None, sinks=None
)  # fmt: skip
HEADS, KV_HEADS, WIDTH, PAGE, VOCAB = 32, 8, 128, 16, 4096


def step(number: int) -> None:
    """One engine step: batch, block table and lengths are what `number` makes of them."""
    batch, tokens, pages = 2 + number % 61, 5 + number % 173, 2 + number % 509
    bf16, i32, i64 = torch.bfloat16, torch.int32, torch.int64
    cache = dict(
        k_cache=torch.empty(4, PAGE, KV_HEADS, WIDTH, dtype=bf16),
        v_cache=torch.empty(4, PAGE, KV_HEADS, WIDTH, dtype=bf16),
    )
    scales = dict(k_scale=None, v_scale=None)
    lengths = dict(block_table=torch.empty(batch, pages, dtype=i32), seqlens_k=torch.empty(batch, dtype=i32))
    q, new = torch.empty(batch, HEADS, WIDTH, dtype=bf16), torch.empty(tokens, KV_HEADS, WIDTH, dtype=bf16)
    decode.paged_decode_attention(
        q=q, **cache, **lengths, **scales, **MASK, split_size=0, workspace=None, out=torch.empty_like(q),
        lse=torch.empty(HEADS, (batch + 3) // 4 * 4)[:, :batch],
    )  # fmt: skip
    rows = torch.empty(tokens, HEADS, WIDTH, dtype=bf16)
    prefill.paged_prefill_attention(
        q=rows, **cache, **lengths, **scales, **MASK, cu_seqlens_q=torch.empty(batch + 1, dtype=i32), max_seqlen_q=tokens,
        max_seqlen_k=pages * PAGE, out=torch.empty_like(rows), lse=None,
    )  # fmt: skip
    positions = torch.empty(tokens, dtype=i64)
    kv_cache.rope_append_kv(
        q=rows, k=new, v=new, positions=positions, inv_freq=torch.empty(WIDTH // 2), interleaved=False, rope_scale=1.0, **cache,
        **scales, slot_mapping=torch.empty(tokens, dtype=i64), q_out=torch.empty_like(rows),
    )  # fmt: skip
    rope.rotary_embedding(
        q=rows, k=new, positions=positions, inv_freq=torch.empty(WIDTH // 2), interleaved=False, rope_scale=1.0,
        q_out=torch.empty_like(rows), k_out=torch.empty_like(new),
    )  # fmt: skip
    floats = {n: torch.empty(batch) for n in ("temperature", "top_p", "min_p")}
    sampling.sample(
        logits=torch.empty(batch, VOCAB), **floats, top_k=torch.empty(batch, dtype=i32), seeds=torch.empty(batch, dtype=i64),
        positions=torch.empty(batch, dtype=i64), repetition_penalty=torch.empty(batch), presence_penalty=None,
        frequency_penalty=None, prompt_ids=None, output_ids=torch.empty(batch, 3 + number, dtype=i64), logit_bias=None,
        allowed_mask=None, logprobs_mode="raw", ids=torch.empty(batch, dtype=i64), valid=torch.empty(batch, dtype=torch.bool),
        logprob=None, top_ids=None, top_logprobs=None,
    )  # fmt: skip


def main() -> int:
    found: dict[str, set[str]] = collections.defaultdict(set)
    for number in range(int(sys.argv[1])):
        for launch in capture(TARGETS["sm90"][0], lambda number=number: step(number)):
            key = f"{signature(launch)} {sorted(launch.options.items())}"
            # One kernel may serve two purposes (prefill and decode): each must have one specialisation.
            fixed = tuple(v is None for v in launch.arguments.values())
            found[f"{launch.kernel.__name__} {hash(fixed) & 0xFFFF:04x}"].add(key)
    for name, keys in sorted(found.items()):
        print(f"{name}: {len(keys)}")
    wrong = [name for name, keys in found.items() if len(keys) > 1]
    if wrong:
        print("specialised on something that changes from step to step:", ", ".join(wrong))
        for name in wrong:
            first, second = sorted(found[name])[:2]
            print(f"{name}\n  {first}\n  {second}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
