"""How the suite runs: the harness measures, pytest-benchmark keeps, shows and compares.

    pytest bench/suite -k decode                         under a minute on two cores
    pytest bench/suite --benchmark-json now.json         everything, under ten minutes
    pytest bench/suite --cases full -k "tables and linear"

All options of the plugin work; `--benchmark-max-time` is the time of one benchmark (default here: 0.2 seconds),
`--benchmark-disable` runs each op once and compares it with the reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from pykernels.bench import problems, suite_records
from pykernels.bench.control import Control
from pykernels.bench.harness import Measurement, StopRule, measure
from pykernels.bench.machine import measurable
from pykernels.bench.suite.grids import Bench
from pykernels.registry import backends
from pykernels.roofline import Ceilings
from pykernels.roofline import measure as measure_ceilings
from pykernels.roofline.ceilings import remeasurer
from pykernels.testing.compare import check_case
from pykernels.testing.factories import Case

SECONDS = 0.2


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("pykernels")
    group.addoption(
        "--cases", choices=("smoke", "full"), default="smoke", help="which of the tests' cases are measured"
    )
    group.addoption("--warm", action="store_true", help="measure with warm caches (default: cold)")
    group.addoption("--entry", choices=("kernel", "op"), default="kernel", help="kernel leaves out the op's own Python")


def pytest_report_header() -> list[str]:
    states = backends()
    missing = [f"{n}: {'; '.join(getattr(s, 'reasons', ()))}" for n, s in states.items() if not s]
    return [f"measured backends: {', '.join(measurable())}", *(f"not measured: {text}" for text in missing)]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "smoke: one quick problem of every op")
    config.addinivalue_line("markers", "tables(family): takes the cases of that family's tests")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for mark in metafunc.definition.iter_markers("tables"):
        found = problems.tables(mark.args[0], metafunc.config.getoption("--cases"))
        metafunc.parametrize("case", found, ids=str)
    if "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", measurable())


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> Iterator[None]:
    """torch's pool does not fight with ours."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def ceilings() -> Ceilings | None:
    """The limits of this machine's CPU; there are none yet for a GPU."""
    return measure_ceilings() if "cpu" in measurable() else None


@pytest.fixture
def bench(request: pytest.FixtureRequest, ceilings: Ceilings | None) -> Bench:
    """Measures a case on a backend and hands the samples to the plugin."""
    playback = suite_records.Playback()
    request.node.add_marker(pytest.mark.benchmark(timer=playback.now, group=request.node.originalname))
    benchmark = request.getfixturevalue("benchmark")
    option, control = request.config.getoption, Control()

    def run(case: Case, backend: str) -> None:
        device = "cpu" if backend == "cpu" else "cuda"
        try:
            if benchmark.disabled:
                check_case(case, suite_records.runner(backend), device)
                benchmark.pedantic(lambda: None)
                return
            limits = ceilings if device == "cpu" else None
            before = control.seconds()
            found = measure(
                case,
                backend,
                device=device,
                cold=not option("--warm"),
                entry=option("--entry"),
                rule=_rule(request.config),
                ceilings=limits,
                remeasure=remeasurer(limits) if limits else None,
            )
        except NotImplementedError as error:
            pytest.skip(str(error))
        benchmark.extra_info["control_seconds"] = min(before, control.seconds())
        _hand_over(benchmark, playback, found)

    return run


def _rule(config: pytest.Config) -> StopRule:
    given = any(str(word).startswith("--benchmark-max-time") for word in config.invocation_params.args)
    seconds = float(config.getoption("benchmark_max_time")) if given else SECONDS
    return StopRule(min_samples=max(10, int(config.getoption("benchmark_min_rounds"))), seconds=seconds, noise=0.01)


def _hand_over(benchmark: Any, playback: suite_records.Playback, found: Measurement) -> None:
    samples: Sequence[float] = found.timing.samples
    playback.load(samples)
    benchmark.extra_info.update(suite_records.extra_info(found))
    benchmark.pedantic(playback.advance, rounds=len(samples))
