"""The hedge defense: go where the classifier is least sure of every class.

Source: Wu et al., "Attacking Adversarial Attacks as A Defense" (2021); the constants, and how it is attacked, as in
Croce et al., "Evaluating the Adversarial Robustness of Adaptive Test-time Defenses" (2022), section 3.4.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from robust_ext.core.modules import given, module_class
from robust_ext.core.settings import setting
from robust_ext.defenses._common import SignPurifier, random_start
from robust_ext.models.rows import RowRNG, State


@module_class
class HedgeDefense(SignPurifier):
    """Sign steps that raise the cross-entropy summed over all classes, from a random start (Wu et al. 2021).

    Each row costs ``steps + 1`` forward and ``steps`` backward passes of the classifier, 21 and 20 by default. Plain
    gradients flow through start and projections, as the sign itself has none.

    Example:
        >>> import torch
        >>> defense = HedgeDefense(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3)), seed=0)
        >>> x = torch.full((2, 1, 2, 2), 0.5)
        >>> trace = defense.trace(x)
        >>> len(trace.iterates), bool((trace.final - x).abs().max() <= 8.001 / 255)
        (21, True)
    """

    name = "hd"
    building_blocks = ("IP", "IA", "R")
    random = True

    steps: int = setting(default=20, help="Number of steps.", minimum=0)
    radius: float = setting(default=8 / 255)
    step_size: float = setting(default=4 / 255)
    random_start: bool = setting(
        default=True, help="Whether to start uniformly in the ball; else at the input, and the defense is not random."
    )
    clip_start: bool = setting(
        default=True,
        help="Whether the random start is clipped to the bounds, as the paper's constraint demands. In the case "
        "study's code it is not, and the first gradient is taken where it lies.",
    )
    seed: int | None = given("Of the starts, see :class:`~robust_ext.models.adaptive.AdaptiveDefense`.", default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.random = self.random_start

    def start(self, x: Tensor, rng: RowRNG) -> tuple[Tensor, State]:
        """Return the input, or a point drawn uniformly from the ball around it."""
        return random_start(self, x, rng, clip=self.clip_start) if self.random else x, {}

    def loss(self, point: Tensor, **held: Any) -> Tensor:
        """Return the cross-entropy summed over all classes, ``(N,)``."""
        logits: Tensor = self.classifier(point)
        return -logits.log_softmax(1).sum(1)
