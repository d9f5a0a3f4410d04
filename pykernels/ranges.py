"""Named ranges around the phases, layers and ops of a run, for a profiler to show.

    with annotated(Nvtx()):        # under nsys or ncu
        generator.generate(["..."])

They cost nothing while nobody looks: outside of `annotated`, `span` returns one shared object that does nothing, and ops
have no observer. Ops that a recorded native plan replays on the CPU never pass through Python; `PYKERNELS_PLAN=0` shows them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch

from .contract import Op
from .library import observed

DOMAIN = "pykernels"


class Domain(Protocol):
    """Where ranges go. They nest: `pop` ends the one that was pushed last."""

    def push(self, name: str) -> None: ...
    def pop(self) -> None: ...


class Nvtx:
    """Ranges of NVTX's push and pop kind, in the domain `pykernels`. Without an attached tool they go nowhere."""

    def __init__(self) -> None:
        try:
            import nvtx
        except ImportError as error:
            raise ImportError("NVTX ranges need nvtx: pip install 'pykernels[profile]'") from error
        self._domain = nvtx.get_domain(DOMAIN)
        self._attributes: dict[str, Any] = {}

    def push(self, name: str) -> None:
        if name not in self._attributes:
            self._attributes[name] = self._domain.get_event_attributes(message=name)
        self._domain.push_range(self._attributes[name])

    def pop(self) -> None:
        self._domain.pop_range()


class TorchRanges:
    """Ranges that torch.profiler records and its Chrome trace shows."""

    def __init__(self) -> None:
        self._open: list[Any] = []

    def push(self, name: str) -> None:
        self._open.append(torch.profiler.record_function(name))
        self._open[-1].__enter__()

    def pop(self) -> None:
        self._open.pop().__exit__(None, None, None)


_OFF = nullcontext()
_domains: list[Domain] = []


class _Span:
    def __init__(self, domain: Domain, name: str) -> None:
        self.domain, self.name = domain, name

    def __enter__(self) -> None:
        self.domain.push(self.name)

    def __exit__(self, *error: object) -> None:
        self.domain.pop()


def span(name: str, index: int | None = None) -> AbstractContextManager[None]:
    """A range `name`, or `name index`, of the domain in use, from entering to leaving, errors included."""
    if not _domains:
        return _OFF
    return _Span(_domains[-1], name if index is None else f"{name} {index}")


@contextmanager
def annotated(domain: Domain, *, ops: bool = True) -> Iterator[None]:
    """Every `span` inside goes to `domain`, and with `ops` every op that runs is a range of its name."""

    def observe(op: Op, _: Mapping[str, Any], run: Callable[[], None]) -> None:
        with _Span(domain, op.name):
            run()

    _domains.append(domain)
    try:
        with observed(observe) if ops else nullcontext():
            yield
    finally:
        _domains.remove(domain)
