"""Reversal: steps that make views of an image look alike again, away from the rest of the batch.

Source: Mao et al., "Adversarial Attacks are Reversible with Natural Supervision" (2021); attacked in Croce et al.,
"Evaluating the Adversarial Robustness of Adaptive Test-time Defenses" (2022), section 3.6.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.core.bounds import from_unit, to_unit
from robust_ext.core.modules import given, module_class, positional
from robust_ext.core.settings import setting
from robust_ext.defenses._common import SignPurifier, random_start
from robust_ext.defenses.training.contrastive import (
    POSITIVES,
    ContrastiveEncoder,
    ContrastiveHead,
    ContrastiveTraining,
    contrastive_losses,
)
from robust_ext.defenses.training.views import RandomViews
from robust_ext.models.features import split
from robust_ext.models.row_rng import RowRNG
from robust_ext.models.vjp import row_gradient


@module_class
class ContrastiveReversal(SignPurifier):
    """Sign steps down a contrastive loss whose negatives are the other images of the group (Mao et al. 2021).

    Random, by the start and by the views, which are drawn anew for each step. Each step takes one forward and one
    backward pass of the encoder with ``views`` images a row, and the logits one forward pass of the classifier: 160
    images forward and back, and 1, by default.

    Example:
        >>> encoder = nn.Sequential(nn.Flatten(), nn.Linear(16, 5))
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
        >>> defense = ContrastiveReversal(net, encoder, group_size=4, steps=2, seed=0)
        >>> defense(torch.rand(8, 1, 4, 4)).shape
        torch.Size([8, 3])
    """

    name = "reverse"
    part_class = ContrastiveHead
    training_class = ContrastiveTraining
    random = True
    batch_level = True

    encoder: nn.Module = positional(
        "From images to embeddings ``(N, D)``, in eval mode, see "
        ":class:`~robust_ext.defenses.training.contrastive.ContrastiveTraining`.",
        kw_only=False,
    )
    steps: int = setting(default=40, help="At least 0.", minimum=0)
    step_size: float = setting(default=2 / 255)
    radius: float = setting(default=16 / 255)
    views: int = setting(default=4, help="Views of each image, at least 2; the paper has 2 or 4.", minimum=2)
    temperature: float = setting(default=0.2, help="Of the loss.", above=0)
    positives: str = setting(
        default="first",
        help="See :func:`robust_ext.defenses.training.contrastive.contrastive_losses`.",
        choices=POSITIVES,
    )
    augment: nn.Module = given(
        "How views are drawn, a :class:`~robust_ext.defenses.training.views.RandomViews`; those of the authors "
        "when left out.",
        default_factory=RandomViews,
    )
    random_start: bool = setting(
        default=True, help="Whether to start uniformly in the ball, as their code does, or at the input."
    )
    group_size: int = setting(default=50, help="At least 2. Mao et al. have 512, Croce et al. 50.", minimum=2)
    pad: bool = setting(default=False, help="See :class:`~robust_ext.models.adaptive.AdaptiveDefense`.")
    seed: int | None = given("Of starts and views.", default=None)

    @classmethod
    def part_arguments(cls, part: Any, classifier: nn.Module, inputs: Tensor) -> dict[str, Any]:
        """The contrastive encoder on the classifier's features, and the views that it was trained on."""
        encoder = ContrastiveEncoder(split(classifier, inputs).features, part)
        encoder(inputs)
        return {"encoder": encoder, "augment": part.views}

    def start(self, x: Tensor, rng: RowRNG) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The input, or a point drawn uniformly from the ball around it, in bounds."""
        return random_start(self, x, rng) if self.random_start else x, {}

    def direction(self, point: Tensor, *, number: int, state: Mapping[str, Tensor], rng: RowRNG) -> Tensor:
        """Down."""
        return -row_gradient(lambda leaf: self.loss(leaf, rng, number), point).sign()

    def loss(self, point: Tensor, rng: RowRNG, number: int) -> Tensor:
        """The contrastive loss ``(N,)`` of each row of a group ``(N, C, H, W)``; ``number`` is the step's."""
        unit = to_unit(point, self.bounds)
        seen = torch.cat([self.augment(unit, rng, "view", number, view) for view in range(self.views)])
        embeddings: Tensor = self.encoder(from_unit(seen, self.bounds))
        return contrastive_losses(
            embeddings.view(self.views, len(point), -1), temperature=self.temperature, positives=self.positives
        )
