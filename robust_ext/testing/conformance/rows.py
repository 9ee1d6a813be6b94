"""Whether an attack treats rows as its traits say, seen from what it asks."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class WatchedRows(nn.Module):
    """A binarized classifier that watches whose rows it is asked about.

    In a batch in row order, a row that is far closer to another row's input than to its own is out of order. In batches
    of any rows, a row about as close to two inputs cannot be told to be either's.

    Args:
        module: The classifier.
        inputs: Where the rows begin, ``(N, ...)``.
        batching: ``"full"`` or ``"any"``.
        norm: In which closeness is measured.

    Attributes:
        complaint: What was wrong, in words; empty while nothing was.
    """

    def __init__(self, module: nn.Module, inputs: Tensor, *, batching: str, norm: str) -> None:
        super().__init__()
        self.module = module
        self.batching = batching
        self.complaint = ""
        self._p = {"linf": torch.inf, "l2": 2.0, "l1": 1.0}[norm]
        self._inputs = inputs.flatten(1).double()
        self.training = module.training

    def forward(self, x: Tensor) -> Tensor:
        """The classifier's logits."""
        if len(self._inputs) > 1 and len(x):
            self._look(x.detach().flatten(1).double())
        logits: Tensor = self.module(x)
        return logits

    def _look(self, x: Tensor) -> None:
        distances = torch.cdist(x, self._inputs, p=self._p)
        nearest = distances.min(1).values
        if self.batching == "full":
            if len(x) == len(self._inputs) and bool((nearest < 0.5 * distances.diagonal()).any()):
                self.complaint = "it asked about a row that belongs to another, in a batch that was to be in row order"
        elif bool((nearest > 0.9 * distances.topk(2, largest=False).values[:, 1]).any()):
            self.complaint = "it asked about a row as close to two inputs, in a batch of any rows"
