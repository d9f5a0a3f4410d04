"""The command line as a user meets it: wrong input gives one clear line and exit code 2, never a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("gguf")


def pykernels(*args: str, stdin: str | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pykernels.cli", *args]
    return subprocess.run(
        command, input=stdin, capture_output=True, text=True, env=os.environ | environment, timeout=300
    )


def model_file() -> Path:
    from pykernels.models import resolve_model

    try:
        return resolve_model("smollm2")
    except ValueError as error:
        pytest.skip(str(error))


def one_line(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 2, (done.returncode, done.stderr)
    assert "Traceback" not in done.stderr
    message = done.stderr.strip().splitlines()[-1]
    for word in words:
        assert word in message, done.stderr
    assert done.stdout == ""


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    one_line(pykernels("generate", "hi", "--model", str(tmp_path / "no.gguf")), "no.gguf", "no such file")


@pytest.mark.parametrize("size", [0, 3, 100, 100_000, 1_500_000, 50_000_000])
def test_a_truncated_gguf_is_one_line(tmp_path: Path, size: int) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(model_file().read_bytes()[:size])
    one_line(pykernels("generate", "hi", "--model", str(path)), "cut.gguf")


def test_a_file_that_is_not_a_gguf_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(4096))
    one_line(pykernels("generate", "hi", "--model", str(path)), "model.gguf")


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    from tiny_models import tiny_metadata, write_gguf

    path = write_gguf(tmp_path / "odd.gguf", metadata=tiny_metadata() | {"general.architecture": "mamba"})
    one_line(pykernels("generate", "hi", "--model", str(path)), "mamba", "known")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--temperature", "-1"], ["temperature", "-1"]),
        (["--temperature", "nan"], ["temperature", "nan"]),
        (["--top-p", "0"], ["top_p", "0"]),
        (["--top-p", "1.5"], ["top_p", "1.5"]),
        (["--min-p", "-0.1"], ["min_p"]),
        (["--max-new-tokens", "0"], ["max_new_tokens", "at least 1"]),
        (["--seed", "-3"], ["seed", "-3"]),
        (["--stop", ""], ["stop"]),
        (["--backend", "gpu"], ["backend must be one of", "'gpu'"]),
        (["--threads", "0"], ["--threads", "at least 1"]),
        (["--kv", "int3"], ["--kv", "int3"]),
    ],
)
def test_a_wrong_option_is_one_line(options: list[str], words: list[str]) -> None:
    model_file()
    one_line(pykernels("generate", "hi", *options), *words)


@pytest.mark.parametrize("prompt", ["", "  \n"])
def test_an_empty_prompt_is_one_line(prompt: str) -> None:
    one_line(pykernels("generate", prompt), "prompt is empty")
    one_line(pykernels("generate", "-", stdin=prompt), "prompt is empty")


def test_a_prompt_longer_than_the_context_is_one_line() -> None:
    model_file()
    one_line(pykernels("generate", "--raw", "-", stdin="a b c d " * 4000), "the model's context is 8192")


def test_an_unwritable_report_folder_is_one_line(tmp_path: Path) -> None:
    model_file()
    (tmp_path / "file").write_text("")
    one_line(pykernels("roofline", "--quick", "--report", str(tmp_path / "file" / "report")), "report")


def test_help_has_examples() -> None:
    for command in (
        "generate",
        "roofline",
        "report",
        "profile",
        "check",
        "bench",
        "gate",
        "baseline",
        "tune",
        "doctor",
    ):
        done = pykernels(command, "--help")
        assert done.returncode == 0
        assert f"pykernels {command}" in done.stdout.split("examples:")[1]


def test_generate_streams_and_its_json_has_the_documented_keys() -> None:
    model_file()
    options = ("The capital of France is", "--raw", "--max-new-tokens", "8")
    text = pykernels("generate", *options)
    assert text.returncode == 0, text.stderr
    done = pykernels("generate", *options, "--json")
    document = json.loads(done.stdout)
    assert set(document) == {
        "text",
        "token_ids",
        "finish_reason",
        "ttft_ms",
        "itl_ms",
        "prefill_tokens_per_s",
        "decode_tokens_per_s",
    }
    assert "Paris" in document["text"]
    assert text.stdout.rstrip("\n") == document["text"].rstrip("\n")
    assert len(document["token_ids"]) == 8
    assert document["finish_reason"] == "length"
    assert all(document[key] > 0 for key in ("ttft_ms", "itl_ms", "prefill_tokens_per_s", "decode_tokens_per_s"))


def test_doctor_tells_the_level_and_why_a_forced_one_cannot_run() -> None:
    document = json.loads(pykernels("doctor", "--json").stdout)
    assert document["backends"]["cpu"]["available"]
    assert document["cpu"]["level"] in document["cpu"]["levels"]
    done = pykernels("doctor", "--json", PYKERNELS_CPU_ISA="avx1024")
    assert done.returncode == 1
    assert "avx1024" in json.loads(done.stdout)["backends"]["cpu"]["reasons"][0]


def test_check_passes_and_fails_with_its_exit_code() -> None:
    done = pykernels("check", "--backend", "cpu", "--op", "rms_norm", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["ok"]
    assert document["rows"][0]["passed"] > 0
    one_line(pykernels("check", "--backend", "nothing"), "backend must be one of")
