"""How close each kernel came to this machine's limit: ceilings measured here, costs from the contract, one report.

Imports nothing of the generator: the generator fills `records` and hands its calls to `points`.
"""

from __future__ import annotations

from .ceilings import Ceiling, Ceilings, Roof, RoofError, measure, roof
from .environment import Environment
from .points import OpPoint, Recorder, op_points
from .records import RequestRecord, StepRecord, metrics, output_hash
from .report import document, render
from .table import print_report

__all__ = [
    "Ceiling",
    "Ceilings",
    "Environment",
    "OpPoint",
    "Recorder",
    "RequestRecord",
    "Roof",
    "RoofError",
    "StepRecord",
    "document",
    "measure",
    "metrics",
    "op_points",
    "output_hash",
    "print_report",
    "render",
    "roof",
]
