"""Makes Triton's interpreter several times faster for the tests, without changing what it computes.

Every call of a nested `@triton.jit` function patches the whole of `triton.language` again, although the launch around it
already has. Here a module is patched once per launch. And every sum and product of integers is computed a second time, in 64 bits,
for an assertion that only a debug build makes: not here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from triton.runtime import interpreter


def patch_once() -> None:
    """Installs the change. Does nothing on a Triton whose interpreter is built differently."""
    patch_lang = getattr(interpreter, "_patch_lang", None)
    executor = getattr(interpreter, "GridExecutor", None)
    if patch_lang is None or executor is None or getattr(interpreter, "_patches_once", False):
        return
    patched: set[int] = set()
    depth = [0]
    launch = executor.__call__

    def patch(fn: Any) -> Any:
        if depth[0] == 1 and patched and id(fn.__globals__) in patched:
            return None
        patched.add(id(fn.__globals__))
        return patch_lang(fn)

    def launch_once(self: Any, *args: Any, **kwargs: Any) -> Any:
        patched.clear()
        depth[0] += 1
        try:
            return launch(self, *args, **kwargs)
        finally:
            depth[0] -= 1
            patched.clear()

    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
    interpreter._patch_lang = patch
    executor.__call__ = launch_once
    interpreter._patches_once = True
