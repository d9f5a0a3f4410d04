"""Every argument that transformers hands to its attention and mask functions, and every option of ours, has an entry here:
it has an effect, is refused by name, or leaves the bits alone by its meaning. The names are read off the signatures, off
transformers' own attention functions, and off the calls in its model files: a new one fails until it has an entry.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from compat_models import NEW_MASKS, ROOT, keywords_of_calls, layer, mask_of, names_of
from transformers import masking_utils as hf
from transformers.generation.continuous_batching import continuous_api
from transformers.integrations import flash_attention, sdpa_attention
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss
from transformers.modeling_flash_attention_utils import FlashAttentionKwargs
from transformers.utils import TransformersKwargs

from pykernels.compat import transformers_modules
from pykernels.compat.transformers import NEUTRAL, attention, register
from pykernels.compat.transformers_mask import table_of, visible_keys

Change = tuple[str, Any]  # ("changes" | "refused" | "same", value or dict of arguments; "base" replaces the base call)


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2


# ---- attention ------------------------------------------------------------------------------------------------------
BASE = {
    "module": layer(),
    "query": normal(2, 4, 9, 16, seed=1),
    "key": normal(2, 2, 9, 16, seed=2),
    "value": normal(2, 2, 9, 16, seed=3),
    "attention_mask": None,
}
CU = torch.tensor([0, 4, 9], dtype=torch.int32)
PACKED = {n: x[:1] if isinstance(x, torch.Tensor) else x for n, x in BASE.items()}
PACKED |= {"cu_seq_lens_q": CU, "cu_seq_lens_k": CU, "max_length_q": 5, "max_length_k": 5}
PACKED_OLD = {n: x for n, x in PACKED.items() if not n.startswith("max")} | {"max_seqlen_q": 5, "max_seqlen_k": 5}
MOVED = CU + torch.tensor([0, 1, 0], dtype=torch.int32)


class Cache:
    """The paged cache of continuous batching in 4.x, which the attention function has to update."""

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, read_index: Any, write_index: Any, **others: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(x[0].transpose(0, 1).flip(0)[read_index] + write_index for x in (key, value))


PAGED = {**PACKED, "cache": Cache(), "read_index": torch.arange(9), "write_index": 0.0}
FOUR = torch.ones(4)
ATTENTION: dict[str, Change] = {
    "module": ("changes", layer(causal=False)),
    "query": ("changes", BASE["query"].flip(2)),
    "key": ("changes", BASE["key"].flip(2)),
    "value": ("changes", BASE["value"].flip(2)),
    "attention_mask": ("changes", torch.eye(9).bool().expand(2, 1, 9, 9)),
    "scaling": ("changes", -0.3),
    "is_causal": ("changes", False),
    "sliding_window": ("changes", {"base": PACKED, "sliding_window": 2}),
    "softcap": ("changes", 0.5),
    "s_aux": ("changes", torch.ones(4)),
    "dropout": ("refused", 0.1),
    "output_attentions": ("refused", True),
    "head_mask": ("refused", FOUR),
    "position_bias": ("refused", torch.zeros(1, 4, 9, 9)),
    "sinks": ("refused", FOUR),
    "indices": ("refused", torch.zeros(2, 9, 4, dtype=torch.long)),
    "block_indices": ("refused", torch.zeros(2, 9, 4, dtype=torch.long)),
    "block_table": ("refused", {"base": PACKED, "block_table": torch.zeros(2, 1, dtype=torch.int32)}),
    "cu_seq_lens_q": ("changes", {"base": PACKED, "cu_seq_lens_q": MOVED}),
    "cu_seq_lens_k": ("changes", {"base": PACKED, "cu_seq_lens_k": MOVED}),
    "max_length_q": ("refused", {"base": PACKED, "max_length_q": None}),
    "max_length_k": ("refused", {"base": PACKED, "max_length_k": None}),
    "max_seqlen_q": ("allows", {"base": PACKED_OLD, "max_seqlen_q": 5}),
    "max_seqlen_k": ("allows", {"base": PACKED_OLD, "max_seqlen_k": 5}),
    "cache": ("changes", {"base": PACKED, **PAGED}),
    "read_index": ("changes", {"base": PAGED, "read_index": torch.arange(9).flip(0)}),
    "write_index": ("changes", {"base": PAGED, "write_index": 0.5}),
} | dict.fromkeys(NEUTRAL, ("same", torch.arange(9)))
CONSUMED = {"input_ids"}  # of the arguments of a forward pass, by the model itself
OF_THE_MODEL = {"logits", "labels", "vocab_size"}  # of a loss, whose other arguments go through the layers too
CALLED_OTHERWISE = {"cumulative_seqlens_q": "cu_seq_lens_q", "cumulative_seqlens_k": "cu_seq_lens_k"}


def what_transformers_passes() -> set[str]:
    files = sorted(ROOT.glob("models/*/modeling_*.py"))
    assert len(files) > 100
    paged = continuous_api.__dict__.get("PagedAttentionArgs")
    if paged is None:
        from transformers.generation.continuous_batching.input_outputs import PagedAttentionArgs as paged
    passed = keywords_of_calls("attention_interface", files)
    passed |= {CALLED_OTHERWISE.get(name, name) for name in paged.__annotations__} - CONSUMED
    passed |= {*TransformersKwargs.__annotations__, *FlashAttentionKwargs.__annotations__}
    passed |= names_of(ForCausalLMLoss, ForMaskedLMLoss) - OF_THE_MODEL
    return passed | names_of(sdpa_attention.sdpa_attention_forward, flash_attention.flash_attention_forward)


def test_every_argument_of_attention_has_an_entry() -> None:
    passed = what_transformers_passes()
    assert {"scaling", "cu_seq_lens_q", "read_index", "output_hidden_states", "softcap", "shift_labels"} <= passed
    assert passed | names_of(attention) <= {*ATTENTION}


def run(function: Callable[..., Any], args: dict[str, Any]) -> torch.Tensor:
    return function(**{name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in args.items()})[0]


@pytest.mark.parametrize("argument", sorted(ATTENTION))
def test_an_argument_of_attention_has_an_effect_or_is_refused(argument: str) -> None:
    kind, value = ATTENTION[argument]
    change = dict(value) if isinstance(value, dict) else {argument: value}
    base = change.pop("base", BASE)
    assert argument in change
    if kind == "refused":
        run(attention, base)
        with pytest.raises((NotImplementedError, ValueError), match=argument):
            run(attention, base | change)
    elif kind == "allows":
        with pytest.raises(ValueError, match=argument.replace("seqlen", "length")):
            run(attention, base | {argument: None})
        assert torch.equal(run(attention, base | change), run(attention, PACKED))
    else:
        assert torch.equal(run(attention, base | change), run(attention, base)) == (kind == "same")


def test_an_argument_that_nobody_knows_is_refused_unless_it_is_none() -> None:
    assert torch.equal(run(attention, BASE | {"unheard_of": None}), run(attention, BASE))
    with pytest.raises(NotImplementedError, match="unheard_of"):
        run(attention, BASE | {"unheard_of": False})


@pytest.mark.parametrize(
    "argument", ["cu_seq_lens_k", "max_length_q", "max_length_k", "cache", "read_index", "write_index"]
)
def test_lengths_without_the_starts_of_the_queries_are_refused(argument: str) -> None:
    with pytest.raises(ValueError, match=f"{argument} needs cu_seq_lens_q"):
        run(attention, BASE | {argument: PAGED[argument]})


# ---- masks beside arguments ------------------------------------------------------------------------------------------------------
def inputs(queries: int = 9, keys: int = 9) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    return torch.randn(2, 4, queries, 16), torch.randn(2, 2, keys, 16), torch.randn(2, 2, keys, 16)


def test_the_layer_says_whether_it_is_causal_where_the_call_does_not() -> None:
    q, k, v = inputs()
    both = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(attention(layer(causal=False), q, k, v, None)[0], both, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_mask_of_the_callers_own_is_obeyed(kind: str) -> None:
    q, k, v = inputs(5, 9)
    shown = torch.rand(2, 1, 5, 9) < 0.5
    shown[..., 0] = True
    mask = shown if kind == "bool" else torch.where(shown, 0.0, torch.finfo(torch.float32).min)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, shown, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(attention(layer(), q, k, v, mask)[0], expected, rtol=1e-5, atol=1e-5)


def test_packed_lengths_are_obeyed() -> None:
    q, k, v = (x[:1] for x in inputs())
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 5, "max_length_k": 5}
    out = attention(layer(), q, k, v, None, **lengths)[0]
    torch.testing.assert_close(out[:, 4:], attention(layer(), q[:, :, 4:], k[:, :, 4:], v[:, :, 4:], None)[0])
    windowed = attention(layer(), q, k, v, None, sliding_window=2, **lengths)[0]
    assert not torch.allclose(windowed, out, atol=1e-3)
    padded = mask_of(q_length=9, kv_length=9, batch_size=1, attention_mask=torch.ones(1, 9).bool())
    with pytest.raises(ValueError, match="contradict"):
        attention(layer(), q, k, v, padded, **lengths)


def test_a_mask_that_contradicts_the_call_is_refused() -> None:
    q, k, v = inputs()
    with pytest.raises(ValueError, match="where do 3 causal queries"):
        attention(layer(), q[:, :, :3], k, v, None)
    with pytest.raises(ValueError, match="needs a mask"):
        attention(layer(), q, k, v, None, sliding_window=4)
    with pytest.raises(ValueError, match="for 8 keys"):
        attention(layer(), q, k, v, mask_of(q_length=8, kv_length=8))
    with pytest.raises(ValueError, match="for 3 queries"):
        attention(layer(), q, k, v, mask_of(q_length=3, q_offset=6, kv_length=9))
    with pytest.raises(ValueError, match="sliding_window=4"):
        attention(layer(), q, k, v, mask_of(q_length=9, kv_length=9), sliding_window=4)
    with pytest.raises(NotImplementedError, match="-inf elsewhere"):
        attention(layer(), q, k, v, torch.full((2, 1, 9, 9), 0.5))
    with pytest.raises(NotImplementedError, match="4 heads"):
        table_of(torch.ones(2, 4, 9, 9, dtype=torch.bool))


# ---- register and use_ops -------------------------------------------------------------------------------------------
def test_register_has_these_options_and_each_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert names_of(register) == {"name", "continuous_batching", "torch_threads"}
    shared: list[bool] = []
    monkeypatch.setattr("pykernels.compat.transformers.share_torch_threads", lambda: shared.append(True))
    register("another", torch_threads=False)
    assert shared == []
    assert register("another") == "another"
    assert shared == [True]
    assert transformers.AttentionInterface()["another"] is attention
    assert hf.AttentionMaskInterface()["another"] is visible_keys
    assert register("another", continuous_batching=True) == ("another_flash" if NEW_MASKS else "another")
    if NEW_MASKS:
        assert transformers.AttentionInterface()["another_flash"] is attention


def test_use_ops_has_this_option() -> None:
    assert names_of(transformers_modules.use_ops) == {"model"}
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    assert not any(transformers_modules.use_ops(model)), "nothing here is ours to replace"


def test_every_function_that_this_adapter_offers_is_tested_here() -> None:
    """What a caller can import and call: the two that transformers calls, and the two that a user calls."""
    from pykernels.compat import transformers as adapter

    offered = {
        n
        for n, f in vars(adapter).items()
        if inspect.isfunction(f) and f.__module__ == adapter.__name__ and n[0] != "_"
    }
    offered |= {n for n, f in vars(transformers_modules).items() if n == "use_ops"}
    assert offered == {"register", "attention", "use_ops"}
