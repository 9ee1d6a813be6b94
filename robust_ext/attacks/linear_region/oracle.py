"""The true network near some inputs: which points are adversarial, and how far from adversarial the others are."""

from __future__ import annotations

from copy import copy
from dataclasses import replace

import torch
from torch import Tensor

from robust_ext.attacks._common.rows import over_rows
from robust_ext.core.criteria import aimed
from robust_ext.core.errors import AttackError
from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel

# A point counts only where its margin is more than rounding, relative to the logits: other batches round otherwise.
_CERTAIN = 2e-6
# Shares by which the nearest points are moved further out, and rows from which on networks round alike in any batch; of
# fewer points copies are sent.
_FURTHER, _BATCH = (0.0, *(2.0**-power for power in range(20, 9, -2))), 8


class BoundaryOracle:
    """Queries the network about points near inputs ``(N, ...)`` with labels ``(N,)``.

    Points come with ``sample_index``, int64 ``(B,)``: the inputs they belong to.

    Attributes:
        passes: Rows sent forward and backward for each input, int64 ``(N,)``.
        points: The nearest adversarial point among all queries for each input, or the input, ``(N, ...)``.
        nearest: Its distance, float64 ``(N,)``; infinite without one.
    """

    def __init__(
        self, target: Target, inputs: Tensor, labels: Tensor, *, threat_model: ThreatModel, targeted: bool
    ) -> None:
        self.target, self.inputs, self.labels, self.targeted = target, inputs, labels, targeted
        # Distances do not depend on epsilon; the target's bounds are those that every point has to keep.
        self.threat_model = self._kept_by = replace(threat_model, bounds=target.bounds)
        self.passes = torch.zeros(len(inputs), dtype=torch.int64, device=inputs.device)
        self.points = inputs.clone()
        self.nearest = torch.full((len(inputs),), torch.inf, dtype=torch.float64, device=inputs.device)

    def in_norm(self, norm: str) -> BoundaryOracle:
        """Return the same network, passes and nearest points, with :meth:`distances` in this norm."""
        other = copy(self)
        other.threat_model = replace(self.threat_model, norm=norm)
        return other

    def spend(self, sample_index: Tensor, passes: Tensor | int) -> None:
        """Count passes of the inputs."""
        amount = torch.as_tensor(passes, device=sample_index.device).expand(sample_index.shape)
        self.passes.index_add_(0, sample_index, amount)

    def distances(self, points: Tensor, sample_index: Tensor) -> Tensor:
        """Return distances of points ``(B, ...)`` from their inputs, float64 ``(B,)``."""
        return self.threat_model.distance(points, self.inputs[sample_index])

    def adversarial(self, points: Tensor, sample_index: Tensor, *, beyond_rounding: bool = True) -> Tensor:
        """Return which points are adversarial, bool ``(B,)``, by one forward pass."""
        self.spend(sample_index, 1)
        with torch.no_grad():
            logits = self.target.module(points)
        goal = aimed(self.target.criterion) if self.targeted else self.target.criterion
        hit = goal.adversarial(logits, self.labels[sample_index])
        if beyond_rounding:
            hit = _certain(self.margins(logits, sample_index)[0], logits)
        self._keep(points, sample_index, hit)
        return hit

    def margins(self, logits: Tensor, sample_index: Tensor) -> tuple[Tensor, Tensor]:
        """Return margins ``(B,)``, above 0 for adversarial points, and the strongest other class, int64 ``(B,)``."""
        labels, goal = self.labels[sample_index].unsqueeze(1), self.target.criterion
        own = logits.gather(1, labels).squeeze(1)
        other, rivals = logits.scatter(1, labels, -torch.inf).max(1)
        if goal.ranks:
            return goal.margin(logits, labels.squeeze(1)), rivals
        return (own - other if self.targeted else other - own), rivals

    def linearised(
        self, points: Tensor, sample_index: Tensor, aims: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return margins ``(B,)``, gradients ``(B, D)`` and which points are adversarial; a pass forward and back.

        Where ``aims``, int64 ``(B,)``, are at least 0, the margin is that of this class over the label.
        """
        self.spend(sample_index, 2)
        with torch.enable_grad():
            points = points.detach().requires_grad_(True)
            logits = self.target.module(points)
            if not logits.requires_grad:
                needs = "the linear-region attack needs a piecewise affine network whose logits can be differentiated"
                raise AttackError(f"the target gives no gradients; {needs}")
            margin, _ = self.margins(logits, sample_index)
            certain = _certain(margin.detach(), logits.detach())
            if aims is not None:
                columns = torch.stack([self.labels[sample_index], aims.clamp_min(0)], 1)
                own, other = logits.gather(1, columns).unbind(1)
                margin = torch.where(aims >= 0, other - own, margin)
            (gradient,) = torch.autograd.grad(margin.sum(), points)
        self._keep(points.detach(), sample_index, certain)
        return margin.detach(), gradient.flatten(1), certain

    def bisect_to_input(self, points: Tensor, sample_index: Tensor, *, least: float = 0.0, halvings: int = 8) -> Tensor:
        """Go from adversarial points ``(B, ...)`` towards their inputs as far as they stay adversarial, by bisection.

        The share ``least`` of the perturbation, in [0, 1), is kept in any case.
        """
        inputs, kept = self.inputs[sample_index], points.new_ones(len(points))
        left, best = torch.full_like(kept, least), points
        for _ in range(halvings if len(points) else 0):
            middle = (kept + left) / 2
            tried = torch.lerp(inputs, points, over_rows(middle, points))
            good = self.adversarial(tried, sample_index)
            best = torch.where(over_rows(good, points), tried, best)
            kept, left = torch.where(good, middle, kept), torch.where(good, left, middle)
        return best

    def move_beyond_rounding(self) -> None:
        """Move the nearest points out, by at most a thousandth, until they are adversarial in other batches too.

        They lie on the boundary to within rounding, and float32 rounds the logits of a point otherwise in another
        batch: the margin has to exceed the difference between the whole batch and the point alone. Where a thousandth
        does not suffice, a point stays.
        """
        every = torch.arange(len(self.inputs), device=self.inputs.device)
        left = torch.isfinite(self.nearest) & (self.nearest > 0)
        copies = -(-_BATCH // len(every))
        for more in _FURTHER:
            if not bool(left.any()):
                break
            tried = self.points
            if more:
                tried = torch.where(over_rows(left, tried), torch.lerp(self.inputs, tried, 1 + more), tried)
                tried = tried.clamp(*self.threat_model.bounds)
            together = self._margins_of(torch.cat([tried] * copies), every.repeat(copies))[: len(every)]
            alone = together.clone()
            for row in torch.split(left.nonzero().flatten(), 1):
                alone[row] = self._margins_of(tried[row], row)
            sure = left & (torch.minimum(together, alone) > (together - alone).abs())
            self.points = torch.where(over_rows(sure, tried), tried, self.points)
            left &= ~sure & torch.isfinite(together) & torch.isfinite(alone)
        distances = self._kept_by.distance(self.points, self.inputs)
        self.nearest = torch.where(torch.isfinite(self.nearest), distances, self.nearest)

    def _margins_of(self, points: Tensor, sample_index: Tensor) -> Tensor:
        self.spend(sample_index, 1)
        with torch.no_grad():
            return self.margins(self.target.module(points.clone()), sample_index)[0]

    def _keep(self, points: Tensor, sample_index: Tensor, adversarial: Tensor) -> None:
        rows = adversarial.nonzero().flatten()
        distances = self._kept_by.distance(points[rows], self.inputs[sample_index[rows]])
        near = distances < self.nearest[sample_index[rows]]
        rows, distances = rows[near], distances[near]
        first = nearest_rows(distances, sample_index[rows])
        samples = sample_index[rows[first]]
        self.points[samples], self.nearest[samples] = points[rows[first]], distances[first]


def _certain(margin: Tensor, logits: Tensor) -> Tensor:
    return margin > _CERTAIN * (1 + logits.abs().amax(1))


def nearest_rows(distances: Tensor, sample_index: Tensor) -> Tensor:
    """Return int64 indices of the point nearest to each input, for distances ``(B,)`` to ``sample_index (B,)``."""
    order = distances.argsort(stable=True)
    order = order[sample_index[order].argsort(stable=True)]
    samples = sample_index[order]
    return order[torch.cat([samples.new_ones(len(samples[:1])), samples.diff()]) != 0]
