"""What a defense that optimises at test time did with a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Solution:
    """What the inner steps of a defense came to, for some rows.

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
        """The first ``rows`` rows of the solutions of groups, one after another; they have the same iterates' number.

        Args:
            parts: At least one.
            rows: At most as many as they have.
        """
        paths = zip(*(part.iterates for part in parts), strict=True)
        return Solution(
            final=torch.cat([part.final for part in parts])[:rows],
            iterates=tuple(torch.cat(points)[:rows] for points in paths),
            state={name: torch.cat([part.state[name] for part in parts])[:rows] for name in parts[0].state},
        )


@dataclass(frozen=True)
class Trace(Solution):
    """What a defense did with a batch.

    Attributes:
        inputs: The batch, ``(N, ...)``.
        logits: The defense's answer, ``(N, K)``.
        seeds: Those of the rows, int64 ``(N,)``; with them :meth:`AdaptiveDefense.trace` does the same again.
    """

    inputs: Tensor = field(kw_only=True)
    logits: Tensor = field(kw_only=True)
    seeds: Tensor = field(kw_only=True)
