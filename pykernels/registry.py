"""Which backends there are, what each can do here, and which one serves a call."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from .contract import Op, device_of


class Backend(Protocol):
    """An implementation of the contract. It may only narrow what it accepts, by returning reasons."""

    name: str

    def unavailable(self) -> list[str]: ...
    def refuses(self, op_name: str, args: Mapping[str, Any]) -> list[str]: ...
    def run(self, op_name: str, args: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class Available:
    """A backend that can run here."""

    name: str

    def __bool__(self) -> bool:
        return True


@dataclass(frozen=True)
class Unavailable:
    """A backend that cannot run here, and why."""

    name: str
    reasons: tuple[str, ...]

    def __bool__(self) -> bool:
        return False


# Imported on first use, so that `import pykernels` needs neither triton nor a GPU library.
_MODULES = {
    "cpu": "pykernels.native",
    "cuda": "pykernels.cuda",
    "triton": "pykernels.triton",
    "reference": "pykernels.reference_backend",
}
# Device first: which backends `backend="auto"` tries, fastest first. Never the reference.
_AUTO = {"cpu": ("cpu",), "cuda": ("cuda", "triton")}

# Families that a backend leaves out, with the reason.
ABSENT: dict[tuple[str, str], str] = {}


def backend_names() -> tuple[str, ...]:
    return tuple(_MODULES)


def _known(name: str) -> None:
    if name not in _MODULES:
        raise ValueError(f"backend must be one of auto, {', '.join(_MODULES)}, got {name!r}")


def load(name: str) -> Backend:
    """The backend of that name, imported; ValueError for a name that does not exist."""
    _known(name)
    return importlib.import_module(_MODULES[name]).BACKEND


def backends() -> dict[str, Available | Unavailable]:
    """Every backend, and for those that cannot run on this machine the reasons."""
    found: dict[str, Available | Unavailable] = {}
    for name in _MODULES:
        try:
            reasons = load(name).unavailable()
        except ImportError as error:
            reasons = [str(error)]
        found[name] = Unavailable(name, tuple(reasons)) if reasons else Available(name)
    return found


def _reasons(name: str, op: Op, args: Mapping[str, Any]) -> list[str]:
    if (name, op.family) in ABSENT:
        return [ABSENT[name, op.family]]
    try:
        backend = load(name)
    except ImportError as error:
        return [str(error)]
    return backend.unavailable() or backend.refuses(op.name, args)


def resolve(op: Op, args: Mapping[str, Any], backend: str) -> Backend:
    """The backend that serves this call. NotImplementedError with every reason when none can."""
    device = device_of(op, args)[0].type
    names = _AUTO.get(device, ()) if backend == "auto" else (backend,)
    refused = []
    for name in names:
        _known(name)
        reasons = _reasons(name, op, args)
        if not reasons:
            return load(name)
        refused.append(f"{name}: {'; '.join(reasons)}")
    why = "; ".join(refused) or f"no backend serves {device} tensors"
    raise NotImplementedError(f"{op.name}: no backend can serve this call ({why})")
