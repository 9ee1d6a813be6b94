"""Batch-level defenses whose missing rows are held images: clean samples of a test, or negatives of their own.

Where rows are defended together, what happens to a row follows from the company that it is in. Croce et al.,
"Evaluating the Adversarial Robustness of Adaptive Test-time Defenses" (2022), section 2.4: an attacker may be able to
influence one image of the batch, or the whole batch.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.random import derive_seed
from robust_ext.core.threat import ThreatModel
from robust_ext.models.adaptive import AdaptiveDefense
from robust_ext.models.rows import Solution

T = TypeVar("T", bound=AdaptiveDefense)


class Accompanied(AdaptiveDefense):
    """A batch-level defense that takes any rows, see :func:`in_company` and :func:`one_image`."""

    company: Tensor  # Held images, whole groups of them.

    def _grouped(self, x: Tensor, seeds: Tensor, *, record: bool) -> Solution:
        groups, places = self._placed(x)
        held = self.company.to(x).view(-1, self.size, *x.shape[1:])[groups].flatten(0, 1)
        others = seeds[:1].repeat(len(held))
        if self.random and bool((seeds != seeds[0]).any()):
            # Where every row draws the same, as one draw is held, so do held images.
            own = [derive_seed(int(seeds[0]), "company", number) for number in range(len(held))]
            others = torch.tensor(own, dtype=torch.int64)
        others[places.cpu()] = seeds
        found = super()._grouped(held.index_copy(0, places, x), others, record=record)
        return found.select(places)

    @property
    def size(self) -> int:
        """The rows of a group."""
        return self.group_size or 1

    def _placed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the group of held images of each batch of the defense, and the place of each row among all of them."""
        raise NotImplementedError


class InCompany(Accompanied):
    """A batch-level defense among the clean samples of a test, see :func:`in_company`."""

    samples: int
    norm: str

    def _placed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            flat, clean = x.flatten(1).float(), self.company[: self.samples].flatten(1).float()
            order = {"linf": torch.inf, "l2": 2.0, "l1": 1.0}[self.norm]
            nearest = torch.cdist(flat, clean, p=order, compute_mode="donot_use_mm_for_euclid_dist").argmin(1)
        # The first points of all samples are in one batch, the second ones in the next.
        same = nearest[:, None] == nearest
        times = same.tril(-1).sum(1)
        groups = len(self.company) // self.size
        keys, batch = torch.unique(times * groups + nearest // self.size, return_inverse=True)
        return keys % groups, batch * self.size + nearest % self.size


class OneImage(Accompanied):
    """A batch-level defense of one row next to held negatives, see :func:`one_image`."""

    batch_level = False

    def _placed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows = torch.arange(len(x), device=x.device)
        return torch.zeros_like(rows), rows * self.size


def in_company(defense: T, inputs: Tensor, threat_model: ThreatModel) -> T:
    """Return a batch-level defense that fills up incomplete groups with the clean samples of a test.

    Samples ``0 .. group_size - 1`` are the first group, and so on; the last one is filled up with the first samples. A
    row belongs to the sample that is nearest to it in the threat model's norm, and is defended next to the rows of the
    batch that belong to the other samples of its group, in whichever order they come. Where there are several rows of
    one sample, the first of each are together, then the second ones; the clean sample stands in where one is missing.
    So any batch can be sent, and a batch of all samples is what the defense sees in an evaluation.

    Args:
        defense: See :class:`~robust_ext.models.adaptive.AdaptiveDefense`; the copy shares its networks.
        inputs: Clean samples ``(N, ...)``.
        threat_model: Whose norm decides.
    """
    missing = -len(inputs) % _size(defense)
    filled = torch.cat([inputs, inputs[torch.arange(missing) % len(inputs)]])
    return _copied(defense, InCompany, filled, samples=len(inputs), norm=threat_model.norm)


def one_image(defense: T, negatives: Tensor) -> T:
    """Return a batch-level defense for an attacker of one image: the others of its group are held images.

    Each row is defended alone among ``negatives``, which cost as much as rows: a batch of N takes ``N x group_size``
    (Croce et al. 2022, appendix B.8, where the defense loses its robustness this way).

    Args:
        defense: See :class:`~robust_ext.models.adaptive.AdaptiveDefense`; the copy shares its networks.
        negatives: Images in the bounds that the attacker does not know or cannot change, one fewer than the group has
            rows, ``(group_size - 1, ...)``.

    Raises:
        InvalidArgumentError: The defense treats each row on its own already, or the number of negatives is another.
    """
    size = _size(defense)
    if len(negatives) != size - 1:
        expected = f"{size - 1}, one fewer than group_size"
        raise InvalidArgumentError("negatives", f"{len(negatives)} images", expected)
    return _copied(defense, OneImage, torch.cat([negatives.new_zeros(1, *negatives.shape[1:]), negatives]))


def _size(defense: AdaptiveDefense) -> int:
    if not defense.batch_level or defense.group_size is None:
        raise InvalidArgumentError("defense", type(defense).__name__, "a defense with batch_level = True")
    return defense.group_size


def _copied(defense: T, kind: type, company: Tensor, **attributes: Any) -> T:
    other: Any = mixed(defense, kind)
    other.register_buffer("company", company.detach().clone(), persistent=False)
    vars(other).update(attributes)
    made: T = other
    return made


def mixed(defense: AdaptiveDefense, mixin: type) -> Any:
    """Return a copy of a defense that shares the networks, with the methods of ``mixin`` before its own."""
    other: Any = defense.with_steps(defense.steps)
    if not isinstance(other, mixin):
        other.__class__ = type(f"{mixin.__name__}{type(defense).__name__}", (mixin, type(defense)), {})
    return other
