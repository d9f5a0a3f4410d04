"""How the report writes a number: three significant digits and the unit that fits. One place for table and HTML."""

from __future__ import annotations

_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
UNDEFINED = "–"


def digits(value: float) -> str:
    """Three significant digits without an exponent: `0.0123`, `1.23`, `12.3`, `123`, `1,234`."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 999.5:
        return f"{value:,.0f}"
    places = 0 if size >= 99.95 else 1 if size >= 9.995 else 2 if size >= 0.9995 else 3
    return f"{value:.{places}f}" if size >= 0.0005 else f"{value:.2g}"


def seconds(value: float) -> str:
    scale, unit = next(((s, u) for s, u in _TIMES if abs(value) >= 0.9995 * s), _TIMES[-1])
    return f"{digits(value / scale)} {unit}" if value else "0 s"


def rate(value: float, unit: str) -> str:
    """`1.2e10, "B/s"` -> `12.0 GB/s`; decimal prefixes."""
    scale, prefix = next(((s, p) for s, p in _PREFIXES if abs(value) >= 0.9995 * s), _PREFIXES[-1])
    return f"{digits(value / scale)} {prefix}{unit}"


def text(value: float | str | None, unit: str = "") -> str:
    """A value of the document as the reader sees it. Units: s, B, B/s, FLOP/s, %, tok/s, or any word; None is a dash."""
    if value is None:
        return UNDEFINED
    if isinstance(value, str):
        return value
    if unit == "s":
        return seconds(value)
    if unit in ("B", "B/s", "FLOP", "FLOP/s"):
        return rate(value, unit)
    if unit == "MiB":
        return f"{digits(value / 2**20)} MiB"
    shown = f"{value:,}" if isinstance(value, int) else digits(value)
    return f"{shown} {unit}".rstrip()
