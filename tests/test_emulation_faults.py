"""Every kind of mistake, injected into a small kernel: reported with its source line, under every schedule.

Each self-test kernel exists in a sound and in a faulty version that differ by one mistake. The line that must be named
carries a comment in the source. A fault that only some schedules or some timings of asynchronous copies reveal would fail here.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from emulation_selftest import FOLDER, library, line_of, pointer

from pykernels.testing import emulation
from pykernels.testing.emulation_build import available

pytestmark = pytest.mark.skipif(available() is not None, reason=str(available()))

MEMORY, BARRIER, HOPPER = "faults_memory.cu", "faults_barrier.cu", "faults_hopper.cu"

# kernel, file, kind, the comment on the line that is named (the kernel's own name unless given), whether the launch fails
FAULTS = [
    ("missing_barrier", MEMORY, "race"),
    ("missing_syncwarp", MEMORY, "race"),
    ("partial_syncwarp", MEMORY, "race"),
    ("missing_async_wait", MEMORY, "async_in_flight"),
    ("one_group_too_few", MEMORY, "async_in_flight"),
    ("stage_refilled_early", MEMORY, "race"),
    ("global_read_past_end", MEMORY, "global_out_of_bounds"),
    ("global_read_before", MEMORY, "global_out_of_bounds"),
    ("global_write_past_end", MEMORY, "global_out_of_bounds"),
    ("global_write_before", MEMORY, "global_out_of_bounds"),
    ("cp_async_past_end", MEMORY, "global_out_of_bounds"),
    ("atomic_past_end", MEMORY, "global_out_of_bounds"),
    ("shared_read_past_end", MEMORY, "shared_out_of_bounds"),
    ("shared_write_before", MEMORY, "shared_out_of_bounds"),
    ("ldmatrix_past_end", MEMORY, "shared_out_of_bounds"),
    ("write_to_input", MEMORY, "read_only_write"),
    ("misaligned_load", MEMORY, "misaligned"),
    ("uninitialised_dynamic", MEMORY, "uninitialised_shared"),
    ("uninitialised_static", MEMORY, "uninitialised_shared"),
    ("uninitialised_tile", MEMORY, "uninitialised_shared"),
    ("race_in_static", MEMORY, "race"),
    ("counter_without_atomic", MEMORY, "race"),
    ("counter_read_early", MEMORY, "race"),
    ("bytes_of_a_word", MEMORY, "race"),
    ("copy_never_awaited", MEMORY, "unawaited_copy"),
    ("diverged_barrier", BARRIER, "barrier_divergence"),
    ("barrier_after_exit", BARRIER, "barrier_exited"),
    ("named_barrier_short", BARRIER, "deadlock"),
    ("named_barrier_counts_differ", BARRIER, "barrier_divergence"),
    ("producer_never_arrives", BARRIER, "deadlock"),
    ("arrival_nobody_awaits", BARRIER, "barrier_divergence"),
    ("warp_splits_at_named_barriers", BARRIER, "warp_divergence"),
    ("shuffle_after_exit", BARRIER, "exited_lane"),
    ("diverged_shuffle", BARRIER, "warp_divergence"),
    ("lane_outside_its_mask", BARRIER, "lane_outside_mask"),
    ("shuffle_from_outside_the_mask", BARRIER, "lane_outside_mask"),
    ("overlapping_masks", BARRIER, "warp_divergence|exited_lane", "overlapping_masks|overlapping_masks_other"),
    ("endless_spin", BARRIER, "livelock"),
    ("missing_full_wait", HOPPER, "race|async_in_flight", "consumer"),
    ("missing_phase", HOPPER, "race|async_in_flight|deadlock", "consumer|full_wait"),
    ("missing_empty_wait", HOPPER, "race|async_in_flight|mbarrier", "producer|too_many_arrivals_at_full"),
    ("too_many_arrivals", HOPPER, "mbarrier|race", "too_many_arrivals|empty_init|producer"),
    ("arrive_without_syncwarp", HOPPER, "race", "producer"),
    ("missing_init_fence", HOPPER, "proxy_fence", "producer"),
    ("mbarrier_never_initialised", HOPPER, "mbarrier"),
    ("mbarrier_overwritten", HOPPER, "mbarrier"),
    ("mbarrier_never_completes", HOPPER, "deadlock"),
    ("async_arrival_not_awaited", HOPPER, "race|async_in_flight"),
    ("missing_wgmma_wait", HOPPER, "wgmma", "product_use"),
    ("missing_wgmma_fence", HOPPER, "wgmma", "product_issue"),
    ("missing_proxy_fence", HOPPER, "proxy_fence", "product_issue"),
    ("operand_overwritten", HOPPER, "race"),
    ("a_registers_refilled", HOPPER, "wgmma"),
]
SCHEDULES = [("forward", 1), ("reverse", 1), ("random", 1), ("random", 2), ("random", 3)]
SETTINGS = list(itertools.product(SCHEDULES, emulation.ASYNC_MODES))


def run(name: str, faulty: bool, schedule: str, seed: int, async_copies: str, build: str = "race", **options):
    lib = library(build)
    lib.emu_free_all()
    out = emulation.place(lib, torch.zeros(4096), "out")
    values = emulation.place(
        lib,
        torch.rand(4096, generator=torch.Generator().manual_seed(7)).half().repeat(2).view(torch.float32)[:4096],
        "in",
    )
    emulation.register(lib, values, "in", writable=False)
    with emulation.session(lib, schedule=schedule, seed=seed, async_copies=async_copies, **options) as report:
        status = lib.selftest_fault(name.encode(), int(faulty), pointer(out), pointer(values))
    assert status >= 0, f"no self-test kernel {name}"
    return report, out


@pytest.mark.parametrize("fault", FAULTS, ids=[f[0] for f in FAULTS])
def test_every_injected_fault_is_reported_where_it_is(fault):
    name, file, kinds, marks = (*fault, fault[0])[:4]
    places = {(f"{FOLDER}/{file}", line_of(file, mark)) for mark in marks.split("|")}
    for (schedule, seed), async_copies in SETTINGS:
        report, _ = run(name, True, schedule, seed, async_copies)
        named = [
            f
            for f in report.faults
            if f.kind in kinds.split("|") and {(f.file, f.line), (f.other_file, f.other_line)} & places
        ]
        assert named, f"{schedule} {seed} {async_copies}: {report}"


@pytest.mark.parametrize("fault", FAULTS, ids=[f[0] for f in FAULTS])
def test_the_sound_version_has_no_report_and_one_result(fault):
    results = []
    for (schedule, seed), async_copies in SETTINGS:
        report, out = run(fault[0], False, schedule, seed, async_copies)
        assert not report.faults, f"{schedule} {seed} {async_copies}: {report}"
        results.append(out.clone().view(torch.int32))
    assert all(torch.equal(results[0], other) for other in results[1:])
