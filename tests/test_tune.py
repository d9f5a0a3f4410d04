"""The search for tiles without a GPU: known times, candidates that fail or lie, the table that is written and read back."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from interpreter import patch_once

from pykernels.bench import gpu, tune
from pykernels.cli import main
from pykernels.testing import attention_cases
from pykernels.testing.attention_cases import Attention
from pykernels.testing.factories import Case
from pykernels.triton import BACKEND, candidates, configs, tuned
from pykernels.triton.common import INTERPRETED, Target
from pykernels.triton.configs import AttentionShape, Tile

SHAPE = AttentionShape(head_dim=128, head_dim_v=128, group=4, q_bytes=2, kv_bytes=2, paged=True)


@dataclass
class Told:
    """A clock that is told each call's time: what is called sets `now`."""

    times: dict[str, list[float]]
    name: str = "told"
    shortest: float = 0.0
    now: float = 1.0

    def call(self, tile: str) -> Callable[[], None]:
        def run() -> None:
            taken = self.times[tile]
            self.now = taken[0]
            self.times[tile] = taken[1:] + taken[:1]

        return run

    def chunk(self, calls: Any) -> Any:
        return calls[0]

    def seconds(self, chunk: Any) -> float:
        chunk()
        return self.now

    def flush(self) -> None: ...

    def settle(self) -> None: ...

    def cache_bytes(self) -> int:
        return 1


def search(times: dict[str, list[float]], **wrong: Exception) -> tune.Found:
    """A search from "analytic" over tiles whose times are known; those in `wrong` fail."""
    clock, last = Told(times), [""]

    def prepare(tile: str) -> Any:
        if isinstance(wrong.get(tile), RuntimeError):
            raise wrong[tile]
        last[0] = tile
        return clock.call(tile)

    def verify() -> None:
        if last[0] in wrong:
            raise wrong[last[0]]

    return tune.search("analytic", list(times), prepare, verify, clock, rounds=9)


def test_the_fastest_tile_that_is_right_is_found() -> None:
    times = {"analytic": [1.0], "a": [0.8], "b": [0.9], "wrong": [0.1], "large": [0.1]}
    found = search(times, wrong=AssertionError("out is off"), large=RuntimeError("out of resource: shared memory"))
    assert (found.best, found.better) == ("a", True)
    assert found.gain == pytest.approx(0.2)
    assert found.dropped == {"wrong": "out is off", "large": "out of resource: shared memory"}
    assert set(found.seconds) == {"analytic", "a", "b"}


def test_a_gain_within_the_noise_keeps_the_analytic_tile() -> None:
    assert not search({"analytic": [1.0], "a": [0.99]}).better  # less than two runs differ by
    assert search({"analytic": [1.0], "a": [0.97]}).better
    noisy = search({"analytic": [0.7, 1.3, 1.0], "a": [0.7, 0.9, 1.2]})
    assert noisy.best == "a"
    assert noisy.gain == pytest.approx(0.1)
    assert not noisy.better


def test_an_analytic_tile_that_is_wrong_is_an_error() -> None:
    with pytest.raises(AssertionError, match="out is off"):
        search({"analytic": [1.0], "a": [0.5]}, analytic=AssertionError("out is off"))


# ---- the search space --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("arch", [80, 86, 90, 100])
@pytest.mark.parametrize("problem", tune.problems(), ids=lambda p: p.name)
def test_the_analytic_tile_is_among_the_candidates(problem: tune.Problem, arch: int) -> None:
    target, shape = Target("cuda", arch), AttentionShape(**problem.shape)
    tma_ok = problem.kind == "prefill" and arch >= 90
    space = candidates.search_space(problem.kind, shape, tma_ok)
    fitting = [tile for tile in space if not candidates.why_not(target, shape, tile)]
    assert len(fitting) > 10
    with tuned.scope():
        prefill = problem.kind == "prefill"
        choice = configs.prefill_tile(target, shape, tma_ok) if prefill else configs.decode_tile(target, shape)
    assert choice in fitting


def test_what_cannot_run_is_pruned_with_the_reason() -> None:
    reasons = [
        candidates.why_not(Target("cuda", 86), SHAPE, tile)
        for tile in (Tile(64, 128, 4, 4), Tile(128, 128, 4, 1), Tile(16, 16, 4, 1), Tile(16, 64, 4, 3))
    ]
    assert "bytes of shared memory" in reasons[0]
    assert "registers a thread" in reasons[1]
    assert "4 warps share 2 products" in reasons[2]
    assert not reasons[3]


# ---- the table ---------------------------------------------------------------------------------------------------------
@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes entries for the GPU "Test GPU" where the package reads its tables."""
    monkeypatch.setattr(tuned.resources, "files", lambda _: tmp_path)
    caches = (tuned.entries, tuned._found)

    def write(*found: dict[str, Any]) -> None:
        (tmp_path / "tuned").mkdir(exist_ok=True)
        (tmp_path / "tuned/test-gpu.json").write_text(json.dumps(tune.document("Test GPU", found, {"triton": "3.9"})))
        for cached in caches:
            cached.cache_clear()

    yield write
    for cached in caches:
        cached.cache_clear()


def entry(tile: Tile | None, **shape: Any) -> dict[str, Any]:
    fields = {**vars(SHAPE), "tma_ok": False, **shape}
    found = {"kind": "decode", "shape": fields, "problem": "p", "gain": 0.1, "noise": 0.01}
    return {**found, "tile": tile and vars(tile), "seconds": 1.0, "analytic_seconds": 1.1}


def test_a_measured_tile_replaces_the_analytic_one_for_its_gpu_and_shape_alone(table: Any) -> None:
    measured = Tile(64, 16, 8, 4, False)
    table(entry(measured), entry(None, head_dim=64))
    here, elsewhere = Target("cuda", 90, "Test GPU"), Target("cuda", 90, "Other GPU")
    analytic = configs.decode_tile(elsewhere, SHAPE)
    assert measured not in (analytic, configs.decode_tile(Target("cuda", 90), SHAPE))
    assert configs.decode_tile(here, SHAPE) == measured
    other = AttentionShape(**{**vars(SHAPE), "head_dim": 64, "head_dim_v": 64})
    assert configs.decode_tile(here, other) == configs.decode_tile(elsewhere, other)
    assert configs.prefill_tile(here, SHAPE) == configs.prefill_tile(elsewhere, SHAPE)
    with tuned.scope():
        assert configs.decode_tile(here, SHAPE) == analytic
    with tuned.scope(Tile(16, 32, 4, 2, False)):
        assert configs.decode_tile(here, SHAPE) == Tile(16, 32, 4, 2, False)
    assert configs.decode_tile(here, SHAPE) == measured


def test_a_measured_tile_still_holds_a_whole_group(table: Any) -> None:
    table(entry(Tile(16, 16, 4, 2, False), group=40))
    wide = AttentionShape(**{**vars(SHAPE), "group": 40})
    assert configs.decode_tile(Target("cuda", 90, "Test GPU"), wide).block_m == 64


def test_every_table_that_is_shipped_can_be_read() -> None:
    for path in (Path(tuned.__file__).parent / "tuned").glob("*.json"):
        document = json.loads(path.read_text())
        assert path.stem == tuned.slug(document["gpu"])
        for found in document["entries"]:
            assert Tile(**found["tile"]).num_stages >= 1
            AttentionShape(**{n: v for n, v in found["shape"].items() if n != "tma_ok"})


# ---- with the kernels, interpreted -------------------------------------------------------------------------------------
@pytest.mark.skipif(not INTERPRETED.value or bool(BACKEND.unavailable()), reason="for Triton's interpreter")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_candidates_run_and_one_that_is_wrong_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_once()
    spec = Attention(
        q_lens=(1, 1), k_lens=(70, 70), heads=4, kv_heads=2, head_dim=32, head_dim_v=32, dtype=torch.bfloat16, lse=False
    )
    problem = tune.Problem(
        "small", "decode", Case("paged_decode_attention", "small", lambda m: attention_cases.decode(spec, m), False), {}
    )
    tiles = [Tile(16, 16, 4, 1, False), Tile(16, 64, 4, 1, False)]
    monkeypatch.setattr(candidates, "search_space", lambda *_: tiles)
    monkeypatch.setattr(candidates, "why_not", lambda *_: "")
    used, run = [], BACKEND.run

    def spoil(op_name: str, args: dict[str, Any]) -> None:
        run(op_name, args)
        tile = tuned.lookup("seen", "", SHAPE)
        used.append(tile)
        if tile == vars(tiles[1]):
            args["out"].add_(1)

    monkeypatch.setattr(BACKEND, "run", spoil)
    found = tune.tune(problem, gpu.build(problem, torch.device("cpu")), Told({}), rounds=3)
    assert vars(tiles[0]) in used  # the choice was really handed to the kernel's launcher
    assert list(found["dropped"]) == [str(tiles[1])]
    assert "small is wrong" in found["dropped"][str(tiles[1])]
    assert found["shape"]["head_dim"] == 32
    assert found["tile"] is None  # the clock says that all take the same time
    assert found["gain"] == 0.0


# ---- the command -------------------------------------------------------------------------------------------------------
def test_the_dry_run_lists_what_would_be_tried(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--dry-run", "--arch", "80", "--only", "decode-d128-kv_int8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "pruned" in lines[0] + lines[-2] + "".join(lines)
    assert lines[-1].startswith(f"{len(lines) - 1} candidates for sm_80")
    assert main(["tune", "--dry-run", "--json", "--only", "prefill-d64"]) == 0
    assert json.loads(capsys.readouterr().out)["arch"] == 90


def test_without_a_gpu_the_command_says_that_the_analytic_choice_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert main(["tune"]) == 2
    assert "no GPU to tune on" in (text := capsys.readouterr().err)
    assert "analytic" in text
    assert main(["tune", "--only", "nothing"]) == 2
    assert main(["tune", "--rounds", "1"]) == 2
