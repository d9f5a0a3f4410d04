"""The whole report: benchmarks, profiles, occupancy and a run before, and how a browser shows it."""

from __future__ import annotations

import copy
import html
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import report_data
import roofline_data
from test_roofline_report import Page

from pykernels.roofline import latency_charts, level_chart, render, units
from pykernels.roofline.attach import attach, bench_rows, compare, heat_table
from pykernels.roofline.report import lookup


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    page = render(report_data.full_document(), tmp_path_factory.mktemp("report"))
    return json.loads((page.parent / "roofline.json").read_text()), page


def equal_figures(data: dict[str, Any], page: Page) -> set[str]:
    """The paths of all figures on the page, each of which is checked against the document."""
    for attributes, shown in page.figures:
        value = lookup(data, str(attributes["data-key"]))
        exact = "" if value is None else repr(value) if isinstance(value, float) else str(value)
        assert attributes["value"] == exact, attributes
        assert shown == units.text(value, str(attributes["data-unit"])), attributes
    return {str(attributes["data-key"]) for attributes, _ in page.figures}


# ---- what is attached -----------------------------------------------------------------------------------------------
def test_the_page_has_a_figure_for_everything_attached(report: tuple[dict[str, Any], Path]) -> None:
    data, path = report
    seen = equal_figures(data, Page(path.read_text()))
    assert {f"bench.{i}.{name}" for i in range(len(data["bench"])) for name in ("roof_pct", "time")} <= seen
    assert {f"profiles.0.points.{i}.levels.{level}.bytes" for i in range(3) for level in ("l1", "l2", "dram")} <= seen
    assert {f"comparison.metrics.{i}.ratio" for i in range(len(data["comparison"]["metrics"]))} <= seen
    assert {"occupancy.0.registers", "occupancy.1.occupancy %"} <= seen
    assert path.stat().st_size < 1 << 19


def test_the_commands_to_reproduce_are_on_the_page(report: tuple[dict[str, Any], Path]) -> None:
    data, path = report
    text = Page(path.read_text()).text
    for command in (data["command"], data["report_command"], data["profiles"][0]["command"]):
        assert command in text


def test_a_bare_run_has_none_of_the_further_sections(tmp_path: Path) -> None:
    text = render(roofline_data.sample_document(), tmp_path).read_text()
    for title in ("By memory level", "Every op, backend and size", "Against the run before", "Occupancy"):
        assert f"<h2>{title}</h2>" not in text
        assert f"<h2>{title}</h2>" in render(report_data.full_document(), tmp_path).read_text()


def test_the_heat_table_has_each_benchmark_in_its_place() -> None:
    rows = bench_rows(report_data.suite())
    placed = []
    for op in heat_table(rows):
        for size, cells in op["sizes"]:
            assert len(cells) == len(op["backends"])
            for backend, index in zip(op["backends"], cells, strict=True):
                if index is not None:
                    row = rows[index]
                    assert (row["op"], row["backend"], row["size"]) == (op["op"], backend, size)
                    placed.append(index)
    assert sorted(placed) == list(range(len(rows)))
    fewer = [r for r in rows if (r["backend"], r["op"]) != ("triton", "linear") or r["size"] != rows[-1]["size"]]
    assert sum(i is not None for op in heat_table(fewer) for _, cells in op["sizes"] for i in cells) == len(fewer)
    hole = [r for i, r in enumerate(rows) if i != 1]  # one size of the first op, on its second backend
    assert heat_table(hole)[0]["sizes"][0][1] == [0, None]


def test_cold_and_warm_are_not_one_cell() -> None:
    suite = report_data.suite()
    warm = copy.deepcopy(suite["benchmarks"][0])
    warm["extra_info"]["temperature"] = "warm"
    rows = bench_rows({"benchmarks": [suite["benchmarks"][0], warm]})
    assert [cells for _, cells in heat_table(rows)[0]["sizes"]] == [[0], [1]]


@pytest.mark.parametrize(
    "suite", [{}, {"benchmarks": []}, {"benchmarks": [{"name": "t", "extra_info": {}, "stats": {}}]}]
)
def test_a_file_that_is_not_the_suite_s_is_refused(suite: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"holds no benchmark|not of this suite"):
        bench_rows(suite)


def test_occupancy_with_ragged_columns_is_refused() -> None:
    with pytest.raises(ValueError, match="different columns"):
        attach(roofline_data.sample_document(), occupancy=[{"a": 1}, {"b": 1}])


# ---- before and after -----------------------------------------------------------------------------------------------
def pair() -> tuple[dict[str, Any], dict[str, Any]]:
    before, after = (attach(roofline_data.sample_document(), bench=[report_data.suite()]) for _ in range(2))
    return copy.deepcopy(before), copy.deepcopy(after)


def test_a_ratio_above_one_is_faster_for_times_and_for_rates() -> None:
    before, after = pair()
    after["metrics"]["ttft"] = before["metrics"]["ttft"] / 2
    after["metrics"]["decode_tokens_per_s"] = before["metrics"]["decode_tokens_per_s"] * 3
    after["metrics"]["itl"] = before["metrics"]["itl"] * 4
    after["bench"][5]["time"] = before["bench"][5]["time"] / 5
    after["bench"][5]["quartiles"] = [q / 5 for q in before["bench"][5]["quartiles"]]
    found = compare(before, after)
    ratios = {row["name"]: row["ratio"] for row in found["metrics"]}
    assert (ratios["ttft"], ratios["decode_tokens_per_s"], ratios["itl"]) == (
        pytest.approx(2),
        pytest.approx(3),
        pytest.approx(0.25),
    )
    assert found["bench"][0]["ratio"] == pytest.approx(5)
    assert [row["apart"] for row in found["bench"]].count(True) == 1
    assert found["bench_median_ratio"] == 1.0


def test_other_outputs_are_not_compared() -> None:
    before, after = pair()
    after["metrics"]["output_hash"] = "f" * 16
    after["bench"][0]["output_hash"] = "f" * 16
    found = compare(before, after)
    assert not found["same_output"]
    assert {row["ratio"] for row in found["metrics"]} == {None}
    assert [row["ratio"] for row in found["bench"]].count(None) == 1


def test_two_machines_are_not_compared() -> None:
    before, after = pair()
    after["ceilings"]["machine"]["cpu"] = "another"
    with pytest.raises(ValueError, match="two machines"):
        compare(before, after)
    before, after = pair()
    after["ceilings"]["machine"]["version"] = "0.2.0"
    after["bench"] = [{**row, "machine_key": "another"} for row in after["bench"]]
    assert compare(before, after)["bench"] == []


def test_what_is_missing_or_new_is_named() -> None:
    before, after = pair()
    gone, new = after["bench"].pop(0), before["bench"].pop(-1)
    found = compare(before, after)
    assert found["only_before"] == [f"{gone['op']} {gone['case']} {gone['backend']}"]
    assert found["only_after"] == [f"{new['op']} {new['case']} {new['backend']}"]


# ---- charts ---------------------------------------------------------------------------------------------------------
def test_the_hierarchical_roofline_has_a_point_per_level() -> None:
    data = report_data.full_document()
    drawn = level_chart.level_roofline(data, 880.0).render()
    levels = [level for p in data["profiles"][0]["points"] for level in p["levels"]]
    assert drawn.count('class="level ') == len(levels) == 9
    assert drawn.count("roof slope") == 3
    assert level_chart.levels_of(data) == ["l1", "l2", "dram"]
    tips = re.findall(r"<title>(decode_kernel[^<]*)</title>", drawn)
    assert "DRAM: 64.0 MB a call, 3.20 TB/s\n96.1 % of the level&#x27;s 3.33 TB/s" in tips[-1]


def test_points_of_one_kernel_stand_at_one_speed() -> None:
    drawn = level_chart.level_roofline(report_data.full_document(), 380.0).render()
    heights = re.findall(r'<circle cx="[\d.]+" cy="([\d.]+)"', drawn)
    assert [heights.count(h) for h in dict.fromkeys(heights)] == [3, 3, 3]


def test_a_kernel_is_called_by_its_name() -> None:
    long = "void pk::cuda::<unnamed>::decode_kernel<__nv_bfloat16, (int)128>(pk::cuda::Decode)"
    assert level_chart.short_kernel(long) == "decode_kernel"
    assert level_chart.short_kernel("_merge_splits") == "_merge_splits"


@pytest.mark.parametrize("count", [1, 2, 5])
def test_every_request_is_a_dot(count: int) -> None:
    data = report_data.several_requests(roofline_data.sample_document())
    data["requests"] = data["requests"][:count]
    drawn = latency_charts.ttft_strip(data, 380.0).render()
    assert drawn.count("<circle") == count == len(latency_charts.ttfts_of(data))
    assert "nan" not in drawn


# ---- the command ----------------------------------------------------------------------------------------------------
def cli(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pykernels.cli", "report", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_the_command_puts_the_parts_together(tmp_path: Path) -> None:
    parts = {"run": roofline_data.sample_document(), "bench": report_data.suite(), "profile": report_data.profile()}
    for name, part in parts.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(part))
    run, bench = tmp_path / "run.json", tmp_path / "bench.json"
    words = (run, "--bench", bench, "--profile", tmp_path / "profile.json", "--before", run, "--before-bench", bench)
    done = cli(*words, "--out", tmp_path / "page", "--json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data == json.loads((tmp_path / "page" / "roofline.json").read_text())
    assert {"bench", "profiles", "comparison", "report_command"} <= set(data)
    assert data["comparison"]["bench_median_ratio"] == 1.0
    assert "--before-bench" in data["report_command"]


def test_the_command_s_mistakes_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{")
    (tmp_path / "empty.json").write_text("{}")
    for words, message in (
        ((tmp_path / "x.json",), "is no JSON"),
        ((tmp_path / "none.json",), "none.json"),
        ((tmp_path / "empty.json", "--out", tmp_path / "page"), "the report lacks"),
    ):
        done = cli(*words)
        assert (done.returncode, message in done.stderr, "Traceback" in done.stderr) == (2, True, False), done.stderr


# ---- in a browser ---------------------------------------------------------------------------------------------------
def chromium(page: Path, folder: Path, width: int, *flags: str) -> subprocess.CompletedProcess[str]:
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    quiet = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync --hide-scrollbars"
    command = [browser, *quiet.split(), "--disable-component-update", f"--user-data-dir={folder / 'browser'}"]
    command += ["--enable-logging=stderr", "--log-level=0", f"--window-size={width},1200", *flags, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)


PROBE = """
<script>
addEventListener("load", () => {
  const out = parent.document.documentElement.dataset, tip = document.getElementById("tip");
  out.width = document.documentElement.clientWidth;
  out.overflow = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  const seen = [...document.querySelectorAll("svg.chart")].filter((c) => c.getBoundingClientRect().width > 0);
  out.cut = [...document.querySelectorAll(".scroll:not(.any), pre")].filter((e) => e.scrollWidth > e.clientWidth).map((e) => e.textContent.trim().slice(0, 30));
  out.charts = seen.length;
  out.empty = seen.filter((c) => c.getBoundingClientRect().height < 50).length;
  const mark = seen[0].querySelector("[data-tip]");
  mark.dispatchEvent(new PointerEvent("pointerdown", { bubbles: true, clientX: 300, clientY: 100 }));
  const place = tip.getBoundingClientRect();
  out.said = tip.hidden ? "" : tip.textContent;
  out.inside = place.left >= 0 && place.right <= document.documentElement.clientWidth;
  document.body.dispatchEvent(new PointerEvent("pointerdown", { bubbles: true }));
  out.after = tip.hidden;
  out.paper = getComputedStyle(document.body).backgroundColor;
});
</script>
"""


def probe(report: Path, folder: Path, width: int, *flags: str) -> dict[str, str]:
    """What a browser of that width says of the page."""
    copied, inner = folder / "probe.html", html.escape(report.read_text() + PROBE)
    frame = f'<iframe style="width: {width}px; height: 1200px; border: 0" srcdoc="{inner}"></iframe>'
    copied.write_text(f"<!doctype html><html><body>{frame}</body></html>")  # a window is never as narrow as a phone
    done = chromium(copied, folder, 1200, "--dump-dom", *flags)
    assert "CONSOLE" not in done.stderr, done.stderr
    root = re.search(r"<html[^>]*>", done.stdout)
    assert root
    return {name: html.unescape(value) for name, value in re.findall(r'data-(\w+)="([^"]*)"', root[0])}


def test_a_browser_shows_the_json_s_figures_without_errors(report: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    data, path = report
    done = chromium(path, tmp_path, 1100, "--dump-dom")
    assert "CONSOLE" not in done.stderr, done.stderr
    source, shown = Page(path.read_text()), Page(done.stdout)
    assert equal_figures(data, shown) == equal_figures(data, source)
    assert len(shown.figures) == len(source.figures) > 400
    charts = [a for tag, a in shown.tags if tag == "svg" and str(a.get("class")).startswith("chart")]
    assert len(charts) == 16  # eight, each for wide and for narrow screens
    tips = [a["data-tip"] for _, a in shown.tags if "data-tip" in a]
    assert len(tips) == path.read_text().count("<title>") - 1 > 100  # all but the page's own


@pytest.mark.parametrize("width", [1100, 390])
def test_the_page_fits_its_screen_and_tells_what_is_tapped(
    report: tuple[dict[str, Any], Path], tmp_path: Path, width: int
) -> None:
    said = probe(report[1], tmp_path, width)
    assert int(said["width"]) == width
    assert said["overflow"] == "0"
    assert said["cut"] == ""  # no table and no command goes on beyond its box
    assert (said["charts"], said["empty"]) == ("8", "0")
    assert "GB/s" in said["said"] or "FLOP/s" in said["said"]
    assert (said["inside"], said["after"]) == ("true", "true")


def test_the_page_is_dark_where_that_is_preferred(report: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    light, dark = (probe(report[1], tmp_path, 800, f"--blink-settings=preferredColorScheme={n}") for n in (1, 0))
    assert (light["paper"], dark["paper"]) == ("rgb(250, 249, 246)", "rgb(20, 23, 27)")


def test_the_page_can_be_printed(report: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    dark = re.findall(r"@media[^{]*prefers-color-scheme[^{]*", report[1].read_text())
    assert dark
    assert all("screen" in query for query in dark), dark  # ink on paper, whatever the screen's colours
    chromium(report[1], tmp_path, 1100, f"--print-to-pdf={tmp_path / 'page.pdf'}")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")
