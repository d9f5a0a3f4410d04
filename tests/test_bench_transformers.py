"""The work that the comparison with transformers divides by the roofs."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from compat_models import model_of
from torch.utils.flop_counter import FlopCounterMode

from pykernels.bench.transformers_model import Work, needed


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_the_needed_work_is_what_torch_counts_less_what_causality_hides(family: str) -> None:
    model, n = model_of(family), 37
    c = model.config
    model.set_attn_implementation("eager")
    work = Work.draw(c.vocab_size + 150, 1, n, 5, "dynamic")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(work.prompt.remainder(c.vocab_size), logits_to_keep=1)
    hidden = n * n - n * (n + 1) // 2
    heads = c.num_hidden_layers * c.num_attention_heads
    assert needed(model, work)["prefill"] == counter.get_total_flops() - 4 * c.head_dim * heads * hidden


def test_padding_needs_nothing() -> None:
    model = model_of("Llama")
    alone, padded = (needed(model, Work.draw(300, rows, 40, 5, "dynamic")) for rows in (1, 2))
    assert alone["prefill"] < padded["prefill"] < 2 * alone["prefill"]
    weights = sum(p.nbytes for p in model.parameters() if p.dim() > 1) - model.get_input_embeddings().weight.nbytes
    keys = alone["decode"] - weights
    assert keys == 4 * 2 * 3 * 2 * 16 * (
        40 + 3
    )  # float32, keys and values, layers, kv heads, head dim, tokens on average
    assert padded["decode"] == weights + keys * (40 + 40 - 10 + 2 * 3) / (40 + 3)
