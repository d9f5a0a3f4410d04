"""Files as the suite writes them, made up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def entry(name: str, scale: float = 1.0, samples: int = 20, **changes: Any) -> dict[str, Any]:
    """A benchmark of about `scale` seconds; `changes` go into its extra_info."""
    info = {
        "machine_key": "m1",
        "output_hash": "h1",
        "temperature": "cold",
        "entry": "kernel",
        "control_seconds": 1e-3,
        "roof_pct": 50.0,
    }
    data = [scale * (1 + i % 5 / 1000) for i in range(samples)]
    return {"fullname": name, "extra_info": info | changes, "stats": {"data": data, "median": scale * 1.002}}


def write(path: Path, *found: dict[str, Any]) -> Path:
    path.write_text(json.dumps({"benchmarks": found}))
    return path
