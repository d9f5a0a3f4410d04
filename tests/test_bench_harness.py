"""The timing core: what it times, when it stops, and what it refuses to time."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from pykernels.bench import clocks, gpu_state, harness, inputs, machine
from pykernels.bench.harness import StopRule, Timer, Timing, measure, noise, output_hash, time_calls
from pykernels.contract import OPS
from pykernels.roofline import Ceiling, Ceilings, RoofError
from pykernels.testing.compare import Mismatch, same_bits
from pykernels.testing.factories import Case, cases

QUICK = StopRule(min_samples=3, max_samples=6, seconds=0.05)


def case_of(op: str, name: str) -> Case:
    return next(c for c in cases(op) if c.name == name)


class FakeClock:
    """Every chunk takes the next of `times`; remembers what happened in which order."""

    name, shortest = "fake", 1e-5

    def __init__(self, times: Sequence[float]) -> None:
        self.times, self.events, self.at = list(times), [], 0
        self.chunks: list[Sequence[Callable[[], None]]] = []

    def chunk(self, calls: Sequence[Callable[[], None]]) -> Callable[[], None]:
        self.chunks.append(calls)
        return lambda: [call() for call in calls] and None

    def seconds(self, chunk: Callable[[], None]) -> float:
        chunk()
        self.events.append("timed")
        self.at += 1
        return self.times[(self.at - 1) % len(self.times)]

    def flush(self) -> None:
        self.events.append("flush")

    def settle(self) -> None:
        self.events.append("settle")

    def cache_bytes(self) -> int:
        return 1 << 20


# ---- samples and the stop rule ----------------------------------------------------------------------------------------
def test_the_noise_is_the_median_s_interval_by_order_statistics() -> None:
    assert noise([2.0] * 20) == 0.0
    values = [float(v) for v in range(1, 101)]  # ranks 40 and 59 of 0..99 hold 95 % of the median
    assert noise(values) == pytest.approx((61 - 41) / 2 / 50.5)


@pytest.mark.parametrize(
    ("times", "rule", "words"),
    [
        ([1e-3], StopRule(min_samples=10, noise=0.01), "noise 0 % <= 1 %"),
        ([1e-3, 3e-3], StopRule(min_samples=4, max_samples=30, seconds=60, noise=0.01), "30 samples"),
        ([1e-3, 3e-3], StopRule(min_samples=4, seconds=1e-9, noise=0.01), "1e-09 s"),
    ],
)
def test_timing_stops_for_the_reason_that_it_gives(times: list[float], rule: StopRule, words: str) -> None:
    timing = time_calls([lambda: None], FakeClock(times), rule)
    assert timing.stopped == words
    assert len(timing.samples) >= rule.min_samples


@pytest.mark.parametrize("wrong", [{"min_samples": 1}, {"max_samples": 2}, {"seconds": 0.0}, {"noise": -1.0}])
def test_a_stop_rule_that_cannot_be_met_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="stop rule needs"):
        StopRule(**wrong)


def test_a_timing_keeps_its_samples_and_refuses_what_is_no_time() -> None:
    samples = [3.0, 1.0, 2.0, 5.0, 4.0]
    timing = Timing(samples, 1, "fake", "", 3)
    assert timing.samples == samples
    assert timing.median == 3.0
    assert timing.quartiles == (1.5, 4.5)
    for wrong in ([], [1.0], [1.0, 0.0], [1.0, float("nan")]):
        with pytest.raises(ValueError, match="positive samples"):
            Timing(wrong, 1, "fake", "", 3)


def test_short_calls_are_timed_several_in_a_row_and_told_per_call() -> None:
    clock = FakeClock([3e-6])
    timer = Timer([lambda: None], clock)
    assert timer.calls_per_sample == 4
    assert len(clock.chunks[0]) == 4
    assert timer.sample() == pytest.approx(3e-6 / 4)


def test_every_copy_is_warmed_up_before_the_first_sample() -> None:
    seen: list[int] = []
    clock = FakeClock([1.0])
    timer = Timer([lambda i=i: seen.append(i) for i in range(5)], clock)
    assert set(seen) == set(range(5))
    assert timer.warm_up_calls == len(seen)
    assert "settle" in clock.events


@pytest.mark.parametrize(("copies", "once"), [(7, 4e-6), (6, 4e-6), (4, 1.0), (3, 1e-6)])
def test_cold_copies_take_turns_without_a_break(copies: int, once: float) -> None:
    order: list[int] = []
    timer = Timer([lambda i=i: order.append(i) for i in range(copies)], FakeClock([once]))
    order.clear()
    for _ in range(2 * copies):
        timer.sample()
    assert order == [i % copies for i in range(len(order))]


def test_flushing_comes_before_each_sample_of_one_call() -> None:
    clock = FakeClock([1e-6])
    timer = Timer([lambda: None], clock, flush=True)
    clock.events.clear()
    timer.sample()
    timer.sample()
    assert timer.calls_per_sample == 1
    assert clock.events == ["flush", "timed"] * 2


def test_nothing_to_time_is_refused() -> None:
    with pytest.raises(ValueError, match="no call"):
        Timer([], FakeClock([1.0]))
    with pytest.raises(ValueError, match="moves no bytes"):
        measure(case_of("linear", "dense_no_tokens"), "cpu", rule=QUICK)


def test_the_cpu_flush_evicts_what_was_in_the_cache() -> None:
    clock = clocks.CpuClock()
    x = torch.ones(1 << 18)  # a MiB: inside of the second-level cache
    warm, cold = [], []
    for _ in range(9):
        x.sum()
        warm.append(clock.seconds(lambda: x.sum()))
        clock.flush()
        cold.append(clock.seconds(lambda: x.sum()))
    assert statistics.median(cold) > statistics.median(warm)


# ---- inputs and outputs -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("op", ["paged_decode_attention", "prefill_attention", "append_kv", "rms_norm", "copy_pages"])
def test_copies_keep_values_strides_and_shared_memory(op: str) -> None:
    for case in cases(op, "smoke"):
        args = case.args()
        (copy,) = inputs.copies_of(args, 1)
        for name, value in args.items():
            if not isinstance(value, torch.Tensor):
                assert copy[name] == value
                continue
            assert copy[name].stride() == value.stride()
            assert same_bits(copy[name], value).all()
            assert copy[name].numel() == 0 or copy[name].data_ptr() != value.data_ptr()
            for other, second in args.items():
                if isinstance(second, torch.Tensor):
                    shared = value.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
                    mine = copy[name].untyped_storage().data_ptr() == copy[other].untyped_storage().data_ptr()
                    assert shared == mine or not value.numel()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("cold", [True, False], ids=["cold", "warm"])
def test_every_op_can_be_timed_on_the_cpu(op: str, cold: bool) -> None:
    case = next(c for c in cases(op, "smoke") if c.name not in ("bfloat16_plain", "dense_odd"))
    found = measure(case, "cpu", cold=cold, rule=QUICK)
    assert found.temperature == ("cold" if cold else "warm")
    assert found.how
    assert found.timing.median > 0
    assert found.bytes > 0
    assert found.output_hash == measure(case, "cpu", cold=not cold, rule=QUICK).output_hash
    assert found.machine["key"]


def writing(scale: float, calls_that_write: int = 10**9, only_first_copy: bool = False) -> harness.Prepare:
    """Calls of rms_norm in torch, wrong where `scale` is not one, which write in the first few calls only."""
    made: list[int] = []

    def prepare(op_name: str, args: dict[str, Any]) -> Callable[[], None]:
        made.append(0)
        mine, count = len(made), [0]
        factor = scale if mine > 1 or not only_first_copy else 1.0

        def run() -> None:
            count[0] += 1
            if count[0] > calls_that_write:
                return
            x = args["x"].double()
            y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + args["eps"]) * args["weight"].double()
            args["out"].copy_(y * factor)

        return run

    return prepare


def test_a_right_call_of_the_caller_s_own_is_timed() -> None:
    found = measure(case_of("rms_norm", "width_576"), "torch", call=writing(1.0), rule=QUICK)
    assert found.entry == "own"
    assert found.label == "rms_norm[width_576] on torch"


def test_a_wrong_op_is_not_timed() -> None:
    with pytest.raises(Mismatch, match="not timed, it is wrong"):
        measure(case_of("rms_norm", "width_576"), "torch", call=writing(1.01), rule=QUICK)


def test_a_call_that_stopped_writing_after_its_warm_up_is_not_timed() -> None:
    with pytest.raises(Mismatch, match="not timed"):
        measure(case_of("rms_norm", "width_576"), "torch", call=writing(1.0, calls_that_write=6), rule=QUICK)


def test_copies_that_disagree_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clocks.CpuClock, "cache_bytes", lambda self: 1 << 14)
    with pytest.raises(Mismatch, match="copy 2 has other bits"):
        measure(case_of("rms_norm", "width_576"), "torch", call=writing(1.01, only_first_copy=True), rule=QUICK)


def test_a_case_that_the_backend_refuses_is_not_timed() -> None:
    with pytest.raises(NotImplementedError, match="plain packed weight"):
        measure(case_of("linear", "bfloat16_plain"), "cpu", rule=QUICK)
    with pytest.raises(ValueError, match="entry must be one of"):
        measure(case_of("rms_norm", "width_576"), "cpu", entry="python")


def test_the_hash_sees_one_bit_and_the_shape() -> None:
    x = torch.arange(6, dtype=torch.float32)
    changed = x.clone()
    changed.view(torch.int32)[3] ^= 1
    hashes = {output_hash({"out": t}) for t in (x, changed, x.view(2, 3))}
    assert len(hashes) == 3
    assert output_hash({"out": x.clone()}) in hashes


# ---- the roof ---------------------------------------------------------------------------------------------------------
def flat(rate: float) -> Ceilings:
    names = ("l1", "l2", "l3", "dram", "float32")
    table = {n: Ceiling("FLOP/s" if n == "float32" else "B/s", [rate] * 4) for n in names}
    return Ceilings({}, "avx2", 2, "0-1", {"l1": 1 << 15, "l2": 1 << 20, "l3": 1 << 25}, table)


def test_a_point_above_its_roof_is_an_error() -> None:
    with pytest.raises(RoofError, match=r"rms_norm\[width_576\] on cpu"):
        measure(case_of("rms_norm", "width_576"), "cpu", rule=QUICK, ceilings=flat(1e3))


@pytest.mark.parametrize(("cold", "level"), [(True, "dram"), (False, "l2")])
def test_cold_is_held_to_memory_and_warm_to_the_cache_that_holds_it(cold: bool, level: str) -> None:
    limits = flat(1e15)
    limits.table["float32"] = Ceiling("FLOP/s", [1e18] * 4)
    found = measure(case_of("linear", "dense_many"), "cpu", cold=cold, rule=QUICK, ceilings=limits)
    assert found.bound == level
    assert found.roof_pct is not None
    assert found.roof_pct == pytest.approx(100 * found.bytes / 1e15 / found.timing.median)


# ---- machine and GPU --------------------------------------------------------------------------------------------------
def test_the_machine_s_key_depends_on_the_threads_and_names_no_host() -> None:
    from pykernels import native

    here = machine.machine(torch.device("cpu"))
    assert set(here) == {"cpu", "flags", "affinity", "threads", "level", "key"}
    threads = native.module().num_threads()
    try:
        native.module().set_num_threads(threads + 1)
        assert machine.machine(torch.device("cpu"))["key"] != here["key"]
    finally:
        native.module().set_num_threads(threads)


def smi(folder: Path, output: str, code: int = 0) -> str:
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho '{output}'\nexit {code}\n")
    tool.chmod(0o755)
    return str(tool)


def test_clocks_and_throttling_are_read_from_nvidia_smi(tmp_path: Path) -> None:
    state = gpu_state.read_state(smi(tmp_path, "1755, 1980, 2619, 41, 305.12, 0x0000000000000024"), "0")
    assert state["sm_mhz"] == 1755
    assert state["power_w"] == 305.12
    assert state["throttled"] == ["power cap", "software thermal slowdown"]
    state = gpu_state.read_state(smi(tmp_path, "1755, 1980, 2619, 41, [N/A], 0x0000000000000001"), "0")
    assert state["power_w"] is None
    assert state["throttled"] == []


def test_a_driver_that_knows_throttling_by_another_name_is_asked_by_that(tmp_path: Path) -> None:
    tool = Path(smi(tmp_path, "1755, 1980, 2619, 41, 305.12, 0x0000000000000004"))
    refusal = 'Field "clocks_throttle_reasons.active" is not a valid field to query.'
    tool.write_text(
        tool.read_text().replace("echo", f"case $1 in *throttle*) echo '{refusal}'; exit 2 ;; esac\necho", 1)
    )
    assert gpu_state.read_state(str(tool), "0")["throttled"] == ["power cap"]


def test_a_gpu_that_tells_nothing_comes_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "No devices" in gpu_state.read_state(smi(tmp_path, "No devices were found", 6), "0")["unknown"]
    assert "failed" in gpu_state.read_state(str(tmp_path / "absent"), "0")["unknown"]
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert gpu_state.gpu_state(torch.device("cuda", 0)) == {"unknown": "nvidia-smi is not on PATH"}
    assert "cpu" in gpu_state.gpu_state(torch.device("cpu"))["unknown"]


class FakeCuda:
    """As much of `torch.cuda` as the clock uses. Time passes by `step` seconds per call."""

    def __init__(self, step: float) -> None:
        self.step, self.now, self.log = step, 0.0, []
        self.capturing, self.captured = False, 0

    def call(self) -> None:
        if self.capturing:
            self.captured += 1
        else:
            self.now += self.step

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fake = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = fake.now

            def synchronize(self) -> None:
                fake.log.append("synchronized")

            def elapsed_time(self, end: Any) -> float:
                return 1e3 * (end.at - self.at)

        class Graph:
            calls = 0

            def replay(self) -> None:
                fake.log.append("replayed")
                fake.now += fake.step * self.calls

        class Capture:
            def __init__(self, graph: Graph) -> None:
                self.graph = graph

            def __enter__(self) -> None:
                fake.capturing, fake.captured = True, 0

            def __exit__(self, *error: object) -> None:
                fake.capturing, self.graph.calls = False, fake.captured

        for name, value in {
            "Event": Event,
            "CUDAGraph": Graph,
            "graph": Capture,
            "_sleep": lambda cycles: None,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value, raising=False)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: fake.log.append("synchronized"))


@pytest.mark.parametrize(("step", "graph"), [(1e-6, True), (1e-3, False)])
def test_short_gpu_calls_are_replayed_from_a_graph(monkeypatch: pytest.MonkeyPatch, step: float, graph: bool) -> None:
    fake = FakeCuda(step)
    fake.install(monkeypatch)
    clock = clocks.GpuClock(torch.device("cuda", 0))
    timing = time_calls([fake.call, fake.call], clock, QUICK)
    assert timing.clock == ("cuda graph" if graph else "cuda events")
    assert timing.median == pytest.approx(step)
    assert ("replayed" in fake.log) == graph
    with pytest.raises(ValueError, match="CUDA device"):
        clocks.GpuClock(torch.device("cpu"))


def test_the_bench_installs_below_pykernels() -> None:
    import pykernels.bench

    root = Path(__file__).parents[1] / "bench"
    assert pykernels.bench.__name__ == "pykernels.bench"
    assert Path(str(pykernels.bench.__file__)).parent == root
