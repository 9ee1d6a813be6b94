"""Criteria: which samples are right to begin with, and at which points an attack has succeeded.

A criterion judges logits ``(N, K)`` by goals int64 ``(N,)``: the true classes, or with :class:`Targeted` the classes to
aim at. Attacks maximise its margin, and verification asks it alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.foreign import teaching
from robust_ext.core.random import derive_seed
from robust_ext.core.validation import Array, check_choice, check_integer, check_labels

RULES = ("next", "random", "likeliest")


class Criterion(ABC):
    """Base of criteria.

    Attributes:
        aims: Whether goals are classes to aim at instead of true classes.
    """

    aims: ClassVar[bool] = False

    @property
    def ranks(self) -> bool:
        """True if attacks maximise its margin instead of the loss they are set to.

        Else they follow that loss, which is one of the label, or with ``aims`` its negative.
        """
        return False

    @property
    @abstractmethod
    def words(self) -> str:
        """When a point is adversarial, to follow "adversarial: " in tables."""

    def goals(self, labels: Tensor, *, logits: Tensor, ids: Sequence[int]) -> Tensor:
        """Labels for attacks, int64 ``(N,)``: the true classes.

        Args:
            labels: The true classes, int64 ``(N,)``.
            logits: Of the clean inputs, ``(N, K)``.
            ids: Of the samples, which decide random draws.

        Raises:
            InvalidArgumentError: The criterion does not fit the labels or the number of classes.
        """
        return labels

    def correct(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return a mask of the samples that are right to begin with, bool ``(N,)``, by logits and true classes."""
        return logits.argmax(1) == labels

    @abstractmethod
    def adversarial(self, logits: Tensor, goals: Tensor) -> Tensor:
        """Return a mask of the points at which an attack has succeeded, bool ``(N,)``."""

    @abstractmethod
    def margin(self, logits: Tensor, goals: Tensor) -> Tensor:
        """Return margins ``(N,)``, above 0 where a point is adversarial; at 0 equal logits are decided by argmax."""


@dataclass(frozen=True)
class Misclassification(Criterion):
    """Success: any class but the true one is predicted. The default."""

    @property
    def words(self) -> str:
        """See :class:`Criterion`."""
        return "another class than the true one is predicted"

    def adversarial(self, logits: Tensor, goals: Tensor) -> Tensor:
        """See :meth:`Criterion.adversarial`."""
        return logits.argmax(1) != goals

    def margin(self, logits: Tensor, goals: Tensor) -> Tensor:
        """``max_{i != y} z_i - z_y`` for goals y."""
        return _others(logits, goals).max(1).values - _chosen(logits, goals)


@teaching
@dataclass(frozen=True)
class TopK(Criterion):
    """Success: the true class is not among the ``k`` largest logits. Samples are right where it is among them.

    Example:
        >>> logits = torch.tensor([[3.0, 2.0, 1.0]]).repeat(3, 1)
        >>> TopK(2).adversarial(logits, torch.arange(3))
        tensor([False, False,  True])
    """

    k: int
    ranks = True

    def __post_init__(self) -> None:
        check_integer("k", self.k, minimum=1)

    @property
    def words(self) -> str:
        """See :class:`Criterion`."""
        return f"the true class is not among the top {self.k}"

    def goals(self, labels: Tensor, *, logits: Tensor, ids: Sequence[int]) -> Tensor:
        """See :meth:`Criterion.goals`."""
        _check_k(self, self.k, classes=logits.shape[1])
        return labels

    def correct(self, logits: Tensor, labels: Tensor) -> Tensor:
        """See :meth:`Criterion.correct`."""
        return ~self.adversarial(logits, labels)

    def adversarial(self, logits: Tensor, goals: Tensor) -> Tensor:
        """Return where at least ``k`` logits are larger than the true class's."""
        return (logits > _chosen(logits, goals)[:, None]).sum(1) >= self.k

    def margin(self, logits: Tensor, goals: Tensor) -> Tensor:
        """The ``k``-th largest of the other logits less the true class's."""
        return _others(logits, goals).topk(self.k, 1).values[:, -1] - _chosen(logits, goals)


@teaching
@dataclass(frozen=True, eq=False)
class Targeted(Criterion):
    """Success: the target of a sample is predicted, or among the ``k`` largest logits.

    Samples are right where their true class is predicted, and the target is not among the ``k`` largest yet.

    Args:
        targets: ``"next"``: the class after the true one, and 0 after the last. ``"random"``: any other class alike,
            by ``seed`` and the sample's id. ``"likeliest"``: of the other classes, that of the ``k``-th highest logit
            at the clean input. An integer: that class for all samples. Integers ``(N,)``, a tensor or numpy array: one
            for each sample.
        seed: Of ``"random"``.
        k: Among how many largest logits the target has to be; with 1, it is predicted.

    Example:
        >>> Targeted("next").goals(torch.tensor([0, 2]), logits=torch.zeros(2, 3), ids=range(2))
        tensor([1, 0])
    """

    targets: str | int | Array = "next"
    seed: int = 0
    k: int = 1
    aims = True

    @property
    def ranks(self) -> bool:
        """See :class:`Criterion`; losses of the target want it first."""
        return self.k > 1

    def __post_init__(self) -> None:
        check_integer("seed", self.seed, minimum=0)
        check_integer("k", self.k, minimum=1)
        if isinstance(self.targets, str):
            check_choice("targets", self.targets, RULES)
        elif isinstance(self.targets, int):
            check_integer("targets", self.targets, minimum=0)

    def __repr__(self) -> str:
        shown = repr(self.targets) if isinstance(self.targets, (str, int)) else "one each"
        drawn = isinstance(self.targets, str) and self.targets == "random"
        more = {**({"seed": self.seed} if drawn else {}), **({"k": self.k} if self.ranks else {})}
        return f"Targeted({', '.join([shown, *(f'{name}={value}' for name, value in more.items())])})"

    @property
    def words(self) -> str:
        """See :class:`Criterion`."""
        where = f"among the top {self.k}" if self.ranks else "predicted"
        if isinstance(self.targets, int):
            return f"class {self.targets} is {where}"
        rule = {"next": "the next class", "random": "a random class", "likeliest": "the likeliest other class"}
        which = f" ({rule[self.targets]})" if isinstance(self.targets, str) else ""
        return f"the sample's target{which} is {where}"

    def goals(self, labels: Tensor, *, logits: Tensor, ids: Sequence[int]) -> Tensor:
        """Return the targets, see :meth:`Criterion.goals`."""
        classes = logits.shape[1]
        _check_k(self, self.k, classes=classes)
        rule = self.targets if isinstance(self.targets, str) else ""
        if rule == "next":
            return (labels + 1) % classes
        if rule == "random":
            drawn = [1 + derive_seed(self.seed, one, "targets") % (classes - 1) for one in ids]
            return (labels + torch.tensor(drawn, device=labels.device)) % classes
        if rule == "likeliest":
            return _others(logits, labels).topk(self.k, 1).indices[:, -1]
        given = torch.full_like(labels, self.targets) if isinstance(self.targets, int) else self.targets
        found = check_labels("targets", given, samples=len(labels), classes=classes).to(labels.device)
        own = (found == labels).nonzero().flatten().tolist()
        if own:
            raise InvalidArgumentError(
                "targets",
                f"the true class for {len(own)} of {len(labels)} samples, the first of which is number {own[0]}",
                "another class than the true one; leave these samples out: keep = targets != labels",
            )
        return found

    def adversarial(self, logits: Tensor, goals: Tensor) -> Tensor:
        """See :meth:`Criterion.adversarial`."""
        if self.ranks:
            return (logits > _chosen(logits, goals)[:, None]).sum(1) < self.k
        return logits.argmax(1) == goals

    def margin(self, logits: Tensor, goals: Tensor) -> Tensor:
        """``z_t`` less the ``k``-th largest other logit, for goals t."""
        return _chosen(logits, goals) - _others(logits, goals).topk(self.k, 1).values[:, -1]


@teaching
@dataclass(frozen=True)
class MultiLabel(Misclassification):
    """Success: the decision about any label of a chosen set changes; for labels ``(N, L)`` of zeros and ones.

    The model returns L logits, what its sigmoids are taken of: label l is present where logit l is above 0. Evaluations
    make a classifier of sets of labels of it, see :class:`robust_ext.models.label_sets.LabelSets`, which every attack
    of every library can be run on. Samples are right where all chosen labels are.

    Args:
        labels: The chosen columns; all when left out.
    """

    labels: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.labels is None:
            return
        chosen = tuple(self.labels) if isinstance(self.labels, (list, tuple)) else ()
        if not chosen or len(set(chosen)) < len(chosen):
            raise InvalidArgumentError("labels", self.labels, "columns of the labels, each once, as in (0, 3)")
        object.__setattr__(self, "labels", tuple(check_integer("labels", one, minimum=0) for one in chosen))

    @property
    def words(self) -> str:
        """See :class:`Criterion`."""
        which = "any label" if self.labels is None else f"any of the labels {', '.join(map(str, self.labels))}"
        return f"the decision about {which} changes"


MISCLASSIFICATION = Misclassification()
AIMED = Targeted()
"""The criterion of goals to aim at, wherever they are from."""


def aimed(criterion: Criterion) -> Criterion:
    """Return the criterion of an attack that is given goals to aim at, on a target of this criterion."""
    return criterion if criterion.aims else AIMED


def check_criterion(criterion: object) -> Criterion:
    """Return a criterion; that of None is misclassification. InvalidArgumentError for anything else."""
    if criterion is None:
        return MISCLASSIFICATION
    if not isinstance(criterion, Criterion):
        raise InvalidArgumentError(
            "criterion",
            repr(criterion),
            "robust_ext.TopK(5), robust_ext.Targeted('next') or robust_ext.MultiLabel(); None is misclassification",
        )
    return criterion


def _check_k(criterion: Criterion, k: int, *, classes: int) -> None:
    if k >= classes:
        expected = f"k below the number of classes, {classes}: all are among the top k"
        raise InvalidArgumentError("criterion", repr(criterion), expected)


def _chosen(logits: Tensor, classes: Tensor) -> Tensor:
    return logits.gather(1, classes[:, None]).squeeze(1)


def _others(logits: Tensor, classes: Tensor) -> Tensor:
    return logits.scatter(1, classes[:, None], -torch.inf)
