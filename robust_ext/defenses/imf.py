"""IMF: one step towards logits that a discriminator takes for those of a clean input.

Source: Qian et al., "Improving Model Robustness with Latent Distribution Locally and Globally" (2021), inference with
manifold transformation; the constants, and how it is attacked, as in Croce et al., "Evaluating the Adversarial
Robustness of Adaptive Test-time Defenses" (2022), appendix A.1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from robust_ext.core.bounds import check_bounds
from robust_ext.core.errors import InvalidArgumentError, ModelError
from robust_ext.core.validation import check_number
from robust_ext.defenses.sign_steps import keep_in, over_rows
from robust_ext.models.purifier import Purifier
from robust_ext.models.row_rng import RowRNG
from robust_ext.models.vjp import row_gradient


class IMF(Purifier):
    """A sign step towards logits that a discriminator says are those of a clean input (Qian et al. 2021).

    The loss is the binary cross-entropy to the answer "clean". The step is ``step_size`` long, and shorter by the
    factor ``doubt`` where the discriminator is in doubt. Each row costs ``steps + 1`` forward and ``steps`` backward
    passes of the classifier, 2 and 1 by default, and ``steps`` of each of the discriminator.

    The paper's radius is twice the 8/255 of its attacks. Its code and that of the case study take these 16/255 on
    inputs stretched to [-1, 1], which is 8/255 for inputs in [0, 1]: for the moves that were evaluated there, set
    ``radius=8 / 255``.

    Args:
        classifier: From inputs ``(N, ...)`` to logits ``(N, K)``, in eval mode.
        discriminator: From logits ``(N, K)`` to numbers ``(N,)`` or ``(N, 1)``, in eval mode: the higher, the more
            likely a clean input; their sigmoid is the probability of one. See
            :func:`robust_ext.defenses.auxiliary.fit_discriminator`.
        steps: At least 0.
        radius: Of the linf ball around the input, for inputs in [0, 1]; follows the width of other bounds.
        step_size: Likewise, above 0; the radius when left out.
        doubt: Factor of the step, where the probability is between ``doubtful``'s two numbers.
        doubtful: The lower and the higher one, in [0, 1], neither belonging to the doubt.
        saturating: Whether the loss is that of the probability, as in the paper: a row stays where float32 rounds it to
            1. Else of the number itself, whose gradient vanishes nowhere.
        bounds: Of the inputs.
        checkpoint: See :class:`~robust_ext.models.purifier.Purifier`.

    Raises:
        InvalidArgumentError: A setting is not accepted.
    """

    needs_gradients = True

    def __init__(
        self,
        classifier: nn.Module,
        discriminator: nn.Module,
        *,
        steps: int = 1,
        radius: float = 16 / 255,
        step_size: float | None = None,
        doubt: float = 0.5,
        doubtful: tuple[float, float] = (0.3, 0.7),
        saturating: bool = True,
        bounds: Sequence[float] = (0.0, 1.0),
        checkpoint: bool = False,
    ) -> None:
        super().__init__(classifier, steps=steps, checkpoint=checkpoint)
        self.discriminator = discriminator
        self.bounds = check_bounds(bounds)
        width = self.bounds[1] - self.bounds[0]
        self.radius = check_number("radius", radius, minimum=0) * width
        step = radius if step_size is None else check_number("step_size", step_size, minimum=0, open_minimum=True)
        self.step_size = step * width
        self.doubt = check_number("doubt", doubt, minimum=0)
        if len(doubtful) != 2:
            raise InvalidArgumentError("doubtful", doubtful, "a pair (lower, higher)")
        low, high = (check_number("doubtful", value, minimum=0, maximum=1) for value in doubtful)
        self.doubtful = (low, high)
        self.saturating = saturating

    def step(self, point: Tensor, *, x: Tensor, number: int, state: Mapping[str, Tensor], rng: RowRNG) -> Tensor:
        """One sign step down, back into ball and bounds."""
        said: list[Tensor] = []

        def loss(point: Tensor) -> Tensor:
            value = one_a_row(self.discriminator(self.classifier(point)), len(point))
            said.append(value.detach())
            if not self.saturating:
                return nn.functional.softplus(-value)
            return nn.functional.binary_cross_entropy(value.sigmoid(), torch.ones_like(value), reduction="none")

        gradient = row_gradient(loss, point)
        probability = said[0].sigmoid()
        unsure = (probability > self.doubtful[0]) & (probability < self.doubtful[1])
        share = torch.ones_like(probability).masked_fill(unsure, self.doubt).to(point)
        moved = point - self.step_size * over_rows(share, point) * gradient.sign()
        return keep_in(moved, x=x, radius=self.radius, bounds=self.bounds)


def one_a_row(value: Tensor, rows: int) -> Tensor:
    """What a discriminator returned, ``(N,)`` or ``(N, 1)``, as ``(N,)``.

    Raises:
        ModelError: It has another shape.
    """
    if value.shape not in ((rows,), (rows, 1)):
        raise ModelError(
            f"discriminator: returned shape {tuple(value.shape)} for {rows} rows, expected ({rows},) or ({rows}, 1)"
        )
    return value.reshape(rows)
