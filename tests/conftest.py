"""What every test file shares: one thread for torch, so that its pool does not fight with ours."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
