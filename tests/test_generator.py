"""The generator on the real model: the oracle's tokens, the same bits everywhere, streaming, stops, seeds, records."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("gguf")

from oracle import Case, Divergence, compare, load_cases

from pykernels import native
from pykernels.contract import Cost, bind_dims
from pykernels.generator import Completion, Generator, SamplingParams
from pykernels.generator.graph import ModelStep
from pykernels.library import observed
from pykernels.models import resolve_model
from pykernels.models.decoder import Buffers


def packaged() -> str:
    try:
        resolve_model("smollm2")
    except ValueError as error:
        pytest.skip(str(error))
    return "smollm2"


@pytest.fixture(scope="module")
def exact() -> Generator:
    return Generator.from_pretrained(packaged(), compute="float32", weights="float32", max_batch=8)


@pytest.fixture(scope="module")
def quantised() -> Generator:
    return Generator.from_pretrained(packaged(), max_batch=8)


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return load_cases()


@pytest.fixture
def threads() -> Iterator[Any]:
    before = native.module().num_threads()
    yield native.module().set_num_threads
    native.module().set_num_threads(before)


def greedy(tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=tokens, **options)


# ---- truth ------------------------------------------------------------------------------------------------------
def test_float32_greedy_tokens_equal_those_of_transformers(exact: Generator, cases: list[Case]) -> None:
    done = exact.generate([c.prompt_ids for c in cases], greedy(64, ignore_eos=True))
    for case, completion in zip(cases, done, strict=True):
        assert list(completion.token_ids) == case.ids, case.name


def test_float32_logits_agree_with_transformers(exact: Generator, cases: list[Case]) -> None:
    for case in cases:
        got = case.sampled(exact.engine.logits(case.teacher_ids).numpy())
        want = case.rows["logits"]
        assert np.abs(got - want).max() <= 1e-3 * np.abs(want).max(), case.name


def decode_logits(generator: Generator, case: Case) -> np.ndarray:
    """Logits of the teacher's rows with everything after the first prompt token through the decode phase."""
    engine, ids = generator.engine, case.teacher_ids
    buffers = Buffers(engine.decoder.config, engine.decoder.precision, 1, 1)
    step = ModelStep(engine.decoder, engine.cache, buffers, "decode", (1, 1), engine.use_plan)
    sequence = engine.cache.add_sequence()
    rows = []
    for position, token in enumerate(ids):
        step.inputs.ids[0], step.inputs.positions[0] = token, position
        step.inputs.slot_mapping.copy_(engine.cache.append(sequence, 1))
        engine.cache.write_tables([sequence], step.inputs.block_table, step.inputs.seqlens_k)
        step.run()
        rows.append(step.buffers.logits.clone())
    engine.cache.free(sequence)
    return torch.cat(rows).numpy()


def total(parts: list[Divergence]) -> tuple[float, float]:
    """Mean KL over all rows, and the largest float32 gap at a top-1 miss."""
    rows = sum(p.rows for p in parts)
    return sum(p.kl * p.rows for p in parts) / rows, max(p.largest_missed_gap for p in parts)


@pytest.mark.parametrize(("kv", "limit"), [("auto", 0.002), ("int8", 0.003)])
def test_quantised_prefill_stays_close_to_float32(kv: str, limit: float, cases: list[Case]) -> None:
    generator = Generator.from_pretrained(packaged(), kv=kv, max_batch=1)
    parts = [compare(c.rows, generator.engine.logits(c.teacher_ids).numpy()) for c in cases]
    kl, gap = total(parts)
    assert kl <= limit
    assert gap <= 0.4


def test_quantised_decode_stays_close_to_float32(quantised: Generator, cases: list[Case]) -> None:
    short = [c for c in cases if len(c.teacher_ids) < 200]
    kl, gap = total([compare(c.rows, decode_logits(quantised, c)) for c in short])
    assert kl <= 0.005
    assert gap <= 0.4


def test_a_wrong_scale_would_be_noticed(quantised: Generator, cases: list[Case]) -> None:
    """The judges above can fail: five percent on the attention scale of one layer's norm passes neither."""
    norm = quantised.decoder.layers[3].attn_norm
    norm *= 1.3
    try:
        kl, _ = total([compare(c.rows, quantised.engine.logits(c.teacher_ids).numpy()) for c in cases[:4]])
    finally:
        norm /= 1.3
    assert kl > 0.005


# ---- the same bits everywhere ---------------------------------------------------------------------------------------
def ids(completions: list[Completion]) -> list[tuple[int, ...]]:
    return [c.token_ids for c in completions]


SAMPLED = greedy(24, temperature=0.9, top_p=0.95, seed=7, ignore_eos=True)


@pytest.mark.parametrize("params", [greedy(24, ignore_eos=True), SAMPLED], ids=["greedy", "sampled"])
def test_a_request_gives_the_same_tokens_alone_and_in_any_batch(
    params: SamplingParams, quantised: Generator, cases: list[Case]
) -> None:
    prompts = [c.prompt_ids for c in cases]
    alone = [ids(quantised.generate([p], params))[0] for p in prompts]
    assert ids(quantised.generate(prompts, params)) == alone
    assert ids(quantised.generate(prompts[::-1], params)) == alone[::-1]
    assert ids(quantised.generate(prompts[2:5], params)) == alone[2:5]


def test_logits_do_not_depend_on_the_chunk_the_threads_or_the_plan(
    quantised: Generator, cases: list[Case], threads: Any
) -> None:
    case = max(cases, key=lambda c: len(c.prompt_ids))
    whole = quantised.engine.logits(case.prompt_ids)
    before = quantised.engine.chunk
    try:
        for chunk in (1 + len(case.prompt_ids) // 2, len(case.prompt_ids) - 1, 100):
            quantised.engine.chunk = chunk
            assert torch.equal(quantised.engine.logits(case.prompt_ids), whole), chunk
    finally:
        quantised.engine.chunk = before
    short = min(cases, key=lambda c: abs(len(c.teacher_ids) - 80))
    decoded = decode_logits(quantised, short)
    threads(1)
    assert torch.equal(quantised.engine.logits(case.prompt_ids), whole)
    assert np.array_equal(decode_logits(quantised, short), decoded)
    threads(3)
    assert torch.equal(quantised.engine.logits(case.prompt_ids), whole)
    quantised.engine.use_plan = False
    try:
        assert np.array_equal(decode_logits(quantised, short), decoded)
    finally:
        quantised.engine.use_plan = True


TESTS = str(Path(__file__).parent)
HASH = """
import hashlib
from pykernels.generator import Generator
from oracle import load_cases
generator = Generator.from_pretrained("smollm2", max_batch=2)
case = load_cases()[1]
print(hashlib.sha256(generator.engine.logits(case.teacher_ids[:40]).numpy().tobytes()).hexdigest())
"""


@pytest.mark.parametrize("level", ["scalar", "avx2", "avx512", "emulated512"])
def test_every_isa_level_is_deterministic_over_threads(level: str) -> None:
    packaged()
    if reason := native.level_reason(level):
        pytest.skip(reason)
    hashes = set()
    for count in ("1", "2"):
        environment = os.environ | {"PYKERNELS_CPU_ISA": level, "PYKERNELS_THREADS": count, "PYTHONPATH": TESTS}
        done = subprocess.run([sys.executable, "-c", HASH], env=environment, capture_output=True, text=True, check=True)
        hashes.add(done.stdout)
    assert len(hashes) == 1


# ---- text -------------------------------------------------------------------------------------------------------
def test_streamed_pieces_join_to_the_text(quantised: Generator) -> None:
    params = greedy(40)
    prompt = quantised.encode_chat([{"role": "user", "content": "Write three emoji and the word naïve."}])
    pieces = list(quantised.stream(prompt, params))
    assert "".join(pieces) == quantised.generate([prompt], params)[0].text
    assert all("\ufffd" not in piece for piece in pieces[:-1])  # the length limit may cut a character


def test_a_stop_string_ends_the_text_and_no_part_of_it_leaks(quantised: Generator) -> None:
    prompt = "The capital of France is"
    full = quantised.generate([prompt], greedy(30))[0].text
    stop = full[12:18]
    done = quantised.generate([prompt], greedy(30, stop=[stop]))[0]
    assert done.text == full[: full.index(stop)]
    assert done.finish_reason == "stop"
    assert "".join(quantised.stream(prompt, greedy(30, stop=[stop]))) == done.text


def test_an_end_token_stops_and_is_not_text(quantised: Generator) -> None:
    prompt = quantised.encode_chat([{"role": "user", "content": "Say only the word yes."}])
    done = quantised.generate([prompt], greedy(200))[0]
    assert done.finish_reason == "stop"
    assert done.token_ids[-1] in quantised.config.eos_ids
    assert "<|im_end|>" not in done.text


def test_the_length_limit_is_exact(quantised: Generator) -> None:
    for n in (1, 2, 5):
        done = quantised.generate(["Once upon a time"], greedy(n, ignore_eos=True))[0]
        assert len(done.token_ids) == n
        assert done.finish_reason == "length"


def test_the_context_limit_ends_a_text() -> None:
    generator = Generator.from_pretrained(packaged(), max_batch=1)
    limit = 300  # of the model as if it were that small: its own 8,192 take half a minute
    generator.decoder.config = replace(generator.decoder.config, max_context=limit)
    prompt = [1 + i % 1000 for i in range(limit - 3)]
    done = generator.generate([prompt], greedy(50, ignore_eos=True))[0]
    assert len(done.token_ids) == 3
    assert done.finish_reason == "length"


def test_seeds_decide_the_tokens_and_no_seed_differs(quantised: Generator) -> None:
    def once(**options: Any) -> tuple[int, ...]:
        return quantised.generate(["My favourite"], greedy(16, temperature=1.5, ignore_eos=True, **options))[
            0
        ].token_ids

    assert once(seed=3) == once(seed=3)
    assert once(seed=3) != once(seed=4)
    assert once() != once()


def test_each_request_has_its_own_parameters(quantised: Generator) -> None:
    prompts = ["Rain falls because", "Rain falls because", "Rain falls because"]
    params = [
        greedy(12, ignore_eos=True),
        greedy(12, temperature=1.3, seed=5, ignore_eos=True),
        greedy(3, ignore_eos=True),
    ]
    done = quantised.generate(prompts, params)
    assert [len(c.token_ids) for c in done] == [12, 12, 3]
    assert done[0].token_ids[:3] == done[2].token_ids
    assert done[0].token_ids != done[1].token_ids
    assert done[1].token_ids == quantised.generate(prompts[:1], params[1])[0].token_ids


def test_logprobs_of_the_greedy_token_lead_the_list(quantised: Generator) -> None:
    done = quantised.generate(["Two plus two is"], greedy(5, logprobs=3))[0]
    assert done.logprobs is not None
    for token, entry in zip(done.token_ids, done.logprobs, strict=True):
        assert entry.top[0] == (token, pytest.approx(entry.logprob))
        assert len(entry.top) == 3
    assert quantised.generate(["Two plus two is"], greedy(5))[0].logprobs is None


def test_a_repetition_penalty_changes_a_repeating_text(quantised: Generator) -> None:
    prompt = "one two one two one two one two"
    plain, punished = (
        quantised.generate([prompt], greedy(16, repetition_penalty=p, ignore_eos=True))[0] for p in (1.0, 3.0)
    )
    assert len(set(punished.token_ids)) > len(set(plain.token_ids))


def test_more_requests_than_fit_wait_their_turn(cases: list[Case]) -> None:
    generator = Generator.from_pretrained(packaged(), max_batch=2, cache_tokens=1024)
    prompts = [c.prompt_ids[:100] for c in cases]
    params = greedy(8, ignore_eos=True)
    together = ids(generator.generate(prompts, params))
    assert together == [ids(generator.generate([p], params))[0] for p in prompts]
    assert generator.engine.cache.free_pages == generator.engine.cache.num_pages


def test_a_cancelled_stream_gives_its_pages_back(quantised: Generator) -> None:
    stream = quantised.stream("Once upon a time", greedy(50, ignore_eos=True))
    next(stream)
    stream.close()
    assert quantised.engine.cache.free_pages == quantised.engine.cache.num_pages


@pytest.mark.parametrize(
    ("prompt", "words"),
    [("", "prompt is empty"), ([5] * 9000, "the model's context is 8192"), ([70000], "outside the vocabulary")],
)
def test_a_prompt_that_cannot_run_is_refused(prompt: Any, words: str, quantised: Generator) -> None:
    with pytest.raises(ValueError, match=words):
        quantised.generate([prompt])
    assert quantised.generate(["Fine"], greedy(1))[0].finish_reason == "length"


# ---- records ----------------------------------------------------------------------------------------------------
def test_step_costs_equal_the_sum_of_the_contracts_costs(quantised: Generator) -> None:
    """The closed form of a step against the ops that it ran: matrices, attention, and the cache traffic of both."""
    engine, seen = quantised.engine, []

    def observer(op: Any, args: Any, run: Any) -> None:
        seen.append((op.name, op.cost(bind_dims(op, args), args), args))
        run()

    with observed(observer):
        engine.logits([5, 6, 7] * 40)
    matrices = [(cost, args) for name, cost, args in seen if name == "linear"]
    attention = sum((cost for name, cost, _ in seen if name == "paged_prefill_attention"), Cost(0, 0))
    flops, nbytes = engine.cost([120], [120], 120)
    assert flops == pytest.approx(sum(c.flops for c, _ in matrices) + attention.flops)
    kv_read = 120 * engine.cache.bytes_per_token
    weights = sum(args["weight"].numel() for _, args in matrices)
    rows = 120 * engine.decoder.embedding.nbytes / quantised.config.vocab_size
    assert nbytes == pytest.approx(weights + rows + 2 * kv_read)


def test_steps_tell_the_two_phases_apart(quantised: Generator) -> None:
    quantised.engine.steps.clear()
    quantised.generate([[7] * 300], greedy(4, ignore_eos=True))
    steps = quantised.engine.steps
    assert [s.phase for s in steps] == ["prefill", "prefill", "decode", "decode", "decode"]
    assert [s.tokens for s in steps] == [256, 44, 1, 1, 1]
    assert [s.context for s in steps] == [256, 300, 301, 302, 303]
    assert all(0 < s.kernel_seconds <= s.seconds for s in steps)
