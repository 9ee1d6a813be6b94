"""Randomized smoothing: what a classifier predicts on average, or most often, around an input."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from robust_ext.core.modules import given, module_class, positional
from robust_ext.core.settings import setting
from robust_ext.defenses._common import with_zero_gradient
from robust_ext.models.adaptive import AdaptiveDefense
from robust_ext.models.rows import RowRNG, Solution, State


@module_class
class RandomizedSmoothing(AdaptiveDefense):
    """The mean softmax, or the share of votes, of many noisy copies of an input (Cohen et al. 2019).

    The noise is part of the readout, so a trace's points are the input; its state holds the seeds of the noise. Each
    batch of logits takes ``samples`` forward passes. The mean has a gradient; that of the votes is 0: attack them with
    ``BPDA(smoothing, backward=...)`` and the mean, or the classifier, as substitute.

    Example:
        >>> smoothed = RandomizedSmoothing(nn.Identity(), samples=100, noise=1.0, seed=0)
        >>> smoothed(torch.tensor([[0.0, 4.0]])).exp().round(decimals=1)
        tensor([[0., 1.]])
    """

    name = "randomized-smoothing"
    building_blocks = ("IP", "R")
    random = True
    output = "probabilities"
    stretched = ("noise",)

    classifier: nn.Module = positional(
        "A module from inputs ``(N, ...)`` to logits ``(N, K)``, in eval mode, trained with noise.", kw_only=False
    )
    noise: float = setting(
        default=0.25,
        help="Standard deviation, at least 0, for inputs in [0, 1]; follows the width of other bounds.",
        minimum=0,
    )
    samples: int = setting(default=100, help="Noisy copies of each input.", minimum=1)
    vote: str = setting(default="majority", help='``"majority"`` or ``"mean"``.', choices=("mean", "majority"))
    chunk: int = setting(default=10, help="Copies of each row in one batch, at least 1.", minimum=1)
    bounds: tuple[float, float] = given("Of the inputs; noisy copies are not clipped to them.", default=(0.0, 1.0))
    seed: int | None = given("Of the noise.", default=None)

    def solve(self, x: Tensor, rng: RowRNG, *, record: bool) -> Solution:
        """Return the unchanged input, and the seeds of the noise."""
        return Solution(x, (x,), {"seeds": torch.tensor(rng.seeds, dtype=torch.int64)})

    def readout(self, point: Tensor, state: State) -> Tensor:
        """Return probabilities ``(N, K)``, or shares of votes."""
        rng, parts = RowRNG(state["seeds"]), []
        for first in range(0, self.samples, self.chunk):
            numbers = range(first, min(first + self.chunk, self.samples))
            noisy = torch.cat([point + self.noise * rng.normal(point, "noise", number) for number in numbers])
            logits: Tensor = self.classifier(noisy)
            votes = nn.functional.one_hot(logits.argmax(1), logits.shape[1]).to(logits)
            shares = logits.softmax(1) if self.vote == "mean" else with_zero_gradient(votes, logits)
            parts.append(shares.view(len(numbers), len(point), -1).sum(0))
        return torch.stack(parts).sum(0) / self.samples
