"""An op's grid, and a family's case tables, as pytest parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pykernels.bench.problems import GRIDS, SMOKE, row_name
from pykernels.testing.factories import Case

Bench = Callable[[Case, str], None]


def grid(op: str) -> pytest.MarkDecorator:
    """One parameter per column; the row that is in every smoke run carries the mark `smoke`."""
    columns = GRIDS[op].columns

    def row(values: tuple[Any, ...]) -> Any:
        marks = [pytest.mark.smoke] if values == SMOKE[op] else []
        return pytest.param(*values, id=row_name(dict(zip(columns, values, strict=True))), marks=marks)

    return pytest.mark.parametrize(columns, [row(values) for values in GRIDS[op].rows])


def table(family: str) -> pytest.MarkDecorator:
    """The cases of a family's tests, as many as `--cases` says."""
    return pytest.mark.tables(family)
