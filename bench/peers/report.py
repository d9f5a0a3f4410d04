"""The Markdown of a result: tables of speeds and ratios, of quality, of single ops; and what could not take part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pykernels.roofline.units import digits, seconds

from . import document
from .document import Document
from .spread import Spread

DASH = "–"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table; the first column is text, the others are numbers."""
    line = "|" + "|".join(["---", *["---:"] * (len(head) - 1)]) + "|"
    return [f"| {' | '.join(head)} |", line, *(f"| {' | '.join(row)} |" for row in rows), ""]


def with_range(found: Spread | None, show: Callable[[float], str] = digits) -> str:
    """`median (quartile to quartile)`."""
    return DASH if found is None else f"{show(found.median)} ({show(found.low)} to {show(found.high)})"


def percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def factor(value: float) -> str:
    return f"{value:.2f}x"


def job_title(job: Mapping[str, Any]) -> str:
    contexts = job["contexts"]
    if job["phase"] == "prefill":
        return f"prefill, {contexts[0]:,} tokens"
    if len(contexts) == 1:
        return f"decode at {contexts[0]:,}"
    return f"decode, batch {len(contexts)} at {min(contexts):,} to {max(contexts):,}"


def job_order(data: Document) -> list[str]:
    """Prefill, decode, batches; shorter contexts first."""

    def key(name: str) -> tuple[bool, int, int]:
        job = data["jobs"][name]
        return job["phase"] != "prefill", len(job["contexts"]), max(job["contexts"])

    done = {s["job"] for s in data["samples"]}
    return sorted(done, key=key)


def markdown(data: Document) -> str:
    """The whole document for a reader."""
    machine = data["machine"]
    parts = [
        f"{data['model']} on {machine['cores']} cores of {machine['cpu']} ({machine['isa_level']}), {data['threads']} "
        f"threads for every engine, revision {data['revision']}.",
        "",
    ]
    if data["samples"]:
        parts += [*_weather(data), *_speeds(data), *_ratios(data), *_roofs(data)]
    if data["engines"]:
        parts += _engines(data)
    if data["quality"]:
        parts += _quality(data)
    if data["ops"]:
        parts += _ops(data)
    return "\n".join(parts)


def summary(data: Document) -> str:
    """Ratios alone, for the terminal."""
    return "\n".join(_ratios(data)) if data["samples"] else markdown(data)


def _weather(data: Document) -> list[str]:
    found = document.noise(data)
    words = [f"other processes took {with_range(found['others'])} CPUs beside a sample"]
    if "dram" in found:
        words.append(f"DRAM probe {with_range(found['dram'], lambda v: digits(v / 1e9))} GB/s")
    if "int8" in found:
        words.append(f"int8 probe {with_range(found['int8'], lambda v: digits(v / 1e9))} GOP/s")
    return ["Medians over rounds, quartiles in brackets. The machine meanwhile: " + "; ".join(words) + ".", ""]


def _speeds(data: Document) -> list[str]:
    names = document.measured(data)
    rows = []
    for job in job_order(data):
        rows.append(
            [
                job_title(data["jobs"][job]),
                *(with_range(document.speed(data, n, job), lambda v: f"{v:,.0f}") for n in names),
            ]
        )
    return ["## Tokens per second", "", *table(["", *names], rows)]


def _ratios(data: Document) -> list[str]:
    """ours / theirs, round by round."""
    names = document.measured(data)
    ours = [n for n in names if n.startswith("pykernels")]
    peers = [n for n in names if n not in ours]
    head = ["", *(f"{o} / {p}" for o in ours for p in peers), "rounds"]
    rows = []
    for job in job_order(data):
        found = [document.ratio(data, o, p, job) for o in ours for p in peers]
        count = max((f.count for f in found if f), default=0)
        rows.append([job_title(data["jobs"][job]), *(with_range(f, factor) for f in found), str(count)])
    if "pykernels-int8" in ours and "pykernels" in ours:
        head.append("int8 / bfloat16 KV")
        for row, job in zip(rows, job_order(data), strict=True):
            row.append(with_range(document.ratio(data, "pykernels-int8", "pykernels", job), factor))
    return ["## Ratios, round by round", "", *table(head, rows)]


def _roofs(data: Document) -> list[str]:
    names = document.measured(data)
    rows = []
    for job in job_order(data):
        ours = [n for n in names if n.startswith("pykernels")]
        lost = [document.overhead(data, n, job) for n in ours]
        rows.append(
            [
                job_title(data["jobs"][job]),
                *(with_range(document.roof_share(data, n, job), percent) for n in names),
                with_range(document.linear_share(data, job), percent),
                with_range(lost[0], lambda v: f"{100 * v:.1f} %") if lost else DASH,
            ]
        )
    text = (
        "Decode of one sequence against the DRAM probe beside each sample (bytes of the weights and the KV cache; other "
        "engines as if they read this file and two-byte keys and values); prefill and batches against the int8 probe (all "
        "FLOPs). `matrices`: those of our prefill, timed one by one, against the int8 probe. Above 100 %: the last-level "
        "cache keeps part of the weights between two steps."
    )
    head = ["", *names, "matrices", "outside of kernels"]
    return ["## Share of the probe", "", text, "", *table(head, rows)]


def _engines(data: Document) -> list[str]:
    rows, out = [], []
    for name, entry in data["engines"].items():
        if entry.get("state") not in ("measured", "left"):
            out.append(f"- **{name}**, {entry['state']}: {entry['reason']}")
            continue
        agreed = entry.get("agreement")
        share = f"{agreed['agreed']} of {agreed['positions']}, {agreed['missed_gap']:.2f}" if agreed else DASH
        texts = f"{agreed['identical']} of {agreed['texts']}, {agreed['split_gap']:.2f}" if agreed else DASH
        peak = f"{(entry['peak'] - entry['base']) / 2**20:,.0f} MiB" if "peak" in entry else DASH
        version = str(entry["info"].get("version", DASH))
        loads = sorted(entry["load_seconds"])
        rows.append([name, version, entry["remark"], share, texts, seconds(loads[0]), peak])
        if entry["state"] == "left":
            out.append(f"- **{name}** left: {entry['reason']}")
        out += [f"- **{name}** without {job}: {reason}" for job, reason in entry.get("cannot", {}).items()]
    head = [
        "",
        "version",
        "",
        "next tokens equal, largest gap missed",
        "greedy texts equal, gap",
        "load",
        "peak memory",
    ]
    text = (
        "Checked before anything is timed, against transformers in float32: next tokens, teacher-forced, and greedy texts; "
        "the gap is float32's, between its two likeliest tokens, where an engine took another. Peak memory is above what "
        "the process held before it loaded the model, with all prompts of the run held at once."
    )
    return ["## Engines", "", text, "", *table(head, rows), *out, ""]


def _quality(data: Document) -> list[str]:
    rows = []
    for name, phases in data["quality"].items():
        for phase, found in phases.items():
            if "reason" in found:
                continue
            rows.append(
                [
                    f"{name}, {phase}",
                    f"{found['kl']:.4f} ± {found['kl_error']:.4f}",
                    f"{100 * found['top1']:.1f} %",
                    f"{found['missed_gap']:.2f}",
                    str(found["positions"]),
                ]
            )
    head = ["", "KL to float32", "likeliest token equal", "largest float32 gap missed", "positions"]
    return ["## Quality, teacher-forced", "", *table(head, rows)]


def _ops(data: Document) -> list[str]:
    out = [
        "## Single ops against torch",
        "",
        "`op`: through the public op; `plan`: recorded, as in a generator's step. Times are medians, ratios medians of "
        "torch / ours sample by sample, with torch in its fastest form. The share is that of the probe that bounds the op.",
        "",
    ]
    for family in dict.fromkeys(r["family"] for r in data["ops"]):
        rows = []
        for found in data["ops"]:
            if found["family"] == family:
                share = found["plan"].get("roof_share")
                rows.append(
                    [
                        found["case"],
                        seconds(found["plan"]["median"]),
                        f"{seconds(found['torch']['median'])} ({found['torch_form']})",
                        *(with_range(Spread(**found[f"{way}_ratio"]), factor) for way in ("plan", "op")),
                        DASH if share is None else f"{percent(share)} of {next(iter(found['probe']))}",
                    ]
                )
        out += [f"### {family}", "", *table(["", "plan", "torch", "torch / plan", "torch / op", "share"], rows)]
    return out
