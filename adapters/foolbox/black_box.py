"""This project's attacks without gradients, and those of smallest perturbation, as Foolbox attacks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from robust_ext.adapters.foolbox.library import foolbox
from robust_ext.adapters.foolbox.native import NativeFixedEpsilonAttack
from robust_ext.attacks.native import NativeAttack
from robust_ext.attacks.rays import RayS
from robust_ext.attacks.square import Square
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.validation import check_number

_base = foolbox.attacks.base
_distances: Any = foolbox.distances
MinimizationAttack: Any = _base.MinimizationAttack


class NativeMinimizationAttack(MinimizationAttack, ABC):  # type: ignore[misc]
    """Base of this project's attacks that look for the smallest perturbation: everything but the settings.

    A subclass has a ``distance``, keeps its settings as attributes of the same names, and makes the attack from them in
    :meth:`native`. Unless it says otherwise, it draws no random numbers. Criteria are those of
    :class:`robust_ext.adapters.foolbox.native.NativeFixedEpsilonAttack`. Models are left as they were.

    Attributes:
        can_aim: Whether :class:`foolbox.criteria.TargetedMisclassification` is supported.
    """

    can_aim: ClassVar[bool] = True

    @abstractmethod
    def native(self, *, stop: bool = True) -> NativeAttack:
        """The attack with the settings of this object.

        Args:
            stop: Whether samples may be finished once a point within epsilon is found.

        Raises:
            InvalidArgumentError: A setting is not accepted.
        """

    def run(self, model: Any, inputs: Any, criterion: Any, *, early_stop: float | None = None, **kwargs: Any) -> Any:
        """Perturb a batch, see Foolbox's ``MinimizationAttack.run``.

        Args:
            model: A Foolbox model of PyTorch tensors, wrapped or not.
            inputs: A batch ``(N, ...)`` in the model's bounds, a PyTorch tensor or EagerPy's.
            criterion: Labels ``(N,)``, or a criterion.
            early_stop: Samples are finished once they are this near, where the attack can stop; None or 0: none are.
                Foolbox passes the smallest of the epsilons.
            **kwargs: There are none.

        Returns:
            Points in the bounds, of the type of the inputs; they may lie farther away than any epsilon.

        Raises:
            ValueError: The criterion is not supported, the tensors are not PyTorch's, or labels do not fit.
        """
        _base.raise_if_kwargs(kwargs)
        if hasattr(criterion, "target_classes") and not self.can_aim:
            expected = f"labels or Misclassification: {type(self).__name__} cannot aim at a class"
            raise InvalidArgumentError("criterion", repr(criterion), expected)
        near = 0.0 if early_stop is None else check_number("epsilons", early_stop, minimum=0)
        # Where nothing stops, any epsilon above 0 will do.
        return _Once(self.native(stop=near > 0), self.distance).run(model, inputs, criterion, epsilon=near or 1.0)


class LinfRaySAttack(NativeMinimizationAttack):
    """RayS, see :class:`robust_ext.attacks.rays.RayS`: the nearest boundary from predicted labels alone.

    Samples are finished once they are within the smallest epsilon; with ``epsilons=None``, or 0 among them, they are
    searched on until their queries are used up.

    Args:
        queries: Most points asked about for each sample, the input among them.
        tolerance: How near to the boundary a binary search ends, above 0.
        keep_rows: Whether every query sends the whole batch, finished samples as they are.

    References:
        Chen and Gu, "RayS: A Ray Searching Method for Hard-label Adversarial Attack" (2020).
    """

    distance = _distances.linf
    can_aim = False

    def __init__(self, *, queries: int = 10_000, tolerance: float = 1e-3, keep_rows: bool = True) -> None:
        self.queries = queries
        self.tolerance = tolerance
        self.keep_rows = keep_rows
        self.native()

    def native(self, *, stop: bool = True) -> RayS:
        """RayS with these settings."""
        return RayS(queries=self.queries, tolerance=self.tolerance, stop=stop, keep_rows=self.keep_rows)


class BaseSquareAttack(NativeFixedEpsilonAttack):
    """The Square attack, see :class:`robust_ext.attacks.square.Square`; its subclasses have a norm.

    Args:
        queries: Points asked about in each run, the first one among them.
        p: Share of the pixels in the first windows, in (0, 1].
        restarts: Runs from first points of their own.
        loss: ``"margin"`` or ``"ce"``.
        stop_early: Whether samples that are solved stay as they are.
        seed: Of all draws, the same in every call; None: what ``torch.manual_seed`` makes of them.

    References:
        Andriushchenko et al., "Square Attack: a query-efficient black-box adversarial attack via random search" (2020).
    """

    def __init__(
        self,
        *,
        queries: int = 5000,
        p: float = 0.8,
        restarts: int = 1,
        loss: str = "margin",
        stop_early: bool = True,
        seed: int | None = None,
    ) -> None:
        self.queries = queries
        self.p = p
        self.restarts = restarts
        self.loss = loss
        self.stop_early = stop_early
        self.seed = seed
        self._check()

    def native(self) -> Square:
        """Square with these settings."""
        return Square(
            queries=self.queries, p=self.p, restarts=self.restarts, loss=self.loss, stop_early=self.stop_early
        )


class LinfSquareAttack(BaseSquareAttack):
    """Linf Square."""

    distance = _distances.linf


class L2SquareAttack(BaseSquareAttack):
    """L2 Square."""

    distance = _distances.l2


class L1SquareAttack(BaseSquareAttack):
    """L1 Square."""

    distance = _distances.l1


class _Once(NativeFixedEpsilonAttack):
    """An attack of smallest perturbation, run as one with an epsilon."""

    distance: Any = None

    def __init__(self, attack: NativeAttack, distance: Any) -> None:
        self.attack = attack
        self.distance = distance
        self.seed = 0

    def native(self) -> NativeAttack:
        return self.attack
