"""The problems of `ops`: inputs, our call, torch's forms of it, and a float64 check of a part of the output.

`cases("decode/9x3")` selects by a part of the name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

import pykernels as pk
from pykernels.bench.clocks import Call
from pykernels.roofline.machine import cache_totals
from pykernels.testing.compare import Mismatch

Args = dict[str, Any]
SHAPES = {"9x3x64": (9, 3, 64), "32x8x128": (32, 8, 128)}
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
MAX_COPIES = 64
PAGE = 64
SHARP = 3.0  # of queries: a softmax over near-equal scores would hide an error
CHECKED = 16  # query rows per end that are computed in float64
TEMPERATURE, TOP_K, TOP_P = 0.8, 50, 0.9


@dataclass(frozen=True)
class OpCase:
    """`make()` builds inputs; `ours(args)` and the forms give calls that write or return; `verify(args)` raises
    `Mismatch`, and returns the errors it saw. `probe` is the ceiling that bounds the op."""

    family: str
    name: str
    make: Callable[[], Args]
    ours: Callable[[Args], Call]
    torch_forms: Mapping[str, Callable[[Args], Call]]
    verify: Callable[[Args], dict[str, float]]
    flops: float
    bytes: float
    probe: str
    cold: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)

    def copies(self) -> list[Args]:
        """Inputs of which one turn touches twice the last-level cache, as a model's layers do."""
        wanted = 1 + math.ceil(2 * cache_totals(1).get("l3", 32 << 20) / max(self.bytes, 1)) if self.cold else 1
        return [self.make() for _ in range(min(MAX_COPIES, wanted))]

    def check(self, args: Args) -> dict[str, float]:
        return self.verify(args)


def cases(words: str, *, smoke: bool = False) -> Iterator[OpCase]:
    """The cases of a family, or those whose name has what stands after a slash."""
    family, _, part = words.partition("/")
    grid = {"prefill": _prefills, "decode": _decodes, "linear": _linears, "sampling": _samplings}[family]
    yield from (case for case in grid(smoke) if part in case.name)


def _pair(*sizes: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(*sizes).to(dtype), torch.randn(*sizes).to(dtype)


def _judge(what: str, ours: torch.Tensor, theirs: torch.Tensor, truth: torch.Tensor, eps: float) -> dict[str, float]:
    """The house's budget: twice the error of torch in the same type, and rounding."""
    found = {name: float((t.double() - truth).abs().max()) for name, t in (("ours", ours), ("torch", theirs))}
    limit = 2 * found["torch"] + eps * float(truth.abs().max())
    if not found["ours"] <= limit:
        raise Mismatch(
            f"{what} is not timed, it is wrong: error {found['ours']:.3g} against float64, limit {limit:.3g}"
        )
    if not found["torch"] <= 0.05 * float(truth.abs().max()):
        raise Mismatch(f"{what}: torch's form is wrong: error {found['torch']:.3g} against float64")
    return found


# ---- prefill attention ----------------------------------------------------------------------------------------------
def _prefills(smoke: bool) -> Iterator[OpCase]:
    for tokens in (48,) if smoke else (512, 1024, 2048, 4096):
        for shape in SHAPES:
            for dtype in DTYPES:
                yield _prefill(shape, dtype, tokens)


def _prefill(shape: str, dtype: str, tokens: int) -> OpCase:
    heads, kv_heads, dim = SHAPES[shape]
    kind = DTYPES[dtype]

    def make() -> Args:
        q, k, v = ((SHARP * torch.randn(tokens, heads, dim)).to(kind), *_pair(tokens, kv_heads, dim, dtype=kind))
        dense = {n: t.transpose(0, 1).contiguous()[None] for n, t in (("tq", q), ("tk", k), ("tv", v))}
        wide = {f"{n}_wide": dense[n].repeat_interleave(heads // kv_heads, 1) for n in ("tk", "tv")}
        cu = torch.tensor([0, tokens], dtype=torch.int32)
        return {"q": q, "k": k, "v": v, "cu": cu, "out": torch.empty_like(q), **dense, **wide}

    def ours(a: Args) -> Call:
        lengths = {"cu_seqlens_q": a["cu"], "cu_seqlens_k": a["cu"], "max_seqlen_q": tokens, "max_seqlen_k": tokens}
        return lambda: pk.prefill_attention(a["q"], a["k"], a["v"], **lengths, out=a["out"])

    def gqa(a: Args) -> Call:
        return lambda: F.scaled_dot_product_attention(a["tq"], a["tk"], a["tv"], is_causal=True, enable_gqa=True)

    def repeated(a: Args) -> Call:  # keys and values repeated beforehand: not torch's loss
        return lambda: F.scaled_dot_product_attention(a["tq"], a["tk_wide"], a["tv_wide"], is_causal=True)

    def verify(a: Args) -> dict[str, float]:
        ours(a)()
        theirs = repeated(a)()[0].transpose(0, 1)
        rows = sorted({*range(min(CHECKED, tokens)), *range(max(0, tokens - CHECKED), tokens)})
        group = heads // kv_heads
        k, v = (a[n].double().repeat_interleave(group, 1) for n in ("k", "v"))
        scores = torch.einsum("qhd,khd->hqk", a["q"][rows].double(), k) / math.sqrt(dim)
        hidden = torch.arange(tokens)[None, :] > torch.tensor(rows)[:, None]
        truth = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), v)
        return _judge(f"prefill {shape} {dtype} {tokens}", a["out"][rows], theirs[rows], truth, torch.finfo(kind).eps)

    pairs = tokens * (tokens + 1) / 2
    moved = (2 * heads + 2 * kv_heads) * tokens * dim * kind.itemsize
    forms = {"enable_gqa": gqa, "repeated beforehand": repeated}
    flops = 4 * heads * dim * pairs
    return OpCase("prefill", f"{shape} {dtype} {tokens}", make, ours, forms, verify, flops, moved, dtype)


# ---- decode attention -----------------------------------------------------------------------------------------------
def _decodes(smoke: bool) -> Iterator[OpCase]:
    for context in (100,) if smoke else (1024, 4096, 16384):
        for batch in (2,) if smoke else (1, 8):
            for shape in SHAPES:
                for dtype in DTYPES:
                    yield _decode(shape, dtype, context, batch)


def _decode(shape: str, dtype: str, context: int, batch: int) -> OpCase:
    heads, kv_heads, dim = SHAPES[shape]
    group, kind = heads // kv_heads, DTYPES[dtype]
    pages = -(-context // PAGE)

    def make() -> Args:
        q = (SHARP * torch.randn(batch, heads, dim)).to(kind)
        tk, tv = _pair(batch, kv_heads, context, dim, dtype=kind)
        order = torch.randperm(batch * pages).int().view(batch, pages)
        caches = []
        for t in (tk, tv):
            padded = torch.zeros(batch, kv_heads, pages * PAGE, dim, dtype=kind)
            padded[:, :, :context] = t
            paged = padded.view(batch, kv_heads, pages, PAGE, dim).permute(0, 2, 3, 1, 4).flatten(0, 1)
            cache = torch.empty(batch * pages, PAGE, kv_heads, dim, dtype=kind)
            cache[order.flatten().long()] = paged
            caches.append(cache)
        lengths = torch.full((batch,), context, dtype=torch.int32)
        out = torch.empty_like(q)
        return {"q": q, "tk": tk, "tv": tv, "k": caches[0], "v": caches[1], "table": order, "lens": lengths, "out": out}

    def ours(a: Args) -> Call:
        where = {"block_table": a["table"], "seqlens_k": a["lens"]}
        return lambda: pk.paged_decode_attention(a["q"], a["k"], a["v"], **where, out=a["out"])

    def gqa(a: Args) -> Call:
        q = a["q"].view(batch, heads, 1, dim)
        return lambda: F.scaled_dot_product_attention(q, a["tk"], a["tv"], enable_gqa=True)

    def repeated(a: Args) -> Call:
        q = a["q"].view(batch, heads, 1, dim)
        wide = [a[n].repeat_interleave(group, 1) for n in ("tk", "tv")] if batch * context <= 4096 else None

        def run() -> torch.Tensor:
            k, v = wide or (a[n].repeat_interleave(group, 1) for n in ("tk", "tv"))
            return F.scaled_dot_product_attention(q, k, v)

        return run

    def folded(a: Args) -> Call:  # the heads of a group as query rows: keys and values are read once
        q = a["q"].view(batch, kv_heads, group, dim)
        return lambda: F.scaled_dot_product_attention(q, a["tk"], a["tv"])

    def verify(a: Args) -> dict[str, float]:
        ours(a)()
        theirs = folded(a)().reshape(batch, heads, dim)
        rows, truths = sorted({0, batch - 1}), []
        for row in rows:
            q = a["q"][row].double().view(kv_heads, group, dim)
            scores = q @ a["tk"][row].double().transpose(1, 2) / math.sqrt(dim)
            truths.append((scores.softmax(-1) @ a["tv"][row].double()).view(heads, dim))
        truth = torch.stack(truths)
        what = f"decode {shape} {dtype} {context} x {batch}"
        return _judge(what, a["out"][rows], theirs[rows], truth, torch.finfo(kind).eps)

    moved = 2 * batch * kv_heads * context * dim * kind.itemsize
    forms = {"folded": folded, "enable_gqa": gqa, "repeated": repeated}
    flops = 4.0 * batch * heads * dim * context
    return OpCase("decode", f"{shape} {dtype} {context} x {batch}", make, ours, forms, verify, flops, moved, "dram")


# ---- linear ---------------------------------------------------------------------------------------------------------
def _linears(smoke: bool) -> Iterator[OpCase]:
    for tokens in (3,) if smoke else (1, 8, 128, 512):
        for rows, columns in ((96, 64),) if smoke else ((3072, 576), (4096, 4096)):
            for format in ("bfloat16", "float32", "q4_1"):
                yield _linear(format, tokens, rows, columns)


def _linear(format: str, tokens: int, rows: int, columns: int) -> OpCase:
    """y = x W^T. A quantised weight stands against F.linear in bfloat16, which reads four times as much."""
    kind = DTYPES.get(format, torch.bfloat16)
    quantised = format not in DTYPES

    def make() -> Args:
        x, w = torch.randn(tokens, columns), torch.randn(rows, columns) / math.sqrt(columns)
        mine = pk.pack_weight(w, format, layout="rows16") if quantised else w.to(kind)
        xs = x if quantised else x.to(kind)
        out = torch.empty(tokens, rows, dtype=xs.dtype)
        return {"x": xs, "w": mine, "tx": x.to(kind), "tw": w.to(kind), "plain": w, "out": out}

    def ours(a: Args) -> Call:
        options: dict[str, Any] = {"activations": "int8"} if quantised else {}
        return lambda: pk.linear(a["x"], a["w"], out=a["out"], **options)

    def torch_linear(a: Args) -> Call:
        return lambda: F.linear(a["tx"], a["tw"])

    def verify(a: Args) -> dict[str, float]:
        ours(a)()
        theirs = torch_linear(a)()
        what = f"linear {format} {tokens} x {rows} x {columns}"
        if not quantised:
            return _judge(what, a["out"], theirs, a["tx"].double() @ a["tw"].double().T, torch.finfo(kind).eps)
        truth = a["x"].double() @ a["w"].dequantize().double().T
        weight = truth if truth is not None else a["x"].double() @ a["plain"].double().T
        error = float((a["out"].double() - weight).norm() / weight.norm())
        if error > 0.1:
            raise Mismatch(f"{what} is not timed, it is wrong: relative error {error:.3g}")
        return {"relative": error}

    sizes = {"bfloat16": 2.0, "float32": 4.0, "q4_1": 20 / 32}
    moved = rows * columns * sizes[format]
    probe = "dram" if tokens == 1 else "int8" if quantised else format
    flops = 2.0 * tokens * rows * columns
    name = f"{format} {tokens} x {rows} x {columns}"
    return OpCase("linear", name, make, ours, {"F.linear": torch_linear}, verify, flops, moved, probe)


# ---- sampling -------------------------------------------------------------------------------------------------------
def _samplings(smoke: bool) -> Iterator[OpCase]:
    for vocab in (1000,) if smoke else (49152, 128256, 151936, 262144):
        for batch in (2,) if smoke else (1, 8, 64):
            yield _sampling(vocab, batch, "sort")
            yield _sampling(vocab, batch, "topk")


def top_p_after_sort(x: torch.Tensor) -> torch.Tensor:
    """softmax + sort + multinomial with the same filters: top-k 50, top-p 0.9, temperature 0.8."""
    values, ids = (x / TEMPERATURE).sort(-1, descending=True)
    values[:, TOP_K:] = -math.inf
    return _draw(values, ids)


def top_k_first(x: torch.Tensor) -> torch.Tensor:
    values, ids = torch.topk(x / TEMPERATURE, TOP_K, -1)
    return _draw(values, ids)


def _draw(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    p = values.softmax(-1)
    p = p * (p.cumsum(-1) - p < TOP_P)
    return ids.gather(-1, torch.multinomial(p, 1))


def _sampling(vocab: int, batch: int, form: str) -> OpCase:
    draw = {"sort": top_p_after_sort, "topk": top_k_first}[form]

    def make() -> Args:
        logits = torch.randn(batch, vocab) * 3
        numbers = torch.arange(batch, dtype=torch.int64)
        drawn = pk.sample(logits, temperature=0.0, seeds=numbers, positions=numbers)
        rows = {
            "temperature": torch.full((batch,), TEMPERATURE),
            "top_k": torch.full((batch,), TOP_K, dtype=torch.int32),
            "top_p": torch.full((batch,), TOP_P),
            "min_p": torch.zeros(batch),
            "seeds": numbers,
            "positions": numbers.clone(),
        }
        return {"logits": logits, "rows": rows, "out": drawn}

    def ours(a: Args) -> Call:
        return lambda: pk.sample(a["logits"], **a["rows"], out=a["out"])

    def theirs(a: Args) -> Call:
        return lambda: draw(a["logits"])

    def verify(a: Args) -> dict[str, float]:
        """Both draws are inside the kept set, computed in float64."""
        ours(a)()
        values, ids = (a["logits"].double() / TEMPERATURE).topk(TOP_K, -1)
        p = values.softmax(-1)
        kept = p.cumsum(-1) - p < TOP_P
        for name, drawn in (("ours", a["out"].ids), ("torch's", draw(a["logits"])[:, 0])):
            inside = ((ids == drawn[:, None]) & kept).any(-1)
            if not inside.all():
                raise Mismatch(f"sampling {vocab} x {batch}: {name} drew a token outside of the kept set")
        return {}

    moved = 4.0 * batch * vocab
    name = f"{vocab} x {batch}, {form} first"
    return OpCase("sampling", name, make, ours, {f"{form} first": theirs}, verify, 0.0, moved, "dram")
