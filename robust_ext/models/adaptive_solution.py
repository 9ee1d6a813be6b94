"""Batches of a defense that optimises at test time: in which groups it gets them, and what it does with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from robust_ext.core.errors import ModelError
from robust_ext.core.random import derive_seed


@dataclass(frozen=True)
class Solution:
    """The result of a defense's inner steps, for some rows.

    Attributes:
        final: What is classified, ``(N, ...)``.
        iterates: The starting point and the point after each step, ``(N, ...)`` each; may be empty where they were not
            to be recorded.
        state: What else the readout needs, such as controls or pseudo-labels; tensors of N rows.
    """

    final: Tensor
    iterates: tuple[Tensor, ...] = ()
    state: Mapping[str, Tensor] = field(default_factory=dict)

    def detached(self) -> Solution:
        """The same values without their graphs."""
        state = {name: tensor.detach() for name, tensor in self.state.items()}
        return Solution(self.final.detach(), tuple(point.detach() for point in self.iterates), state)

    @staticmethod
    def joined(parts: Sequence[Solution], rows: int) -> Solution:
        """The first ``rows`` rows of the solutions of groups, one after another, which have equally many iterates."""
        paths = zip(*(part.iterates for part in parts), strict=True)
        return Solution(
            final=torch.cat([part.final for part in parts])[:rows],
            iterates=tuple(torch.cat(points)[:rows] for points in paths),
            state={name: torch.cat([part.state[name] for part in parts])[:rows] for name in parts[0].state},
        )


@dataclass(frozen=True)
class Trace(Solution):
    """The trace of a defense on a batch.

    Attributes:
        inputs: The batch, ``(N, ...)``.
        logits: What the defense returns, ``(N, K)``.
        seeds: Those of the rows, int64 ``(N,)``; with them :meth:`AdaptiveDefense.trace` does the same again.
    """

    inputs: Tensor = field(kw_only=True)
    logits: Tensor = field(kw_only=True)
    seeds: Tensor = field(kw_only=True)


def whole_groups(x: Tensor, seeds: Tensor, *, size: int, pad: bool, random: bool) -> list[tuple[Tensor, Tensor]]:
    """The groups of a batch ``(N, ...)``, in order, and their rows' seeds, int64 ``(N,)``.

    With ``pad`` the last group is filled up with copies of the first rows, over and over where there are few, which get
    seeds of their own if ``random``; else ModelError is raised where rows are missing.
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
