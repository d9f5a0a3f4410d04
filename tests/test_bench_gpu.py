"""The GPU benchmarks without a GPU: the table, its checks that must notice, what a run keeps, ceilings from known times."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pykernels.bench import gpu, gpu_peers, sanitize, spot_check
from pykernels.bench.clocks import CpuClock
from pykernels.bench.harness import StopRule, kernel_call
from pykernels.contract import OPS
from pykernels.roofline.gpu_ceilings import GpuProber
from pykernels.testing import attention_cases, sampling_cases
from pykernels.testing.attention_cases import Attention
from pykernels.testing.compare import Mismatch
from pykernels.testing.emulated_cuda import EmulatedCuda
from pykernels.testing.emulation_build import available as emulation_missing
from pykernels.testing.factories import Case
from pykernels.triton import tuned

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[1]
RULE = StopRule(min_samples=2, max_samples=3, seconds=0.01)


def small(op: str) -> gpu.Benchmark:
    """A benchmark of the table's kind that two cores do in no time."""
    shape = Attention(
        q_lens=(40,), k_lens=(40,), heads=8, kv_heads=2, head_dim=64, head_dim_v=64, dtype=torch.bfloat16, lse=False
    )
    options = {"temperature": 0.8, "top_k": 5, "top_p": 0.9}

    def sample(make: Any) -> dict[str, Any]:
        spec = sampling_cases.Sampling(5, 1000, torch.float32, use=(), num_logprobs=None)
        args = sampling_cases.sample(spec, make)
        for name, value in options.items():
            args[name].fill_(value)
        return args

    builds: dict[str, tuple[Any, dict[str, Any]]] = {
        "prefill_attention": (lambda make: attention_cases.prefill(shape, make), {"tokens": 8192}),
        "paged_decode_attention": (
            lambda make: attention_cases.decode(Attention(**{**vars_of(shape), "k_lens": (40,) * 3}), make),
            {"batch": 3, "context": 40, "kv": "bfloat16"},
        ),
        "sample": (sample, {"filters": "top_k_top_p", **options}),
    }
    build, traits = builds[op]
    return gpu.Benchmark(f"small-{op}", Case(op, "small", build, False), traits)


def vars_of(spec: Attention) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in spec.__dataclass_fields__}


ALL = ("prefill_attention", "paged_decode_attention", "sample")


def computed(op: str) -> dict[str, Any]:
    args = gpu.build(small(op), CPU)
    kernel_call("cpu")(op, args)()
    return args


def test_the_table_has_the_shapes_that_people_serve() -> None:
    names = [b.name for b in gpu.table()]
    assert len(set(names)) == len(names)
    assert {f"prefill-causal-{k}k" for k in (1, 2, 4, 8, 16)} <= set(names)
    for kv in ("bfloat16", "fp8_e4m3", "int8"):
        assert {f"decode-batch_{b}-{c}k-kv_{kv}" for b in (1, 8, 64) for c in (1, 8)} <= set(names)
    assert {f"sample-batch_64-{f}" for f in ("greedy", "temperature", "top_k_top_p")} <= set(names)
    assert len(names) == 5 + 18 + 3


def test_listing_needs_no_gpu_and_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(gpu.table())
    assert all("cuda" in line and "triton" in line for line in lines)
    assert gpu.main(["--list", "--only", "nothing"]) == 2
    if not torch.cuda.is_available():
        assert gpu.main([]) == 2
        assert "there is no GPU" in capsys.readouterr().err


def test_a_gpu_s_file_has_its_name() -> None:
    assert tuned.slug("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3"


# ---- checks --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("op", ALL)
def test_rows_of_a_right_result_pass(op: str) -> None:
    assert 0 <= spot_check.verify(OPS[op], computed(op), exact=True, what="here") <= 1


@pytest.mark.parametrize(
    ("op", "spoil"),
    [
        ("prefill_attention", lambda a: a["out"][0, 0, 3:4].add_(0.5)),
        ("prefill_attention", lambda a: a["out"][-1, -1, 3:4].add_(0.5)),
        ("paged_decode_attention", lambda a: a["out"][0, 7, :1].add_(0.5)),
        ("paged_decode_attention", lambda a: a["out"][-1, 4, :1].mul_(1.5)),
        ("sample", lambda a: a["ids"][4:].add_(1)),
        ("sample", lambda a: a["valid"].logical_not_()),
    ],
)
def test_a_wrong_row_is_noticed(op: str, spoil: Any) -> None:
    args = computed(op)
    spoil(args)
    with pytest.raises(Mismatch, match="here is wrong"):
        spot_check.verify(OPS[op], args, exact=True, what="here")


def test_a_peer_s_draw_outside_the_support_is_noticed() -> None:
    args = computed("sample")
    assert spot_check.verify(OPS["sample"], args, exact=False, what="here") == 0.0
    order = args["logits"].argsort(-1, descending=True)
    args["ids"] = order[:, 5]  # one past top_k
    with pytest.raises(Mismatch, match="5 ids outside the support"):
        spot_check.verify(OPS["sample"], args, exact=False, what="here")
    args["ids"] = order[:, 4]
    spot_check.verify(OPS["sample"], args, exact=False, what="here")
    args["ids"] = torch.full_like(order[:, 0], 1000)
    with pytest.raises(Mismatch):
        spot_check.verify(OPS["sample"], args, exact=False, what="here")


# ---- a run ---------------------------------------------------------------------------------------------------------
def document() -> dict[str, Any]:
    return {"results": [], "skipped": [], "failed": []}


def test_a_run_measures_ours_and_the_peers_and_keeps_each_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "BACKENDS", ("cpu", "triton"))
    monkeypatch.setattr(
        gpu_peers,
        "PEERS",
        tuple(p for p in gpu_peers.PEERS if p.name in ("sdpa", "sdpa-flash", "torch", "flash-attn-2")),
    )
    bench = gpu.Bench(CPU, CpuClock(), None, None, RULE)
    found, kept = document(), []
    good = gpu.run(
        bench,
        found,
        [small(op) for op in ALL],
        ("cpu",),
        lambda: kept.append(len(found["results"])),
        time.monotonic() + 60,
    )
    assert good
    assert not found["failed"], found["failed"]
    measured = {(r["op"], r["implementation"]) for r in found["results"]}
    assert {(op, "cpu") for op in ALL} <= measured
    assert {("prefill_attention", "sdpa-flash"), ("paged_decode_attention", "sdpa"), ("sample", "torch")} <= measured
    assert kept == sorted(kept)
    assert len(kept) == 3
    reasons = {(s["implementation"], s["reason"]) for s in found["skipped"]}
    assert ("triton", "backend triton is not available") in reasons
    for result in found["results"]:
        assert result["seconds"] > 0
        assert result["copies"] > 1
        assert result["bytes"] > 0


def test_a_wrong_backend_fails_the_run_and_a_wrong_peer_is_only_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(args: dict[str, Any]) -> Any:
        return gpu_peers.kept(lambda: torch.zeros_like(args["out"]), "out", args["out"].shape)

    monkeypatch.setattr(gpu, "BACKENDS", ("cpu",))
    monkeypatch.setattr(gpu_peers, "PEERS", (gpu_peers.Peer("zeros", "prefill_attention", wrong),))
    bench, found = gpu.Bench(CPU, CpuClock(), None, None, RULE), document()
    far = time.monotonic() + 60
    assert gpu.run(bench, found, [small("prefill_attention")], ("cpu",), lambda: None, far)
    assert [f["implementation"] for f in found["failed"]] == ["zeros"]
    assert "Mismatch" in found["failed"][0]["error"]

    def refuse(*_: Any, **__: Any) -> float:
        raise Mismatch("prefill is wrong")

    monkeypatch.setattr(spot_check, "verify", refuse)
    assert not gpu.run(bench, document(), [small("prefill_attention")], ("cpu",), lambda: None, far)


def test_what_the_time_budget_leaves_out_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "BACKENDS", ("cpu",))
    bench, found = gpu.Bench(CPU, CpuClock(), None, None, RULE), document()
    gpu.run(bench, found, [small("sample")], ("cpu",), lambda: None, time.monotonic() - 1)
    assert not found["results"]
    assert found["skipped"][0]["reason"] == "the time budget was spent"


def test_peers_that_compile_first_wait_until_all_else_is_measured() -> None:
    order = [(b.name, [name for name, _, _ in found]) for b, found in gpu.schedule(gpu.table(), ())]
    quick, slow = order[: len(gpu.table())], order[len(gpu.table()) :]
    assert all(names[:2] == ["cuda", "triton"] and "flashinfer" not in names for _, names in quick)
    assert slow[0] == ("prefill-causal-8k", ["flex_attention", "flashinfer"])
    assert sorted(len(names) for _, names in order) == sorted(map(len, [n for _, n in quick] + [n for _, n in slow]))
    both = sum(len(list(gpu.implementations(b, ()))) for b in gpu.table())
    assert sum(len(names) for _, names in order) == both  # none is lost, none is there twice


def test_a_lost_device_ends_the_run_and_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dying(CpuClock):
        dead = False

        def settle(self) -> None:
            if self.dead:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")

    clock = Dying()

    def crash(args: dict[str, Any]) -> Any:
        clock.dead = True
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(gpu, "BACKENDS", ("cpu",))
    monkeypatch.setattr(gpu_peers, "PEERS", (gpu_peers.Peer("crash", "prefill_attention", crash),))
    found, kept = document(), []
    bench = gpu.Bench(CPU, clock, None, None, RULE)
    chosen = [small(op) for op in ALL]
    far = time.monotonic() + 60
    assert not gpu.run(bench, found, chosen, ("cpu",), lambda: kept.append(len(found["results"])), far)
    assert [r["implementation"] for r in found["results"]] == ["cpu"]  # what was measured before it stays
    assert [f["implementation"] for f in found["failed"]] == ["crash"]
    assert [s["reason"] for s in found["skipped"]] == ["the device was lost when crash ran small-prefill_attention"] * 2
    assert kept == [1, 1, 1]


def test_a_document_says_what_was_checked_before() -> None:
    made = gpu.new_document(CPU, None, "command", "build=ok correctness=over_budget")
    assert made["checks"] == {"build": "ok", "correctness": "over_budget"}
    assert gpu.new_document(CPU, None, "command", "")["checks"] == {}
    assert made["versions"]["torch"] == torch.__version__


# ---- what compute-sanitizer watches --------------------------------------------------------------------------------
def test_every_op_is_launched_under_the_sanitizer_smoke_cases_first() -> None:
    if reason := emulation_missing():
        pytest.skip(reason)
    order = sanitize.order()
    smoke = [case.smoke for case in order]
    assert smoke == sorted(smoke, reverse=True)
    assert {c.op for c in order if c.smoke} == set(OPS)
    assert not any("vast" in c.name for c in order)
    done = sanitize.launch(EmulatedCuda(races=False), "cpu", time.monotonic())
    assert not done.errors
    assert set(done.count) == set(OPS)
    assert done.count["prefill_attention"] >= 6  # masks are in cases of float32, which run as bfloat16
    assert done.left_out == len(smoke) - sum(smoke)


def test_an_op_that_fails_or_never_runs_is_an_error_under_the_sanitizer(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        name = "failing"

        def unavailable(self) -> list[str]:
            return []

        def refuses(self, op_name: str, args: dict[str, Any]) -> list[str]:
            return ["no"] if op_name == "sample" else []

        def run(self, op_name: str, args: dict[str, Any]) -> None:
            if op_name == "rms_norm":
                raise RuntimeError("cudaErrorIllegalAddress")

    done = sanitize.launch(Failing(), "cpu", time.monotonic())
    assert "sample: no case was launched" in done.errors
    assert "rms_norm-bfloat16: cudaErrorIllegalAddress" in done.errors
    assert not [e for e in done.errors if not e.startswith(("sample", "rms_norm"))]
    if not torch.cuda.is_available():
        assert sanitize.main([]) == 2


# ---- ceilings ------------------------------------------------------------------------------------------------------
def prober(seconds: dict[str, float]) -> GpuProber:
    """Every probe runs on the CPU once per sample, and takes the time that its kind is given."""
    sizes = {"l2_bytes": 4096, "memory_bytes": 1 << 16, "matrix": {"bfloat16": 8, "float32": 8}}
    made = GpuProber(CPU, lambda work: (work(), now[0])[1], **sizes)
    now, plain = [1.0], made._work

    def work(name: str) -> Any:
        now[0] = seconds[name]
        return plain(name)

    made._work = work  # type: ignore[method-assign]
    return made


def test_ceilings_are_amounts_over_times() -> None:
    found = prober({"dram": 1e-3, "copy": 2e-3, "l2": 1e-4, "bfloat16": 1e-6, "float32": 1e-5}).measure()
    assert found.table["dram"].value == pytest.approx(65536 / 1e-3)
    assert found.table["copy"].value == pytest.approx(65536 / 2e-3)
    assert found.table["l2"].value == pytest.approx(20 * 2048 / 1e-4)
    assert found.table["bfloat16"].value == pytest.approx(2 * 8**3 / 1e-6)
    assert found.bandwidth(4096) == "l2"
    assert found.bandwidth(4097) == "dram"
    assert found.peak("bfloat16") == "bfloat16"


def test_memory_s_ceiling_is_the_faster_of_reading_and_copying_and_a_slow_l2_probe_is_dropped() -> None:
    found = prober({"dram": 2e-3, "copy": 1e-3, "l2": 1.0, "bfloat16": 1e-6, "float32": 1e-5}).measure()
    assert found.table["dram"].value == pytest.approx(65536 / 1e-3)
    assert "l2" not in found.table
    assert found.bandwidth(1) == "dram"


# ---- the script ----------------------------------------------------------------------------------------------------
FAKES = {
    "nvidia-smi": "echo GPU 0",
    "compute-sanitizer": """echo "$*" >> $CALLS
case "$*" in *racecheck*) echo "RACECHECK 1 hazard"; exit 9 ;; *synccheck*) [ -z "${HANG:-}" ] || { echo $$ >> $HANG; exec sleep 60; } ;; esac""",
    "python": """case "$*" in
*versions*) echo torch ;; *arch) echo 90a ;; *packages | *toolkit) ;;
*pytest*) trap 'echo interrupted; exit 2' INT; echo "$*" >> $CALLS; for i in {1..600}; do sleep 0.1; done ;;
*) echo "$*" "archs=${PYKERNELS_CUDA_ARCHS:-}" >> $CALLS ;;
esac""",
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the script, commands that only note their arguments, and a venv made of them; tests hang."""
    (tmp_path / "ci").mkdir()
    (tmp_path / "ci/gpu.sh").write_text((ROOT / "ci/gpu.sh").read_text())
    for folder in ("bin", ".venv-gpu/bin"):
        (tmp_path / folder).mkdir(parents=True)
        for name, body in FAKES.items():
            path = tmp_path / folder / name
            path.write_text(f"#!/bin/bash\n{body}\n")
            path.chmod(0o755)
    return tmp_path


def run_script(root: Path, *words: str, **environment: str) -> tuple[int, str, list[str]]:
    """Exit code, output and the calls that the fakes noted, from a folder that is not the script's."""
    calls = root / "calls"
    calls.write_text("")
    path = f"{root}/bin:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "CALLS": str(calls), "PYTHON": f"{root}/bin/python", **environment}
    done = subprocess.run(
        ["bash", f"{root}/ci/gpu.sh", *words], cwd="/", env=env, capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stdout + done.stderr, calls.read_text().splitlines()


def test_a_stage_that_hangs_or_fails_leaves_the_others_running_and_their_results_known(checkout: Path) -> None:
    code, output, calls = with_budget(
        checkout,
        "correctness",
        lambda calls: any("-m pytest" in c for c in calls),
        GPU_STAGES="build correctness sanitizer benchmarks",
    )
    assert "== build: ok" in output
    assert "== correctness: over_budget" in output
    assert "interrupted" in output  # and not killed: pytest still prints what failed
    assert "== sanitizer: failed" in output
    assert "RACECHECK 1 hazard" in output
    assert "memcheck: no error" in output
    assert code == 4 + 8
    (benchmarks,) = [c for c in calls if "pykernels.bench.gpu" in c]
    assert "--checks build=ok correctness=over_budget sanitizer=failed" in benchmarks
    assert any("pip install" in c and "archs=90a" in c for c in calls)
    (tests,) = [c for c in calls if "-m pytest" in c]
    assert "tests/test_cuda_device.py" in tests
    tools = [c for c in calls if c.startswith("--tool")]
    assert sorted(c.split()[1] for c in tools) == ["initcheck", "memcheck", "racecheck", "synccheck"]
    assert not [c for c in tools if "initcheck" in c and "kns" in c]  # what torch's kernels write must count as written
    logs = {p.name for p in (checkout / "build/gpu").iterdir()}
    assert {"build.log", "correctness.log", "sanitizer.log", "benchmarks.log", "racecheck.log"} <= logs


def with_budget(
    root: Path, stage: str, begun: Callable[[list[str]], bool], **environment: str
) -> tuple[int, str, list[str]]:
    """What the script did with a budget for `stage` just long enough for `begun(calls)`, however busy the machine is. 20 s are
    those that correctness keeps for what comes after its tests."""
    script = root / "ci/gpu.sh"
    for seconds in (22, 27, 47) if stage == "correctness" else (2, 7, 27):
        script.write_text(re.sub(rf"(BUDGET=.*\[{stage}\]=)\d+", rf"\g<1>{seconds}", script.read_text()))
        code, output, calls = run_script(root, **environment)
        if begun(calls):
            return code, output, calls
    raise AssertionError(f"{stage} did not begin in {seconds} s: {output}")


def running(pid: int) -> bool:
    """Whether a process still runs 20 s after it was told to end; one that nobody has waited for has ended."""
    for _ in range(200):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        if state == "Z":
            return False
        time.sleep(0.1)
    return True


def test_what_a_stage_left_in_the_background_ends_with_its_budget(checkout: Path) -> None:
    """It would run beside the benchmarks."""
    hung = checkout / "hung"
    code, output, _ = with_budget(
        checkout,
        "sanitizer",
        lambda _: hung.exists() and hung.read_text().strip() != "",
        GPU_STAGES="sanitizer",
        HANG=str(hung),
    )
    assert "== sanitizer: over_budget" in output
    assert code == 8
    assert not running(int(hung.read_text().split()[-1]))


def test_without_a_gpu_nothing_is_started(checkout: Path) -> None:
    (checkout / "bin/nvidia-smi").write_text("#!/bin/bash\nexit 9\n")
    code, output, calls = run_script(checkout)
    assert code == 64
    assert "there is no NVIDIA GPU" in output
    assert not calls


def test_budgets_are_under_ten_minutes_together() -> None:
    text = (ROOT / "ci/gpu.sh").read_text()
    line = next(line for line in text.splitlines() if line.startswith("declare -A BUDGET"))
    assert 0 < sum(int(n) for n in re.findall(r"\]=(\d+)", line)) < 600


def test_the_dry_run_prints_every_stage_and_needs_no_gpu() -> None:
    done = subprocess.run(["bash", "ci/gpu.sh", "--dry-run"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for stage in ("setup", "build", "correctness", "sanitizer", "benchmarks"):
        assert f"== {stage}" in done.stdout
    assert "prefill-causal-8k" in done.stdout
