"""What the ceilings depend on: processor, caches, affinity, memory. No host name, no paths."""

from __future__ import annotations

import functools
import hashlib
import os
import re
from pathlib import Path

from .. import native

_CPUS = Path("/sys/devices/system/cpu")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
# Where the system does not tell: small enough to be inside the caches of any current processor.
ASSUMED_CACHES = {"l1": 32 << 10, "l2": 512 << 10}


def affinity() -> tuple[int, ...]:
    """CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def ranges(cpus: tuple[int, ...]) -> str:
    """`(0, 1, 2, 5)` -> `"0-2,5"`."""
    parts: list[list[int]] = []
    for cpu in cpus:
        if parts and parts[-1][-1] == cpu - 1:
            parts[-1] = [parts[-1][0], cpu]
        else:
            parts.append([cpu])
    return ",".join("-".join(str(c) for c in p) for p in parts)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]?)", text)
    return int(match[1]) * _UNITS[match[2]] if match else 0


@functools.cache
def _cache_instances() -> dict[str, dict[str, int]]:
    """level -> {set of CPUs that share it: bytes}, over the CPUs of the affinity mask."""
    found: dict[str, dict[str, int]] = {}
    for cpu in affinity():
        for index in sorted((_CPUS / f"cpu{cpu}" / "cache").glob("index*")):
            if _read(index / "type") == "Instruction":
                continue
            size = _bytes(_read(index / "size"))
            if size:
                found.setdefault(f"l{_read(index / 'level')}", {})[_read(index / "shared_cpu_list")] = size
    return found


def cache_totals(threads: int) -> dict[str, int]:
    """Bytes that `threads` threads find in each cache level together: one private cache each, shared ones once."""
    instances = _cache_instances()
    if "l1" not in instances:
        return {level: size * threads for level, size in ASSUMED_CACHES.items()}
    return {
        level: min(threads, len(shared)) * max(shared.values())
        for level, shared in sorted(instances.items())
        if level in ("l1", "l2", "l3")
    }


def memory_bytes(field: str = "MemTotal") -> int:
    """A line of /proc/meminfo in bytes, 0 when unknown."""
    for line in _read(Path("/proc/meminfo")).splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0


def machine_key(level: str, threads: int, version: str) -> dict[str, str | int]:
    """Everything that a measured ceiling depends on. Two runs with equal keys may share ceilings."""
    flags = hashlib.sha256(" ".join(sorted(native.cpu_flags())).encode()).hexdigest()[:12]
    return {
        "cpu": native.cpu_name(),
        "flags": flags,
        "affinity": ranges(affinity()),
        "threads": threads,
        "level": level,
        "version": version,
    }


def key_hash(key: dict[str, str | int]) -> str:
    text = "|".join(f"{name}={key[name]}" for name in sorted(key))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
