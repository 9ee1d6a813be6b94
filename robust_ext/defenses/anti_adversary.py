"""The anti-adversary: make the classifier surer of the class that it predicts already.

Source: Alfarra et al., "Combating Adversaries with Anti-Adversaries" (2022); the constants, and how it is attacked, as
in Croce et al., "Evaluating the Adversarial Robustness of Adaptive Test-time Defenses" (2022), section 3.8.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.core.modules import module_class
from robust_ext.core.settings import setting
from robust_ext.defenses._common import SignPurifier
from robust_ext.models.rows import RowRNG, State


@module_class
class AntiAdversary(SignPurifier):
    """Sign steps that lower the cross-entropy of the class predicted at the input (Alfarra et al. 2022).

    Each row costs ``steps + 2`` forward and ``steps`` backward passes of the classifier, 4 and 2 by default. In the
    paper there is neither a ball nor a clip: points may leave the bounds. Steps of .15 are large for a network that was
    not trained adversarially, and can then change many decisions.

    Example:
        >>> network = nn.Linear(2, 2, bias=False)
        >>> with torch.no_grad():
        ...     _ = network.weight.copy_(torch.tensor([[1.0, -1.0], [-1.0, 1.0]]))
        >>> AntiAdversary(network).trace(torch.tensor([[0.75, 0.5]])).final
        tensor([[1.0500, 0.2000]])
    """

    name = "anti-adversary"
    building_blocks = ("IP", "IA")
    sign = -1

    steps: int = setting(default=2, help="Number of steps.", minimum=0)
    step_size: float = setting(default=0.15)
    clip: bool = setting(default=False, help="Whether every point is clipped to the bounds.")

    def start(self, x: Tensor, rng: RowRNG) -> tuple[Tensor, State]:
        """Return the input; the state holds its prediction, ``"predicted"``, int64 ``(N,)``."""
        with torch.no_grad():
            logits: Tensor = self.classifier(x)
        return x, {"predicted": logits.argmax(1)}

    def loss(self, point: Tensor, **held: Any) -> Tensor:
        """Return the cross-entropy of the class that was predicted, ``(N,)``."""
        return nn.functional.cross_entropy(self.classifier(point), held["state"]["predicted"], reduction="none")
