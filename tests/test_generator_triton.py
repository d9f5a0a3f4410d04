"""The generator on the Triton backend, kernels interpreted where there is no GPU: the CPU backend's tokens, end to end."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("gguf")

from interpreter import patch_once
from tiny_models import tiny_tensors, write_gguf

from pykernels.generator import Completion, Generator, SamplingParams
from pykernels.triton import BACKEND
from pykernels.triton.common import INTERPRETED

if INTERPRETED.value:
    patch_once()

pytestmark = [
    pytest.mark.skipif(not INTERPRETED.value, reason="the generator keeps its tensors on the CPU"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, from lanes that a mask throws away
]
PROMPTS = ([5, 9, 101, 17, 230, 44, 8], [77, 12])
LENGTHS = (3, 6)  # the first request ends while the second runs on


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")


def generate(
    model: Path, backend: str, *prompts: list[int], seed: int | None = None, **options: str
) -> list[Completion]:
    made = Generator.from_pretrained(model, backend=backend, max_batch=2, cache_tokens=256, chunk=4, **options)
    params = [
        SamplingParams(max_new_tokens=n, ignore_eos=True, temperature=0.0 if seed is None else 0.8, seed=seed, top_k=40)
        for n, _ in zip(LENGTHS, prompts, strict=False)
    ]
    return made.generate(prompts, params)


@pytest.mark.parametrize("kv", ["auto", "int8", "fp8_e4m3"])
def test_greedy_tokens_of_two_requests_in_one_batch_equal_those_of_the_cpu(model: Path, kv: str) -> None:
    ours, cpu = (generate(model, name, *PROMPTS, kv=kv, compute="float32") for name in ("triton", "cpu"))
    assert [c.token_ids for c in ours] == [c.token_ids for c in cpu]
    assert [len(c.token_ids) for c in ours] == list(LENGTHS)


def test_a_request_gets_the_same_tokens_alone_and_in_a_batch(model: Path) -> None:
    together = generate(model, "triton", *PROMPTS, compute="float32")
    alone = generate(model, "triton", PROMPTS[0], compute="float32")
    assert alone[0].token_ids == together[0].token_ids


def test_seeded_draws_equal_those_of_the_cpu(model: Path) -> None:
    ours, cpu = (generate(model, name, PROMPTS[1], seed=3, compute="float32") for name in ("triton", "cpu"))
    assert ours[0].token_ids == cpu[0].token_ids


def test_quantised_weights_run_in_the_files_own_format(tmp_path: Path) -> None:
    """With bfloat16 keys and values, and activations that are not quantised: the weights that the file holds, no others."""
    types = {n: "Q4_1" for n, x in tiny_tensors().items() if x.ndim == 2}
    path = write_gguf(tmp_path / "q4_1.gguf", types=types)
    made = Generator.from_pretrained(path, backend="triton", max_batch=1, cache_tokens=128)
    matrices = made.decoder.matrices()
    assert {(w.format, w.layout) for w in matrices} == {("q4_1", "plain")}
    cpu = Generator.from_pretrained(path, backend="cpu", max_batch=1, cache_tokens=128)
    ours, theirs = (g.engine.logits(PROMPTS[0]) for g in (made, cpu))
    assert torch.nn.functional.cosine_similarity(ours, theirs).min() > 0.99
    assert not BACKEND.unavailable()
