"""Clocks, temperature, power and throttling of a GPU, or the reason why they are not known."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

import torch

# nvidia-smi's field -> our name and unit.
FIELDS = {
    "clocks.sm": "sm_mhz",
    "clocks.max.sm": "sm_max_mhz",
    "clocks.mem": "memory_mhz",
    "temperature.gpu": "temperature_c",
    "power.draw": "power_w",
    "clocks_throttle_reasons.active": "throttle_mask",
}
# Bits of the mask that slow the clocks down. Idle, settings and display clocks are no throttling.
THROTTLES = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}


def gpu_state(device: torch.device) -> dict[str, Any]:
    """What nvidia-smi says now: clocks in MHz, degrees, watts and the list `throttled`. `{"unknown": reason}` without it."""
    if device.type != "cuda":
        return {"unknown": f"{device.type} devices report no clocks"}
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {"unknown": "nvidia-smi is not on PATH"}
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return read_state(tool, f"GPU-{uuid}" if uuid else str(device.index or 0))


def read_state(tool: str, gpu: str) -> dict[str, Any]:
    """One query of nvidia-smi, a second one where a driver no longer knows a field's old name. `gpu` is an index or a UUID."""
    fields = ",".join(FIELDS)
    try:
        done = _query(tool, fields, gpu)
        if "not a valid field" in done.stdout + done.stderr:
            done = _query(tool, fields.replace("clocks_throttle_reasons", "clocks_event_reasons"), gpu)
    except (OSError, subprocess.SubprocessError) as error:
        return {"unknown": f"nvidia-smi failed: {error}"}
    words = [w.strip() for w in done.stdout.strip().split(",")]
    if done.returncode or len(words) != len(FIELDS):
        return {"unknown": f"nvidia-smi failed: {' '.join((done.stderr or done.stdout).split())}"}
    state: dict[str, Any] = {}
    for name, word in zip(FIELDS.values(), words, strict=True):
        try:
            state[name] = int(word, 16) if word.startswith("0x") else float(word)
        except ValueError:
            state[name] = None  # "[N/A]": this GPU does not tell
    mask = state.pop("throttle_mask")
    state["throttled"] = None if mask is None else [word for bit, word in THROTTLES.items() if int(mask) & bit]
    return state


def _query(tool: str, fields: str, gpu: str) -> subprocess.CompletedProcess[str]:
    command = [tool, f"--query-gpu={fields}", "--format=csv,noheader,nounits", "-i", gpu]
    return subprocess.run(command, capture_output=True, text=True, timeout=10)
