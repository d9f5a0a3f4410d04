"""`python -m pykernels.bench.peers`: pykernels beside every other engine that is installed.

    python -m pykernels.bench.peers --python llama.cpp=~/llama/bin/python --out peers.json
    python -m pykernels.bench.peers --jobs decode --rounds 3 --append --out peers.json    # adds to what is there
    python -m pykernels.bench.peers --jobs none --ops decode,sampling --out peers.json    # single ops against torch
    python -m pykernels.bench.peers --report-only --out peers.json                        # the Markdown and the chart again

Writes FILE.json, and beside it FILE.md and FILE.svg. Times are worth what the machine was: every sample stands beside a
probe of memory and arithmetic, and says how much of the machine others took.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from pykernels import native
from pykernels.models import resolve_model
from pykernels.roofline.environment import Environment, load_average

from . import agreement, chart, document, jobs, ops, report
from .client import DeadWorker, Worker, WorkerError
from .engines import BY_NAME, ENGINES, Engine, Missing, Setting, start
from .interleave import Contest
from .weather import Probe

VOCAB = 40000  # ids of prompts: words of any tokenizer of this size, no control tokens


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def pairs(words: Sequence[str]) -> dict[str, str]:
    """`ENGINE=VALUE` words. ValueError for another form or an unknown engine."""
    known = {e.family for e in ENGINES}
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name not in known:
            raise ValueError(f"expected ENGINE=PATH with an engine of {', '.join(sorted(known))}, got {word!r}")
        found[name] = str(Path(value).expanduser())
    return found


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="python -m pykernels.bench.peers",
        description=__doc__.split("\n", 1)[0],
        epilog=__doc__.split("\n", 1)[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("peers.json"), help="the result file (default: %(default)s)")
    add("--engines", default=",".join(BY_NAME), help="comma-separated (default: all)")
    add("--jobs", default="all", help=f"names or groups ({', '.join(jobs.GROUPS)}), or none (default: %(default)s)")
    add("--rounds", type=int, default=5, help="visits to every engine and job (default: %(default)s)")
    add("--ops", default="", help=f"single ops against torch: {', '.join(ops.FAMILIES)}, or all (default: none)")
    add("--ops-samples", type=int, default=15, help="samples of each op and form (default: %(default)s)")
    add("--quality", action="store_true", help="also compare logits with float32's, teacher-forced")
    add("--python", action="append", default=[], metavar="ENGINE=PATH", help="the interpreter that has an engine")
    add("--model", action="append", default=[], metavar="ENGINE=PATH", help="the converted model of an engine")
    add("--gguf", default="smollm2", help="the model: a GGUF file, or a packaged name (default: %(default)s)")
    add("--threads", type=int, default=None, help="of every engine (default: the CPUs of this process)")
    add("--prepare-threads", type=int, help="while prompts are filled; 1 helps on a busy machine (default: --threads)")
    add("--append", action="store_true", help="add to the samples of --out: same machine, model and revision")
    add("--wait", action="store_true", help="say ready and wait for a line before each round; it may name jobs")
    add("--oracle", type=Path, default=agreement.ORACLE, help="the committed teacher")
    add("--smoke", action="store_true", help="tiny jobs, one round: does everything run?")
    add("--report-only", action="store_true", help="write the Markdown and the chart of --out again")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, 1 when our own output is wrong or nothing could be measured, 2 for wrong usage."""
    args = parse(argv)
    try:
        if args.report_only:
            write(args.out, document.load_any(args.out))
            return 0
        return run(args)
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def write(path: Path, data: document.Document) -> None:
    """The three files of a result."""
    document.save(path, data)
    path.with_suffix(".md").write_text(report.markdown(data))
    if data["samples"]:
        path.with_suffix(".svg").write_text(chart.draw(data))
    say(f"wrote {path}, {path.with_suffix('.md').name}" + (f", {path.stem}.svg" if data["samples"] else ""))


def opened(args: argparse.Namespace, model: Path, threads: int) -> document.Document:
    here = Environment.here()
    facts = here.to_json()
    machine = {name: facts[name] for name in ("cpu", "cores", "affinity", "isa_level", "caches", "memory_bytes", "os")}
    key = (machine, model.name, threads, here.git_revision)
    if args.append and args.out.exists():
        return document.load(args.out, *key)
    return document.new(*key)


def run(args: argparse.Namespace) -> int:
    chosen = jobs.SMOKE if args.smoke else () if args.jobs == "none" else jobs.chosen(args.jobs)
    names = [n for n in args.engines.split(",") if n]
    if unknown := [n for n in names if n not in BY_NAME]:
        raise ValueError(f"unknown engine {unknown[0]!r}; engines: {', '.join(BY_NAME)}")
    threads = args.threads or native.module().num_threads()
    native.module().set_num_threads(threads)
    torch.set_num_threads(threads)
    model = Path(resolve_model(args.gguf))
    data = opened(args, model, threads)
    code = 0
    if chosen or args.quality:
        contexts = [n + 64 for job in chosen for n in job.contexts]
        setting = Setting(
            model=str(model),
            threads=threads,
            context=min(8192, max([*contexts, 1024])),
            cache_tokens=8192 + sum(-(-n // 64) * 64 + 64 for n in contexts),
            pythons=pairs(args.python),
            models=pairs(args.model),
        )
        code = contest(args, [BY_NAME[n] for n in names], chosen, setting, data)
    if args.ops:
        ops.run(args.ops, data["ops"], args.ops_samples, threads, args.smoke, say)
    write(args.out, data)
    print(report.summary(data))
    return code


def contest(
    args: argparse.Namespace,
    engines: Sequence[Engine],
    chosen: Sequence[jobs.Job],
    setting: Setting,
    data: document.Document,
) -> int:
    """Starts, checks, times, and notes everything in the document."""
    oracle = agreement.load_oracle(args.oracle)
    cases = oracle.load_cases()[: 2 if args.smoke else None]
    workers = admitted(args, engines, setting, oracle, cases, data)
    load = load_average()
    match = Contest(
        engines,
        workers,
        chosen,
        jobs.Windows(time.time_ns(), VOCAB),
        Probe(setting.threads),
        say,
        threads=setting.threads,
        prepare_threads=args.prepare_threads or setting.threads,
        number=len(data["slices"]),
    )
    data["jobs"].update({j.name: {"phase": j.phase, "contexts": list(j.contexts), "new": j.new} for j in chosen})
    part: dict[str, Any] = {"rounds": 0, "load_at_start": load, "engines": list(workers)}
    try:
        if args.quality:
            for name, worker in workers.items():
                data["quality"][name] = judged(worker, oracle, cases)
        match.prepare()
        data["slices"] += [part] if chosen else []
        for number, now in enumerate(rounds(args, chosen)):
            match.round(number, now)
            part["rounds"] = number + 1
            note(data, match)
            document.save(args.out, data)
    finally:
        match.close()
    ours = [e for e in engines if e.ours]
    return 1 if any(data["engines"][e.name]["state"] != "measured" for e in ours) else 0


def rounds(args: argparse.Namespace, chosen: Sequence[jobs.Job]) -> Iterator[Sequence[jobs.Job]]:
    """The jobs of every round. With --wait each waits for a line, which may name those that it is for."""
    if not chosen:
        return
    if not args.wait:
        yield from [chosen] * (1 if args.smoke else args.rounds)
        return
    while True:
        print("ready", flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        names = [j.name for j in jobs.chosen(line.strip())] if line.strip() else [j.name for j in chosen]
        yield [j for j in chosen if j.name in names]


def note(data: document.Document, match: Contest) -> None:
    """Moves what the contest found into the document."""
    for name, found in match.memory().items():
        data["engines"][name]["peak"] = max(found["peak"], data["engines"][name].get("peak", 0))
    for name, reason in match.left.items():
        data["engines"][name] |= {"state": "left", "reason": reason}
    for name, reasons in match.cannot.items():
        data["engines"][name].setdefault("cannot", {}).update(reasons)
    data["samples"] += match.samples
    match.samples.clear()


def admitted(
    args: argparse.Namespace,
    engines: Sequence[Engine],
    setting: Setting,
    oracle: Any,
    cases: Sequence[Any],
    data: document.Document,
) -> dict[str, Worker]:
    """Engines that run and compute the model. The others are noted with the reason."""
    workers = {}
    for engine in engines:
        entry = data["engines"].setdefault(engine.name, {})
        entry["remark"] = engine.remark
        worker = None
        try:
            worker = start(engine, setting)
            say(f"{engine.name} loaded in {worker.hello['load_seconds']:.2f} s")
            if worker.hello["threads"]:
                worker.ask("threads", count=args.prepare_threads or setting.threads)
            if entry.get("info") != worker.hello["info"] or "agreement" not in entry:
                entry["agreement"] = agreement.check(engine, worker, oracle, cases).to_json()
                say(f"{engine.name} agrees: {entry['agreement']}")
        except (Missing, WorkerError, agreement.WrongOutput) as error:
            kinds = {Missing: "missing", DeadWorker: "left", agreement.WrongOutput: "wrong"}
            entry |= {"state": kinds.get(type(error), "failed"), "reason": str(error)}
            say(f"without {engine.name}: {error}")
            if worker is not None:
                worker.close()
            continue
        hello = worker.hello
        loads = [*entry.get("load_seconds", []), hello["load_seconds"]]
        entry |= {"state": "measured", "info": hello["info"], "load_seconds": loads, "base": hello["resident_before"]}
        entry.pop("reason", None)
        workers[engine.name] = worker
    return workers


def judged(worker: Worker, oracle: Any, cases: Sequence[Any]) -> dict[str, Any]:
    """Quality of both phases; an engine that gives no logits says so."""
    found: dict[str, Any] = {}
    for phase in ("prefill", "decode"):
        try:
            found[phase] = agreement.quality(worker, oracle, cases, phase)
        except WorkerError as error:
            found[phase] = {"reason": str(error)}
        say(f"{worker.name}, {phase}: {found[phase]}")
    return found


if __name__ == "__main__":
    sys.exit(main())
