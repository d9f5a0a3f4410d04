"""Puts an adapter under the name of the package that it stands in for, so that code which imports that package runs."""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from types import ModuleType

# Name to import -> module of this package.
_STANDS_IN = {
    "flash_attn": {"flash_attn": "flash_attn", "flash_attn.flash_attn_interface": "flash_attn"},
    "flash_attn_interface": {"flash_attn_interface": "flash_attn_interface"},
    "vllm_flash_attn": {
        "vllm_flash_attn": "vllm_flash_attn",
        "vllm_flash_attn.flash_attn_interface": "vllm_flash_attn",
    },
}
_MARK = "__stands_in_for__"


def install(package: str) -> ModuleType:
    """`import flash_attn` (or `flash_attn_interface`, `vllm_flash_attn`) gives our adapter from now on, in this process.

    Code that imported names from the real package before keeps them, so install first.

    Args:
        package: one of "flash_attn", "flash_attn_interface", "vllm_flash_attn".

    Returns:
        The module now in `sys.modules`.

    Raises:
        ValueError: an unknown package; RuntimeError: the real package has been imported already.
    """
    for name, source in _names(package).items():
        present = sys.modules.get(name)
        if present is not None and not hasattr(present, _MARK):
            raise RuntimeError(
                f"{name} has been imported from {getattr(present, '__file__', '?')}: install before that"
            )
        sys.modules[name] = _stand_in(name, importlib.import_module(f"{__package__}.{source}"))
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, sys.modules[name])
    return sys.modules[package]


def uninstall(package: str) -> None:
    """Undoes `install`: the next import finds the real package, or none. Does nothing when ours is not there."""
    for name in _names(package):
        if hasattr(sys.modules.get(name), _MARK):
            del sys.modules[name]


def _names(package: str) -> dict[str, str]:
    if package not in _STANDS_IN:
        raise ValueError(f"package must be one of {', '.join(_STANDS_IN)}, got {package!r}")
    return _STANDS_IN[package]


def _stand_in(name: str, source: ModuleType) -> ModuleType:
    module = ModuleType(name, source.__doc__)
    public = [n for n in dir(source) if not n.startswith("__")]
    module.__dict__.update({n: getattr(source, n) for n in public})
    module.__dict__["__version__"] = source.__dict__["__version__"]
    module.__dict__[_MARK] = source.__name__
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, origin=source.__file__, is_package="." not in name)
    module.__file__ = source.__file__
    module.__path__ = []
    return module
