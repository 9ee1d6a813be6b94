"""Reversal: steps that make views of an image look alike again, away from the rest of the batch.

Source: Mao et al., "Adversarial Attacks are Reversible with Natural Supervision" (2021); attacked in Croce et al.,
"Evaluating the Adversarial Robustness of Adaptive Test-time Defenses" (2022), section 3.6.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from robust_ext.core.bounds import check_bounds, from_unit, to_unit
from robust_ext.core.validation import check_choice, check_integer, check_number
from robust_ext.defenses.sign_steps import keep_in
from robust_ext.defenses.training_contrastive import POSITIVES, contrastive_losses
from robust_ext.defenses.training_views import RandomViews
from robust_ext.models.purifier import Purifier
from robust_ext.models.row_rng import RowRNG
from robust_ext.models.vjp import row_gradient


class ContrastiveReversal(Purifier):
    """Sign steps down a contrastive loss whose negatives are the other images of the group (Mao et al. 2021).

    Random, by the start and by the views, which are drawn anew for each step. Each step takes one forward and one
    backward pass of the encoder with ``views`` images a row, and the answer one forward pass of the classifier: 160
    images forward and back, and 1, by default.

    Args:
        classifier: From images ``(N, C, H, W)`` to logits ``(N, K)``, in eval mode.
        encoder: From images to embeddings ``(N, D)``, in eval mode, see
            :func:`robust_ext.defenses.training_contrastive.fit_contrastive_encoder`.
        steps: At least 0.
        step_size: Above 0, for inputs in [0, 1]; follows the width of other bounds.
        radius: Of the linf ball around the input, likewise.
        views: Views of each image, at least 2; the paper has 2 or 4.
        temperature: Of the loss.
        positives: See :func:`robust_ext.defenses.training_contrastive.contrastive_losses`.
        augment: How views are drawn; those of the authors when left out.
        random_start: Whether to start uniformly in the ball, as their code does, or at the input.
        group_size: At least 2. Mao et al. have 512, Croce et al. 50.
        pad: See :class:`~robust_ext.models.adaptive.AdaptiveDefense`.
        bounds: Of the inputs.
        checkpoint: See :class:`~robust_ext.models.purifier.Purifier`.
        seed: Of starts and views.

    Raises:
        InvalidArgumentError: A setting is not accepted.

    Example:
        >>> encoder = nn.Sequential(nn.Flatten(), nn.Linear(16, 5))
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
        >>> defense = ContrastiveReversal(net, encoder, group_size=4, steps=2, seed=0)
        >>> defense(torch.rand(8, 1, 4, 4)).shape
        torch.Size([8, 3])
    """

    random = True
    batch_level = True
    needs_gradients = True

    def __init__(
        self,
        classifier: nn.Module,
        encoder: nn.Module,
        *,
        steps: int = 40,
        step_size: float = 2 / 255,
        radius: float = 16 / 255,
        views: int = 4,
        temperature: float = 0.2,
        positives: str = "first",
        augment: RandomViews | None = None,
        random_start: bool = True,
        group_size: int = 50,
        pad: bool = False,
        bounds: Sequence[float] = (0.0, 1.0),
        checkpoint: bool = False,
        seed: int | None = None,
    ) -> None:
        check_integer("group_size", group_size, minimum=2)
        super().__init__(classifier, steps=steps, group_size=group_size, pad=pad, checkpoint=checkpoint, seed=seed)
        self.encoder = encoder
        self.bounds = check_bounds(bounds)
        width = self.bounds[1] - self.bounds[0]
        self.step_size = check_number("step_size", step_size, minimum=0, open_minimum=True) * width
        self.radius = check_number("radius", radius, minimum=0) * width
        self.views = check_integer("views", views, minimum=2)
        self.temperature = check_number("temperature", temperature, minimum=0, open_minimum=True)
        self.positives = check_choice("positives", positives, POSITIVES)
        self.augment = RandomViews() if augment is None else augment
        self.random_start = random_start

    def start(self, x: Tensor, rng: RowRNG) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The input, or a point drawn uniformly from the ball around it, in bounds."""
        if not self.random_start:
            return x, {}
        point = x + rng.uniform(x, "start", low=-self.radius, high=self.radius)
        return keep_in(point, x=x, radius=self.radius, bounds=self.bounds), {}

    def step(self, point: Tensor, *, x: Tensor, number: int, state: Mapping[str, Tensor], rng: RowRNG) -> Tensor:
        """One sign step down, back into ball and bounds."""
        gradient = row_gradient(lambda leaf: self.loss(leaf, rng, number), point)
        return keep_in(point - self.step_size * gradient.sign(), x=x, radius=self.radius, bounds=self.bounds)

    def loss(self, point: Tensor, rng: RowRNG, number: int) -> Tensor:
        """The contrastive loss of each row of a group, ``(N,)``.

        Args:
            point: ``(N, C, H, W)``.
            rng: Of these rows.
            number: Of the step.
        """
        unit = to_unit(point, self.bounds)
        seen = torch.cat([self.augment(unit, rng, "view", number, view) for view in range(self.views)])
        embeddings: Tensor = self.encoder(from_unit(seen, self.bounds))
        return contrastive_losses(
            embeddings.view(self.views, len(point), -1), temperature=self.temperature, positives=self.positives
        )
