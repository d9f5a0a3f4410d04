"""The mask function of the adapter: what it recognises, that it shows what transformers' own mask shows, its arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from compat_models import NEW_MASKS, ROOT, keywords_of_calls, layer, mask_of, model_of, names_of, prompts
from transformers import masking_utils as hf

from pykernels.compat.transformers import attention, register
from pykernels.compat.transformers_mask import HINTS, Band, Pages, Runs, Segments, Table, band_of, visible_keys

Change = tuple[str, Any]  # ("changes" | "same", value or dict of arguments)

# ---- arguments ----------------------------------------------------------------------------------------------------------
MASK_BASE = {
    "batch_size": 2,
    "q_length": 9,
    "kv_length": 12,
    "q_offset": 3,
    "kv_offset": 0,
    "mask_function": hf.causal_mask_function,
    "attention_mask": None,
}
PADDING = torch.arange(12) >= torch.tensor([[0], [4]])
PADDINGS = {
    "none": None,
    "left": PADDING,
    "right": torch.arange(12) < torch.tensor([[12], [7]]),
    "right in every row": torch.arange(12) < torch.tensor([[5], [3]]),
    "both": (torch.arange(12) >= torch.tensor([[2], [0]])) & (torch.arange(12) < torch.tensor([[8], [11]])),
    "a row of nothing else": torch.arange(12) < torch.tensor([[0], [9]]),
    "holes": torch.arange(12) % 5 != torch.tensor([[1], [2]]),
}
MASK: dict[str, Change] = {
    "batch_size": ("changes", 3),
    "q_length": ("changes", {"q_length": 7, "q_offset": 5}),
    "kv_length": ("changes", 13),
    "q_offset": ("changes", 2),
    "kv_offset": ("changes", 1),
    "mask_function": ("changes", hf.sliding_window_causal_mask_function(4)),
    "attention_mask": ("changes", PADDING),
    "allow_is_bidirectional_skip": ("same", True),
    "allow_is_causal_skip": ("same", False),
    "config": ("same", transformers.LlamaConfig(sliding_window=4)),
    "device": ("same", torch.device("cpu")),
    "dtype": ("same", torch.float16),
    "local_size": ("same", 4),
    "use_vmap": ("same", True),
} | ({} if NEW_MASKS else {"cache_position": ("changes", torch.arange(9) + 1)})


CAUSAL = {"kv_length": 12, "attention_mask": PADDING}


def seen(args: dict[str, Any]) -> torch.Tensor:
    """What a mask shows, `[batch, queries, keys]`: attention over equal keys to values that are the rows of an identity."""
    given = dict(args)
    if not NEW_MASKS and "cache_position" not in given:
        given["cache_position"] = torch.arange(given["q_length"]) + given["q_offset"]
    if "cache_position" in given:
        given = {name: x for name, x in given.items() if name not in ("q_length", "q_offset")}
    mask = visible_keys(**given)
    queries, keys, batch = args["q_length"], args["kv_length"], args["batch_size"]
    zeros = torch.zeros(batch, 1, queries, 16)
    value = torch.eye(keys, 16).expand(batch, 1, keys, 16)
    return attention(layer(), zeros, torch.zeros(batch, 1, keys, 16), value, mask)[0][:, :, 0, :keys] > 0


def test_every_argument_of_the_mask_has_an_entry() -> None:
    passed = keywords_of_calls("mask_interface", [ROOT / "masking_utils.py"])
    theirs = names_of(hf.sdpa_mask, hf.eager_mask, hf.flash_attention_mask)
    assert {"mask_function", "kv_offset", "dtype", "config"} <= passed
    assert passed | theirs | names_of(visible_keys) <= {*MASK, "options"}
    assert {name for name, (kind, _) in MASK.items() if kind == "same"} == HINTS


@pytest.mark.parametrize("pattern", ["band", "list"])
@pytest.mark.parametrize("argument", sorted(MASK))
def test_an_argument_of_the_mask_has_an_effect_or_none_by_its_meaning(argument: str, pattern: str) -> None:
    kind, value = MASK[argument]
    change = dict(value) if isinstance(value, dict) else {argument: value}
    base = dict(MASK_BASE)
    if pattern == "list":
        base["mask_function"] = hf.and_masks(hf.causal_mask_function, lambda b, h, q, kv: kv != 6)
    plain, changed = seen(base), seen(base | change)
    assert (plain.shape == changed.shape and torch.equal(plain, changed)) == (kind == "same")


@pytest.mark.parametrize("function", ["causal", "window", "everything", "holes"])
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize(
    "sizes", [(9, 12, 3, 0), (9, 15, 3, 0), (1, 12, 11, 0), (5, 8, 7, 4), (12, 12, 0, 0), (3, 12, 4, 0)]
)
def test_what_is_visible_is_what_transformers_own_mask_shows(
    function: str, padding: str, sizes: tuple[int, int, int, int]
) -> None:
    """Of padding too: what follows the real tokens sees them, as in eager."""
    functions = {
        "causal": hf.causal_mask_function,
        "window": hf.sliding_window_causal_mask_function(3),
        "everything": lambda b, h, q, kv: q >= 0,
        "holes": hf.and_masks(hf.causal_mask_function, lambda b, h, q, kv: kv % 3 != 1),
    }
    args = dict(zip(("q_length", "kv_length", "q_offset", "kv_offset"), sizes, strict=True))
    args |= {"batch_size": 2, "mask_function": functions[function], "attention_mask": PADDINGS[padding]}
    theirs = dict(args) | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    if not NEW_MASKS:
        theirs["cache_position"] = torch.arange(theirs.pop("q_length")) + theirs.pop("q_offset")
    assert torch.equal(seen(args), hf.sdpa_mask(**theirs)[:, 0].expand(2, -1, -1))


@pytest.mark.parametrize("queries", [9, 1])
def test_layers_that_lay_out_their_keys_differently_share_a_mask(queries: int) -> None:
    """What is computed once per mask depends on how many rows lie between two sequences."""
    torch.manual_seed(4)
    q, k, v = (torch.randn(2, 2, n, 16) for n in (queries, 12, 12))
    sizes = {"q_length": queries, "q_offset": 12 - queries}
    mask = mask_of(**CAUSAL, **sizes)
    assert isinstance(mask, Runs if queries > 1 else Table)
    by_token = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v)]
    longer = [torch.cat((x, x), dim=2)[:, :, :12] for x in (k, v)]
    for keys, values in ((k, v), by_token, longer, (k, v)):
        alone = attention(layer(), q, k, v, mask_of(**CAUSAL, **sizes))[0]
        assert torch.equal(attention(layer(), q, keys, values, mask)[0], alone)


@pytest.mark.skipif(
    not NEW_MASKS, reason="4.x gives positions as a tensor, which are not read ahead of the keys' lengths"
)
def test_queries_after_the_last_key_see_all_keys() -> None:
    args = {"batch_size": 2, "q_length": 9, "kv_length": 11, "q_offset": 4, "mask_function": hf.causal_mask_function}
    assert torch.equal(seen(args), hf.sdpa_mask(**args, allow_is_causal_skip=False)[:, 0].expand(2, -1, -1))


def test_a_mask_option_that_nobody_knows_is_refused_unless_it_is_none() -> None:
    assert isinstance(mask_of(q_length=9, kv_length=9, unheard_of=None), Runs)
    with pytest.raises(NotImplementedError, match="unheard_of"):
        mask_of(q_length=9, kv_length=9, unheard_of=0)


# ---- masks ----------------------------------------------------------------------------------------------------------
def test_band_is_read_from_what_a_mask_function_computes() -> None:
    assert band_of(hf.causal_mask_function) == Band(None, 0)
    assert band_of(hf.sliding_window_causal_mask_function(5)) == Band(4, 0)
    assert band_of(lambda b, h, q, kv: q >= kv) == Band(None, 0)
    assert band_of(lambda b, h, q, kv: kv < q + 1) == Band(None, 0)
    assert band_of(lambda b, h, q, kv: abs(q - kv) <= 3) == Band(3, 3)
    assert band_of(lambda b, h, q, kv: q >= 0) == Band()


def test_a_pattern_that_is_not_a_band_is_listed_key_by_key() -> None:
    chunked = hf.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.long))
    either = hf.or_masks(hf.causal_mask_function, lambda b, h, q, kv: kv == 5)
    for function, kind in ((chunked, Segments), (either, Table), (lambda b, h, q, kv: kv < q, Table)):
        assert band_of(function) is None
        made = mask_of(q_length=6, kv_length=6, mask_function=function, allow_is_causal_skip=False)
        assert isinstance(made, kind)
    holes = torch.tensor([[1, 1, 0, 1, 1, 1]] * 2).bool()
    assert isinstance(mask_of(q_length=6, kv_length=6, attention_mask=holes), Table)
    late = torch.tensor([[0, 1, 1, 1, 1, 1]] * 2).bool()
    assert isinstance(mask_of(q_length=6, kv_length=6, attention_mask=late), Runs)
    assert isinstance(mask_of(q_length=1, q_offset=5, kv_length=6, attention_mask=late), Table)
    assert isinstance(mask_of(q_length=1, q_offset=5, kv_length=6), Pages)


def test_packed_positions_become_segments() -> None:
    register()
    model = model_of("Llama")
    ids = prompts(True, (20,))[0]
    positions = torch.cat((torch.arange(7), torch.arange(13)))[None]
    found = []
    with torch.no_grad():
        for implementation in ("eager", "pykernels"):
            model.set_attn_implementation(implementation)
            found.append(model(ids, position_ids=positions, use_cache=False).logits)
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-4)
    same = torch.tensor([[0] * 7 + [1] * 13])
    function = hf.and_masks(hf.causal_mask_function, hf.packed_sequence_mask_function(same))
    made = mask_of(batch_size=1, q_length=20, kv_length=20, mask_function=function)
    assert isinstance(made, Segments)
    assert made.cu_seqlens.tolist() == [0, 7, 20]
