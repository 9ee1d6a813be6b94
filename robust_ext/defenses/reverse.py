"""Reversal: steps that make views of an image look alike again, away from the rest of the batch.

Source: Mao et al., "Adversarial Attacks are Reversible with Natural Supervision" (2021); attacked in Croce et al.,
"Evaluating the Adversarial Robustness of Adaptive Test-time Defenses" (2022), section 3.6.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.modules import given, module_class, positional
from robust_ext.core.random import derive_seed, seeded_globals
from robust_ext.core.settings import setting, settings_class
from robust_ext.core.validation import check_choice, from_unit, to_unit
from robust_ext.defenses._common import SignPurifier, random_start
from robust_ext.defenses.training.loop import NetworkTraining, TrainedPart
from robust_ext.defenses.training.views import RandomViews
from robust_ext.models.features import split
from robust_ext.models.rows import RowRNG, State, seeds_of

POSITIVES = ("first", "all")


class ContrastiveHead(TrainedPart):
    """From features ``(N, F)`` to embeddings: linear, batch normalisation, rectifier, linear, as the authors'.

    It holds how the ``views`` that it was trained on are drawn; those of the authors when left out.
    """

    def __init__(
        self, features: int, *, width: int = 256, dimension: int = 16, views: RandomViews | None = None
    ) -> None:
        super().__init__()
        first, last = nn.Linear(features, width), nn.Linear(width, dimension)
        self.layers = nn.Sequential(first, nn.BatchNorm1d(width), nn.ReLU(), last)
        self.views = RandomViews() if views is None else views
        self.settings = {"features": features, "width": width, "dimension": dimension, "views": self.views.settings}
        self.eval()

    @classmethod
    def untrained(cls, *, views: dict[str, Any], **sizes: int) -> ContrastiveHead:  # type: ignore[override]
        """See :meth:`TrainedPart.untrained`."""
        return cls(**sizes, views=RandomViews(**views))

    def forward(self, features: Tensor) -> Tensor:
        """Return embeddings ``(N, D)`` of features ``(N, F)``."""
        out: Tensor = self.layers(features)
        return out


class ContrastiveEncoder(nn.Module):
    """From inputs ``(N, ...)`` to embeddings ``(N, D)``: features of a frozen network, and a small head on them."""

    def __init__(self, features: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.features, self.head = features, head
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        """Return embeddings ``(N, D)`` of inputs ``(N, ...)``."""
        out: Tensor = self.head(self.features(x).flatten(1))
        return out


def contrastive_losses(embeddings: Tensor, *, temperature: float = 0.2, positives: str = "first") -> Tensor:
    """Return the contrastive loss of each row's views ``(views, N, D)`` against those of other rows, ``(N,)``.

    For a view it is the cross-entropy of finding a view of the same row among all other views, by cosine similarities
    divided by the temperature; the mean is taken over a row's views. ``positives`` names which view is to be found:
    ``"first"``, the first other one of the row, as in the authors' code, where the rest count as wrong; ``"all"``:
    each, and the mean is taken.
    """
    check_choice("positives", positives, POSITIVES)
    if embeddings.dim() != 3 or len(embeddings) < 2:
        raise InvalidArgumentError("embeddings", f"shape {tuple(embeddings.shape)}", "(views, N, D), 2 views or more")
    views, rows = embeddings.shape[:2]
    directions = nn.functional.normalize(embeddings, dim=2).flatten(0, 1)
    likeness = directions @ directions.T / temperature
    total = likeness.masked_fill(torch.eye(views * rows, dtype=torch.bool, device=likeness.device), -torch.inf)
    # The likeness of each view of a row to each other view of it, (N, views, views).
    own = likeness.view(views, rows, views, rows).diagonal(dim1=1, dim2=3).permute(2, 0, 1)
    others = ~torch.eye(views, dtype=torch.bool, device=own.device)
    own = own[:, others].view(rows, views, views - 1)
    wanted = own[..., 0] if positives == "first" else own.mean(2)
    return (total.logsumexp(1).view(views, rows).T - wanted).mean(1)


@settings_class
class ContrastiveTraining(NetworkTraining):
    """Training of a :class:`ContrastiveHead` on a classifier's features, without labels.

    The authors' learns from all of CIFAR-10 for 200 passes at a rate of 1e-4.
    """

    views: RandomViews | None = setting(default=None, help="How views are drawn; those of the authors when left out.")
    count: int = setting(default=2, help="Views of each image in a step, at least 2.", minimum=2)
    temperature: float = setting(default=0.2, help="See :func:`contrastive_losses`.", above=0)
    width: int = setting(default=256, help="Width of the head's hidden layer.", minimum=1)
    dimension: int = setting(default=16, help="Dimension of the embeddings.", minimum=1)

    def fit(self, classifier: nn.Module, inputs: Tensor, labels: Tensor | None = None) -> ContrastiveHead:
        """Train; see :meth:`Training.fit`."""
        unit = to_unit(self.checked(classifier, inputs), self.bounds)
        features = split(classifier, from_unit(unit[:2], self.bounds)).features
        with torch.no_grad():
            size = features(from_unit(unit[:2], self.bounds)).shape[1]
        with seeded_globals(derive_seed(self.seed, "head")):
            head = ContrastiveHead(size, width=self.width, dimension=self.dimension, views=self.views).to(unit.device)

        def loss(rows: Tensor) -> Tensor:
            rng = RowRNG(seeds_of(len(rows)))
            seen = torch.cat([head.views(unit[rows], rng, "view", number) for number in range(self.count)])
            with torch.no_grad():
                values = features(from_unit(seen, self.bounds))
            embeddings = head(values).view(self.count, len(rows), -1)
            return contrastive_losses(embeddings, temperature=self.temperature).mean()

        self.run(head, len(unit), loss)
        return head.requires_grad_(False)


@module_class
class ContrastiveReversal(SignPurifier):
    """Sign steps down a contrastive loss whose negatives are the other images of the group (Mao et al. 2021).

    Random, by the start and by the views, which are drawn again for each step. Each step takes one forward and one
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
    building_blocks = ("IP", "IA", "AN", "R", "ED")
    sign = -1
    part_class = ContrastiveHead
    training_class = ContrastiveTraining
    random = True
    batch_level = True

    encoder: nn.Module = positional(
        "A module from images to embeddings ``(N, D)``, in eval mode, see "
        ":class:`~robust_ext.defenses.reverse.ContrastiveTraining`.",
        kw_only=False,
    )
    steps: int = setting(default=40, help="Number of steps.", minimum=0)
    step_size: float = setting(default=2 / 255)
    radius: float = setting(default=16 / 255)
    views: int = setting(default=4, help="Views of each image, at least 2; the paper has 2 or 4.", minimum=2)
    temperature: float = setting(default=0.2, help="Temperature of the loss.", above=0)
    positives: str = setting(
        default="first", help="See :func:`robust_ext.defenses.reverse.contrastive_losses`.", choices=POSITIVES
    )
    augment: nn.Module = given(
        "How views are drawn, a :class:`~robust_ext.defenses.training.views.RandomViews`; those of the authors "
        "when left out.",
        default_factory=RandomViews,
    )
    random_start: bool = setting(
        default=True, help="Whether to start uniformly in the ball, as their code does, or at the input."
    )
    group_size: int = setting(
        default=50, help="Rows defended together. Mao et al. have 512, Croce et al. 50.", minimum=2
    )
    pad: bool = setting(default=False, help="See :class:`~robust_ext.models.adaptive.AdaptiveDefense`.")
    seed: int | None = given("Of starts and views.", default=None)

    @classmethod
    def part_arguments(cls, part: Any, classifier: nn.Module, inputs: Tensor) -> dict[str, Any]:
        """Return the contrastive encoder on the classifier's features, and the views of its training."""
        encoder = ContrastiveEncoder(split(classifier, inputs).features, part)
        encoder(inputs)
        return {"encoder": encoder, "augment": part.views}

    def start(self, x: Tensor, rng: RowRNG) -> tuple[Tensor, State]:
        """Return the input, or a point drawn uniformly from the ball around it, in bounds."""
        return random_start(self, x, rng) if self.random_start else x, {}

    def loss(self, point: Tensor, **held: Any) -> Tensor:
        """Return the contrastive loss ``(N,)`` of each row of a group ``(N, C, H, W)`` at a step."""
        unit = to_unit(point, self.bounds)
        keys = [("view", held["number"], view) for view in range(self.views)]
        seen = torch.cat([self.augment(unit, held["rng"], *key) for key in keys])
        embeddings: Tensor = self.encoder(from_unit(seen, self.bounds)).view(self.views, len(point), -1)
        return contrastive_losses(embeddings, temperature=self.temperature, positives=self.positives)
