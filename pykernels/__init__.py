"""pykernels: kernels for the two phases of LLM inference, and the bench that proves how close each is to the limit."""

from __future__ import annotations

from .ops.norm import rms_norm
from .registry import backends

__version__ = "0.1.0"

__all__ = ["backends", "rms_norm"]
