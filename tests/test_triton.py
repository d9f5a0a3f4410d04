"""The Triton backend in Triton's interpreter: every op against the reference, and what only this backend promises."""

from __future__ import annotations

import ast
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from interpreter import patch_once

from pykernels.contract import OPS
from pykernels.testing import Case, attention_cases, cases, check_case
from pykernels.testing.attention_cases import Attention
from pykernels.triton import BACKEND, configs
from pykernels.triton.common import INTERPRETED, Target

ROOT = Path(__file__).parents[1]
DEVICE = "cpu" if INTERPRETED.value else "cuda"
if INTERPRETED.value:
    patch_once()

pytestmark = [
    pytest.mark.skipif(bool(BACKEND.unavailable()), reason="; ".join(BACKEND.unavailable())),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, from lanes that a mask throws away
]


def run(op_name: str, args: dict[str, Any]) -> None:
    BACKEND.run(op_name, args)


# Thousands of programs of few tokens: minutes in the interpreter. test_any_split_size_changes_only_rounding has smaller ones.
TOO_LONG = {("paged_decode_attention", f"split_{n}") for n in (1, 16)} if INTERPRETED.value else set()


def table() -> list[Any]:
    """Every case: the smoke subset plainly, the rest marked slow."""
    return [
        pytest.param(case, id=str(case), marks=[] if case.smoke else [pytest.mark.slow])
        for op in OPS
        for case in cases(op, "full")
        if (op, case.name) not in TOO_LONG
    ]


@pytest.mark.parametrize("case", table())
def test_agrees_with_the_reference(case: Case) -> None:
    reasons = BACKEND.refuses(case.op, case.args(DEVICE))
    if reasons:
        pytest.skip("; ".join(reasons))
    check_case(case, run, DEVICE)


def find(op: str, name: str) -> Case:
    return next(case for case in cases(op, "full") if case.name == name)


def outputs(case: Case, **changes: Any) -> dict[str, Any]:
    args = {**case.args(DEVICE), **changes}
    run(case.op, args)
    return args


def test_only_cpu_layouts_and_activations_are_refused() -> None:
    refused = [c for op in OPS for c in cases(op, "full") if BACKEND.refuses(op, c.args(DEVICE))]
    for case in refused:
        args = case.args(DEVICE)
        assert args["layout"] == "rows16" or args.get("activations") != "float", case


def test_a_request_has_the_same_bits_alone_and_in_a_batch() -> None:
    case = find("paged_decode_attention", "int8")
    together = outputs(case)
    for b in range(together["q"].shape[0]):
        row = {n: together[n][b : b + 1] for n in ("q", "block_table", "seqlens_k")}
        alone = outputs(case, **row, out=torch.empty_like(together["out"][:1]), lse=None)
        assert torch.equal(alone["out"][0], together["out"][b])


def test_splits_do_not_depend_on_the_width_of_the_block_table() -> None:
    case = find("paged_decode_attention", "ragged")
    args = case.args(DEVICE)
    sinks = torch.linspace(-2, 6, args["q"].shape[1], device=DEVICE)
    wide = torch.nn.functional.pad(args["block_table"], (0, 40), value=-1)
    narrow = outputs(case, sinks=sinks)
    padded = outputs(case, sinks=sinks, block_table=wide)
    counts = [configs.split_count(t.shape[1] * args["k_cache"].shape[1], 0) for t in (args["block_table"], wide)]
    assert counts[0] < counts[1]
    assert torch.equal(narrow["out"], padded["out"])
    assert torch.equal(narrow["lse"], padded["lse"])


def test_a_sequence_longer_than_all_smallest_splits_keeps_its_tail() -> None:
    tokens = 16_500
    spec = Attention(k_lens=(tokens, 3), heads=1, kv_heads=1, head_dim=16, head_dim_v=16, page_size=64)
    assert tokens > configs.MAX_SPLITS * configs.SPLIT_TOKENS
    check_case(
        Case("paged_decode_attention", "tail", lambda make: attention_cases.decode(spec, make), False), run, DEVICE
    )


def test_an_empty_side_counts_for_nothing_whatever_it_holds() -> None:
    case = find("merge_attention_states", "float32")
    clean, args = outputs(case), case.args(DEVICE)
    empty = torch.isinf(args["lse_b"]).all(0)
    assert empty.any()
    args["out_b"][empty] = math.nan
    run(case.op, args)
    assert torch.equal(args["out"], clean["out"])


def test_tokens_of_a_page_that_is_not_there_are_gathered_as_nan() -> None:
    case = find("gather_kv", "int8_token")
    args = case.args(DEVICE)
    args["block_table"][0, 1] = -1
    run(case.op, args)
    page = args["k_cache"].shape[1]
    for x in (args["k"], args["v"]):
        assert torch.isnan(x[page : 2 * page]).all()
        assert not torch.isnan(x[:page]).any()


def test_tokens_past_the_outputs_are_not_gathered() -> None:
    args = find("gather_kv", "int8_token").args(DEVICE)
    held = {name: torch.zeros_like(args[name]) for name in ("k", "v")}
    run("gather_kv", args | {name: x[:-7] for name, x in held.items()})
    for x in held.values():
        assert x[:-7].any(-1).all()
        assert not x[-7:].any()


@pytest.mark.skipif(not INTERPRETED.value, reason="a device does not tell what it reads")
@pytest.mark.parametrize("op", ["paged_decode_attention", "paged_prefill_attention"])
def test_the_block_table_is_not_read_before_the_window(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that have left the window may belong to somebody else by now."""
    from triton.runtime import interpreter

    args = find(op, "page_3").args(DEVICE) | {"window_left": 4}
    table, length, rows = args["block_table"], int(args["seqlens_k"][0]), 1
    if op == "paged_prefill_attention":
        rows = int(args["cu_seqlens_q"][1])
    read: set[int] = set()
    load = interpreter.InterpreterBuilder.create_masked_load

    def noted(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        entries = (pointers.data[mask.data].astype("int64") - table.data_ptr()) // table.element_size()
        read.update(int(e) for e in entries.ravel() if 0 <= e < table.shape[1])
        return load(self, pointers, mask, *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_masked_load", noted)
    run(op, args)
    assert min(read) == (length - rows - 4) // args["k_cache"].shape[1] > 0
    assert max(read) == (length - 1) // args["k_cache"].shape[1]


@pytest.mark.parametrize("op", ["append_kv", "copy_pages"])
def test_an_index_past_the_cache_writes_nothing(op: str) -> None:
    """Nobody has checked indices on a device: the page behind the cache belongs to somebody else."""
    args = find(op, "bfloat16").args(DEVICE)
    pools = {}
    for name in ("k_cache", "v_cache"):
        pools[name] = torch.zeros(
            (args[name].shape[0] + 1, *args[name].shape[1:]), dtype=args[name].dtype, device=DEVICE
        )
        args[name] = pools[name][:-1]
    pages, page_size = args["k_cache"].shape[:2]
    if op == "append_kv":
        args["slot_mapping"] = torch.arange(args["k"].shape[0], device=DEVICE) % page_size + pages * page_size
    else:
        args["src_pages"], args["dst_pages"] = args["src_pages"] * 0, args["dst_pages"] * 0 + pages
        pools["k_cache"][0] = pools["v_cache"][0] = 1.0
    run(op, args)
    assert not any(pool[-1].any() for pool in pools.values())


@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("paged_prefill_attention", "fp8_per_tensor"),
        ("paged_decode_attention", "fp8"),
        ("gather_kv", "fp8_token"),
        ("linear", "fp8_e4m3_plain_bfloat16"),
        ("embedding", "fp8_e4m3_plain_float16"),
    ],
)
def test_e4m3_codes_are_widened_by_hand_where_triton_has_no_such_type(
    op: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Target, "has_e4m3", False)
    check_case(find(op, name), run, DEVICE)


@pytest.mark.parametrize("split_size", [1, 7, 16, 33])
def test_any_split_size_changes_only_rounding(split_size: int) -> None:
    case = find("paged_decode_attention", "all_masks")
    whole, split = outputs(case), outputs(case, split_size=split_size)
    assert torch.allclose(whole["out"], split["out"], atol=2e-6, rtol=0)
    assert torch.allclose(whole["lse"], split["lse"], atol=2e-6, rtol=1e-6)


def test_decode_writes_its_parts_into_the_workspace_or_says_what_it_needs() -> None:
    case = find("paged_decode_attention", "ragged")
    args = case.args(DEVICE) | {"split_size": 16}
    small = args | {"workspace": torch.empty(64, dtype=torch.uint8, device=DEVICE)}
    (reason,) = BACKEND.refuses(case.op, small)
    needed = int(next(word for word in reason.split() if word.isdigit()))
    workspace = torch.zeros(needed, dtype=torch.uint8, device=DEVICE)
    assert not BACKEND.refuses(case.op, args | {"workspace": workspace})
    run(case.op, args | {"workspace": workspace})
    plain = outputs(case, split_size=16)
    assert torch.equal(args["out"], plain["out"])
    assert workspace.any()


def test_infinite_values_reach_only_the_rows_that_see_them() -> None:
    case = find("prefill_attention", "ragged")
    args = case.args(DEVICE)
    args["v"][7, 0, 3] = math.inf
    run(case.op, args)
    length = int(args["cu_seqlens_q"][1])
    group = args["q"].shape[1] // args["v"].shape[1]
    assert torch.isfinite(args["out"][:7]).all()
    assert torch.isinf(args["out"][7:length, :group, 3]).all()


def test_small_value_scales_keep_their_precision_in_float16() -> None:
    """P x scale is kept relative to the largest scale: alone it would fall below float16's smallest number."""
    case = find("paged_decode_attention", "int8")
    args = case.args(DEVICE)
    small = {n: args[n].half() if n in ("q", "out") else args[n] for n in args}
    small["out"], small["lse"] = torch.empty_like(small["out"]), None
    big = {**small, "out": torch.empty_like(small["out"])}
    run(case.op, big)
    run(case.op, {**small, "v_scale": args["v_scale"] * 2.0**-12})
    assert torch.allclose(small["out"].float() * 2**12, big["out"].float(), atol=2e-2, rtol=2e-2)


def test_sampled_frequencies_follow_the_distribution() -> None:
    case = find("sample", "plain")
    vocab, draws = 12, 4000 if DEVICE == "cuda" else 300  # the interpreter takes 50 ms a row
    probabilities = torch.softmax(torch.linspace(0, 3, vocab), 0)
    args = case.args(DEVICE)
    args |= {n: args[n][:1].expand(draws).contiguous() for n in ("temperature", "top_k", "top_p", "min_p", "seeds")}
    args |= {"logits": torch.linspace(0, 3, vocab, device=DEVICE).expand(draws, vocab), "logprob": None}
    args |= {"positions": torch.arange(draws, device=DEVICE), "top_ids": None, "top_logprobs": None}
    args |= {"ids": torch.empty(draws, dtype=torch.int64, device=DEVICE)}
    args |= {"valid": torch.empty(draws, dtype=torch.bool, device=DEVICE)}
    run("sample", args)
    counts = torch.bincount(args["ids"].cpu(), minlength=vocab).double()
    chi_square = float(((counts - draws * probabilities) ** 2 / (draws * probabilities)).sum())
    assert chi_square < 31.3  # the 0.1 % point of chi-square with 11 degrees of freedom


@pytest.mark.parametrize("arch", [80, 86, 90, 100])
@pytest.mark.parametrize("group", [1, 3, 8, 71])
def test_tiles_hold_whole_groups_and_fit_shared_memory(arch: int, group: int) -> None:
    target = Target("cuda", arch)
    for width in (64, 128, 256):
        shape = configs.AttentionShape(head_dim=width, head_dim_v=width, group=group)
        for tile in (configs.prefill_tile(target, shape), configs.decode_tile(target, shape)):
            assert tile.block_m >= group
            assert tile.num_stages * tile.block_n * width * 2 * 2 <= target.shared_memory


def hardware(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a script with kernels compiled, not interpreted."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_machine_code_keeps_its_figures() -> None:
    done = hardware("ci/compile_matrix.py", "--quick")
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_row_of_the_compile_matrix_was_made_from_this_code() -> None:
    done = hardware("ci/compile_matrix.py", "--stale")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_thousand_steps_of_growing_length_compile_once() -> None:
    done = hardware("ci/recompiles.py", "1000")
    assert done.returncode == 0, done.stdout + done.stderr


def test_constants_of_kernels_call_nothing() -> None:
    """`max` and `min` of constants are no constant in Triton 3.4, where a loop with such a step does not compile."""
    bound = [
        (path.name, node.lineno, node.value)
        for path in sorted((ROOT / "pykernels/triton").glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "tl.constexpr"
    ]
    assert bound
    assert not [b for b in bound if any(isinstance(n, ast.Call) for n in ast.walk(b[2]))]


def test_importing_the_backend_does_not_import_triton() -> None:
    code = "import sys, pykernels.triton as t; t.BACKEND.unavailable(); sys.exit('triton' in sys.modules)"
    assert hardware("-c", code).returncode == 0
