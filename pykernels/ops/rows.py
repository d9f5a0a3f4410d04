"""Leading dimensions folded into rows, for ops that work on the last dimension."""

from __future__ import annotations

import torch


def rows(t: torch.Tensor | None) -> torch.Tensor | None:
    """`[..., n]` as `[rows, n]`; anything that is not such a tensor is left for the contract to refuse."""
    return t.reshape(-1, t.shape[-1]) if isinstance(t, torch.Tensor) and t.dim() not in (0, 2) else t


def written_rows(t: torch.Tensor | None) -> torch.Tensor | None:
    """The same for an output: never a copy, so a layout that cannot be viewed as rows is refused."""
    return t.view(-1, t.shape[-1]) if isinstance(t, torch.Tensor) and t.dim() not in (0, 2) else t
