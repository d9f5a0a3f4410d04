"""`pykernels generate`: streams text."""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext
from typing import Any

from ..ranges import Nvtx, annotated
from ..roofline.records import metrics
from .options import add_model_options, add_sampling_options, load_generator, sampling_params

EXAMPLES = """\
  pykernels generate "What is a KV cache?"
  pykernels generate --raw "Once upon a time" --temperature 0.8 --top-p 0.9 --seed 1
  pykernels generate --kv int8 --json "Name three rivers."
  echo "Explain the roofline model." | pykernels generate -
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", help="the prompt; - reads it from standard input")
    parser.add_argument("--raw", action="store_true", help="continue the prompt as it is, without the chat template")
    parser.add_argument("--system", help="the system message of the chat")
    parser.add_argument(
        "--nvtx", action="store_true", help="NVTX ranges around phases, layers and ops, to be seen by nsys"
    )
    add_model_options(parser)
    add_sampling_options(parser)


def run(args: argparse.Namespace) -> tuple[int, dict[str, Any] | None]:
    params = sampling_params(args)
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    if not prompt.strip():
        raise ValueError("the prompt is empty: there is nothing to continue")
    if args.raw and args.system:
        raise ValueError("--system is part of a chat, and --raw leaves the chat template out")
    generator = load_generator(args, max_batch=1)
    request = generator.request(prompt if args.raw else _chat(generator, args.system, prompt), params)
    with annotated(Nvtx()) if args.nvtx else nullcontext():
        for piece in generator.pieces(request):
            if not args.json:
                print(piece, end="", flush=True)
    completion = request.completion()
    measured = metrics(generator.engine.steps, [request.record()])
    if args.json:
        return 0, {
            "text": completion.text,
            "token_ids": list(completion.token_ids),
            "finish_reason": completion.finish_reason,
            "ttft_ms": completion.metrics["ttft_ms"],
            "itl_ms": completion.metrics["itl_ms"],
            "prefill_tokens_per_s": measured["prefill_tokens_per_s"],
            "decode_tokens_per_s": measured["decode_tokens_per_s"],
        }
    print()
    print(_summary(completion.metrics, completion.finish_reason), file=sys.stderr)
    return 0, None


def _chat(generator: Any, system: str | None, prompt: str) -> list[int]:
    if generator.checkpoint.chat_template is None:
        raise ValueError("the model has no chat template: continue a plain prompt with --raw")
    messages = [{"role": "system", "content": system}] if system else []
    return generator.encode_chat([*messages, {"role": "user", "content": prompt}])


def _summary(values: dict[str, Any], reason: str) -> str:
    itl = values["itl_ms"]
    speed = "" if not itl else f", ITL {itl:.2f} ms ({1e3 / itl:.0f} tokens/s)"
    tokens = f"{values['prompt_tokens']} prompt + {values['output_tokens']} new tokens"
    return f"[{tokens}, TTFT {values['ttft_ms']:.1f} ms{speed}, ended by {reason}]"
