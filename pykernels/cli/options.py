"""Options that several commands share."""

from __future__ import annotations

import argparse
import sys

from ..generator import Generator, SamplingParams
from ..models.decoder import WEIGHT_MODES


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def add_model_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model", default="smollm2", help="smollm2, a GGUF file, or a Hugging Face folder (default: smollm2)"
    )
    group.add_argument("--backend", default="auto", help="backend of every op (default: auto)")
    group.add_argument("--weights", default="auto", choices=WEIGHT_MODES, help="auto keeps the file's format (default)")
    group.add_argument(
        "--kv",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16", "int8", "fp8_e4m3"),
        help="format of the KV cache (default: auto, the compute type)",
    )
    group.add_argument(
        "--compute",
        default="auto",
        choices=("auto", "float32"),
        help="float32 quantises no activation and keeps K and V in float32 (default: auto)",
    )
    group.add_argument("--threads", type=positive, help="CPU threads (default: the CPUs of this process)")


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    defaults = SamplingParams()
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-new-tokens", type=int, default=128, help="at most this many tokens (default: 128)")
    group.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    group.add_argument("--top-k", type=int, default=defaults.top_k, help="keep the k most probable tokens; 0 is off")
    group.add_argument(
        "--top-p", type=float, default=defaults.top_p, help="keep the smallest set of this mass; 1 is off"
    )
    group.add_argument(
        "--min-p", type=float, default=defaults.min_p, help="relative to the most probable token; 0 is off"
    )
    group.add_argument("--repetition-penalty", type=float, default=defaults.repetition_penalty)
    group.add_argument("--seed", type=int, help="fixes the random numbers (default: from the operating system)")
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated"
    )


def load_generator(args: argparse.Namespace, **options: int) -> Generator:
    """The model that the options name, with a word of progress."""
    with Progress() as progress:
        progress.say(f"loading {args.model}")
        return Generator.from_pretrained(
            args.model,
            backend=args.backend,
            kv=args.kv,
            weights=args.weights,
            compute=args.compute,
            threads=args.threads,
            **options,
        )


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        seed=args.seed,
        stop=[s.encode().decode("unicode_escape") if "\\" in s else s for s in args.stop],
    )


class Progress:
    """A line on standard error that says what is going on and how far it is; on a terminal it goes away at the end."""

    def __init__(self, total: int = 0) -> None:
        self.total, self.done, self.text = total, 0, ""
        self.terminal = sys.stderr.isatty()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        if self.terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        """What happens next."""
        self.text = text
        self._show(end="" if self.terminal else "\n")

    def tick(self) -> None:
        """One of `total` parts is done."""
        self.done += 1
        if self.terminal:
            self._show(end="")

    def _show(self, end: str) -> None:
        share = f"{100 * self.done // self.total:3d} %  " if self.total else ""
        start = "\r\033[K" if self.terminal else ""
        print(f"{start}{share}{self.text} ...", end=end, file=sys.stderr, flush=True)
