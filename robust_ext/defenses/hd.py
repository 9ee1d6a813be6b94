"""The hedge defense: go where the classifier is least sure of every class.

Source: Wu et al., "Attacking Adversarial Attacks as A Defense" (2021); the constants, and how it is attacked, as in
Croce et al., "Evaluating the Adversarial Robustness of Adaptive Test-time Defenses" (2022), section 3.4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from robust_ext.core.bounds import check_bounds
from robust_ext.core.validation import check_number
from robust_ext.defenses.sign_steps import keep_in
from robust_ext.models.purifier import Purifier
from robust_ext.models.row_rng import RowRNG
from robust_ext.models.vjp import row_gradient


class HedgeDefense(Purifier):
    """Sign steps that raise the cross-entropy summed over all classes, from a random start (Wu et al. 2021).

    Each row costs ``steps + 1`` forward and ``steps`` backward passes of the classifier, 21 and 20 by default. Plain
    gradients flow through start and projections, as the sign itself has none.

    Args:
        classifier: From inputs ``(N, ...)`` to logits ``(N, K)``, in eval mode.
        steps: At least 0.
        radius: Of the linf ball around the input, for inputs in [0, 1]; follows the width of other bounds.
        step_size: Likewise, above 0.
        random_start: Whether to start uniformly in the ball; else at the input, and the defense is not random.
        clip_start: Whether the random start is clipped to the bounds, as the paper's constraint asks. In the case
            study's code it is not, and the first gradient is taken where it lies.
        bounds: Of the inputs.
        checkpoint: See :class:`~robust_ext.models.purifier.Purifier`.
        seed: Of the starts, see :class:`~robust_ext.models.adaptive.AdaptiveDefense`.

    Raises:
        InvalidArgumentError: A setting is not accepted.

    Example:
        >>> import torch
        >>> defense = HedgeDefense(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), seed=0)
        >>> x = torch.full((2, 1, 2, 2), 0.5)
        >>> trace = defense.trace(x)
        >>> len(trace.iterates), bool((trace.final - x).abs().max() <= 8.001 / 255)
        (21, True)
    """

    random = True
    needs_gradients = True

    def __init__(
        self,
        classifier: nn.Module,
        *,
        steps: int = 20,
        radius: float = 8 / 255,
        step_size: float = 4 / 255,
        random_start: bool = True,
        clip_start: bool = True,
        bounds: Sequence[float] = (0.0, 1.0),
        checkpoint: bool = False,
        seed: int | None = None,
    ) -> None:
        super().__init__(classifier, steps=steps, checkpoint=checkpoint, seed=seed)
        self.bounds = check_bounds(bounds)
        width = self.bounds[1] - self.bounds[0]
        self.radius = check_number("radius", radius, minimum=0) * width
        self.step_size = check_number("step_size", step_size, minimum=0, open_minimum=True) * width
        self.random = random_start
        self.clip_start = clip_start

    def start(self, x: Tensor, rng: RowRNG) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The input, or a point drawn uniformly from the ball around it."""
        if not self.random:
            return x, {}
        point = x + rng.uniform(x, "start", low=-self.radius, high=self.radius)
        return keep_in(point, x=x, radius=self.radius, bounds=self.bounds if self.clip_start else None), {}

    def step(self, point: Tensor, *, x: Tensor, number: int, state: Mapping[str, Tensor], rng: RowRNG) -> Tensor:
        """One sign step up, back into ball and bounds."""
        gradient = row_gradient(self.loss, point)
        return keep_in(point + self.step_size * gradient.sign(), x=x, radius=self.radius, bounds=self.bounds)

    def loss(self, point: Tensor) -> Tensor:
        """The cross-entropy summed over all classes, ``(N,)``."""
        logits: Tensor = self.classifier(point)
        return -logits.log_softmax(1).sum(1)
