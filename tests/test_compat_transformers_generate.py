"""`generate` and `generate_batch` in every mode with `attn_implementation="pykernels"`: the ids of eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from compat_models import model_of, prompts

from pykernels.compat.transformers import register


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    register()


# Group beams, contrastive search and DoLa left transformers for code on the hub (4.56, 5.0) and are not here; what they ask
# of attention and cache (hidden states, rows of a cache repeated and chosen) is in `contrastive` below.
GENERATE: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 0.7, "top_k": 20},
    "sampled, several": {"do_sample": True, "top_p": 0.9, "num_return_sequences": 3},
    "beams": {"num_beams": 3},
    "beams, several": {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.5},
    "beams, sampled": {"num_beams": 3, "do_sample": True},
    "prompt lookup": {"prompt_lookup_num_tokens": 4, "repetition_penalty": 1.1},
    "penalties": {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "min_new_tokens": 4},
    "no cache": {"use_cache": False},
    "static cache": {"cache_implementation": "static"},
    "static cache, beams": {"cache_implementation": "static", "num_beams": 2},
    "offloaded cache": {"cache_implementation": "offloaded"},
    "offloaded static cache": {"cache_implementation": "offloaded_static"},
    "prompt in chunks": {"prefill_chunk_size": 8},
}
ON_GPU = {"offloaded cache", "offloaded static cache"}  # transformers copies on streams of CUDA
SINGLE = {"prompt lookup"}  # one row at a time, says transformers


def both(model: Any, *args: Any, seed: int = 2, **options: Any) -> dict[str, Any]:
    """What `generate` returns with eager's attention and with ours."""
    found = {}
    defaults = {"do_sample": False, "max_new_tokens": 10, "pad_token_id": 0, "eos_token_id": None}
    for implementation in ("eager", "pykernels"):
        model.set_attn_implementation(implementation)
        torch.manual_seed(seed)
        found[implementation] = model.generate(*args, **{**defaults, **options})
    return found


@pytest.mark.parametrize(
    ("family", "padding"),
    [("Llama", "none"), ("Gemma3", "left")]
    + [
        pytest.param(*slow, marks=pytest.mark.slow)
        for slow in (("Llama", "left"), ("Gemma3", "none"), ("GptOss", "left"))
    ],
)
@pytest.mark.parametrize("mode", GENERATE)
def test_generate_returns_the_ids_of_eager(family: str, mode: str, padding: str) -> None:
    if mode in ON_GPU and not torch.cuda.is_available():
        pytest.skip("an offloaded cache needs a GPU")
    ids, mask = prompts(True, (20,)) if mode in SINGLE else prompts(True)
    given = mask if padding == "left" else torch.ones_like(mask)
    found = both(model_of(family), ids, attention_mask=given, **GENERATE[mode])
    assert found["eager"].shape[1] == 30
    assert torch.equal(found["eager"], found["pykernels"])


@pytest.mark.parametrize("mode", ["greedy", "beams", "no cache", "static cache"])
@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_prompts_padded_on_the_right_return_the_ids_of_eager(family: str, mode: str) -> None:
    """Of little use, as the last query is padding, but it sees the prompt, alone or with the tokens that follow it."""
    ids, mask = prompts(False)
    found = both(model_of(family), ids, attention_mask=mask, **GENERATE[mode])
    assert torch.equal(found["eager"], found["pykernels"])
    plain, assistant = both(model_of(family), ids[:1], attention_mask=mask[:1]), model_of(family, seed=5)
    assisted = both(model_of(family), ids[:1], attention_mask=mask[:1], assistant_model=assistant)
    assert torch.equal(plain["eager"], assisted["pykernels"])


def test_a_second_turn_on_the_same_cache_returns_the_ids_of_eager() -> None:
    model = model_of("Gemma3")
    ids, mask = prompts(True)
    first = both(model, ids, attention_mask=mask, return_dict_in_generate=True)
    found = []
    for name, turn in first.items():
        model.set_attn_implementation(name)
        more = torch.cat((turn.sequences, prompts(True, (6, 6, 6))[0]), dim=1)
        seen = torch.cat((mask, torch.ones(3, more.shape[1] - mask.shape[1], dtype=torch.long)), dim=1)
        options = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 0, "eos_token_id": None}
        found.append(model.generate(more, attention_mask=seen, past_key_values=turn.past_key_values, **options))
    assert torch.equal(*found)


def contrastive(model: Any, input_ids: torch.Tensor, **options: Any) -> torch.Tensor:
    """Contrastive search (Su et al., 2022): of the likeliest 4 tokens the one least like what came before."""
    mask, ids, rows, k = options["attention_mask"], input_ids, input_ids.shape[0], 4
    mask = torch.ones_like(ids) if mask is None else mask
    done = model(ids, attention_mask=mask, output_hidden_states=True, use_cache=True)
    before, cache = done.hidden_states[-1], done.past_key_values
    for _ in range(8):
        chance, token = done.logits[:, -1].softmax(-1).topk(k)
        mask = torch.cat((mask, torch.ones_like(mask[:, :1])), dim=1)
        cache.batch_repeat_interleave(k)
        positions = (mask.sum(-1, keepdim=True) - 1).repeat_interleave(k, 0)
        done = model(
            token.view(-1, 1),
            attention_mask=mask.repeat_interleave(k, 0),
            position_ids=positions,
            past_key_values=cache,
            output_hidden_states=True,
        )
        new = done.hidden_states[-1]
        alike = torch.nn.functional.cosine_similarity(before.repeat_interleave(k, 0), new, dim=-1)
        alike = alike.masked_fill(mask[:, :-1].repeat_interleave(k, 0) == 0, -1).max(-1).values
        best = (0.4 * chance - 0.6 * alike.view(rows, k)).argmax(-1)
        chosen = torch.arange(rows) * k + best
        cache.batch_select_indices(chosen)
        done.logits, ids = done.logits[chosen], torch.cat((ids, token.gather(1, best[:, None])), dim=1)
        before = torch.cat((before, new[chosen]), dim=1)
    return ids


@pytest.mark.parametrize("padding", ["none", "left"])
def test_contrastive_search_returns_the_ids_of_eager(padding: str) -> None:
    ids, mask = prompts(True)
    given = mask if padding == "left" else torch.ones_like(mask)
    found = both(model_of("Llama"), ids, attention_mask=given, custom_generate=contrastive)
    assert torch.equal(found["eager"], found["pykernels"])


def test_an_encoder_and_decoder_return_the_ids_of_eager() -> None:
    """Attention both ways over padded prompts, and of a decoder over them."""
    torch.manual_seed(0)
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    config = transformers.BartConfig(vocab_size=128, init_std=0.3, forced_eos_token_id=None, **sizes, **heads)
    model = transformers.BartForConditionalGeneration(config).eval()
    ids, mask = prompts(False)
    for options in ({}, {"num_beams": 3}):
        found = both(model, ids, attention_mask=mask, **options)
        assert torch.equal(found["eager"], found["pykernels"])
        alone = both(model, ids)
        assert not torch.equal(alone["eager"], found["eager"]), "padding makes no difference here"


QUANTISED = {"quanto": "optimum.quanto", "hqq": "hqq", "fp8": "transformers"}


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("backend", [pytest.param("quanto", marks=pytest.mark.slow), "hqq", "fp8"])  # quanto compiles
def test_quantised_caches_return_the_ids_of_eager(backend: str, padding: str) -> None:
    pytest.importorskip(QUANTISED[backend])
    if backend == "fp8" and not hasattr(transformers.cache_utils, "Fp8QuantizedLayer"):
        pytest.skip("this version of transformers has no fp8 cache")
    model = model_of("Llama")
    ids, mask = prompts(True)
    sizes = {} if backend == "fp8" else {"nbits": 4, "q_group_size": 16, "residual_length": 8}
    options = {"cache_implementation": "quantized", "cache_config": {"backend": backend, **sizes}, "max_new_tokens": 16}
    found = both(model, ids, attention_mask=mask if padding == "left" else torch.ones_like(mask), **options)
    assert torch.equal(found["eager"], found["pykernels"])


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("assistant_by", ["eager", "pykernels"])
def test_assisted_generation_returns_the_ids_of_eager(sampled: bool, assistant_by: str) -> None:
    model, assistant = model_of("Llama"), model_of("Llama", seed=5 if sampled else 0)
    assistant.set_attn_implementation(assistant_by)
    found = both(model, prompts(True, (12,))[0], assistant_model=assistant, do_sample=sampled, max_new_tokens=16)
    assert torch.equal(found["eager"], found["pykernels"])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_generate_with_a_compiled_forward_returns_the_ids_of_eager(family: str) -> None:
    model = model_of(family)
    ids, mask = prompts(True)
    torch._dynamo.reset()
    plain = both(model, ids, attention_mask=mask, cache_implementation="static")["eager"]
    model.forward = torch.compile(model.forward, fullgraph=True)
    compiled = model.generate(
        ids,
        attention_mask=mask,
        cache_implementation="static",
        do_sample=False,
        max_new_tokens=10,
        pad_token_id=0,
        eos_token_id=None,
    )
    assert torch.equal(compiled, plain)


@pytest.mark.skipif(
    transformers.__version__ < "5", reason="continuous batching of 4.x measures memory with psutil on a CPU"
)
@pytest.mark.parametrize("family", ["Llama", "Mistral", "Gemma3"])
def test_continuous_batching_returns_the_ids_of_generate(family: str) -> None:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model = model_of(family)
    rows = [torch.randint(3, 128, (n,)).tolist() for n in (5, 12, 20)]
    model.set_attn_implementation("eager")
    expected = []
    for row in rows:
        ids = torch.tensor([row])
        out = model.generate(ids, max_new_tokens=10, do_sample=False, pad_token_id=0, eos_token_id=None)
        expected.append(out[0, len(row) :].tolist())
    model.set_attn_implementation(register(continuous_batching=True))
    config = GenerationConfig(max_new_tokens=10, do_sample=False, eos_token_id=-1, pad_token_id=0)
    small = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=16, page_size=8)  # prompts come in chunks
    done = model.generate_batch(inputs=rows, generation_config=config, continuous_batching_config=small)
    assert [done[k].generated_tokens for k in sorted(done)] == expected
