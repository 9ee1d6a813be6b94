"""Whether an attack treats the samples of a batch as its traits state, seen from what it queries."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class BatchMonitor(nn.Module):
    """A binarized classifier that checks to which of the inputs ``(N, ...)`` each queried point belongs.

    In a batch in order, a point that is far closer to another sample's input than to its own is out of order. In
    batches of any samples, a point about as close to two inputs cannot be attributed to either.
    """

    def __init__(self, module: nn.Module, inputs: Tensor, *, batching: str, norm: str) -> None:
        super().__init__()
        self.module = module
        self.batching = batching
        # A list that grows: an attribute that is set while an attack runs would be put back.
        self.violations: list[str] = []
        self._p = {"linf": torch.inf, "l2": 2.0, "l1": 1.0}[norm]
        self._inputs = inputs.flatten(1).double()
        self.training = module.training

    @property
    def violation(self) -> str:
        """What was wrong first, in words; empty while nothing was."""
        return self.violations[0] if self.violations else ""

    def forward(self, x: Tensor) -> Tensor:
        """The classifier's logits."""
        if len(self._inputs) > 1 and len(x):
            self._check(x.detach().flatten(1).double())
        logits: Tensor = self.module(x)
        return logits

    def _check(self, x: Tensor) -> None:
        distances = torch.cdist(x, self._inputs, p=self._p)
        nearest = distances.min(1).values
        if self.batching == "full":
            if len(x) == len(self._inputs) and bool((nearest < 0.5 * distances.diagonal()).any()):
                self.violations.append(
                    "it queried a sample that belongs to another, in a batch that was to be in order"
                )
        elif bool((nearest > 0.9 * distances.topk(2, largest=False).values[:, 1]).any()):
            self.violations.append("it queried a point as close to two inputs, in a batch of any samples")
