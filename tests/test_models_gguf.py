"""Reading GGUF files: the same as gguf's own reader on a good one, one clear line on a bad one."""

import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import SIZES, tiny_metadata, tiny_tensors, tiny_vocabulary, write_gguf

from pykernels.models import PACKAGED_MODELS, GGUFFile, ModelFileError, load_checkpoint, resolve_model
from pykernels.models.config import config_from_gguf
from pykernels.models.weights import weights_from_gguf


@pytest.fixture(scope="module")
def smollm2() -> Path:
    try:
        return resolve_model("smollm2")
    except ValueError:
        pytest.skip(f"needs the weights: {PACKAGED_MODELS['smollm2'].install}")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


def refused(path: Path, *words: str) -> str:
    """Asserts that loading fails in one line that names the file and has the words."""
    with pytest.raises(ModelFileError) as caught:
        load_checkpoint(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: "), message
    assert "\n" not in message
    assert len(message) < 400
    for word in words:
        assert word in message, message
    return message


def test_metadata_and_tensors_are_those_of_ggufs_own_reader(smollm2: Path) -> None:
    ours, theirs = GGUFFile(smollm2), gguf.GGUFReader(smollm2)
    assert ours.tensors.keys() == {t.name for t in theirs.tensors}
    for tensor in theirs.tensors:
        assert ours.tensors[tensor.name].shape == tuple(int(n) for n in tensor.shape[::-1])
        assert np.array_equal(ours.raw(tensor.name).ravel(), tensor.data.view(np.uint8).ravel())
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            value = ours.metadata[key]
            assert (value.tolist() if isinstance(value, np.ndarray) else value) == field.contents()


def test_every_value_type_of_the_format_is_read(tmp_path: Path) -> None:
    values = {
        1: -7,
        0: 200,
        3: -3000,
        2: 60000,
        5: -(2**31),
        4: 2**32 - 1,
        11: -(2**63),
        10: 2**64 - 1,
        6: 0.5,
        12: 0.1,
        7: True,
    }
    writer = gguf.GGUFWriter(tmp_path / "types.gguf", "llama")
    for code, value in values.items():
        writer.add_key_value(f"x.{code}", value, gguf.GGUFValueType(code))
    writer.add_array("x.bools", [True, False])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    metadata = GGUFFile(tmp_path / "types.gguf").metadata
    assert {code: metadata[f"x.{code}"] for code in values} == values
    assert metadata["x.bools"].tolist() == [True, False]


def test_raw_is_a_view_that_never_writes_to_the_file(tiny: Path) -> None:
    before = tiny.read_bytes()
    file = GGUFFile(tiny)
    view = torch.from_numpy(file.raw("output_norm.weight"))
    address = view.data_ptr()
    view.fill_(0)
    assert torch.from_numpy(file.raw("output_norm.weight")).data_ptr() == address
    assert tiny.read_bytes() == before


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q8_0"])
def test_float32_is_what_was_stored(tmp_path: Path, kind: str) -> None:
    name, values = "blk.0.attn_v.weight", tiny_tensors()["blk.0.attn_v.weight"]
    file = GGUFFile(write_gguf(tmp_path / "q.gguf", types={name: kind}))
    qtype = gguf.GGMLQuantizationType[kind]
    stored = gguf.quants.quantize(values, qtype)
    assert np.array_equal(file.raw(name).ravel(), stored.view(np.uint8).ravel())
    assert np.array_equal(file.float32(name), gguf.quants.dequantize(stored, qtype))
    assert file.float32(name).shape == values.shape


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not a GGUF file"),
        (b"GG", "not a GGUF file"),
        (b"PK\x03\x04" + bytes(100), "not a GGUF file"),
        (b"GGUF", "truncated: the version at byte 4 needs 4 bytes, 0 are left"),
        (b"GGUF\x01\x00\x00\x00" + bytes(64), "GGUF version 1"),
        (b"GGUF\x00\x00\x00\x03" + bytes(64), "a big-endian GGUF file"),
        (b"GGUF\x03\x00\x00\x00" + b"\xff" * 16, "truncated or corrupt: it claims"),
        (b"GGUF\x03\x00\x00\x00" + bytes(16), "the metadata has no general.architecture"),
    ],
)
def test_what_is_not_a_gguf_file_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    refused(path, words)


def test_a_path_that_does_not_exist_is_named(tmp_path: Path) -> None:
    refused(tmp_path / "nothing.gguf", "no such file")
    refused(tmp_path, "not a Hugging Face folder")


@pytest.mark.parametrize("key", [k for k in tiny_metadata() if k.startswith(("llama.", "tokenizer.ggml"))])
def test_missing_metadata_is_named_or_has_a_default(tmp_path: Path, key: str) -> None:
    optional = (
        "llama.attention.head_count_kv",
        "llama.rope.freq_base",
        "tokenizer.ggml.bos_token_id",
        "tokenizer.ggml.eos_token_id",
    )
    metadata = {k: v for k, v in tiny_metadata().items() if k != key}
    path = write_gguf(tmp_path / "m.gguf", metadata)
    if key == "llama.attention.head_count_kv":
        refused(path, "attn_k.weight has the shape [32, 64], expected [64, 64]")
    elif key in optional:
        load_checkpoint(path)
    else:
        refused(path, f"the metadata has no {key}")


@pytest.mark.parametrize("name", list(tiny_tensors()))
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", tensors={k: v for k, v in tiny_tensors().items() if k != name})
    refused(path, f"the file has no tensor {name}")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"general.architecture": "qwen9"}, "unknown architecture 'qwen9'; known in GGUF files: llama"),
        ({"llama.expert_count": 8}, "a mixture of experts"),
        ({"llama.attention.head_count": "four"}, "llama.attention.head_count is of type str, expected int"),
        ({"llama.attention.head_count": 0}, "num_heads is 0"),
        ({"llama.attention.head_count_kv": 3}, "num_heads (4) is not a multiple of num_kv_heads (3)"),
        ({"llama.attention.value_length": 8}, "keys and values of different length"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "rms_eps is nan"),
        ({"llama.rope.dimension_count": 18}, "rope_dim (18) must be even and at most head_dim (16)"),
        (
            {"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0},
            "unknown rotary scaling 'longrope'",
        ),
        ({"llama.feed_forward_length": 64}, "ffn_gate.weight has the shape [96, 64], expected [64, 64]"),
        ({"llama.block_count": 3}, "the file has no tensor blk.2.attn_norm.weight"),
        ({"llama.block_count": 1}, "9 tensors that this architecture does not have, such as 'blk.1.attn_k.weight'"),
        ({"tokenizer.ggml.model": "bert"}, "unknown tokenizer model 'bert'"),
        ({"tokenizer.ggml.pre": "mystery"}, "unknown pre-tokenizer 'mystery'; known: gpt-2"),
        ({"tokenizer.ggml.eos_token_id": 99999}, "the token id 99999 is outside the vocabulary"),
        ({"tokenizer.ggml.merges": ["t h", "q u"]}, "the merge 'q u' is not of two known tokens"),
        ({"tokenizer.ggml.tokens": [*tiny_vocabulary()[:-1], "the"]}, "corrupt vocabulary"),
        ({"tokenizer.chat_template": "{% for m in %}"}, "the chat template is not valid"),
    ],
)
def test_contradictory_metadata_is_refused(tmp_path: Path, changes: dict, words: str) -> None:
    refused(write_gguf(tmp_path / "m.gguf", tiny_metadata() | changes), words)


def test_a_bias_is_refused_and_not_left_out(tmp_path: Path) -> None:
    tensors = tiny_tensors() | {"blk.0.attn_q.bias": np.zeros(SIZES["hidden"], np.float32)}
    refused(write_gguf(tmp_path / "m.gguf", tensors=tensors), "such as 'blk.0.attn_q.bias'")


def test_tensor_data_past_the_end_is_refused(tmp_path: Path, tiny: Path) -> None:
    path = tmp_path / "short.gguf"
    path.write_bytes(tiny.read_bytes()[:-64])
    refused(path, "truncated: tensor", "ends at byte")


def problem_of(load: Callable[[], object]) -> str | None:
    """None if it loads, else the message; any other exception passes through and fails the test."""
    try:
        load()
    except ModelFileError as error:
        return str(error)
    return None


def is_one_clear_line(problem: str) -> bool:
    return "\n" not in problem and len(problem) < 400


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_to_a_small_file_loads_or_is_refused(tmp_path: Path, tiny: Path, data: st.DataObject) -> None:
    content = bytearray(tiny.read_bytes())
    header = GGUFFile(tiny).tensors["token_embd.weight"].offset
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content)))]
    for at, value in data.draw(st.lists(st.tuples(st.integers(0, header - 1), st.integers(0, 255)), max_size=3)):
        if at < len(content):
            content[at] = value
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content)
    problem = problem_of(lambda: load_checkpoint(path))
    assert problem is None or is_one_clear_line(problem)


def open_without_text(path: Path) -> None:
    """All but the tokenizer."""
    file = GGUFFile(path)
    weights_from_gguf(file, config_from_gguf(file))


def with_short_arrays(header: bytes, keep: int = 500) -> bytes:
    """SmolLM2's header with its long arrays cut, so that 200 variants of it are read in seconds."""
    for key, element in (("tokens", 0), ("token_type", 4), ("merges", 0)):
        name = f"tokenizer.ggml.{key}".encode()
        count_at = header.index(name) + len(name) + 8  # behind the types of the value and of its elements
        ends = [count_at + 8]
        for _ in range(struct.unpack_from("<Q", header, count_at)[0]):
            ends.append(ends[-1] + (element or 8 + struct.unpack_from("<Q", header, ends[-1])[0]))
        header = header[:count_at] + struct.pack("<Q", keep) + header[ends[0] : ends[keep]] + header[ends[-1] :]
    return header


def test_200_damages_to_smollm2s_header_load_or_are_refused(tmp_path: Path, smollm2: Path) -> None:
    """Truncations, flipped bits and overwritten words; the tensors' data is a hole in the file."""
    data_start = GGUFFile(smollm2).tensors["token_embd.weight"].offset
    with smollm2.open("rb") as file:
        good = with_short_arrays(file.read(data_start))
    size = smollm2.stat().st_size - data_start + len(good) + 32  # 32: the data starts at an aligned byte
    rng, path, outcomes = random.Random(0), tmp_path / "damaged.gguf", []
    for i in range(200):
        content, end, at = bytearray(good), size, rng.randrange(len(good))
        if i % 3 == 0:
            content, end = content[:at], at
        elif i % 3 == 1:
            content[at] ^= 1 << rng.randrange(8)
        else:
            content[at : at + 8] = rng.randbytes(8)
        path.write_bytes(content)
        os.truncate(path, end)
        problem = problem_of(lambda: open_without_text(path))
        assert problem is None or is_one_clear_line(problem)
        outcomes.append(problem)
    assert {problem is None for problem in outcomes} == {True, False}
    assert len(set(outcomes)) > 50  # each names its own defect


def test_a_truncated_copy_of_smollm2_is_refused(tmp_path: Path, smollm2: Path) -> None:
    path = tmp_path / "half.gguf"
    shutil.copyfile(smollm2, path)
    with path.open("r+b") as file:
        file.truncate(smollm2.stat().st_size // 2)
    refused(path, "truncated: tensor")
