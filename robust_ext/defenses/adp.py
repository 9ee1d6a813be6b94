"""Adaptive denoising purification: noise, a few steps along a score, and the mean of several such runs.

Source: Yoon et al., "Adversarial Purification with Score-based Generative Models" (2021); attacked in Croce et al.,
"Evaluating the Adversarial Robustness of Adaptive Test-time Defenses" (2022), section 3.9.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.modules import given, module_class, positional
from robust_ext.core.random import derive_seed, seeded_globals
from robust_ext.core.settings import setting, settings_class
from robust_ext.core.validation import check_integer, check_number, from_unit, to_unit
from robust_ext.defenses._common import check_images, over_rows
from robust_ext.defenses.training.loop import NetworkTraining, TrainedPart
from robust_ext.models.adaptive import Purifier
from robust_ext.models.rows import RowRNG, Solution, State


class ScoreNetwork(TrainedPart):
    """Convolutions of 3x3 that estimate the noise in images; the score is minus the noise over its variance.

    It has ``depth`` hidden layers of ``width`` channels; ``noise`` is the standard deviation for images in [0, 1].
    """

    def __init__(self, channels: int, *, width: int = 32, depth: int = 3, noise: float = 0.25) -> None:
        super().__init__()
        check_integer("channels", channels, minimum=1)
        check_integer("width", width, minimum=1)
        sizes = [channels, *[width] * check_integer("depth", depth, minimum=1)]
        self.noise = check_number("noise", noise, minimum=0, open_minimum=True)
        hidden = [part for pair in pairwise(sizes) for part in (nn.Conv2d(*pair, 3, padding=1), nn.SiLU())]
        self.layers = nn.Sequential(*hidden, nn.Conv2d(width, channels, 3, padding=1))
        self.settings = {"channels": channels, "width": width, "depth": depth, "noise": self.noise}
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        """Return scores ``(N, C, H, W)`` of images in [0, 1]."""
        out: Tensor = self.layers(x - 0.5)
        return -out / self.noise**2


@settings_class
class ScoreTraining(NetworkTraining):
    """Training of a :class:`ScoreNetwork` to estimate the noise in images, of a deviation between 0 and ``noise``."""

    noise: float = setting(default=0.25, help="Above 0, for images in [0, 1].", above=0)
    width: int = setting(default=32, help="See :class:`ScoreNetwork`.", minimum=1)
    depth: int = setting(default=3, help="Likewise.", minimum=1)
    epochs: int = setting(default=30)
    batch_size: int = setting(default=64)
    learning_rate: float = setting(default=2e-3)

    def fit(self, classifier: nn.Module, inputs: Tensor, labels: Tensor | None = None) -> ScoreNetwork:
        """Train; of the classifier nothing matters but its device. See :meth:`Training.fit`."""
        unit = to_unit(self.checked(classifier, inputs), self.bounds)
        check_images(unit)
        with seeded_globals(derive_seed(self.seed, "score")):
            network = ScoreNetwork(unit.shape[1], width=self.width, depth=self.depth, noise=self.noise).to(unit.device)

        def loss(rows: Tensor) -> Tensor:
            clean = unit[rows]
            level = self.noise * torch.rand(len(rows), 1, 1, 1).to(unit.device)
            added = level * torch.randn(clean.shape).to(unit.device)
            found = -(self.noise**2) * network(clean + added)
            return nn.functional.mse_loss(found, added) / self.noise**2

        self.run(network, len(unit), loss)
        return network.requires_grad_(False)


@module_class
class AdaptiveDenoising(Purifier):
    """Noise, then score steps whose length depends on how the score changes; softmax averaged over runs (Yoon et al.).

    For a score s at a point, ``z = <s, s'> / <s, s>`` with s' the score a short way ``probe`` along s. The step is
    ``length = clamp(share * probe / (1 - z))`` times s. A row whose length is no more than ``stop`` stays where it is.

    Each run takes two forward passes of the score network a step, the logits one of the classifier a run: 200 and 10
    by default, and no backward pass. Random by the noise alone.

    The final point and the iterates are those of the first run; the state holds how far the others' final points are
    from its own, ``offsets`` ``(N, runs - 1, ...)``. Held offsets, as in BPDA, give the mean of all runs' gradients.

    Example:
        >>> from robust_ext.defenses.adp import ScoreNetwork
        >>> defense = AdaptiveDenoising(nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), ScoreNetwork(1), seed=0)
        >>> trace = defense.trace(torch.rand(2, 1, 4, 4))
        >>> trace.state["offsets"].shape, trace.logits.detach().exp().sum(1).round(decimals=4)
        (torch.Size([2, 9, 1, 4, 4]), tensor([1., 1.]))
    """

    name = "adp"
    building_blocks = ("IP", "IA", "AN", "R")
    part_class = ScoreNetwork
    training_class = ScoreTraining
    random = True
    output = "probabilities"

    score: nn.Module = positional(
        "A module from images in [0, 1], whatever the bounds, to scores of the same shape, see "
        ":class:`~robust_ext.defenses.adp.ScoreTraining`.",
        kw_only=False,
    )
    steps: int = setting(default=10, help="Number of steps.", minimum=0)
    noise: float = setting(default=0.25, help="Standard deviation, at least 0, for inputs in [0, 1].", minimum=0)
    runs: int = setting(
        default=10, help="Runs that are averaged. Croce et al. attack single runs, averaged by EoT.", minimum=1
    )
    share: float = setting(default=0.05, help="Factor of the step length.", above=0)
    probe: float = setting(default=1e-3, help="How far along the score the second score is taken.", above=0)
    lengths: Sequence[float] = setting(default=(1e-5, 0.1), help="Least and greatest length of a step.", minimum=0)
    stop: float = setting(default=1e-3, help="Step length at which a row stops.", minimum=0)
    clip: bool = setting(
        default=True,
        help="Whether points are clipped to the bounds after the noise and after each step, as in the authors' code.",
    )
    differentiable_lengths: bool = setting(
        default=False, help="Whether gradients flow through the lengths too. Croce et al. hold them (appendix B.9)."
    )
    bounds: tuple[float, float] = given("Of the inputs.", default=(0.0, 1.0))
    checkpoint: bool = setting(default=False, help="See :class:`~robust_ext.models.adaptive.Purifier`.")
    seed: int | None = given("Of the noise.", default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        lengths = self.lengths
        if not isinstance(lengths, (list, tuple)) or len(lengths) != 2 or not 0 <= lengths[0] <= lengths[1]:
            raise InvalidArgumentError("lengths", lengths, "a pair (least, greatest) of at least 0")
        self.lengths = (float(lengths[0]), float(lengths[1]))

    @classmethod
    def part_arguments(cls, part: Any, classifier: nn.Module, inputs: Tensor) -> dict[str, Any]:
        """Return the score network."""
        part(inputs)
        return {"score": part}

    def solve(self, x: Tensor, rng: RowRNG, *, record: bool) -> Solution:
        """Do all runs in order; a row's noise in a run comes from the row's seed and the run's number."""
        runs = []
        for run in range(self.runs):
            seeds = torch.tensor([derive_seed(seed, "run", run) for seed in rng.seeds], dtype=torch.int64)
            runs.append(super().solve(x, RowRNG(seeds), record=record and run == 0))
        first, *others = runs
        offsets = [other.final - first.final for other in others]
        state = {"offsets": torch.stack(offsets, 1)} if offsets else {}
        return Solution(first.final, first.iterates if record else (), state)

    def start(self, x: Tensor, rng: RowRNG) -> tuple[Tensor, State]:
        """Return the input with noise."""
        width = self.bounds[1] - self.bounds[0]
        return self._clipped(x + width * self.noise * rng.normal(x, "noise")), {}

    def step(self, point: Tensor, *, x: Tensor, number: int, state: State, rng: RowRNG) -> Tensor:
        """Take one step along the score."""
        unit = to_unit(point, self.bounds)
        score: Tensor = self.score(unit)
        with nullcontext() if self.differentiable_lengths else torch.no_grad():
            lengths = self.step_lengths(unit, score)
        return self._clipped(from_unit(unit + over_rows(lengths, unit) * score, self.bounds))

    def step_lengths(self, unit: Tensor, score: Tensor) -> Tensor:
        """Return the step length of each row ``(N,)`` at points in [0, 1] ``(N, ...)``; 0 where it stops for good."""
        ahead = self.score(unit + self.probe * score)
        square = score.flatten(1).square().sum(1)
        along = (score * ahead).flatten(1).sum(1)
        # Where there is no score, no step matters.
        rest = 1 - along / square.clamp_min(torch.finfo(square.dtype).tiny)
        even = rest == 0
        lengths = (self.share * self.probe / torch.where(even, 1, rest)).clamp(*self.lengths)
        lengths = torch.where(even, self.lengths[1], lengths)
        return torch.where(lengths > self.stop, lengths, 0.0)

    def readout(self, point: Tensor, state: State) -> Tensor:
        """Return probabilities ``(N, K)``, the mean over runs."""
        total: Tensor = self.classifier(point).softmax(1)
        for offset in state["offsets"].unbind(1) if self.runs > 1 else ():
            total = total + self.classifier(point + offset).softmax(1)
        return total / self.runs

    def _clipped(self, point: Tensor) -> Tensor:
        return point.clamp(*self.bounds) if self.clip else point
