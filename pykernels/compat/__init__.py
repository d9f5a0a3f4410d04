"""Adapters of names and layouts: each module speaks another package's interface and calls our ops. No kernels here."""

from __future__ import annotations

from .stand_in import install, uninstall

__all__ = ["install", "uninstall"]
