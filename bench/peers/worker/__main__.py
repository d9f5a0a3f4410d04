"""One engine in one process: `python bench/peers/worker ENGINE CONFIG`, JSON lines on standard input and output.

Runs in the peer's own interpreter, so nothing here may import pykernels (but its own engine's file). An engine is a class

    Engine(config)                         loads the model: {"model": path, "threads": n, "context": longest, ...}
    engine.holds                           whether it can keep prompts computed between two `decode`
    engine.info()                          versions and settings
    engine.prefill(ids)                    -> (seconds until the first token could be read, that token)
    engine.hold(name, prompts)             computes prompts and keeps them under a name
    engine.decode(name, prompts, new)      -> (seconds of each step, ids per prompt); what is held under `name`, or `prompts`
    engine.logits(ids, phase)              -> float32 [len(ids), vocab] (optional)
    engine.parts(ids)                      -> seconds and FLOPs per op of a prefill (optional)
    engine.set_threads(count)              from now on (optional)
    engine.extra                           what else the reply to prefill or decode says (optional)

A request is one object with `do` and that method's arguments; a reply has its results, or `error`.
"""

import importlib
import json
import os
import sys

from protocol import serve

ENGINES = {
    "pykernels": "pykernels_engine",
    "llama.cpp": "llama_engine",
    "openvino": "openvino_engine",
    "onnxruntime": "onnxruntime_engine",
    "ctranslate2": "ctranslate2_engine",
    "transformers": "transformers_engine",
    "vllm": "vllm_engine",
}


def engine_class(name):
    """The class of an engine, with its library imported."""
    return importlib.import_module(ENGINES[name]).Engine


def main():
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no reply
    serve(engine_class, sys.argv[1], json.loads(sys.argv[2]), sys.stdin, replies)
    replies.flush()
    os._exit(0)  # some libraries hang, or fault, while they are torn down


if __name__ == "__main__":
    main()
