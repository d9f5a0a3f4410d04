"""The gate: verdicts that can be wrong in both directions, and everything that must fail it."""

from __future__ import annotations

import itertools
import json
import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from suite_file import entry, write

from pykernels import native
from pykernels.bench import gate, verdict
from pykernels.bench.gate import GateError, compare_files, compare_trees

ROOT = Path(__file__).parents[1]
CASE = ("rms_norm", "smollm2-bfloat16-tokens_256")


# ---- verdicts ---------------------------------------------------------------------------------------------------------
def test_nine_repetitions_are_the_fewest_that_hold_the_median() -> None:
    values = [float(v) for v in range(9)]
    assert verdict.median_interval(values) == (0.0, 8.0)
    assert verdict.median_interval([float(v) for v in range(15)]) == (2.0, 12.0)
    with pytest.raises(ValueError, match="at least 9"):
        verdict.median_interval(values[:8])


@pytest.mark.parametrize("n", [9, 15, 27])
def test_the_interval_holds_the_median_as_often_as_it_says(n: int) -> None:
    rng = random.Random(1)
    hits = 0
    for _ in range(2000):
        low, high = verdict.median_interval([rng.expovariate(1.0) for _ in range(n)])
        hits += low <= math.log(2) <= high
    assert hits / 2000 > verdict.CONFIDENCE - 0.008  # three standard errors


def told_at(log_ratios: Callable[[], float], least: int = 9) -> tuple[str, int]:
    """The verdict over ratios that come one by one, and after how many."""
    values: list[float] = []
    while not (found := verdict.look(values, least, 0.03) if values else None):
        values.append(log_ratios())
    return found.kind, len(values)


def test_repetitions_are_judged_at_four_looks_whose_errors_add_up_to_one_per_cent() -> None:
    assert sum(1 - confidence for confidence in verdict.LOOKS.values()) <= 1 - verdict.CONFIDENCE + 1e-9
    undecided = itertools.cycle([-1.0, 1.0])
    assert told_at(lambda: next(undecided)) == ("AMBIGUOUS", 72)
    assert told_at(lambda: next(undecided), 12) == ("AMBIGUOUS", 96)
    late = itertools.chain([-1.0, 1.0] * 5, itertools.repeat(0.2))
    assert told_at(lambda: next(late)) == ("SLOWER", 36)  # would be so after 24, but nobody looks then


@pytest.mark.parametrize("edge", [1.03, 1 / 1.03])
def test_a_change_as_large_as_the_margin_is_rarely_called_larger(edge: float) -> None:
    rng = random.Random(5)
    kinds = [told_at(lambda: math.log(edge) + noisy(rng, 0.02))[0] for _ in range(3000)]
    beyond = "SLOWER" if edge > 1 else "FASTER"
    assert kinds.count(beyond) / 3000 < 0.005 + 0.004  # a half of the error, and three standard errors
    assert kinds.count("SAME") / 3000 < 0.005 + 0.004


@pytest.mark.parametrize("spread", [0.01, 0.03, 0.06])
def test_ten_percent_are_found_in_noise_that_never_makes_a_difference_of_its_own(spread: float) -> None:
    rng = random.Random(6)
    planted = [told_at(lambda: math.log(1.1) + noisy(rng, spread))[0] for _ in range(1000)]
    alike = [told_at(lambda: noisy(rng, spread))[0] for _ in range(1000)]
    assert planted.count("SLOWER") >= 999
    assert not {"SLOWER", "FASTER"} & set(alike)


def noisy(rng: random.Random, spread: float) -> float:
    """One repetition in ten is wild, to either side."""
    return rng.gauss(0.0, spread) if rng.random() > 0.1 else rng.gauss(0.0, 0.3)


@pytest.mark.parametrize(
    ("low", "high", "kind"),
    [
        (1.04, 1.2, "SLOWER"),
        (0.8, 0.96, "FASTER"),
        (0.98, 1.02, "SAME"),
        (1.02, 1.2, "AMBIGUOUS"),
        (0.5, 2.0, "AMBIGUOUS"),
        (0.9, 1.0, "AMBIGUOUS"),
    ],
)
def test_a_verdict_is_two_sided_and_knows_when_it_does_not_know(low: float, high: float, kind: str) -> None:
    assert verdict.judge((low * high) ** 0.5, low, high, 0.03).kind == kind


def test_the_bootstrap_finds_ten_percent_and_says_the_same_twice() -> None:
    rng = random.Random(2)
    a = [rng.gauss(1.0, 0.02) for _ in range(60)]
    b = [rng.gauss(1.1, 0.02) for _ in range(60)]
    found = verdict.of_samples(a, b, 0.05)
    assert found.kind == "SLOWER"
    assert found == verdict.of_samples(a, b, 0.05)
    assert verdict.of_samples(b, a, 0.05).kind == "FASTER"
    assert verdict.of_samples(a, a, 0.05).kind == "SAME"


# ---- files ------------------------------------------------------------------------------------------------------------
def verdicts(tmp_path: Path, a: list[dict[str, Any]], b: list[dict[str, Any]]) -> dict[str, str]:
    lines = compare_files(write(tmp_path / "a.json", *a), write(tmp_path / "b.json", *b))
    return {line.benchmark: line.kind for line in lines}


def test_two_files_are_compared_benchmark_by_benchmark(tmp_path: Path) -> None:
    before = [entry(n) for n in "pqrs"]
    after = [entry("p"), entry("q", scale=1.3), entry("r", scale=0.7), entry("s", scale=1.3, control_seconds=1.3e-3)]
    assert verdicts(tmp_path, before, after) == {"p": "SAME", "q": "SLOWER", "r": "FASTER", "s": "SAME"}


def test_a_benchmark_may_have_a_margin_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gate.MARGINS, "q", 0.5)
    before = [entry("p"), entry("q")]
    after = [entry("p", scale=1.3), entry("q", scale=1.3)]
    assert verdicts(tmp_path, before, after) == {"p": "SLOWER", "q": "SAME"}


def test_an_empty_run_fails(tmp_path: Path) -> None:
    full = write(tmp_path / "a.json", entry("p"))
    for text in ('{"benchmarks": []}', "{}", ""):
        (tmp_path / "b.json").write_text(text)
        with pytest.raises(GateError):
            compare_files(full, tmp_path / "b.json")
    with pytest.raises(GateError, match="empty run"):
        compare_trees(ROOT, ROOT, [])


@pytest.mark.parametrize("gone", [0, 1])
def test_a_missing_entry_fails_on_either_side(tmp_path: Path, gone: int) -> None:
    sides = [[entry("p"), entry("q")], [entry("p"), entry("q")]]
    del sides[gone][1]
    assert verdicts(tmp_path, *sides) == {"p": "SAME", "q": "MISSING"}
    assert gate.Line("q", "MISSING").failed


def test_a_changed_output_hash_fails(tmp_path: Path) -> None:
    assert verdicts(tmp_path, [entry("p")], [entry("p", output_hash="h2")]) == {"p": "CHANGED OUTPUT"}
    assert gate.Line("p", "CHANGED OUTPUT").failed


def test_another_machine_s_baseline_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GateError, match="different machines"):
        verdicts(tmp_path, [entry("p")], [entry("p", machine_key="m2")])


def test_cold_is_not_compared_with_warm(tmp_path: Path) -> None:
    assert verdicts(tmp_path, [entry("p")], [entry("p", temperature="warm")]) == {"p": "MISSING"}


# ---- trees ------------------------------------------------------------------------------------------------------------
def copied(folder: Path) -> Path:
    """A tree of its own with the module in use; the rest of the package is the repository's."""
    ignore = shutil.ignore_patterns("_cpu_*", "_cuda*", "__pycache__")
    shutil.copytree(ROOT / "pykernels", folder / "pykernels", ignore=ignore)
    shutil.copytree(ROOT / "reference", folder / "reference", ignore=ignore)
    for module in (ROOT / "pykernels").glob(f"_cpu_{native.chosen_level()}.*"):
        (folder / "pykernels" / module.name).symlink_to(module)
    return folder


def test_fewer_than_nine_repetitions_are_refused() -> None:
    with pytest.raises(GateError, match="at least 9"):
        compare_trees(ROOT, ROOT, [CASE], repetitions=8)


def test_a_slower_kernel_of_another_tree_is_found(tmp_path: Path) -> None:
    slow = copied(tmp_path / "slow")
    path = slow / "pykernels" / "native.py"
    text = path.read_text()
    once = "getattr(module(), op_name)(*native_arguments(OPS[op_name], args))"
    assert once in text
    path.write_text(text.replace(once, f"{once}\n        {once}"))  # every recorded call is recorded twice
    (line,) = compare_trees(ROOT, slow, [CASE])
    assert line.kind == "SLOWER"
    assert line.ratio == pytest.approx(2.0, rel=0.4)


def test_a_benchmark_that_one_tree_cannot_run_is_missing(tmp_path: Path) -> None:
    broken = copied(tmp_path / "broken")
    path = broken / "pykernels" / "native.py"
    path.write_text(path.read_text().replace('_linear_refusals(args) if op_name == "linear" else []', '["not here"]'))
    (line,) = compare_trees(ROOT, broken, [CASE])
    assert line.kind == "MISSING"
    assert "not here" in line.note


class Told:
    """A side that answers as its table says, without a process."""

    closed: ClassVar[int] = 0

    def __init__(self, tree: Path, threads: int) -> None:
        self.answers = TABLES[tree.name]

    def ask(self, do: str, **words: Any) -> dict[str, Any]:
        return self.answers[do]

    def close(self) -> None:
        Told.closed += 1


def told(key: str = "m1", digest: str = "h1", seconds: float = 1.0) -> dict[str, dict[str, Any]]:
    return {
        "hello": {"machine": key},
        "prepare": {"hash": digest},
        "sample": {"times": [seconds] * 5, "controls": [1.0] * 5},
    }


TABLES = {
    "base": told(),
    "slow": told(seconds=1.1),
    "fast": told(seconds=0.9),
    "throttled": told() | {"sample": {"times": [1.5] * 5, "controls": [1.5] * 5}},
    "changed": told(digest="h2"),
    "wrong": told() | {"prepare": {"error": "Mismatch: it is wrong"}},
    "elsewhere": told(key="m2"),
}


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ("base", "SAME"),
        ("slow", "SLOWER"),
        ("fast", "FASTER"),
        ("throttled", "SAME"),
        ("changed", "CHANGED OUTPUT"),
        ("wrong", "MISSING"),
    ],
)
def test_what_the_sides_say_becomes_a_verdict(monkeypatch: pytest.MonkeyPatch, other: str, expected: str) -> None:
    monkeypatch.setattr(gate, "Side", Told)
    (line,) = compare_trees(Path("base"), Path(other), [CASE])
    assert line.kind == expected
    assert line.failed == (expected not in ("SAME", "FASTER"))


class Weather(Told):
    """A side on a machine that drifts, shared by both, and whose samples and controls are interrupted now and then."""

    rng = random.Random(7)
    speed: ClassVar[float] = 1.0

    def ask(self, do: str, **words: Any) -> dict[str, Any]:
        if do != "sample":
            return super().ask(do, **words)
        Weather.speed *= math.exp(self.rng.gauss(0.0, 0.01))
        seconds = self.answers["sample"]["times"][0]
        times, controls = (
            [self.speed * s * self.rng.choice((1.0, 1.0, 1.0, 1.4)) * math.exp(self.rng.gauss(0.0, 0.02)) for s in each]
            for each in ([seconds] * words["count"], [1.0] * words["count"])
        )
        if self.rng.random() < 0.1:
            controls = [1.5 * c for c in controls]
        return {"times": times, "controls": controls}


@pytest.mark.parametrize(
    ("other", "right"), [("base", {"SAME", "AMBIGUOUS"}), ("slow", {"SLOWER"}), ("fast", {"FASTER"})]
)
def test_the_verdict_is_right_in_bad_weather(monkeypatch: pytest.MonkeyPatch, other: str, right: set[str]) -> None:
    monkeypatch.setattr(gate, "Side", Weather)
    found = [compare_trees(Path("base"), Path(other), [CASE])[0].kind for _ in range(200)]
    assert set(found) <= right
    assert "SAME" not in right or found.count("SAME") >= 198


def test_a_changed_output_passes_where_it_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "Side", Told)
    (line,) = compare_trees(Path("base"), Path("changed"), [CASE], changed=["rms_norm"])
    assert line.kind == "SAME"
    (line,) = compare_trees(Path("base"), Path("changed"), [CASE], changed=["linear"])
    assert line.kind == "CHANGED OUTPUT"


def test_sides_that_run_differently_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "Side", Told)
    Told.closed = 0
    with pytest.raises(GateError, match="run differently"):
        compare_trees(Path("base"), Path("elsewhere"), [CASE])
    assert Told.closed == 2


# ---- the command ------------------------------------------------------------------------------------------------------
def test_the_command_fails_on_a_slower_file_and_tells_wrong_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from pykernels.cli import main

    before = write(tmp_path / "a.json", entry("p"), entry("q"))
    after = write(tmp_path / "b.json", entry("p"), entry("q", scale=1.3))
    kept = before.read_bytes()
    assert main(["gate", str(before), str(before)]) == 0
    assert main(["gate", str(before), str(after), "--json"]) == 1
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert not document["ok"]
    assert [b["kind"] for b in document["benchmarks"]] == ["SAME", "SLOWER"]
    assert main(["gate", str(before), str(after), "--markdown"]) == 1
    assert "| q | SLOWER | 1.300 |" in capsys.readouterr().out
    assert before.read_bytes() == kept
    for wrong in ([str(before), "HEAD"], ["no-such-revision", "."], [str(before), str(tmp_path / "no.json")]):
        assert main(["gate", *wrong]) == 2
        assert "Traceback" not in capsys.readouterr().err


def test_the_working_tree_is_built_before_it_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pykernels.cli import gate as command

    built: list[Path] = []
    monkeypatch.setattr(command, "_git", lambda *words: str(tmp_path))
    monkeypatch.setattr(command, "_build", built.append)
    assert command.tree(".") == tmp_path
    assert built == [tmp_path]
