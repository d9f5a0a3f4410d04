"""What every test file shares: one thread for torch, so that its pool does not fight with ours; Triton interpreted
where there is no GPU (it asks its environment when a kernel is defined, so this must come first)."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

torch.set_num_threads(1)
