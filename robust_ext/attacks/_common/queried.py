"""The best of the points that an attack queries, for attacks that do not keep it themselves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.attacks._common.objectives import margin
from robust_ext.attacks._common.rows import over_rows
from robust_ext.core.threat import ThreatModel


class BestQueried:
    """Keeps for each input ``(N, ...)`` the queried point in bounds and ball of highest margin, above 0.

    A batch of N points is in the order of the inputs; a point of any other belongs to the input that it is nearest to.
    """

    def __init__(self, inputs: Tensor, labels: Tensor, threat_model: ThreatModel) -> None:
        self._inputs, self._labels, self._threat_model = inputs, labels, threat_model
        self._points = inputs.clone()
        self._margin = inputs.new_zeros(len(inputs))

    def note(self, _module: nn.Module, args: tuple[Any, ...], logits: Any) -> None:
        """Look at the logits ``(M, K)`` of points ``(M, ...)``: a forward hook."""
        points = args[0] if args else None
        if not isinstance(points, Tensor) or not isinstance(logits, Tensor):
            return
        points, logits = points.detach(), logits.detach()
        if points.shape[1:] != self._inputs.shape[1:] or len(logits) != len(points):
            return
        if len(points) == len(self._inputs):
            self._keep(torch.arange(len(points), device=points.device), points, logits)
            return
        rows = torch.cdist(points.flatten(1), self._inputs.flatten(1)).argmin(1)
        for one in range(len(points)):
            # One at a time: several may belong to one row.
            self._keep(rows[one : one + 1], points[one : one + 1], logits[one : one + 1])

    def _keep(self, rows: Tensor, points: Tensor, logits: Tensor) -> None:
        low, high = self._threat_model.bounds
        inside = ((points >= low) & (points <= high)).flatten(1).all(1)
        inside &= self._threat_model.contains(points, self._inputs[rows])
        gained = margin(logits, self._labels[rows]).to(self._margin.dtype)
        better = inside & (gained > self._margin[rows])
        self._points[rows] = torch.where(over_rows(better, points), points, self._points[rows])
        self._margin[rows] = torch.where(better, gained, self._margin[rows])

    def or_else(self, candidates: Tensor) -> Tensor:
        """The best points, and the candidates ``(N, ...)`` in rows without one."""
        if candidates.shape != self._points.shape:
            return candidates
        return torch.where(over_rows(self._margin > 0, candidates), self._points.to(candidates), candidates)


@contextmanager
def best_queried(module: nn.Module, inputs: Tensor, labels: Tensor, threat_model: ThreatModel) -> Iterator[BestQueried]:
    """Watch what is sent to a module meanwhile."""
    best = BestQueried(inputs, labels, threat_model)
    handle = module.register_forward_hook(best.note)
    try:
        yield best
    finally:
        handle.remove()
