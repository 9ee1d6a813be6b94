"""The anti-adversary: make the classifier surer of what it already says.

Source: Alfarra et al., "Combating Adversaries with Anti-Adversaries" (2022); the constants, and how it is attacked, as
in Croce et al., "Evaluating the Adversarial Robustness of Adaptive Test-time Defenses" (2022), section 3.8.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from robust_ext.core.bounds import check_bounds
from robust_ext.core.validation import check_number
from robust_ext.defenses.sign_steps import keep_in
from robust_ext.models.purifier import Purifier
from robust_ext.models.row_rng import RowRNG
from robust_ext.models.vjp import row_gradient


class AntiAdversary(Purifier):
    """Sign steps that lower the cross-entropy of the class predicted at the input (Alfarra et al. 2022).

    Each row costs ``steps + 2`` forward and ``steps`` backward passes of the classifier, 4 and 2 by default. In the
    paper there is neither a ball nor a clip: points may leave the bounds. Steps of .15 are large for a network that was
    not trained adversarially, and can then change many decisions.

    Args:
        classifier: From inputs ``(N, ...)`` to logits ``(N, K)``, in eval mode.
        steps: At least 0.
        step_size: For inputs in [0, 1], above 0; follows the width of other bounds.
        radius: Of an linf ball to stay in, in the same units; None for no ball.
        clip: Whether every point is clipped to the bounds.
        bounds: Of the inputs.
        checkpoint: See :class:`~robust_ext.models.purifier.Purifier`.

    Raises:
        InvalidArgumentError: A setting is not accepted.

    Example:
        >>> network = nn.Linear(2, 2, bias=False)
        >>> with torch.no_grad():
        ...     _ = network.weight.copy_(torch.tensor([[1.0, -1.0], [-1.0, 1.0]]))
        >>> AntiAdversary(network).trace(torch.tensor([[0.75, 0.5]])).final
        tensor([[1.0500, 0.2000]])
    """

    needs_gradients = True

    def __init__(
        self,
        classifier: nn.Module,
        *,
        steps: int = 2,
        step_size: float = 0.15,
        radius: float | None = None,
        clip: bool = False,
        bounds: Sequence[float] = (0.0, 1.0),
        checkpoint: bool = False,
    ) -> None:
        super().__init__(classifier, steps=steps, checkpoint=checkpoint)
        self.bounds = check_bounds(bounds)
        width = self.bounds[1] - self.bounds[0]
        self.step_size = check_number("step_size", step_size, minimum=0, open_minimum=True) * width
        self.radius = None if radius is None else check_number("radius", radius, minimum=0) * width
        self.clip = clip

    def start(self, x: Tensor, rng: RowRNG) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The input; the state holds what is predicted for it, ``"predicted"``, int64 ``(N,)``."""
        with torch.no_grad():
            logits: Tensor = self.classifier(x)
        return x, {"predicted": logits.argmax(1)}

    def step(self, point: Tensor, *, x: Tensor, number: int, state: Mapping[str, Tensor], rng: RowRNG) -> Tensor:
        """One sign step down."""

        def loss(point: Tensor) -> Tensor:
            return nn.functional.cross_entropy(self.classifier(point), state["predicted"], reduction="none")

        moved = point - self.step_size * row_gradient(loss, point).sign()
        return keep_in(moved, x=x, radius=self.radius, bounds=self.bounds if self.clip else None)
