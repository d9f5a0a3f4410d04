"""Ceilings, roofs, points and metrics: hand-made numbers with known answers, and the native probes of this machine."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import numpy as np
import pytest
import roofline_data
import torch

from pykernels import native, rms_norm
from pykernels.contract import OPS, Cost, Op
from pykernels.library import observed
from pykernels.roofline import (
    Ceiling,
    Ceilings,
    Environment,
    Recorder,
    RequestRecord,
    RoofError,
    StepRecord,
    machine,
    measure,
    metrics,
    op_points,
    output_hash,
    roof,
)
from pykernels.roofline import (
    ceilings as module,
)
from pykernels.roofline.ceilings import MARGIN, Prober, percent_of_roof
from pykernels.roofline.points import compute_kind
from pykernels.roofline.records import busy_seconds, percentile


def flat(**rates: float) -> Ceilings:
    """Ceilings without noise. L1 holds 64 KiB, L2 1 MiB, L3 32 MiB."""
    table = {
        name: Ceiling("B/s" if name in ("l1", "l2", "l3", "dram") else "FLOP/s", [rate] * 8)
        for name, rate in rates.items()
    }
    return Ceilings({}, "avx2", 2, "0-1", {"l1": 64 << 10, "l2": 1 << 20, "l3": 32 << 20}, table)


@pytest.fixture
def limits() -> Ceilings:
    return flat(l1=400.0, l2=200.0, l3=100.0, dram=10.0, float32=1000.0, int8=4000.0)


# ---- ceilings and roofs -----------------------------------------------------------------------------------------------
def test_a_ceiling_is_the_upper_quartile_of_its_samples() -> None:
    ceiling = Ceiling("B/s", [1.0, 2.0, 3.0, 4.0, 100.0])
    assert ceiling.value == statistics.quantiles([1.0, 2.0, 3.0, 4.0, 100.0], n=4)[2]
    assert ceiling.median == 3.0
    assert ceiling.best == 100.0


@pytest.mark.parametrize("samples", [[], [1.0, 0.0], [1.0, float("nan")]])
def test_a_ceiling_refuses_samples_that_are_not_positive(samples: list[float]) -> None:
    with pytest.raises(ValueError, match="positive samples"):
        Ceiling("B/s", samples)


def test_the_roof_is_the_lower_of_peak_and_bandwidth_times_intensity(limits: Ceilings) -> None:
    memory = roof(Cost(50.0, 100e6), "float32", limits)
    assert (memory.bound, memory.seconds) == ("dram", 1e7)
    assert memory.flops == pytest.approx(10.0 * 50.0 / 100e6)
    compute = roof(Cost(1e9, 100.0), "float32", limits)
    assert (compute.bound, compute.flops, compute.seconds) == ("float32", 1000.0, 1e6)


@pytest.mark.parametrize(("size", "level"), [(1 << 10, "l1"), (100 << 10, "l2"), (32 << 20, "l3"), (33 << 20, "dram")])
def test_the_working_set_chooses_the_memory_level(limits: Ceilings, size: int, level: str) -> None:
    assert roof(Cost(1.0, 1.0), "float32", limits, working_set=size).bandwidth == level


def test_work_without_flops_has_a_roof_in_bytes(limits: Ceilings) -> None:
    limit = roof(Cost(0.0, 100e6), "float32", limits)
    assert (limit.flops, limit.bytes, limit.bound) == (0.0, 10.0, "dram")


def test_a_kind_takes_the_best_instruction_that_the_level_has(limits: Ceilings) -> None:
    assert limits.peak("bfloat16") == "float32"
    assert limits.peak("int8") == "int8"
    assert flat(dram=1.0, float32=1.0, int8=2.0, int8_pairs=3.0).peak("int8") == "int8_pairs"
    with pytest.raises(ValueError, match="got 'int4'"):
        limits.peak("int4")


def test_work_of_nothing_has_no_roof(limits: Ceilings) -> None:
    with pytest.raises(ValueError, match="a roof needs work"):
        roof(Cost(0.0, 0.0), "float32", limits)


def test_a_point_above_its_roof_is_an_error_and_never_a_hundred_percent(limits: Ceilings) -> None:
    work = Cost(1e9, 1.0)  # one second at the float32 peak would be 1e9 / 1000
    assert percent_of_roof("x", work, 2e6, "float32", limits)[0] == pytest.approx(50.0)
    assert percent_of_roof("x", work, 1e6 / 1.04, "float32", limits)[0] == pytest.approx(104.0)
    with pytest.raises(RoofError, match=r"linear: 1e\+09 FLOP .* 107 % of its roof \(float32"):
        percent_of_roof("linear", work, 1e6 / 1.07, "float32", limits)


def test_the_probe_runs_again_before_a_point_fails(limits: Ceilings) -> None:
    asked = []

    def faster(name: str, working_set: float) -> list[float]:
        asked.append((name, working_set))
        return [1500.0] * 8

    percent, limit = percent_of_roof(
        "x", Cost(1e9, 1.0), 1e6 / 1.4, "float32", limits, working_set=7.0, remeasure=faster
    )
    assert asked == [("float32", 7.0)]
    assert limit.flops == limits.table["float32"].value == 1500.0
    assert percent == pytest.approx(100 * 1400 / 1500)

    with pytest.raises(RoofError):
        percent_of_roof("x", Cost(1e9, 1.0), 1e6 / 2.0, "float32", limits, remeasure=faster)
    assert len(asked) == 4


def test_the_best_sample_seen_is_the_last_resort(limits: Ceilings) -> None:
    limits.table["dram"] = Ceiling("B/s", [10.0] * 20 + [30.0])
    percent, _ = percent_of_roof("x", Cost(1.0, 1e9), 1e9 / 28.0, "float32", limits)
    assert percent == pytest.approx(100 * 28 / 30)
    assert limits.raised == ["dram"]
    with pytest.raises(RoofError):
        percent_of_roof("x", Cost(1.0, 1e9), 1e9 / (30.0 * MARGIN * 1.1), "float32", limits)


def test_what_passes_the_dram_roof_is_held_to_what_the_last_cache_can_add(limits: Ceilings) -> None:
    """A working set of three caches' size: a third may still be there from the last use, the rest comes from memory."""
    limits.table["dram"], limits.table["l3"] = Ceiling("B/s", [10.0] * 8), Ceiling("B/s", [40.0] * 8)
    size = 3.0 * limits.caches["l3"]
    seconds = size / 3 / 40 + 2 * size / 3 / 10
    percent, limit = percent_of_roof("x", Cost(1.0, size), 1.25 * seconds, "float32", limits)
    assert (percent, limit.bound) == (pytest.approx(80.0), "dram + cache")
    percent, limit = percent_of_roof("x", Cost(1.0, size), size / 9, "float32", limits)
    assert (percent, limit.bound) == (pytest.approx(90.0), "dram")
    with pytest.raises(RoofError, match="dram"):
        percent_of_roof("x", Cost(1.0, size), seconds / MARGIN / 1.01, "float32", limits)


def test_a_time_of_zero_is_refused(limits: Ceilings) -> None:
    with pytest.raises(ValueError, match="x: seconds must be positive, got 0"):
        percent_of_roof("x", Cost(1.0, 1.0), 0.0, "float32", limits)


# ---- measuring --------------------------------------------------------------------------------------------------------
@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Short probes, small buffers, a cache folder of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(module, "SAMPLES", 4)
    monkeypatch.setattr(module, "SECONDS", 5e-5)
    monkeypatch.setattr(Prober, "bytes_per_thread", lambda self, name: (64 if name in ("dram", "copy") else 1) << 14)
    return tmp_path / "pykernels"


@pytest.mark.parametrize("level", native.usable_levels())
def test_every_level_measures_all_its_ceilings(quick: Path, level: str) -> None:
    found = measure(level)
    kinds = native.load(level).compute_kinds()
    assert set(found.table) == {*found.caches, "dram", "copy", *kinds}
    assert {"float32"} <= set(kinds)
    assert found.level == level
    assert not found.cached
    assert all(c.value > 1e6 for c in found.table.values())


def test_wider_vectors_reach_a_higher_peak() -> None:
    levels = native.usable_levels()
    if "avx2" not in levels:
        pytest.skip("this CPU has one level only")
    best = {lv: max(native.load(lv).probe_compute("float32", 1, 200, 1e-4)) for lv in ("scalar", "avx2")}
    assert best["avx2"] > 1.5 * best["scalar"]


def test_a_small_buffer_reads_faster_than_memory() -> None:
    native_module = native.module()
    l1 = max(native_module.probe_read(16 << 10, False, 1, 200, 1e-4))
    dram = max(native_module.probe_read(256 << 20, True, 1, 200, 1e-4))
    assert l1 > 1.5 * dram


def test_probes_refuse_what_they_cannot_do() -> None:
    m = native.module()
    with pytest.raises(ValueError, match=r"threads must be in \[1, "):
        m.probe_read(1 << 20, False, m.num_threads() + 1, 1, 1e-4)
    with pytest.raises(ValueError, match="bytes_per_thread must be at least 4096"):
        m.probe_read(100, False, 1, 1, 1e-4)
    with pytest.raises(ValueError, match="no int3 peak"):
        m.probe_compute("int3", 1, 1, 1e-4)
    with pytest.raises(ValueError, match="samples and seconds"):
        m.probe_compute("float32", 1, 0, 1e-4)
    with pytest.raises(ValueError, match=r"threads must be in \[1, \d+\] .*, got 0"):
        Prober(native.chosen_level(), 0)


def test_ceilings_are_kept_and_measured_anew_when_asked_or_when_they_drift(
    quick: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = measure()
    (kept,) = quick.glob("ceilings-*.json")
    monkeypatch.setattr(Prober, "drifted", lambda *_: False)
    again = measure()
    assert again.cached
    assert again.machine == first.machine
    assert {n: c.value for n, c in again.table.items()} == pytest.approx(
        {n: c.value for n, c in first.table.items()}, rel=1e-3
    )
    assert not measure(fresh=True).cached

    monkeypatch.setattr(Prober, "drifted", lambda *_: True)
    assert not measure().cached
    monkeypatch.setattr(Prober, "drifted", lambda *_: False)
    for broken in ("{", "[]", "{}", json.dumps({"machine": None})):
        kept.write_text(broken)
        assert not measure().cached


def test_a_spot_check_sees_a_machine_that_runs_at_half_speed(limits: Ceilings, monkeypatch: pytest.MonkeyPatch) -> None:
    prober = Prober(native.chosen_level(), 1)
    monkeypatch.setattr(Prober, "samples", lambda self, name, *_: [limits.table[name].value * 0.9] * 4)
    assert not prober.drifted(limits)
    monkeypatch.setattr(Prober, "samples", lambda self, name, *_: [limits.table[name].value * 0.5] * 4)
    assert prober.drifted(limits)


def test_another_machine_affinity_or_version_has_another_key() -> None:
    key = machine.machine_key("avx2", 2, "1.0")
    for name in key:
        assert machine.key_hash({**key, name: "other"}) != machine.key_hash(key)


def test_an_unwritable_cache_folder_costs_nothing_but_time(quick: Path) -> None:
    quick.write_text("a file where the folder should be")
    assert measure().table


def test_cpu_ranges_are_written_as_the_kernel_writes_them() -> None:
    assert machine.ranges((0, 1, 2, 5, 7, 8)) == "0-2,5,7-8"
    assert machine.ranges((3,)) == "3"


def test_the_environment_names_no_person_and_no_host() -> None:
    import getpass
    import platform

    text = json.dumps(Environment.here().finish().to_json())
    assert str(Path.home()) not in text
    assert platform.node() not in text or len(platform.node()) < 4
    assert f'"{getpass.getuser()}"' not in text


# ---- points -----------------------------------------------------------------------------------------------------------
def linear_args(tokens: int, activations: str = "float", dtype: torch.dtype = torch.float32) -> dict[str, object]:
    weight = torch.zeros(64, 32, dtype=dtype)
    x = torch.zeros(tokens, 32, dtype=dtype)
    args = {"x": x, "weight": weight, "weight_format": "dense", "layout": "plain", "activations": activations}
    return {**args, "bias": None, "residual": None, "out": torch.zeros(tokens, 64, dtype=dtype)}


def decode_args(length: int) -> dict[str, object]:
    cache = torch.zeros(8, 16, 1, 8)
    args: dict[str, object] = {a.name: None for a in OPS["paged_decode_attention"].args}
    args |= {"q": torch.zeros(1, 2, 8), "k_cache": cache, "v_cache": cache, "out": torch.zeros(1, 2, 8)}
    args |= {
        "block_table": torch.zeros(1, 8, dtype=torch.int32),
        "seqlens_k": torch.tensor([length], dtype=torch.int32),
    }
    return args | {
        "causal": True,
        "softmax_scale": 1.0,
        "window_left": -1,
        "window_right": -1,
        "softcap": 0.0,
        "split_size": 0,
    }


def test_the_kind_of_arithmetic_follows_the_operands() -> None:
    linear = OPS["linear"]
    assert compute_kind(linear, linear_args(1)) == "float32"
    assert compute_kind(linear, linear_args(1, dtype=torch.bfloat16)) == "bfloat16"
    assert compute_kind(linear, linear_args(1, "int8")) == "int8"


def test_an_observed_op_becomes_a_point_with_the_contracts_cost() -> None:
    recorder = Recorder()
    x, weight = torch.randn(4, 32), torch.ones(32)
    for _ in range(5):
        with recorder.step("prefill"), observed(recorder):
            rms_norm(x, weight, eps=1e-5)
    (point,) = op_points(recorder, flat(l1=1e15, dram=1e15, float32=1e15))
    assert (point.name, point.phase, point.shape, point.calls) == ("rms_norm", "prefill", "4 x 32", 5)
    assert (point.flops, point.bytes) == (4.0 * 4 * 32, 4.0 * (2 * 4 * 32 + 32))
    assert point.intensity == point.flops / point.bytes
    assert point.time > 0
    assert point.total >= point.time
    assert point.roof_pct == pytest.approx(100 * point.flops / point.time / point.roof)


def test_a_decode_call_costs_what_its_lengths_say_when_it_ran() -> None:
    op, args = OPS["paged_decode_attention"], decode_args(10)
    recorder = Recorder()
    for length in (10, 20, 30):
        args["seqlens_k"][0] = length  # type: ignore[index]
        recorder.add_plan("decode", [(op, args)], [1.0])
    (calls,) = recorder.groups.values()
    assert [c.cost.flops for c in calls] == [2.0 * n * 2 * 16 for n in (10, 20, 30)]


def test_weights_and_cache_are_read_once_a_step_and_activations_come_from_the_cache() -> None:
    recorder = Recorder()
    norm: tuple[Op, dict[str, object]] = (
        OPS["rms_norm"],
        {
            "x": torch.zeros(1, 32),
            "weight": torch.ones(32),
            "eps": 1e-5,
            "residual": None,
            "out": torch.zeros(1, 32),
            "residual_out": None,
        },
    )
    recorder.add_plan("decode", [(OPS["linear"], linear_args(1)), norm], [1.0, 1.0], ["head", ""])
    limits = flat(l1=4e5, dram=1e4, float32=1e6)
    limits.caches = {"l1": 5000}  # holds either call, but not the step
    points = {p.name: p for p in op_points(recorder, limits)}
    assert points["linear"].bandwidth == "dram"
    assert points["linear"].label == "head"
    assert points["rms_norm"].bandwidth == "l1"


def test_points_are_read_against_the_same_ceilings_when_one_of_them_rises() -> None:
    recorder = Recorder()
    slow, fast = linear_args(1), linear_args(2)
    recorder.add_plan("decode", [(OPS["linear"], slow), (OPS["linear"], fast)], [1e-3, 1e-9])
    limits = flat(l1=1e13, dram=1e13, float32=1e12)
    points = op_points(recorder, limits, lambda *_: [9e12] * 8)
    assert {p.roof for p in points if p.bound == "float32"} == {9e12}


def test_a_point_above_its_roof_stops_the_report() -> None:
    recorder = Recorder()
    recorder.add_plan("decode", [(OPS["linear"], linear_args(1))], [1e-12])
    with pytest.raises(RoofError, match=r"linear \(decode, 1 x 32 -> 64, float32\)"):
        op_points(recorder, flat(l1=1e6, dram=1e6, float32=1e6))


def test_a_plan_that_does_not_match_its_calls_is_refused() -> None:
    with pytest.raises(ValueError, match="a plan of 1 ops does not match 0 calls"):
        Recorder().add_plan("decode", [], [1.0])
    with pytest.raises(ValueError, match="phase must be one of prefill, decode, got 'warmup'"):
        Recorder().add_plan("warmup", [], [])
    with pytest.raises(ValueError, match=r"inside Recorder.step"):
        Recorder().add(OPS["linear"], linear_args(1), 1.0)


def test_a_recorded_native_plan_is_timed_op_by_op() -> None:
    calls = []
    x, weight, out = torch.randn(4, 32), torch.ones(32), torch.zeros(4, 32)

    def keep(op: Op, args: dict[str, object], run: object) -> None:
        calls.append((op, args))
        run()  # type: ignore[operator]

    with native.record() as plan, observed(keep):
        rms_norm(x, weight, eps=1e-5, out=out)
        rms_norm(out, weight, eps=1e-5, out=out)
    recorder = Recorder()
    recorder.add_plan("decode", calls, plan.run_timed(), ["first", "second"])
    points = op_points(recorder, flat(l1=1e15, dram=1e15, float32=1e15))
    assert {p.label for p in points} == {"first", "second"}


# ---- records and metrics ----------------------------------------------------------------------------------------------
def step(phase: str, start: float, seconds: float, tokens: int = 1, kernel: float | None = None) -> StepRecord:
    return StepRecord(phase, tokens, 1, 8, start, seconds, seconds if kernel is None else kernel, 100.0, 10.0)


def request(deliveries: list[float], tokens: int | None = None, submitted: float = 0.0) -> RequestRecord:
    first = deliveries[0] if deliveries else None
    return RequestRecord(submitted, first, deliveries, 6, 2, len(deliveries) if tokens is None else tokens, "length")


def test_latency_metrics_of_one_request() -> None:
    one = request([1.0, 1.5, 1.75, 3.0], submitted=0.25)
    assert one.ttft == 0.75
    assert one.itl == 2.0 / 3
    assert one.icl == [0.5, 0.25, 1.25]


def test_itl_counts_tokens_and_icl_counts_deliveries() -> None:
    drafted = request([1.0, 2.0, 3.0], tokens=9)
    assert drafted.itl == 0.25
    assert drafted.icl == [1.0, 1.0]


@pytest.mark.parametrize("deliveries", [[], [1.0]])
def test_itl_is_undefined_below_two_tokens(deliveries: list[float]) -> None:
    short = request(deliveries)
    assert short.itl is None
    out = metrics([step("prefill", 0.0, 1.0)], [short])
    assert out["itl"] is out["icl_p50"] is out["icl_max"] is None
    assert out["ttft"] == (1.0 if deliveries else None)


def test_throughput_is_tokens_over_the_phases_own_steps() -> None:
    steps = [step("prefill", 0.0, 2.0, 6), step("decode", 2.0, 0.5), step("decode", 9.0, 0.5)]
    out = metrics(steps, [request([2.0, 2.5, 9.5])])
    assert out["prefill_tokens_per_s"] == 3.0
    assert out["decode_tokens_per_s"] == 2.0
    assert (out["decode_bytes_per_s"], out["decode_flops_per_s"]) == (200.0, 20.0)
    assert (out["prompt_tokens"], out["cached_tokens"], out["output_tokens"]) == (6, 2, 3)
    assert out["decode_roof_pct"] is None


def test_a_phase_that_did_not_run_has_no_rates() -> None:
    out = metrics([step("prefill", 0.0, 2.0, 6)], [request([2.0])])
    assert out["decode_steps"] == 0
    assert out["decode_tokens_per_s"] is out["decode_overhead_pct"] is None


def test_overhead_counts_gaps_between_steps_but_not_an_idle_server() -> None:
    steps = [step("prefill", 1.0, 2.0, kernel=1.0), step("decode", 4.0, 1.0, kernel=1.0), step("decode", 21.0, 1.0)]
    requests = [request([3.0, 5.0]), request([22.0], submitted=20.0)]
    assert busy_seconds(steps, requests) == 5.0 + 2.0
    out = metrics(steps, requests)
    assert out["overhead_pct"] == pytest.approx(100 * (7.0 - 3.0) / 7.0)
    assert out["prefill_overhead_pct"] == 50.0
    assert out["decode_overhead_pct"] == 0.0


def test_the_phases_roof_uses_its_whole_work(limits: Ceilings) -> None:
    steps = [StepRecord("decode", 1, 1, 8, float(i), 1e8, 1e8, 5e8, 100.0) for i in range(4)]
    out = metrics(steps, [request([1.0])], ceilings=limits)
    assert out["decode_roof_pct"] == pytest.approx(50.0)
    assert out["decode_roof_bound"] == "dram"


@pytest.mark.parametrize("percent", [0, 10, 50, 90, 99, 100])
def test_percentiles_are_numpys(percent: float) -> None:
    values = [3.0, 1.0, 2.0, 10.0, 7.0]
    assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))


def test_the_output_hash_sees_ids_order_and_boundaries() -> None:
    base = output_hash([[1, 2], [3]])
    assert len(base) == 16
    assert base == output_hash([(1, 2), (3,)])
    assert (
        len({base, output_hash([[1], [2, 3]]), output_hash([[3], [1, 2]]), output_hash([[1, 2, 3]]), output_hash([])})
        == 5
    )


def test_records_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="phase must be one of"):
        step("warmup", 0.0, 1.0)
    with pytest.raises(ValueError, match="kernel_seconds <= seconds"):
        step("decode", 0.0, 1.0, kernel=2.0)
    with pytest.raises(ValueError, match="at least one step and one request, got 0 and 1"):
        metrics([], [request([1.0])])


def test_the_sample_document_is_consistent() -> None:
    data = roofline_data.sample_document()
    for op in data["ops"]:
        if op["flops"]:
            assert op["roof_pct"] == pytest.approx(100 * op["flops"] / op["time"] / op["roof"])
