"""The true network as the search asks it: which points are adversarial, and how far from adversarial the others are."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from robust_ext.core.errors import AttackError
from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel

# A point counts only where its margin is more than rounding, relative to the logits: other batches round otherwise.
_CERTAIN = 2e-6


class Judge:
    """Asks the network about points near some inputs, and counts the passes of each input.

    Args:
        target: The network.
        inputs: ``(N, ...)``.
        labels: int64 ``(N,)``: the true classes, or the classes to aim at.
        threat_model: Gives the norm and the bounds.
        targeted: Whether points should be classified as their label instead of as anything else.

    Attributes:
        passes: Rows sent forward and backward for each input, int64 ``(N,)``.
    """

    def __init__(
        self, target: Target, inputs: Tensor, labels: Tensor, *, threat_model: ThreatModel, targeted: bool
    ) -> None:
        self.target, self.inputs, self.labels, self.targeted = target, inputs, labels, targeted
        # Distances do not depend on epsilon; the target's bounds are those that every point has to keep.
        self.threat_model = replace(threat_model, bounds=target.bounds)
        self.passes = torch.zeros(len(inputs), dtype=torch.int64, device=inputs.device)

    def spend(self, owners: Tensor, passes: Tensor | int) -> None:
        """Note passes of the inputs ``owners``, int64 ``(B,)``."""
        amount = torch.as_tensor(passes, device=owners.device).expand(owners.shape)
        self.passes.index_add_(0, owners, amount)

    def distances(self, points: Tensor, owners: Tensor) -> Tensor:
        """Distances of points ``(B, ...)`` from the inputs they belong to, float64 ``(B,)``."""
        return self.threat_model.distance(points, self.inputs[owners])

    def adversarial(self, points: Tensor, owners: Tensor, *, beyond_rounding: bool = True) -> Tensor:
        """Which points are adversarial, bool ``(B,)``; one forward pass."""
        self.spend(owners, 1)
        with torch.no_grad():
            logits = self.target.module(points)
        if not beyond_rounding:
            hit: Tensor = (logits.argmax(1) == self.labels[owners]) == self.targeted
            return hit
        margin, _ = self.margins(logits, owners)
        certain: Tensor = margin > _CERTAIN * (1 + logits.abs().amax(1))
        return certain

    def solved(self) -> Tensor:
        """Which inputs are adversarial as they are, bool ``(N,)``; one forward pass."""
        owners = torch.arange(len(self.inputs), device=self.inputs.device)
        return self.adversarial(self.inputs, owners, beyond_rounding=False)

    def margins(self, logits: Tensor, owners: Tensor) -> tuple[Tensor, Tensor]:
        """Above 0 where adversarial, ``(B,)``, and the strongest class beside the label, int64 ``(B,)``."""
        labels = self.labels[owners].unsqueeze(1)
        own = logits.gather(1, labels).squeeze(1)
        other, rivals = logits.scatter(1, labels, -torch.inf).max(1)
        return (own - other if self.targeted else other - own), rivals

    def linearised(self, points: Tensor, owners: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Margins ``(B,)``, their gradients ``(B, D)`` and which points are adversarial; a pass forward and back."""
        self.spend(owners, 2)
        with torch.enable_grad():
            points = points.detach().requires_grad_(True)
            logits = self.target.module(points)
            if not logits.requires_grad:
                raise AttackError(
                    "the target gives no gradients; the linear-region attack needs a piecewise affine network whose "
                    "logits can be differentiated"
                )
            margin, _ = self.margins(logits, owners)
            (gradient,) = torch.autograd.grad(margin.sum(), points)
        margin = margin.detach()
        certain = margin > _CERTAIN * (1 + logits.detach().abs().amax(1))
        return margin, gradient.flatten(1), certain

    def drawn_in(self, points: Tensor, owners: Tensor, *, least: float = 0.0, halvings: int = 8) -> Tensor:
        """Go from adversarial points towards their inputs as far as they stay adversarial, by bisection.

        Args:
            points: ``(B, ...)``, adversarial.
            owners: int64 ``(B,)``.
            least: The share of the perturbation that is kept in any case, in [0, 1).
            halvings: Forward passes.
        """
        inputs = self.inputs[owners]
        kept = points.new_ones(len(points))
        left = torch.full_like(kept, least)
        shape = (-1, *[1] * (points.dim() - 1))
        best = points
        for _ in range(halvings if len(points) else 0):
            middle = (kept + left) / 2
            tried = torch.lerp(inputs, points, middle.view(shape))
            good = self.adversarial(tried, owners)
            best = torch.where(good.view(shape), tried, best)
            kept, left = torch.where(good, middle, kept), torch.where(good, left, middle)
        return best
