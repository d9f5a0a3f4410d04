"""`pykernels roofline`: the main job. Real text, then how close each kernel came to this machine's limit."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from .. import native
from ..generator.generator import Generator
from ..generator.measure import filler_ids, kv_memory, measure_no_cache, measure_ops, measure_requests
from ..generator.request import Request, SamplingParams
from ..roofline import Environment, document, measure, metrics, op_points, print_report, render
from ..roofline.ceilings import remeasurer
from .options import Progress, add_model_options, load_generator

EXAMPLES = """\
  pykernels roofline
  pykernels roofline --prompt-tokens 1024 --kv int8 --report /tmp/report
  pykernels roofline --quick --json > roofline.json
"""
QUESTION = "What is a KV cache in a language model, and why does decoding need one?"
NO_CACHE_CONTEXTS = (32, 64, 128, 256, 512)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", default=QUESTION, help="the question that is answered first")
    parser.add_argument("--prompt-tokens", type=int, default=512, help="length of the measured prompt (default: 512)")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens generated after it (default: 64)")
    parser.add_argument("--repeats", type=int, default=5, help="measured repetitions; medians are shown (default: 5)")
    parser.add_argument("--report", default="report", help="folder of index.html and roofline.json (default: report)")
    parser.add_argument("--fresh", action="store_true", help="measure the ceilings again instead of using cached ones")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions and tokens, for a first look")
    add_model_options(parser)


def run(args: argparse.Namespace) -> tuple[int, dict[str, Any] | None]:
    if args.quick:
        args.prompt_tokens, args.new_tokens, args.repeats = min(args.prompt_tokens, 128), min(args.new_tokens, 16), 2
    for name in ("prompt_tokens", "new_tokens", "repeats"):
        if getattr(args, name) < 2:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 2, got {getattr(args, name)}")
    folder = Path(args.report)
    _check_writable(folder)
    environment = Environment.here()
    generator = load_generator(args, max_batch=1)
    answer = _answer(generator, args)
    data = _measure(generator, answer, environment, args)
    page = render(data, folder)
    if args.json:
        return 0, data
    print_report(data)
    print(f"\nreport: {page}")
    return 0, None


def _check_writable(folder: Path) -> None:
    """Fails before minutes of measuring rather than after."""
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise PermissionError(13, "the report folder is not writable", str(folder))


def _answer(generator: Generator, args: argparse.Namespace) -> Request:
    """The question's answer, streamed to the terminal as it comes."""
    chat = generator.checkpoint.chat_template is not None
    prompt = generator.encode_chat([{"role": "user", "content": args.prompt}]) if chat else args.prompt
    request = generator.request(prompt, SamplingParams(max_new_tokens=48 if args.quick else 160))
    stream = sys.stderr if args.json else sys.stdout
    print(f"> {args.prompt}\n", file=stream)
    for piece in generator.pieces(request):
        print(piece, end="", file=stream, flush=True)
    print("\n", file=stream)
    return request


def _measure(
    generator: Generator, answer: Request, environment: Environment, args: argparse.Namespace
) -> dict[str, Any]:
    contexts = [c for c in NO_CACHE_CONTEXTS if not args.quick or c <= 128]
    per_context = 2 if args.quick else 3
    with Progress(4 + 2 * (args.repeats + 1) + len(contexts) * per_context) as progress:
        progress.say("measuring the ceilings")
        ceilings = measure(fresh=args.fresh)
        remeasure = remeasurer(ceilings)
        progress.tick()
        progress.say("short prompt")
        short = measure_requests(generator, "short", answer.prompt_ids, args.new_tokens, args.repeats, progress.tick)
        progress.say(f"prompt of {args.prompt_tokens} tokens")
        prompt = filler_ids(generator, args.prompt_tokens)
        long = measure_requests(generator, "long", prompt, args.new_tokens, args.repeats, progress.tick)
        progress.say("every op on its own")
        recorder = measure_ops(generator, prompt, min(args.new_tokens, 32))
        progress.tick()
        progress.say("without a KV cache")
        no_cache = measure_no_cache(generator, contexts, per_context, progress.tick)
    return document(
        model=_model(generator, args),
        generation={"prompt": args.prompt, "text": answer.text},
        ceilings=ceilings,
        ops=op_points(recorder, ceilings, remeasure),
        metrics=metrics(
            long.steps,
            long.requests,
            token_ids=long.token_ids,
            ceilings=ceilings,
            compute_kind="int8",
            remeasure=remeasure,
        ),
        runs=[run.summary(ceilings, remeasure) for run in (short, long)],
        environment=environment.finish(),
        steps=long.steps,
        requests=long.requests,
        kv_memory=kv_memory(generator),
        no_cache=no_cache,
        command=shlex.join(["pykernels", *sys.argv[1:]]),
    )


def _model(generator: Generator, args: argparse.Namespace) -> dict[str, Any]:
    formats = sorted({w.format for w in generator.decoder.matrices()})
    return {
        "name": generator.checkpoint.path.stem,
        "weights": ", ".join(formats),
        "kv": str(generator.engine.cache.dtype).removeprefix("torch."),
        "layers": generator.config.num_layers,
        "backend": args.backend,
        "threads": native.module().num_threads(),
    }
