"""The contrastive encoder of the reversal defense, its loss and its training.

Source: Mao et al., "Adversarial Attacks are Reversible with Natural Supervision" (2021).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.core.bounds import from_unit, to_unit
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.random import derive_seed, seeded_globals
from robust_ext.core.settings import setting, settings_class
from robust_ext.core.validation import check_choice
from robust_ext.defenses.training.loop import NetworkTraining
from robust_ext.defenses.training.part import TrainedPart
from robust_ext.defenses.training.views import RandomViews
from robust_ext.models.features import split
from robust_ext.models.row_rng import RowRNG, seeds_of

POSITIVES = ("first", "all")


class ContrastiveHead(TrainedPart):
    """From features ``(N, F)`` to embeddings: linear, batch normalisation, rectifier, linear, as the authors'.

    It holds how the ``views`` that it was trained on are drawn; those of the authors when left out.
    """

    def __init__(
        self, features: int, *, width: int = 256, dimension: int = 16, views: RandomViews | None = None
    ) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(features, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, dimension)
        )
        self.views = RandomViews() if views is None else views
        self.settings = {"features": features, "width": width, "dimension": dimension, "views": self.views.settings}
        self.eval()

    @classmethod
    def untrained(cls, *, views: dict[str, Any], **sizes: int) -> ContrastiveHead:  # type: ignore[override]
        """See :meth:`TrainedPart.untrained`."""
        return cls(**sizes, views=RandomViews(**views))

    def forward(self, features: Tensor) -> Tensor:
        """Embeddings ``(N, D)`` of features ``(N, F)``."""
        out: Tensor = self.layers(features)
        return out


class ContrastiveEncoder(nn.Module):
    """From inputs ``(N, ...)`` to embeddings ``(N, D)``: features of a frozen network, and a small head on them."""

    def __init__(self, features: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.features, self.head = features, head
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        """Embeddings ``(N, D)`` of inputs ``(N, ...)``."""
        out: Tensor = self.head(self.features(x).flatten(1))
        return out


def contrastive_losses(embeddings: Tensor, *, temperature: float = 0.2, positives: str = "first") -> Tensor:
    """How badly each row's views ``(views, N, D)`` are distinguished from those of other rows, ``(N,)``.

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
    width: int = setting(default=256, help="Of the head's hidden layer.", minimum=1)
    dimension: int = setting(default=16, help="Of the embeddings.", minimum=1)

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
