"""The CPU backend's team of threads: every part of a run is done once, with and without other threads on its cores.

On threads of its own, and on those of torch.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from pykernels import native, rms_norm
from pykernels.testing.compare import same_bits

ROOT = Path(__file__).parents[1]
SOURCES = [str(ROOT / "tests" / "thread_team.cpp"), str(ROOT / "csrc" / "cpu" / "threads.cpp")]
compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")


@pytest.fixture(scope="module", params=["-O2", "-O1 -fsanitize=thread"], ids=["plain", "thread sanitizer"])
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("team") / "team"
    flags = ["-std=c++20", "-pthread", "-I", str(ROOT / "csrc" / "cpu"), *request.param.split()]
    done = subprocess.run(["c++", *flags, *SOURCES, "-o", str(built)], capture_output=True, text=True)
    if done.returncode and "tsan" in done.stderr:
        pytest.skip("the compiler has no thread sanitizer")
    assert done.returncode == 0, done.stderr
    return built


@contextmanager
def busy_cores() -> Iterator[None]:
    """Somebody else spins on every core."""
    others = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in os.sched_getaffinity(0)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


@compiler
@pytest.mark.parametrize(("size", "granted"), [(1, 0), (2, 0), (3, 0), (1, 1), (2, 2), (3, 3), (3, 2), (2, 1)])
def test_every_part_is_done_once(program: Path, size: int, granted: int) -> None:
    done = subprocess.run([program, str(size), "500", str(granted)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@compiler
@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="counts cores by the affinity mask")
def test_the_caller_does_what_no_thread_begins(program: Path) -> None:
    with busy_cores():
        done = subprocess.run([program, "2", "100", "0"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[0]) > 0


@pytest.fixture
def torch_threads() -> Iterator[None]:
    ours, torchs = native.module().num_threads(), torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        if not native.share_torch_threads():
            pytest.skip("this torch has no OpenMP runtime that can be shared")
        yield
    finally:
        native.share_torch_threads(False)
        native.module().set_num_threads(ours)
        torch.set_num_threads(torchs)


def test_outputs_have_the_same_bits_on_the_threads_of_torch(torch_threads: None) -> None:
    assert native.module().num_threads() == 3
    x, weight = torch.randn(64, 577), torch.randn(577)
    on_torch = [rms_norm(x, weight, eps=1e-6) for _ in range(20)]
    native.share_torch_threads(False)
    alone = rms_norm(x, weight, eps=1e-6)
    assert all(same_bits(out, alone).all() for out in on_torch)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_has_threads_of_its_own(torch_threads: None) -> None:
    x, weight = torch.randn(64, 577), torch.randn(577)
    expected = rms_norm(x, weight, eps=1e-6).tolist()  # by threads that the child does not have
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        os._exit(0 if rms_norm(x, weight, eps=1e-6).tolist() == expected else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_nothing_is_shared_with_a_torch_of_one_thread() -> None:
    before = native.module().num_threads()
    assert torch.get_num_threads() == 1  # as the suite sets it
    assert not native.share_torch_threads()
    assert native.module().num_threads() == before
