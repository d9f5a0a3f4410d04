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


GENERATE: dict[str, dict[str, Any]] = {
    "greedy": {},
    "static cache": {"cache_implementation": "static"},
    "beams": {"num_beams": 3},
    "sampled": {"do_sample": True, "temperature": 0.7, "top_k": 20},
    "no cache": {"use_cache": False},
}


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("mode", GENERATE)
@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_generate_returns_the_ids_of_eager(family: str, mode: str, padding: str) -> None:
    model = model_of(family)
    ids, mask = prompts(True)
    found = {}
    for implementation in ("eager", "pykernels"):
        model.set_attn_implementation(implementation)
        torch.manual_seed(2)
        options = {"do_sample": False, "max_new_tokens": 16, "pad_token_id": 0, **GENERATE[mode]}
        given = mask if padding == "left" else torch.ones_like(mask)
        found[implementation] = model.generate(ids, attention_mask=given, eos_token_id=None, **options)
    assert torch.equal(found["eager"], found["pykernels"])


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
    found = {}
    for implementation in ("eager", "pykernels"):
        model.set_attn_implementation(implementation)
        found[implementation] = model.generate(
            ids,
            attention_mask=mask if padding == "left" else torch.ones_like(mask),
            cache_implementation="quantized",
            cache_config={"backend": backend, **sizes},
            do_sample=False,
            max_new_tokens=16,
            pad_token_id=0,
            eos_token_id=None,
        )
    assert torch.equal(found["eager"], found["pykernels"])


def test_assisted_generation_returns_the_ids_of_eager() -> None:
    model, assistant = model_of("Llama"), model_of("Llama")
    ids, _ = prompts(True, (12,))
    found = {}
    for implementation in ("eager", "pykernels"):
        model.set_attn_implementation(implementation)
        assistant.set_attn_implementation(implementation)
        found[implementation] = model.generate(
            ids, assistant_model=assistant, do_sample=False, max_new_tokens=16, pad_token_id=0, eos_token_id=None
        )
    assert torch.equal(found["eager"], found["pykernels"])


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
