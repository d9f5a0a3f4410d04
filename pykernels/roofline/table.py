"""The report in a terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from .charts import LEVEL_NAMES, PEAK_NAMES, display_name
from .units import text

# The metric table of the report: what it is, key in `metrics`, unit.
METRICS = (
    ("time to first token", "ttft", "s"),
    ("between tokens (ITL)", "itl", "s"),
    ("gap p50", "icl_p50", "s"),
    ("gap p90", "icl_p90", "s"),
    ("gap p99", "icl_p99", "s"),
    ("gap max", "icl_max", "s"),
    ("prefill", "prefill_tokens_per_s", "tok/s"),
    ("prefill arithmetic", "prefill_flops_per_s", "FLOP/s"),
    ("prefill, of its roof", "prefill_roof_pct", "%"),
    ("decode", "decode_tokens_per_s", "tok/s"),
    ("decode bandwidth", "decode_bytes_per_s", "B/s"),
    ("decode, of its roof", "decode_roof_pct", "%"),
    ("outside of kernels", "overhead_pct", "%"),
    ("cached prompt tokens", "cached_tokens", ""),
    ("output hash", "output_hash", ""),
)


def _ops_table(title: str, ops: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for heading in ("op", "shape", "time", "share", "of roof", "bound"):
        left = heading in ("op", "shape", "bound")
        table.add_column(heading, justify="left" if left else "right", no_wrap=not left, overflow="fold")
    span = sum(op["total"] for op in ops)
    for op in ops:
        table.add_row(
            display_name(op),
            op["shape"],
            text(op["time"], "s"),
            f"{100 * op['total'] / span:.1f} %",
            f"{op['roof_pct']:.1f} %",
            names.get(op["bound"], op["bound"]),
        )
    return table


def print_report(data: Mapping[str, Any], file: TextIO | None = None) -> None:
    """Prints ceilings, ops and metrics of a document to `file` (default: standard output)."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError as error:
        raise ImportError("the terminal report needs rich: pip install 'pykernels[report]'") from error
    console = Console(file=file or sys.stdout, highlight=False)
    names = {**LEVEL_NAMES, **PEAK_NAMES}

    ceilings = Table(title="Ceilings of this machine", title_justify="left", box=None, pad_edge=False)
    for heading in ("", "roof", "median", "quartiles"):
        ceilings.add_column(heading, justify="left" if not heading else "right")
    for name, c in data["ceilings"]["table"].items():
        low, high = c["quartiles"]
        spread = f"{text(low, c['unit'])} to {text(high, c['unit'])}"
        ceilings.add_row(names.get(name, name), text(c["value"], c["unit"]), text(c["median"], c["unit"]), spread)

    blocks = [ceilings]
    for phase in ("prefill", "decode"):
        mine = [op for op in data["ops"] if op["phase"] == phase]
        if mine:
            blocks.append(_ops_table(f"{phase.capitalize()} ops under the roof", mine, names))

    metrics = Table(title="Metrics", title_justify="left", box=None, pad_edge=False, show_header=False)
    metrics.add_column(justify="left")
    metrics.add_column(justify="right")
    for words, key, unit in METRICS:
        metrics.add_row(words, text(data["metrics"][key], unit))
    for run in data["runs"]:
        words = f"{run['name']}: {text(run['prompt_tokens'])} + {text(run['output_tokens'])} tokens"
        speeds = f"{text(run['prefill_tokens_per_s'])} prefill, {text(run['decode_tokens_per_s'])} decode tok/s"
        metrics.add_row(words, speeds)
    for block in (*blocks, metrics):
        console.print(block)
        console.print()
