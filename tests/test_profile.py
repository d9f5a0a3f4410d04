"""`pykernels profile`: the benchmark's call again, the right command line, and what profilers write, read back.

No GPU was at hand: what Nsight Compute and Nsight Systems write is checked against the formats that NVIDIA documents, in
tables made here, not in files of a real run.
"""

from __future__ import annotations

import ast
import csv
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pykernels.bench import replay
from pykernels.bench.clocks import CpuClock
from pykernels.bench.harness import ENTRIES, kernel_call, measure, prepare
from pykernels.bench.profilers import TRITON_KERNELS, Session, kernel_regex
from pykernels.contract import OPS
from pykernels.ranges import annotated
from pykernels.roofline import Ceiling, Ceilings, RoofError, ncu, nsys, perf
from pykernels.roofline.levels import LevelPoint, Traffic

ROOT = Path(__file__).parents[1]


def cli(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pykernels.cli", "profile", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | environment)


# ---- the call -------------------------------------------------------------------------------------------------------
def run_replay(folder: Path, *words: str) -> dict[str, Any]:
    assert replay.main([*words, "--facts", str(folder / "facts.json")]) == 0
    return json.loads((folder / "facts.json").read_text())


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("warm", [False, True])
def test_the_replay_is_the_benchmark_s_call(tmp_path: Path, entry: str, warm: bool) -> None:
    facts = run_replay(tmp_path, "rms_norm", "--entry", entry, *(["--warm"] if warm else []))
    bench = measure(replay.case_named("rms_norm"), "cpu", cold=not warm, entry=entry).to_json()
    same = ("op", "case", "backend", "entry", "temperature", "shape", "compute_kind", "flops", "bytes", "output_hash")
    assert {k: facts[k] for k in same} == {k: bench[k] for k in same}
    assert facts["machine"] == bench["machine"]
    assert facts["calls"] == 3


class Log:
    def __init__(self) -> None:
        self.events: list[str] = []

    def push(self, name: str) -> None:
        self.events.append(f"push {name}")

    def pop(self) -> None:
        self.events.append("pop")

    def say(self, word: str) -> None:
        self.events.append(word)


@pytest.mark.parametrize("count", [1, 3, 7])
def test_each_profiled_call_is_one_range_and_every_copy_is_written(count: int) -> None:
    log, ran = Log(), []
    case = replay.case_named("rms_norm")
    ready = prepare(case, "cpu", CpuClock(), torch.device("cpu"), cold=False)

    def call(number: int) -> Any:
        def run() -> None:
            ran.append(number)
            log.events.append(f"call {number}")

        return run

    ready.calls = [call(i) for i in range(5)]
    with annotated(log, ops=False):
        seconds = replay.replay(ready, CpuClock(), count, log)  # type: ignore[arg-type]
    assert len(seconds) == count
    assert set(ran) == set(range(5))
    profiled = ran[-count:]
    expected = [e for n in profiled for e in ("enable", "push rms_norm", f"call {n}", "pop", "disable")]
    assert log.events == [f"call {n}" for n in ran[:-count]] + expected


def test_a_wrong_result_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pykernels.testing.compare import Mismatch

    monkeypatch.setitem(replay.ENTRIES, "kernel", lambda backend: lambda op, args: lambda: None)
    with pytest.raises(Mismatch, match="is not timed, it is wrong"):
        replay.main(["rms_norm", "--facts", str(tmp_path / "facts.json")])
    assert not (tmp_path / "facts.json").exists()


def test_a_call_that_writes_only_while_it_warms_up_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pykernels.testing.compare import Mismatch

    left = {"calls": 6}  # what a Timer of one copy makes

    def prepare(op: str, args: dict[str, Any]) -> Any:
        call = kernel_call("cpu")(op, args)

        def run() -> None:
            left["calls"] -= 1
            if left["calls"] >= 0:
                call()

        return run

    monkeypatch.setitem(replay.ENTRIES, "kernel", lambda backend: prepare)
    with pytest.raises(Mismatch, match="is not timed, it is wrong"):
        replay.main(["rms_norm", "--warm", "--facts", str(tmp_path / "facts.json")])
    assert left["calls"] == -3


def test_an_unknown_case_is_told_which_there_are() -> None:
    with pytest.raises(ValueError, match="has no case 'x'; the suite measures smollm2-"):
        replay.case_named("linear", "x")
    assert replay.case_named("linear", replay.case_named("linear").name).op == "linear"


# ---- command lines --------------------------------------------------------------------------------------------------
def session(tool: str, backend: str = "cuda", **options: Any) -> Session:
    return Session(tool, "paged_decode_attention", "row", backend, Path("/out"), **options)


def after(words: list[str], option: str) -> str:
    return words[words.index(option) + 1]


def test_ncu_sees_our_kernels_in_the_op_s_range_alone() -> None:
    words = session("ncu", metrics=("sm__more.sum",)).command()
    assert after(words, "--nvtx-include") == "pykernels@paged_decode_attention/"  # the slash: a push and pop range
    assert (after(words, "--kernel-name"), after(words, "--kernel-name-base")) == ("regex:pk::cuda::", "demangled")
    assert after(words, "--cache-control") == "all"
    metrics = after(words, "--metrics").split(",")
    assert {
        "dram__bytes.sum",
        "lts__t_bytes.sum",
        "l1tex__t_bytes.sum",
        "gpu__time_duration.sum",
        "sm__more.sum",
    } <= set(metrics)
    assert after(words, "--ranges") == "nvtx"
    assert after(session("ncu", warm=True).command(), "--cache-control") == "none"


def test_nsys_starts_at_the_first_call() -> None:
    words = session("nsys").command()
    assert "--capture-range=nvtx" in words
    assert "--nvtx-capture=paged_decode_attention@pykernels" in words
    assert "--env-var=NSYS_NVTX_PROFILER_REGISTER_ONLY=0" in words


@pytest.mark.parametrize("tool", ["ncu", "nsys", "torch", "perf"])
def test_the_replay_takes_what_the_command_hands_it(tool: str) -> None:
    words = session(tool, entry="op", warm=True, calls=5).replay()
    args = replay.parser().parse_args(words[3:])
    assert (args.op, args.case, args.entry, args.warm, args.calls) == ("paged_decode_attention", "row", "op", True, 5)


def launched(path: Path) -> set[str]:
    """Names that a Triton file starts as kernels: `name[grid](...)`, defined with @triton.jit here or elsewhere."""
    jitted = set()
    for file in path.parent.glob("*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in node.decorator_list):
                jitted.add(node.name)
    calls = [n.func for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
    return {f.value.id for f in calls if isinstance(f, ast.Subscript) and isinstance(f.value, ast.Name)} & jitted


def test_the_kernel_names_are_those_that_the_launchers_start() -> None:
    folder = ROOT / "pykernels" / "triton"
    extra = {"sampling": ["verify"]}
    for family, names in TRITON_KERNELS.items():
        files = [folder / f"{file}.py" for file in [family, *extra.get(family, [])]]
        assert set().union(*map(launched, files)) == set(names), family
    for op in OPS.values():
        for name in TRITON_KERNELS[op.family]:
            assert re.search(kernel_regex(op.name, "triton"), name)
        assert not re.search(kernel_regex(op.name, "triton"), "at::native::vectorized_elementwise_kernel")


def test_every_cuda_kernel_lies_in_the_namespace_that_is_asked_for() -> None:
    sources = [p for p in (ROOT / "csrc" / "cuda").glob("*.cu*") if "__global__" in p.read_text()]
    assert len(sources) > 5
    assert all("namespace pk::cuda {" in p.read_text() for p in sources)


# ---- the command ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("tool", "words"), [("ncu", "Nsight Compute"), ("nsys", "Nsight Systems"), ("perf", "linux-perf")]
)
def test_a_missing_tool_is_named_after_the_command(tmp_path: Path, tool: str, words: str) -> None:
    done = cli("--tool", tool, "--op", "decode", "--out", str(tmp_path / "p"), PATH=str(tmp_path))
    assert done.returncode == 2
    assert done.stdout.startswith(tool)
    assert words in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_a_cpu_backend_is_nothing_for_nsight() -> None:
    done = cli("--tool", "ncu", "--op", "decode", "--backend", "cpu")
    assert (done.returncode, "sees GPUs alone" in done.stderr) == (2, True)


def test_a_dry_run_prints_the_command_and_does_nothing(tmp_path: Path) -> None:
    done = cli("--tool", "ncu", "--op", "prefill", "--out", str(tmp_path / "p"), "--dry-run", "--json")
    assert done.returncode == 0
    assert " prefill_attention --case " in json.loads(done.stdout)["command"]
    assert not (tmp_path / "p").exists()


def test_torch_writes_a_chrome_trace_with_the_call_in_its_range(tmp_path: Path) -> None:
    done = cli("--tool", "torch", "--op", "norm", "--entry", "op", "--out", str(tmp_path), "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    ranges = [e for e in events if e.get("cat") == "user_annotation" and e["name"] == "rms_norm"]
    ops = [e for e in events if e.get("name") == "pykernels::rms_norm"]
    assert len(ranges) == 2 * document["calls"] == 6  # around each call, and around the op in it
    assert len(ops) == 3
    assert all(any(r["ts"] <= o["ts"] and o["ts"] + o["dur"] <= r["ts"] + r["dur"] for r in ranges) for o in ops)
    assert document["points"][0]["levels"]["dram"]["bytes"] == document["bytes"]


@pytest.mark.skipif(shutil.which("perf") is None, reason="perf is not installed")
def test_perf_counts_calls_alone(tmp_path: Path) -> None:
    done = cli("--tool", "perf", "--op", "norm", "--calls", "20", "--out", str(tmp_path), "--json")
    if done.returncode and "ermi" in done.stderr:
        pytest.skip("perf may not count here")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert set(document["counters"]) == set(perf.EVENTS)
    busy = document["counters"]["task-clock"]
    assert busy is not None
    assert 0 < busy < 1.0  # the process imports torch for longer than that
    read = cli("--tool", "perf", "--op", "norm", "--read", str(tmp_path), "--json")
    assert json.loads(read.stdout)["points"] == document["points"]
    other = cli("--tool", "perf", "--op", "rope", "--read", str(tmp_path))
    assert (other.returncode, "holds rms_norm" in other.stderr) == (2, True)


# ---- Nsight Compute's tables ----------------------------------------------------------------------------------------
FIXED = (
    "ID",
    "Process ID",
    "Process Name",
    "Host Name",
    "Kernel Name",
    "Context",
    "Stream",
    "Block Size",
    "Grid Size",
    "Device",
    "CC",
)
PUSHED = "thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"
MAIN = "void pk::cuda::<unnamed>::decode_kernel<__nv_bfloat16, 128>(pk::cuda::Decode)"
MERGE = "void pk::cuda::<unnamed>::merge_splits_kernel<__nv_bfloat16>(pk::cuda::Decode)"
RANGE = '1  "pykernels:paged_decode_attention:none:none:none:none:none:none" '
# metric -> unit and value of the two kernels, as `--print-units base` writes them
VALUES: dict[str, tuple[str, float, float]] = {
    "gpu__time_duration.sum": ("ns", 20_000, 2_000),
    "dram__bytes.sum": ("byte", 64_000_000, 1_000_000),
    "dram__bytes.sum.peak_sustained": ("byte/cycle", 1_280, 1_280),
    "dram__cycles_elapsed.avg.per_second": ("cycle/second", 2.6e9, 2.6e9),
    "lts__t_bytes.sum": ("byte", 70_000_000, 3_000_000),
    "lts__t_bytes.sum.peak_sustained": ("byte/cycle", 6_144, 6_144),
    "lts__cycles_elapsed.avg.per_second": ("cycle/second", 1.5e9, 1.5e9),
    "l1tex__t_bytes.sum": ("byte", 140_000_000, 6_000_000),
    "l1tex__t_bytes.sum.peak_sustained": ("byte/cycle", 16_896, 16_896),
    "l1tex__cycles_elapsed.avg.per_second": ("cycle/second", 1.5e9, 1.5e9),
    "smsp__sass_thread_inst_executed_op_fadd_pred_on.sum": ("inst", 100, 10),
    "smsp__sass_thread_inst_executed_op_fmul_pred_on.sum": ("inst", 200, 20),
    "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum": ("inst", 1_000, 50),
    "smsp__sass_thread_inst_executed_op_hadd_pred_on.sum": ("inst", 0, 0),
    "smsp__sass_thread_inst_executed_op_hmul_pred_on.sum": ("inst", 0, 0),
    "smsp__sass_thread_inst_executed_op_hfma_pred_on.sum": ("inst", 300, 0),
    "sm__sass_thread_inst_executed_op_ffma_pred_on.sum.peak_sustained": ("inst/cycle", 16_896, 16_896),
    "sm__cycles_elapsed.avg.per_second": ("cycle/second", 1.5e9, 1.5e9),
}
FLOPS = 1.28e8


def written(rows: list[list[str]]) -> str:
    out = io.StringIO()
    csv.writer(out, quoting=csv.QUOTE_ALL, lineterminator="\n").writerows(rows)
    return (
        '==PROF== Connected to process 17\n==PROF== Profiling "decode_kernel": 0%....100% - 9 passes\n' + out.getvalue()
    )


def fixed(number: int, kernel: str, where: str) -> list[str]:
    tail = ["1", "7", "(128, 1, 1)", "(8, 32, 4)", "0", "9.0", where]
    return [str(number), "17", "python3.11", "127.0.0.1", kernel, *tail]


def wide(values: dict[str, tuple[str, float, float]] = VALUES, calls: int = 2, where: str = RANGE) -> str:
    """`--page raw`: a column per metric and a row of units, numbers with thousands' commas."""
    rows = [[*FIXED, PUSHED, *values], [""] * 12 + [unit for unit, *_ in values.values()]]
    for number in range(2 * calls):
        at = 1 + number % 2
        rows.append([*fixed(number, (MAIN, MERGE)[number % 2], where), *(f"{v[at]:,}" for v in values.values())])
    return written(rows)


def long(values: dict[str, tuple[str, float, float]] = VALUES, calls: int = 2) -> str:
    """The details page: a row per metric."""
    rows = [[*FIXED, PUSHED, "Section Name", "Metric Name", "Metric Unit", "Metric Value"]]
    for number in range(2 * calls):
        for name, (unit, *pair) in values.items():
            start = fixed(number, (MAIN, MERGE)[number % 2], RANGE)
            rows.append([*start, "Command line profiler metrics", name, unit, f"{pair[number % 2]:,.2f}"])
    return written(rows)


def read(table: str, calls: int = 2) -> list[LevelPoint]:
    found = ncu.inside(ncu.launches(table.splitlines(keepends=True)), "paged_decode_attention")
    return ncu.points(found, FLOPS, calls)


@pytest.mark.parametrize("table", [wide(), long()])
def test_a_call_is_the_sum_of_its_kernels_under_the_roof_of_every_level(table: str) -> None:
    whole, main, merge = read(table)
    assert (whole.name, whole.launches, whole.flops, whole.flops_from) == ("call", 4, FLOPS, "contract")
    assert whole.seconds == pytest.approx(22e-6)
    assert {n: t.bytes for n, t in whole.traffic.items()} == {"l1": 146e6, "l2": 73e6, "dram": 65e6}
    levels = whole.to_json()["levels"]
    assert levels["dram"]["intensity"] == pytest.approx(FLOPS / 65e6)
    assert levels["dram"]["roof"] == pytest.approx(1280 * 2.6e9)
    assert levels["dram"]["roof_pct"] == pytest.approx(100 * 65e6 / 22e-6 / 3.328e12)
    assert levels["l2"]["roof"] == pytest.approx(6144 * 1.5e9)
    assert levels["l1"]["roof"] == pytest.approx(16896 * 1.5e9)
    assert (main.name, merge.name, main.launches) == (MAIN, MERGE, 2)
    assert main.flops == 100 + 200 + 2 * 1000 + 2 * 300
    assert main.flops_from == "counted"
    assert main.seconds == pytest.approx(20e-6)
    assert main.peak == pytest.approx(2 * 16896 * 1.5e9)


def test_scaled_units_mean_the_same() -> None:
    scaled = dict(VALUES)
    scaled["gpu__time_duration.sum"] = ("us", 20, 2)
    scaled["dram__bytes.sum"] = ("Mbyte", 64, 1)
    scaled["lts__t_bytes.sum.peak_sustained"] = ("Kbyte/cycle", 6.144, 6.144)
    scaled["dram__cycles_elapsed.avg.per_second"] = ("cycle/nsecond", 2.6, 2.6)
    scaled["lts__cycles_elapsed.avg.per_second"] = ("Ghz", 1.5, 1.5)
    for got, want in zip(read(wide(scaled)), read(wide()), strict=True):
        assert got.seconds == pytest.approx(want.seconds)
        assert {n: (t.bytes, t.roof) for n, t in got.traffic.items()} == {
            n: (pytest.approx(t.bytes), pytest.approx(t.roof)) for n, t in want.traffic.items()
        }


def test_a_tensor_core_metric_is_the_peak_where_it_was_asked_for() -> None:
    tensor = {"sm__ops_path_tensor_src_bf16_dst_fp32.sum.peak_sustained": ("", 540_672.0, 540_672.0)}
    assert read(wide(VALUES | tensor))[0].peak == pytest.approx(540_672 * 1.5e9)


def test_launches_outside_of_the_range_do_not_count() -> None:
    other = wide(where='1  "pykernels:prefill_attention:none:none:none:none:none:none" ')
    with pytest.raises(ValueError, match="none of 4 launches lies in the range pykernels:paged_decode_attention"):
        read(other)
    inside = wide().splitlines(keepends=True)
    mixed = "".join([*inside, *other.splitlines(keepends=True)[4:]])
    assert read(mixed)[0].to_json() == read(wide())[0].to_json()


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission\n", "ERR_NVGPUCTRPERM"),
        ("==PROF== Connected to process 17\n==WARNING== No kernels were profiled.\n", "no table"),
        (written([[*FIXED, PUSHED, *VALUES], [""] * 12 + [u for u, *_ in VALUES.values()]]), "no launch"),
        (wide(calls=1).replace("64,000,000", "64.000.000"), "is no number"),
        (wide({**VALUES, "dram__bytes.sum": ("furlong", 1, 1)}), "unknown unit 'furlong'"),
        (wide({k: v for k, v in VALUES.items() if k != "lts__t_bytes.sum"}), "has no lts__t_bytes.sum"),
        ("\n".join(line for i, line in enumerate(wide().splitlines()) if i != 3), "lacks its row of units"),
    ],
)
def test_a_table_that_tells_nothing_is_an_error(table: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        read(table)


def test_launches_of_a_part_of_a_call_are_refused() -> None:
    with pytest.raises(ValueError, match="4 launches are not those of 3 whole calls"):
        read(wide(), calls=3)


def test_more_bytes_than_a_level_can_move_is_an_error() -> None:
    fast = dict(VALUES)
    fast["gpu__time_duration.sum"] = ("ns", 10_000, 1_000)
    with pytest.raises(RoofError, match="of what dram can do"):
        read(wide(fast))
    with pytest.raises(ValueError, match="must be one of l1, l2, l3, dram"):
        LevelPoint("x", 1, 1.0, 1.0, "contract", {"disk": Traffic(1.0)})


# ---- Nsight Systems and perf ----------------------------------------------------------------------------------------
NSYS = """\
Processing [timeline.sqlite] with [cuda_gpu_kern_sum.py]...

Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Name
90.9,60000,3,20000.0,19000.0,18000,23000,2000.0,"void pk::cuda::<unnamed>::decode_kernel<__nv_bfloat16, 128>(pk::cuda::Decode)"
9.1,6000,3,2000.0,2000.0,1900,2100,80.0,pk::cuda::merge(int)
"""


def test_nsys_gives_the_gpu_s_own_time_of_a_call() -> None:
    whole, main, _ = nsys.points(NSYS.splitlines(), flops=1e6, nbytes=2e5, calls=3)
    assert whole.seconds == pytest.approx(22e-6)
    assert whole.to_json()["levels"]["dram"]["intensity"] == 5.0
    assert (main.launches, main.seconds, dict(main.traffic)) == (3, pytest.approx(19e-6), {})
    with pytest.raises(ValueError, match="no kernel"):
        nsys.points(["SKIPPED: timeline.sqlite does not contain CUDA kernel data."], 1.0, 1.0, 1)


PERF = """\
# started on Thu Jan  1 00:00:00 2026

2000000,,cycles:u,12000000,100.00,,
<not supported>,,instructions:u,0,100.00,,
1000,,L1-dcache-load-misses:u,12000000,100.00,,
{llc},,LLC-load-misses:u,12000000,100.00,,
11.00,msec,task-clock,11002638,100.00,0.002,CPUs utilized
"""


@pytest.mark.parametrize(("llc", "expected"), [("500", 3200.0), ("<not supported>", 777.0)])
def test_perf_counts_what_was_fetched_or_the_contract_s_bytes_stand(llc: str, expected: float) -> None:
    counted = perf.counters(PERF.format(llc=llc).splitlines())
    assert counted["instructions"] is None
    assert counted["task-clock"] == pytest.approx(0.011)
    table = {n: Ceiling("B/s", [rate, rate]) for n, rate in (("l2", 1e11), ("dram", 3e10))}
    limits = Ceilings({}, "avx2", 1, "0", {}, table)
    point = perf.point(counted, 1e-6, 1e3, 777.0, 10, limits)
    assert point.traffic["dram"].bytes == expected
    assert point.traffic["l2"].bytes == 6400.0
    with pytest.raises(ValueError, match="no counter"):
        perf.counters(["# started on"])
