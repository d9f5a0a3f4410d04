"""A transformers model on our attention against its own sdpa: a prefill, and decode steps behind it, measured in turn.

    python -m pykernels.bench.transformers_model --context 2000
    python -m pykernels.bench.transformers_model --context 2000 --cache static --rows 2

All continue the same prompts greedily in float32; different ids are an error, not a result. Every round probes the machine's
float32 arithmetic and its DRAM: shares of these are of the work that cannot be avoided. Needs transformers, accelerate and
gguf (`pip install pykernels[test,demo]`).
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from pykernels import native
from pykernels.compat.transformers import register
from pykernels.compat.transformers_modules import use_ops
from pykernels.models import resolve_model
from pykernels.roofline.ceilings import Prober

ROOFS = {"prefill": ("float32", "GFLOP/s"), "decode": ("dram", "GB/s")}  # what bounds each phase
PHASES = tuple(ROOFS)
PROBES = 3  # samples of a roof per round


@dataclass(frozen=True)
class Work:
    """Prompts `[rows, tokens]`, left-padded where there are several, then `steps` decode steps."""

    prompt: torch.Tensor
    mask: torch.Tensor | None  # [rows, tokens + steps]
    steps: int
    cache: str

    @staticmethod
    def draw(vocabulary: int, rows: int, tokens: int, steps: int, cache: str) -> Work:
        drawn = torch.Generator().manual_seed(0)
        prompt = torch.randint(100, vocabulary - 100, (rows, tokens), generator=drawn)
        mask = torch.ones(rows, tokens + steps, dtype=torch.long)
        for row in range(1, rows):
            mask[row, : row * tokens // (2 * rows)] = 0
        return Work(prompt, mask if rows > 1 else None, steps, cache)


@dataclass
class Contender:
    """One way to run the model: what it takes per phase, in milliseconds, and the ids that it drew last."""

    name: str
    model: Any
    implementation: str
    times: dict[str, list[float]] = field(default_factory=lambda: {phase: [] for phase in PHASES})
    ids: list[list[int]] = field(default_factory=list)

    @torch.inference_mode()
    def run(self, work: Work) -> None:
        """A prefill, then the decode steps, the mean of which is one sample."""
        self.model.set_attn_implementation(self.implementation)
        ids, seen, self.ids = work.prompt, work.prompt.shape[1], []
        config = self.model.config
        cache: Any = DynamicCache(config=config)
        if work.cache == "static":
            cache = StaticCache(config=config, max_cache_len=seen + work.steps)
        for phase, passes in zip(PHASES, (1, work.steps), strict=True):
            begin = time.perf_counter()
            for _ in range(passes):
                given = {} if work.mask is None else self._padding(work.mask[:, :seen], ids.shape[1])
                logits = self.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1, **given).logits
                ids = logits[:, -1].argmax(-1, keepdim=True)
                seen += 1
                self.ids.append(ids[:, 0].tolist())
            self.times[phase].append((time.perf_counter() - begin) / passes * 1e3)

    @staticmethod
    def _padding(mask: torch.Tensor, queries: int) -> dict[str, torch.Tensor]:
        return {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)[:, -queries:]}


def load(name: str) -> Any:
    path = resolve_model(name)
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


def needed(model: Any, work: Work) -> dict[str, float]:
    """FLOPs of a prefill; bytes that a decode step reads at least: all weights that are multiplied, keys and values."""
    c = model.config
    rows, tokens = work.prompt.shape
    lengths = [tokens] if work.mask is None else work.mask[:, :tokens].sum(1).tolist()
    head = model.get_output_embeddings().weight.numel()
    table = model.get_input_embeddings().weight.numel()  # of which a token takes a row
    body = sum(p.numel() for p in model.base_model.parameters() if p.dim() > 1) - table
    dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    scores = c.num_hidden_layers * c.num_attention_heads * sum(n * (n + 1) // 2 for n in lengths)
    keys = c.num_hidden_layers * c.num_key_value_heads * (sum(lengths) + rows * (work.steps + 1) / 2)
    return {
        "prefill": 2 * (body * sum(lengths) + head * rows) + 4 * dim * scores,
        "decode": torch.float32.itemsize * (body + head + 2 * dim * keys),
    }


def compete(contenders: list[Contender], work: Work, repeats: int, prober: Prober) -> dict[str, list[float]]:
    """Runs all in turn, once more than `repeats`; the first round warms up and is not counted. Returns samples of the roofs."""
    first = contenders[0]
    roofs: dict[str, list[float]] = {phase: [] for phase in PHASES}
    for turn in range(repeats + 1):
        for phase, (name, _) in ROOFS.items():
            roofs[phase] += prober.samples(name, PROBES)
        for one in contenders[:: -1 if turn % 2 else 1]:
            one.run(work)
        for one in contenders:
            if one.ids != first.ids:
                raise SystemExit(f"{one.name} draws {one.ids}, {first.name} {first.ids}")
            if turn == 0:
                one.times = {phase: [] for phase in PHASES}
    return roofs


def times_faster(first: Contender, other: Contender, phase: str) -> list[float]:
    return sorted(a / b for a, b in zip(first.times[phase], other.times[phase], strict=True))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a packaged model, or a GGUF file (default: %(default)s)")
    parser.add_argument("--context", type=int, default=2000, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=1, help="prompts, left-padded (default: %(default)s)")
    parser.add_argument("--cache", choices=("dynamic", "static"), default="dynamic", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=16, help="decode steps per round (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="rounds that count (default: %(default)s)")
    given = parser.parse_args(arguments)

    register()
    torch.set_num_threads(native.module().num_threads())
    model = load(given.model)
    with_ops = copy.deepcopy(model)
    use_ops(with_ops)
    work = Work.draw(model.config.vocab_size, given.rows, given.context, given.steps, given.cache)
    contenders = [
        Contender("sdpa", model, "sdpa"),
        Contender("pykernels", model, "pykernels"),
        Contender("pykernels and use_ops", with_ops, "pykernels"),
    ]
    roofs = compete(contenders, work, given.repeats, Prober(native.chosen_level()))
    print(
        f"{given.rows} x {given.context} tokens, {given.cache} cache, {torch.get_num_threads()} threads of {native.cpu_name()}"
    )
    for phase, work_needed in needed(model, work).items():
        roof = statistics.median(roofs[phase])
        for one in contenders:
            ratios = times_faster(contenders[0], one, phase)
            median = statistics.median(one.times[phase])
            spread = f"{statistics.median(ratios):.2f}x ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            share = work_needed / (median / 1e3) / roof
            if share > 1:
                raise SystemExit(f"{phase} of {one.name} is {share:.2f} of its roof: the time or the work is wrong")
            print(f"{phase:8} {one.name:22} {median:8.1f} ms  {spread}  {share:.0%} of the roof")
        low, high = min(roofs[phase]) / 1e9, max(roofs[phase]) / 1e9
        name, unit = ROOFS[phase]
        print(f"{phase:8} roof: {name} {roof / 1e9:.1f} {unit} ({low:.1f} to {high:.1f})")


if __name__ == "__main__":
    main()
