"""Batches as whole groups, for defenses that treat rows together."""

from __future__ import annotations

import torch
from torch import Tensor

from robust_ext.core.errors import ModelError
from robust_ext.core.random import derive_seed


def whole_groups(x: Tensor, seeds: Tensor, *, size: int, pad: bool, random: bool) -> list[tuple[Tensor, Tensor]]:
    """The groups of a batch, in order, and their rows' seeds.

    Args:
        x: ``(N, ...)``, at least one row.
        seeds: int64 ``(N,)``, on the CPU.
        size: Rows of a group, at least 1.
        pad: Whether the last group is filled up with copies of the first rows, over and over where there are few. A
            copy gets a seed of its own.
        random: Where False, copies have the seed that all rows have.

    Raises:
        ModelError: Rows are missing and may not be filled up.
    """
    rows = len(x)
    missing = -rows % size
    if missing and not pad:
        raise ModelError(
            f"test-time defense: got a batch of {rows} rows, expected a whole number of groups of {size}, which this "
            "defense treats together; send whole groups, or make the defense with pad=True"
        )
    if missing:
        copies = torch.arange(missing) % rows
        x = torch.cat([x, x[copies.to(x.device)]])
        own = [derive_seed(seed, "pad", number) for number, seed in enumerate(seeds[copies].tolist())]
        seeds = torch.cat([seeds, torch.tensor(own, dtype=torch.int64) if random else seeds[copies]])
    starts = range(0, len(x), size)
    return [(x[start : start + size], seeds[start : start + size]) for start in starts]
