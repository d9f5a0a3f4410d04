"""The CPU backend's team of threads: every part of a run is done once, with and without other threads on its cores."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

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
@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_part_is_done_once(program: Path, size: int) -> None:
    done = subprocess.run([program, str(size), "500"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@compiler
@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="counts cores by the affinity mask")
def test_the_caller_does_what_no_thread_begins(program: Path) -> None:
    with busy_cores():
        done = subprocess.run([program, "2", "100"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[0]) > 0
