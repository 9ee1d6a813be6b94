"""What the Foolbox classes of this project's own attacks have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import eagerpy as ep
import torch
from torch import Tensor

from robust_ext.adapters.foolbox.library import foolbox
from robust_ext.adapters.foolbox.model import FoolboxModule
from robust_ext.adapters.native import search_module
from robust_ext.attacks.base import draw_seed
from robust_ext.attacks.native import NativeAttack
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.threat import NORMS, ThreatModel
from robust_ext.core.validation import check_integer, check_number

_base = foolbox.attacks.base
FixedEpsilonAttack: Any = _base.FixedEpsilonAttack

NORM_OF_DISTANCE = {getattr(foolbox.distances, norm).p: norm for norm in NORMS}


class NativeFixedEpsilonAttack(FixedEpsilonAttack, ABC):  # type: ignore[misc]
    """Base of this project's attacks as Foolbox attacks: everything but the settings.

    A subclass has a ``distance``, keeps its settings as attributes of the same names (Foolbox shows all attributes in
    the attack's ``repr``), ``seed`` among them, and makes the attack from them in :meth:`native`.

    Without a ``seed``, randomness follows ``torch.manual_seed``, as everywhere in Foolbox. With one, every call draws
    the same, ``repeat`` included. Criteria are :class:`foolbox.criteria.Misclassification`,
    :class:`foolbox.criteria.TargetedMisclassification` and their subclasses. A subclass that adds a condition of its
    own, such as that a detector stays silent, is attacked for its labels alone, and judged by Foolbox with its
    condition; the attacks of :mod:`robust_ext.adapters.foolbox.aware` attack a detector too. Models are left as they
    were, their parameters' gradients included.
    """

    seed: int | None

    @abstractmethod
    def native(self) -> NativeAttack:
        """The attack with the settings of this object.

        Raises:
            InvalidArgumentError: A setting is not accepted.
        """

    def _check(self) -> None:
        """Raise where a setting is not accepted; the last line of a constructor."""
        if self.seed is not None:
            check_integer("seed", self.seed, minimum=0, maximum=2**63 - 1)
        self.native()

    def run(self, model: Any, inputs: Any, criterion: Any, *, epsilon: float, **kwargs: Any) -> Any:
        """Perturb a batch, see Foolbox's ``FixedEpsilonAttack.run``.

        Args:
            model: A Foolbox model of PyTorch tensors, wrapped or not.
            inputs: A batch ``(N, ...)`` in the model's bounds, a PyTorch tensor or EagerPy's.
            criterion: Labels ``(N,)``, or a criterion.
            epsilon: At least 0, in units of the inputs.
            **kwargs: There are none.

        Returns:
            Points in the ball and in the bounds, of the type of the inputs.

        Raises:
            ValueError: The criterion is not supported, the tensors are not PyTorch's, or labels do not fit.
        """
        _base.raise_if_kwargs(kwargs)
        return self._perturb(model, inputs, criterion, epsilon=epsilon)

    def _perturb(
        self, model: Any, inputs: Any, criterion: Any, *, epsilon: float, references: Tensor | None = None
    ) -> Any:
        """See :meth:`run`."""
        x, restore_type = ep.astensor_(inputs)
        criterion_ = _base.get_criterion(criterion)
        del inputs, criterion
        raw = torch_tensor("inputs", x)
        labels, targeted = _aim(criterion_)
        _base.verify_input_bounds(x, model)
        if check_number("epsilon", epsilon, minimum=0) == 0:
            return restore_type(x)
        bounds = (float(model.bounds.lower), float(model.bounds.upper))
        seed = draw_seed(torch.default_generator) if self.seed is None else self.seed
        candidates = self._search(
            FoolboxModule(model),
            raw,
            labels,
            references=references,
            threat_model=ThreatModel(norm=NORM_OF_DISTANCE[self.distance.p], epsilon=epsilon, bounds=bounds),
            generator=torch.Generator().manual_seed(seed),
            targeted=targeted,
        )
        return restore_type(type(x)(candidates))

    def _search(
        self, module: FoolboxModule, inputs: Tensor, labels: Tensor, *, references: Tensor | None, **ways: Any
    ) -> Tensor:
        """Candidates ``(N, ...)``."""
        return search_module(self.native(), module, inputs, labels, **ways)


def _aim(criterion: Any) -> tuple[Tensor, bool]:
    """Labels, and whether to aim at them."""
    if isinstance(criterion, foolbox.criteria.Misclassification):
        return torch_tensor("labels", criterion.labels), False
    if isinstance(criterion, foolbox.criteria.TargetedMisclassification):
        return torch_tensor("target_classes", criterion.target_classes), True
    raise ValueError("unsupported criterion")


def torch_tensor(argument: str, tensor: Any) -> Tensor:
    """The PyTorch tensor inside one of EagerPy.

    Raises:
        InvalidArgumentError: It holds one of another framework.
    """
    if not isinstance(tensor.raw, Tensor):
        kind = f"{type(tensor.raw).__module__}.{type(tensor.raw).__qualname__}"
        raise InvalidArgumentError(argument, kind, "a torch.Tensor; this attack runs on PyTorch models only")
    return tensor.raw
