"""The document of a run, and its page: one file that needs no network, whose figures are those of the JSON beside it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from . import charts, latency_charts, level_chart, units
from .attach import heat_table
from .ceilings import Ceilings
from .environment import Environment
from .points import OpPoint
from .records import RequestRecord, StepRecord

TEMPLATE = Path(__file__).with_name("report.html.j2")
SCRIPT = Path(__file__).with_name("report.js")  # hover and tap; without it every figure is still on the page
KEYS = (
    "model",
    "generation",
    "ceilings",
    "ops",
    "metrics",
    "environment",
    "steps",
    "requests",
    "kv_memory",
    "no_cache",
    "command",
    "runs",
)


def document(
    *,
    model: Mapping[str, Any],
    generation: Mapping[str, Any],
    ceilings: Ceilings,
    ops: Sequence[OpPoint],
    metrics: Mapping[str, Any],
    environment: Environment,
    steps: Sequence[StepRecord],
    requests: Sequence[RequestRecord],
    kv_memory: Mapping[str, Any],
    no_cache: Mapping[str, Any],
    command: str,
    runs: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """The one dictionary that is printed by `--json`, written to `roofline.json` and drawn in `index.html`.

    `model`: `name`, `weights` (format), `kv` (format), and whatever else names it. `generation`: `prompt`, `text`.
    `kv_memory`: `weights_bytes`, `max_context`, `bytes_per_token` (format -> bytes; float32, bfloat16, int8).
    `no_cache`: lists of the same length `context`, `cached_seconds`, `recomputed_seconds` (per token).
    `attach.attach` adds `bench`, `profiles`, `occupancy`, `comparison` and `report_command`, each shown where it is.
    `runs`: repeated requests of one shape each: `name`, `repeats`, `prompt_tokens`, `output_tokens`, `ttft`, `itl`, and per
    phase `<phase>_tokens_per_s`, `<phase>_tokens_per_s_range` [slowest, fastest], `<phase>_roof_pct`.
    ValueError when a part is missing, empty, or not a finite number.
    """
    out = {
        "model": dict(model),
        "generation": dict(generation),
        "ceilings": ceilings.to_json(),
        "ops": [point.to_json() for point in ops],
        "metrics": dict(metrics),
        "environment": environment.to_json(),
        "steps": [asdict(step) for step in steps],
        "requests": [asdict(request) for request in requests],
        "kv_memory": dict(kv_memory),
        "no_cache": dict(no_cache),
        "command": command,
        "runs": [dict(run) for run in runs],
    }
    validate(out)
    return out


def _not_finite(value: Any, where: str) -> str | None:
    """Where the first number is that is no number, or None."""
    if isinstance(value, Mapping):
        items = [(f"{where}.{k}" if where else str(k), v) for k, v in value.items()]
    elif isinstance(value, (list, tuple)):
        items = [(f"{where}.{i}", v) for i, v in enumerate(value)]
    else:
        return where if isinstance(value, float) and not math.isfinite(value) else None
    return next((bad for path, v in items if (bad := _not_finite(v, path))), None)


def validate(data: Mapping[str, Any]) -> None:
    """ValueError that names what is missing, empty or not a finite number."""
    missing = [key for key in KEYS if key not in data]
    if missing:
        raise ValueError(f"the report lacks {', '.join(missing)}")
    for key in ("ops", "steps", "requests"):
        if not data[key]:
            raise ValueError(f"the report has no {key}: nothing was measured")
    if where := _not_finite(data, ""):
        raise ValueError(f"the report's {where} is not a finite number")
    for name in ("dram", "float32"):
        if name not in data["ceilings"]["table"]:
            raise ValueError(f"the report has no {name} ceiling")
    if not any(op["flops"] > 0 and op["bytes"] > 0 for op in data["ops"]):
        raise ValueError("the report has no op with both FLOPs and bytes: nothing can be put under the roof")
    rows = data["no_cache"]
    lengths = {len(rows.get(name, ())) for name in ("context", "cached_seconds", "recomputed_seconds")}
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError("the report's no_cache needs context, cached_seconds and recomputed_seconds of one length")
    memory = data["kv_memory"]
    if not memory.get("bytes_per_token") or not memory.get("max_context") or not memory.get("weights_bytes"):
        raise ValueError("the report's kv_memory needs weights_bytes, max_context and bytes_per_token")


def lookup(data: Any, path: str) -> Any:
    """`lookup(data, "ops.0.time")`."""
    for part in path.split("."):
        data = data[int(part)] if isinstance(data, (list, tuple)) else data[part]
    return data


def figure(data: Mapping[str, Any], path: str, unit: str = "") -> str:
    """A number of the document as HTML that says where it comes from: `<data>` holds path and exact value."""
    value = lookup(data, path)
    exact = "" if value is None else repr(value) if isinstance(value, float) else str(value)
    shown = escape(units.text(value, unit))
    return f'<data data-key="{escape(path)}" data-unit="{escape(unit)}" value="{escape(exact)}">{shown}</data>'


def plural(count: int, word: str) -> str:
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"


def html(data: Mapping[str, Any]) -> str:
    """The page. ValueError as `validate`; ImportError with the command to install what is missing."""
    try:
        import jinja2
        import markupsafe
    except ImportError as error:
        raise ImportError("the report page needs jinja2: pip install 'pykernels[report]'") from error
    validate(data)
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    drawn = [charts.roofline, charts.time_bars, latency_charts.timeline, charts.kv_memory, charts.no_cache]
    if latency_charts.gaps_of(data):
        drawn.append(latency_charts.itl_histogram)
    if latency_charts.ttfts_of(data):
        drawn.append(latency_charts.ttft_strip)
    if level_chart.level_points(data):
        drawn.append(level_chart.level_roofline)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        data=data,
        figure=lambda path, unit="": markupsafe.Markup(figure(data, path, unit)),
        chart={draw.__name__: markupsafe.Markup(charts.both(draw, data)) for draw in drawn},
        groups=charts.time_groups(data),
        series=charts.series_of(data),
        display_name=charts.display_name,
        plural=plural,
        heat=heat_table(data.get("bench", ())),
        script=markupsafe.Markup(SCRIPT.read_text(encoding="utf-8")),
        ceiling_names={**charts.LEVEL_NAMES, **charts.PEAK_NAMES, "copy": "copy, both ways"},
        level_names=charts.LEVEL_NAMES,
        profile_levels=level_chart.levels_of(data),
        short_kernel=level_chart.short_kernel,
        text=units.text,
    )


def render(data: Mapping[str, Any], folder: Path) -> Path:
    """Writes `roofline.json` and `index.html` into `folder` (created if need be); returns the page's path.

    ValueError when the document is incomplete, OSError (one line, with the path) when the folder cannot be written.
    """
    page = html(data)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "roofline.json").write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        (folder / "index.html").write_text(page, encoding="utf-8")
    except OSError as error:
        raise OSError(error.errno, f"cannot write the report ({error.strerror})", str(folder)) from error
    return folder / "index.html"
