"""IMF: one step towards logits that a discriminator takes for those of a clean input.

Source: Qian et al., "Improving Model Robustness with Latent Distribution Locally and Globally" (2021), inference with
manifold transformation; the constants, and how it is attacked, as in Croce et al., "Evaluating the Adversarial
Robustness of Adaptive Test-time Defenses" (2022), appendix A.1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.modules import module_class, positional
from robust_ext.core.settings import setting
from robust_ext.defenses._common import SignPurifier, one_a_row, over_rows
from robust_ext.defenses.training.discriminator import Discriminator, DiscriminatorTraining


@module_class
class IMF(SignPurifier):
    """A sign step towards logits that a discriminator takes for those of a clean input (Qian et al. 2021).

    The loss is the binary cross-entropy to the class "clean". The step is ``step_size`` long, and shorter by the
    factor ``doubt`` where the discriminator is in doubt. Each row costs ``steps + 1`` forward and ``steps`` backward
    passes of the classifier, 2 and 1 by default, and ``steps`` of each of the discriminator.

    The paper's radius is twice the 8/255 of its attacks. Its code and that of the case study take these 16/255 on
    inputs stretched to [-1, 1], which is 8/255 for inputs in [0, 1]: for the moves that were evaluated there, set
    ``radius=8 / 255``.
    """

    name = "imf"
    building_blocks = ("IP", "IA", "AN")
    sign = -1
    part_class = Discriminator
    training_class = DiscriminatorTraining

    discriminator: nn.Module = positional(
        "A module from logits ``(N, K)`` to numbers ``(N,)`` or ``(N, 1)``, in eval mode: the higher, the more likely "
        "a clean input; their sigmoid is the probability of one. See "
        ":class:`~robust_ext.defenses.training.discriminator.DiscriminatorTraining`.",
        kw_only=False,
    )
    steps: int = setting(default=1, help="Number of steps.", minimum=0)
    radius: float = setting(default=16 / 255)
    step_size: float | None = setting(
        default=None, help="Step size in units of [0, 1]; the radius when left out.", above=0
    )
    doubt: float = setting(
        default=0.5, help="Factor of the step, where the probability is between ``doubtful``'s two numbers.", minimum=0
    )
    doubtful: tuple[float, float] = setting(
        default=(0.3, 0.7),
        help="The lower and the higher one, in [0, 1], neither belonging to the doubt.",
        minimum=0,
        maximum=1,
    )
    saturating: bool = setting(
        default=True,
        help="Whether the loss is that of the probability, as in the paper: a row stays where float32 rounds it to 1. "
        "Else of the number itself, whose gradient vanishes nowhere.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.step_size is None:
            self.step_size = self.radius
        if not isinstance(self.doubtful, (tuple, list)) or len(self.doubtful) != 2:
            raise InvalidArgumentError("doubtful", self.doubtful, "a pair (lower, higher)")

    @classmethod
    def part_arguments(cls, part: Any, classifier: nn.Module, inputs: Tensor) -> dict[str, Any]:
        """Return the discriminator of the classifier's logits."""
        if part.layers:
            raise InvalidArgumentError("weights", "a discriminator of layers", "one of logits, trained for imf")
        part(classifier(inputs))
        return {"discriminator": part}

    def direction(self, point: Tensor, **held: Any) -> Tensor:
        """Return the descent direction, shortened in doubt."""
        seen: list[Tensor] = []
        direction = super().direction(point, seen=seen)
        probability = seen[0].sigmoid()
        unsure = (probability > self.doubtful[0]) & (probability < self.doubtful[1])
        share = torch.ones_like(probability).masked_fill(unsure, self.doubt).to(point)
        return over_rows(share, point) * direction

    def loss(self, point: Tensor, **held: Any) -> Tensor:
        """Return the binary cross-entropy to the class "clean", ``(N,)``."""
        value = one_a_row(self.discriminator(self.classifier(point)), len(point))
        held["seen"].append(value.detach())
        if not self.saturating:
            return nn.functional.softplus(-value)
        return nn.functional.binary_cross_entropy(value.sigmoid(), torch.ones_like(value), reduction="none")
