"""A Hugging Face folder: config.json, safetensors (one file or an index of several), tokenizer.json."""

import json
from pathlib import Path
from typing import Any

import safetensors
import torch

from .chat import ChatTemplate
from .config import ModelConfig, config_from_hf
from .errors import ModelFileError
from .tokenizer import Tokenizer, tokenizer_from_json
from .weights import HF_NAMES, Format, ModelWeights, WeightSource, assemble, unexpected_tensors

DTYPES: dict[str, Format] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
NOT_WEIGHTS = ("rotary_emb.inv_freq",)  # old folders store it; it follows from the configuration


class HFFolder:
    """The parts of a folder, checked; raises `ModelFileError` for whatever is missing or wrong."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = _tensor_files(path)
        document = _read_json(path / "config.json")
        generation = _read_json(path / "generation_config.json", optional=True)
        eos = generation.get("eos_token_id")
        eos_ids = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
        tied = HF_NAMES["head"] not in self.files
        if tied and document.get("tie_word_embeddings") is False:
            raise ModelFileError(path, f"the folder has no tensor {HF_NAMES['head']}")
        try:
            self.config: ModelConfig = config_from_hf(document, tied_head=tied, eos_ids=eos_ids)
        except (TypeError, ValueError) as error:
            raise ModelFileError(path / "config.json", str(error)) from None
        self.tokenizer: Tokenizer = tokenizer_from_json(path / "tokenizer.json")
        self.chat_template = self._chat_template()

    def weights(self) -> ModelWeights:
        expected = set()

        def source(name: str, shape: tuple[int, ...]) -> WeightSource:
            expected.add(name)
            return self._source(name, shape)

        weights = assemble(self.config, HF_NAMES, source)
        if self.config.tied_head:
            expected.add(HF_NAMES["head"])
        unused = sorted(n for n in self.files.keys() - expected if not n.endswith(NOT_WEIGHTS))
        if unused:
            raise ModelFileError(self.path, unexpected_tensors(unused))
        return weights

    def _source(self, name: str, shape: tuple[int, ...]) -> WeightSource:
        if name not in self.files:
            raise ModelFileError(self.path, f"the folder has no tensor {name}")
        file = self.files[name]
        try:
            with safetensors.safe_open(file, framework="pt") as tensors:
                entry = tensors.get_slice(name)
                got, stored = tuple(entry.get_shape()), entry.get_dtype()
        except safetensors.SafetensorError as error:
            raise ModelFileError(file, f"tensor {name}: {error}") from None
        if got != shape:
            raise ModelFileError(file, f"tensor {name} has the shape {list(got)}, expected {list(shape)}")
        if stored not in DTYPES:
            raise ModelFileError(file, f"tensor {name} is stored as {stored}, which is not supported")

        def raw() -> torch.Tensor:
            with safetensors.safe_open(file, framework="pt") as tensors:
                return tensors.get_tensor(name)

        nbytes = torch.Size(shape).numel() * (4 if stored == "F32" else 2)
        return WeightSource(name, DTYPES[stored], shape, stored, False, nbytes, raw, lambda: raw().float())

    def _chat_template(self) -> ChatTemplate | None:
        settings = _read_json(self.path / "tokenizer_config.json", optional=True)
        source = settings.get("chat_template")
        own_file = self.path / "chat_template.jinja"
        if own_file.exists():
            source = own_file.read_text(encoding="utf-8")
        if not isinstance(source, str):
            return None
        try:
            return ChatTemplate(source, _special_tokens(settings))
        except ValueError as error:
            raise ModelFileError(self.path, str(error)) from None


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = settings.get(name)
        if isinstance(value, dict):  # an AddedToken written out
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def _tensor_files(path: Path) -> dict[str, Path]:
    """Which file holds each tensor."""
    index = path / "model.safetensors.index.json"
    if index.exists():
        shards = _read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(v, str) and Path(v).name == v for v in shards.values()):
            raise ModelFileError(index, "it has no valid weight_map")
        names = sorted(set(shards.values()))
    else:
        names = ["model.safetensors"]
    files: dict[str, Path] = {}
    for file in (path / name for name in names):
        if not file.exists():
            raise ModelFileError(path, f"the folder has no {file.name}")
        try:
            with safetensors.safe_open(file, framework="pt") as tensors:
                files.update(dict.fromkeys(tensors.keys(), file))
        except (safetensors.SafetensorError, OSError) as error:
            raise ModelFileError(file, f"not a safetensors file: {error}") from None
    return files


def _read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    if optional and not path.exists():
        return {}
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelFileError(path, (error.strerror or str(error)).lower()) from None
    except ValueError as error:
        raise ModelFileError(path, f"not valid JSON: {error}") from None
    if not isinstance(document, dict):
        raise ModelFileError(path, "not a JSON object")
    return document
