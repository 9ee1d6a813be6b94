"""MEAD's objectives as the loss of Foolbox's own gradient attacks."""

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
from robust_ext.adapters.foolbox.native import torch_tensor
from robust_ext.attacks._common.objectives import find_divergence
from robust_ext.core.errors import AttackError, InvalidArgumentError
from robust_ext.core.guard import frozen
from robust_ext.core.validation import check_labels

_BaseGradientDescent: Any = foolbox.attacks.gradient_descent_base.BaseGradientDescent

_TITLES = {"ace": "ACE", "kl": "KL", "gini": "Gini", "fisher-rao": "FisherRao"}


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
        shown = [
            p.replace(default=cls._starts_at_random(p.default)) if p.name == "random_start" else p for p in parameters
        ]
        cls.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]

    def __init__(self, **settings: Any) -> None:
        if self._starts_at_random(False):
            settings.setdefault("random_start", True)
        super().__init__(**settings)

    @classmethod
    def _starts_at_random(cls, default: Any) -> Any:
        return True if find_divergence(cls.objective).compares else default

    def run(self, model: Any, inputs: Any, criterion: Any, *, epsilon: float, **kwargs: Any) -> Any:
        """Perturb a batch; arguments and errors are those of Foolbox's ``FixedEpsilonAttack.run``.

        Tensors are PyTorch's, or EagerPy's around them. Only ``"ace"`` takes a targeted criterion.
        """
        if self.objective != "ace" and hasattr(criterion, "target_classes"):
            expected = f"labels or Misclassification: {self.objective!r} looks at no labels to aim at; only 'ace' does"
            raise InvalidArgumentError("criterion", repr(criterion), expected)
        # A copy, so that attacks keep nothing of a run: Foolbox shows all attributes in their repr.
        bound = copy.copy(self)
        bound._clean = torch_tensor("inputs", ep.astensor(inputs))
        host: Any = super(WithObjective, bound)
        with frozen(FoolboxModule(model)):
            return host.run(model, inputs, criterion, epsilon=epsilon, **kwargs)

    def get_loss_fn(self, model: Any, labels: Any) -> Callable[[Any], Any]:
        """Return the sum of the objective over the batch, which Foolbox's attacks request in a run.

        AttackError outside a run, where there are no clean inputs.
        """
        clean = self._clean
        if clean is None:
            raise AttackError(f"{type(self).__name__}: get_loss_fn has the clean inputs in run alone; call the attack")
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
    """Copy a gradient attack of Foolbox with an objective of MEAD as its loss.

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
