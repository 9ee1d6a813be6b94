"""MEAD's objectives in Foolbox: as attacks of this project, and as the loss of Foolbox's own gradient attacks."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar

import eagerpy as ep
import torch
from torch import Tensor

from robust_ext.adapters.foolbox.library import foolbox
from robust_ext.adapters.foolbox.model import FoolboxModule
from robust_ext.adapters.foolbox.native import NativeFixedEpsilonAttack, torch_tensor
from robust_ext.attacks._common.divergences import find_divergence
from robust_ext.attacks.objective_pgd import ObjectivePGD
from robust_ext.core.errors import AttackError, InvalidArgumentError
from robust_ext.core.target import frozen
from robust_ext.core.validation import check_labels, check_number

_distances: Any = foolbox.distances
_BaseGradientDescent: Any = foolbox.attacks.gradient_descent_base.BaseGradientDescent

_TITLES = {"ace": "ACE", "kl": "KL", "gini": "Gini", "fisher-rao": "FisherRao"}


class BaseObjectivePGD(NativeFixedEpsilonAttack):
    """PGD, BIM and FGSM on an objective of MEAD, see :class:`robust_ext.attacks.objective_pgd.ObjectivePGD`.

    Its subclasses have a norm. Only ``"ace"`` takes :class:`foolbox.criteria.TargetedMisclassification`.

    Args:
        objective: ``"ace"``, ``"kl"``, ``"gini"`` or ``"fisher-rao"``.
        algorithm: ``"pgd"``, ``"bim"`` or ``"fgsm"``: what settings are where they are None.
        steps: At least 1.
        rel_stepsize: Relative to epsilon, above 0.
        abs_stepsize: In units of the inputs, above 0; it goes before ``rel_stepsize``.
        random_start: Whether to start at a random point of the ball, instead of at the input. Where it is None,
            ``"kl"`` and ``"fisher-rao"`` do with every algorithm: at the input their gradient is rounding noise.
        best: Whether to return the misclassified point of highest objective instead of the last point.
        projection: ``"nearest"``, or ``"scaled"`` as in Foolbox's own attacks.
        seed: Of all draws, the same in every call; None: what ``torch.manual_seed`` makes of them.

    References:
        Granese et al., "MEAD: A Multi-Armed Approach for Evaluation of Adversarial Examples Detectors" (2022).
    """

    def __init__(
        self,
        *,
        objective: str = "ace",
        algorithm: str = "pgd",
        steps: int | None = None,
        rel_stepsize: float | None = None,
        abs_stepsize: float | None = None,
        random_start: bool | None = None,
        best: bool = False,
        projection: str = "nearest",
        seed: int | None = None,
    ) -> None:
        self.objective = objective
        self.algorithm = algorithm
        self.steps = steps
        self.rel_stepsize = rel_stepsize
        self.abs_stepsize = abs_stepsize
        self.random_start = random_start
        self.best = best
        self.projection = projection
        self.seed = seed
        self._check()

    def native(self) -> ObjectivePGD:
        """The attack with these settings."""
        for name in ("rel_stepsize", "abs_stepsize"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), minimum=0, open_minimum=True)
        if not isinstance(self.random_start, bool | None):
            raise InvalidArgumentError("random_start", self.random_start, "True, False or None")
        return ObjectivePGD(
            rel_step_size=self.rel_stepsize,
            objective=self.objective,
            algorithm=self.algorithm,
            steps=self.steps,
            step_size=self.abs_stepsize,
            start=None if self.random_start is None else "random" if self.random_start else "input",
            best=self.best,
            projection=self.projection,
        )

    def run(self, model: Any, inputs: Any, criterion: Any, *, epsilon: float, **kwargs: Any) -> Any:
        """Perturb a batch, see :meth:`NativeFixedEpsilonAttack.run`.

        Args:
            model: A Foolbox model of PyTorch tensors, wrapped or not.
            inputs: A batch ``(N, ...)`` in the model's bounds, a PyTorch tensor or EagerPy's.
            criterion: Labels ``(N,)``, or a criterion.
            epsilon: At least 0, in units of the inputs.
            **kwargs: There are none.

        Returns:
            Points in the ball and in the bounds, of the type of the inputs.

        Raises:
            ValueError: The criterion is not supported, or an argument is not accepted.
        """
        _refuse_aims(criterion, self.objective)
        return super().run(model, inputs, criterion, epsilon=epsilon, **kwargs)


class LinfObjectivePGDAttack(BaseObjectivePGD):
    """Linf PGD, BIM or FGSM on an objective of MEAD."""

    distance = _distances.linf


class L2ObjectivePGDAttack(BaseObjectivePGD):
    """L2 PGD, BIM or FGSM on an objective of MEAD."""

    distance = _distances.l2


class L1ObjectivePGDAttack(BaseObjectivePGD):
    """L1 PGD, BIM or FGSM on an objective of MEAD."""

    distance = _distances.l1


LinfObjectivePGD = LinfObjectivePGDAttack
L2ObjectivePGD = L2ObjectivePGDAttack
L1ObjectivePGD = L1ObjectivePGDAttack


class WithObjective:
    """Mixin that gives a gradient attack of Foolbox an objective of MEAD as its loss.

    Put it before the attack among the bases, and name the objective; or let :func:`with_objective` do so. Nothing else
    of the attack changes, but for two things. With ``"kl"`` and ``"fisher-rao"``, ``random_start`` is True where it is
    left out: at the input itself their gradient is rounding noise, and its sign would decide the first step. And models
    are left as they were, their parameters' gradients included.

    These two compare with the logits of the inputs that the attack is called with, which cost one more forward pass a
    run.

    Attributes:
        objective: ``"ace"``, ``"kl"``, ``"gini"`` or ``"fisher-rao"``; only ``"ace"`` can be targeted.

    Example:
        >>> class LinfKL(WithObjective, foolbox.attacks.LinfPGD):
        ...     objective = "kl"
        >>> LinfKL(steps=10).random_start
        True
    """

    objective: ClassVar[str]
    _clean: Tensor | None = None

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        find_divergence(cls.objective)
        host: Any = super()
        _, *parameters = inspect.signature(host.__init__).parameters.values()
        shown = [p.replace(default=cls._starts_at_random(p.default)) if _is_start(p) else p for p in parameters]
        cls.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]

    def __init__(self, **settings: Any) -> None:
        if self._starts_at_random(False):
            settings.setdefault("random_start", True)
        super().__init__(**settings)

    @classmethod
    def _starts_at_random(cls, default: Any) -> Any:
        return True if find_divergence(cls.objective).compares else default

    def run(self, model: Any, inputs: Any, criterion: Any, *, epsilon: float, **kwargs: Any) -> Any:
        """Perturb a batch, see Foolbox's ``FixedEpsilonAttack.run``.

        Args:
            model: A Foolbox model of PyTorch tensors, wrapped or not.
            inputs: A batch ``(N, ...)`` in the model's bounds, a PyTorch tensor or EagerPy's.
            criterion: Labels ``(N,)``, or a criterion.
            epsilon: In units of the inputs.
            **kwargs: Those of the attack.

        Returns:
            Points of the type of the inputs.

        Raises:
            ValueError: The criterion is not supported, or the tensors are not PyTorch's.
        """
        _refuse_aims(criterion, self.objective)
        # A copy, so that attacks keep nothing of a run: Foolbox shows all attributes in their repr.
        bound = copy.copy(self)
        bound._clean = torch_tensor("inputs", ep.astensor(inputs))
        host: Any = super(WithObjective, bound)
        with frozen(FoolboxModule(model)):
            return host.run(model, inputs, criterion, epsilon=epsilon, **kwargs)

    def get_loss_fn(self, model: Any, labels: Any) -> Callable[[Any], Any]:
        """The sum of the objective over the batch, as Foolbox's attacks ask for it in a run.

        Args:
            model: A Foolbox model of PyTorch tensors.
            labels: EagerPy's ``(N,)``.

        Raises:
            InvalidArgumentError: There is not one label an input.
            AttackError: It is called outside a run, where the clean inputs are not known.
        """
        clean = self._clean
        if clean is None:
            raise AttackError(
                f"{type(self).__name__}: get_loss_fn knows the clean inputs in run alone; call the attack"
            )
        y = check_labels("labels", torch_tensor("labels", labels), samples=len(clean))
        divergence = find_divergence(self.objective)
        natural = clean.new_empty(0)
        if divergence.compares:
            with torch.no_grad():
                # A copy, as a model may work on its input in place.
                natural = model(clean.clone())

        def loss_fn(x: Any) -> Any:
            logits = model(x)
            return type(logits)(divergence.value(logits.raw, natural, y).sum())

        return loss_fn


def with_objective(attack_class: Any, objective: str) -> Any:
    """A gradient attack of Foolbox with an objective of MEAD as its loss.

    Args:
        attack_class: A class of Foolbox whose loss comes from ``get_loss_fn``, such as ``foolbox.attacks.LinfPGD``,
            ``L2BasicIterativeAttack``, ``LinfFastGradientAttack`` or ``LinfMomentumIterativeFastGradientMethod``.
        objective: ``"ace"`` (the loss these attacks have anyway), ``"kl"``, ``"gini"`` or ``"fisher-rao"``.

    Returns:
        A subclass of it and of :class:`WithObjective`, with the settings of the attack.

    Raises:
        InvalidArgumentError: The class has another kind of loss, or there is no such objective.

    Example:
        >>> with_objective(foolbox.attacks.LinfFastGradientAttack, "kl")()
        LinfFastGradientAttackWithKL(rel_stepsize=1.0, abs_stepsize=None, steps=1, random_start=True)
    """
    find_divergence(objective)
    if not (isinstance(attack_class, type) and issubclass(attack_class, _BaseGradientDescent)):
        expected = "a class of Foolbox's gradient attacks, such as foolbox.attacks.LinfPGD"
        raise InvalidArgumentError("attack_class", repr(attack_class), expected)
    return _subclass(attack_class, objective)


@cache
def _subclass(attack_class: Any, objective: str) -> Any:
    name = f"{attack_class.__name__}With{_TITLES[objective]}"
    parts = {"objective": objective, "__module__": __name__, "__doc__": f"{attack_class.__name__} on {objective!r}."}
    return type(attack_class)(name, (WithObjective, attack_class), parts)


def _refuse_aims(criterion: Any, objective: str) -> None:
    if objective != "ace" and hasattr(criterion, "target_classes"):
        expected = f"labels or Misclassification: {objective!r} looks at no labels to aim at; only 'ace' does"
        raise InvalidArgumentError("criterion", repr(criterion), expected)


def _is_start(parameter: inspect.Parameter) -> bool:
    return parameter.name == "random_start"
