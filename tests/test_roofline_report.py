"""The report: its figures are the JSON's, it needs no network, and bad data or folders fail in one clear line."""

from __future__ import annotations

import copy
import html.parser
import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import roofline_data

from pykernels.roofline import charts, latency_charts, print_report, render, units
from pykernels.roofline.report import lookup, validate
from pykernels.roofline.svg import Box, Scale, place

VOID = {"meta", "br", "hr", "img", "input", "link", "wbr"}


class Page(html.parser.HTMLParser):
    """Collects tags and `<data>` figures, and checks that tags close in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.figures: list[tuple[dict[str, str | None], str]] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "data":
            self.figures.append((dict(attrs), ""))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.open and self.open[-1] == "data":
            attributes, shown = self.figures[-1]
            self.figures[-1] = (attributes, shown + data)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, Path]:
    folder = tmp_path_factory.mktemp("report") / "new" / "folder"
    page = render(roofline_data.sample_document(), folder)
    return json.loads((folder / "roofline.json").read_text()), page.read_text(), page


def test_every_figure_on_the_page_is_the_json_s(report: tuple[dict[str, Any], str, Path]) -> None:
    data, text, _ = report
    figures = Page(text).figures
    seen = {str(attributes["data-key"]) for attributes, _ in figures}
    for attributes, shown in figures:
        value = lookup(data, str(attributes["data-key"]))
        assert attributes["value"] == ("" if value is None else repr(value)), attributes
        assert shown == units.text(value, str(attributes["data-unit"])), attributes
    headline = {"ttft", "itl", "prefill_tokens_per_s", "decode_tokens_per_s", "prefill_roof_pct", "decode_roof_pct"}
    assert {f"metrics.{name}" for name in headline} <= seen
    assert {f"ops.{i}.roof_pct" for i in range(len(data["ops"]))} <= seen
    assert {f"ceilings.table.{name}.value" for name in data["ceilings"]["table"]} <= seen


def test_the_json_has_the_public_keys(report: tuple[dict[str, Any], str, Path]) -> None:
    data = report[0]
    assert {"ceilings", "ops", "metrics", "environment", "steps", "kv_memory", "no_cache", "command"} <= set(data)
    assert {"name", "phase", "shape", "time", "flops", "bytes", "intensity", "roof", "roof_pct"} <= set(data["ops"][0])


def test_the_page_is_one_small_file_without_a_network(report: tuple[dict[str, Any], str, Path]) -> None:
    _, text, path = report
    assert not re.search(r"(?:https?:)?//\w|@import|url\(|fetch\(|XMLHttp", text)
    fetching = {"link", "img", "iframe", "object", "embed", "source"}
    assert not fetching & {tag for tag, _ in Page(text).tags}
    assert not {"src", "href", "xlink:href"} & {name for _, attributes in Page(text).tags for name in attributes}
    assert path.stat().st_size < 1 << 20


def test_text_of_the_model_is_escaped(tmp_path: Path) -> None:
    data = roofline_data.sample_document()
    data["generation"]["text"] = "<script>alert(1)</script> & more"
    data["ops"][0]["label"] = "<b>"
    page = Page(render(data, tmp_path).read_text())
    assert "<script>alert(1)</script> & more" in page.text
    assert [tag for tag, _ in page.tags].count("script") == 1  # our own


def test_every_op_with_work_is_a_point_on_both_plots(report: tuple[dict[str, Any], str, Path]) -> None:
    data, text, _ = report
    shapes = [(tag, str(a["class"]).split()) for tag, a in Page(text).tags if str(a.get("class")).startswith("point ")]
    for phase, tag in (("prefill", "circle"), ("decode", "rect")):
        expected = [op for op in data["ops"] if op["phase"] == phase and op["flops"] > 0]
        assert shapes.count((tag, ["point", phase])) == 2 * len(expected)


def test_points_stand_where_their_numbers_say() -> None:
    x, y = Scale(1.0, 1000.0, 0.0, 300.0, log=True), Scale(0.0, 10.0, 100.0, 0.0)
    assert [x(v) for v in (1.0, 10.0, 1000.0)] == pytest.approx([0.0, 100.0, 300.0])
    assert y(2.5) == 75.0
    ops = roofline_data.sample_document()["ops"]
    for mark in charts._marks(x, Scale(1e8, 1e12, 400.0, 0.0, log=True), [op for op in ops if op["flops"]], 1.0):
        assert mark.x == pytest.approx(100 * math.log10(mark.op["intensity"]))
        assert mark.y == pytest.approx(400 - 100 * math.log10(mark.op["flops"] / mark.op["time"] / 1e8))


def test_the_timeline_shows_one_run_of_many() -> None:
    data = roofline_data.sample_document()
    later = {**data["requests"][0], "submitted": 500.0, "deliveries": [501.0]}
    beside = {**data["requests"][0], "submitted": 100.1, "deliveries": [101.0]}
    data["requests"] += [later, beside]
    data["steps"].append({**data["steps"][0], "start": 500.5})
    steps, requests = latency_charts.first_request(data)
    assert requests == [data["requests"][0], beside]
    assert steps == data["steps"][:-1]


def test_matrices_without_a_label_are_told_apart_by_their_shape() -> None:
    op = {"name": "linear", "label": "", "shape": "1 x 576 -> 3072, q4_1"}
    assert charts.display_name(op) == "linear · 576 → 3072"
    assert charts.display_name({**op, "label": "gate up"}) == "linear · gate up"
    assert charts.display_name({**op, "name": "rms_norm", "shape": "1 x 576"}) == "rms_norm"


def test_bars_share_out_the_whole_of_each_phase() -> None:
    data = roofline_data.sample_document()
    for phase, shares in charts.time_groups(data).items():
        assert sum(share for _, share in shares) == pytest.approx(100.0)
        assert shares[-1] == ("outside ops", data["metrics"][f"{phase}_overhead_pct"])


def test_labels_never_cover_each_other() -> None:
    frame, taken = Box(0, 0, 200, 120), []
    for _ in range(40):
        box = place((100.0, 60.0), 5.0, "linear 95 %", 12.0, frame, taken)
        if box is None:
            break
        assert box.inside(frame)
        assert not any(box.overlap(t) for t in taken)
        taken.append(box)
    assert 2 <= len(taken) < 40


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (0.2353, "s", "235 ms"),
        (4.6e-3, "s", "4.60 ms"),
        (38e-6, "s", "38.0 µs"),
        (30.84e9, "B/s", "30.8 GB/s"),
        (999.6e9, "FLOP/s", "1.00 TFLOP/s"),
        (2216.4, "tok/s", "2,216 tok/s"),
        (71.62, "%", "71.6 %"),
        (1890, "", "1,890"),
        (0.0123, "", "0.012"),
        (0.0, "s", "0 s"),
        (None, "s", "–"),
        ("avx2", "", "avx2"),
    ],
)
def test_numbers_are_written_with_three_digits_and_a_unit(value: Any, unit: str, shown: str) -> None:
    assert units.text(value, unit) == shown


@pytest.mark.parametrize("width", [charts.WIDE, charts.NARROW])
def test_one_step_one_gap_and_one_context_can_be_drawn(width: float) -> None:
    data = roofline_data.sample_document()
    data["steps"] = data["steps"][:2]
    data["requests"][0]["deliveries"] = data["requests"][0]["deliveries"][:2]
    data["no_cache"] = {"context": [64], "cached_seconds": [0.004], "recomputed_seconds": [0.03]}
    for draw in (
        latency_charts.timeline,
        latency_charts.itl_histogram,
        charts.no_cache,
        charts.roofline,
        charts.time_bars,
    ):
        assert "nan" not in draw(data, width).render()


def test_a_run_of_one_token_has_a_report_without_a_histogram(tmp_path: Path) -> None:
    data = roofline_data.sample_document()
    data["requests"][0]["deliveries"] = data["requests"][0]["deliveries"][:1]
    for name in ("itl", "itl_max", "icl_p50", "icl_p90", "icl_p99", "icl_max"):
        data["metrics"][name] = None
    text = render(data, tmp_path).read_text()
    assert "Distribution of the time between tokens" not in text
    assert f">{units.UNDEFINED}</data>" in text


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("ops", [], "the report has no ops: nothing was measured"),
        ("steps", [], "the report has no steps"),
        ("metrics.ttft", float("nan"), "the report's metrics.ttft is not a finite number"),
        ("ops.1.time", float("inf"), "the report's ops.1.time is not a finite number"),
        ("no_cache.context", [], "no_cache needs context"),
        ("no_cache.cached_seconds", [1.0], "no_cache needs context"),
        ("kv_memory.bytes_per_token", {}, "kv_memory needs"),
        ("ceilings.table.dram", None, "no dram ceiling"),
    ],
)
def test_empty_or_broken_data_is_named(tmp_path: Path, path: str, value: Any, message: str) -> None:
    data = copy.deepcopy(roofline_data.sample_document())
    parent, _, key = path.rpartition(".")
    target = lookup(data, parent) if parent else data
    if value is None:
        del target[key]
    else:
        target[int(key) if isinstance(target, list) else key] = value
    with pytest.raises(ValueError, match=re.escape(message)):
        render(data, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_part_is_named() -> None:
    data = roofline_data.sample_document()
    del data["kv_memory"], data["command"]
    with pytest.raises(ValueError, match="the report lacks kv_memory, command"):
        validate(data)


def test_a_folder_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(OSError, match="cannot write the report") as caught:
        render(roofline_data.sample_document(), blocked / "report")
    assert str(blocked / "report") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_terminal_report_fits_eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = io.StringIO()
    data = roofline_data.sample_document()
    print_report(data, out)
    lines = out.getvalue().splitlines()
    assert max(len(line) for line in lines) <= 80
    assert "…" not in out.getvalue()
    for op in data["ops"]:
        assert any(op["name"] in line and f"{op['roof_pct']:.1f} %" in line for line in lines)
