"""Arms: attacks with a budget each, and the group of arms that each is judged with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from robust_ext.attacks.base import Attack
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.foreign import teaching
from robust_ext.core.threat import NORMS, ThreatModel, check_epsilon
from robust_ext.core.validation import check_choice, check_name
from robust_ext.registry.attack import as_attack
from robust_ext.reports.wording import typed


@teaching
@dataclass(frozen=True, kw_only=True)
class Arm:
    """One attack with one budget.

    Args:
        attack: Anything :func:`robust_ext.as_attack` takes.
        norm: ``"linf"``, ``"l2"`` or ``"l1"``; None for attacks whose perturbations no norm limits, which may return
            any input in bounds.
        epsilon: Budget in the units of the inputs; None for attacks that look for the smallest perturbation and are
            judged by their success alone, and without a norm.
        label: What tables call the attack; its own name when left out.
        objective: What it maximises, where arms of a group differ in that; None: it takes part in the result of every
            objective.
        algorithm: How, where arms of a group differ in that.
    """

    attack: object
    norm: str | None = "linf"
    epsilon: float | None = None
    label: str | None = None
    objective: str | None = None
    algorithm: str | None = None
    resolved: Attack = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("label", "objective", "algorithm"):
            if getattr(self, name) is not None:
                check_name(name, getattr(self, name))
        if self.norm is not None:
            check_choice("norm", self.norm, NORMS)
        if self.epsilon is not None:
            if self.norm is None:
                raise InvalidArgumentError("epsilon", self.epsilon, "none for an arm without a norm")
            object.__setattr__(self, "epsilon", check_epsilon(self.epsilon))
        resolved = as_attack(self.attack, argument="arm")
        object.__setattr__(self, "resolved", resolved)
        if self.epsilon is None and self.norm is not None and not resolved.traits.minimum_norm:
            raise InvalidArgumentError(
                "epsilon", f"none for {self.short}", "a budget: this attack does not look for the smallest perturbation"
            )

    @property
    def short(self) -> str:
        """The attack in a word or two."""
        return self.label or self.resolved.name

    @property
    def group(self) -> str:
        """The arms it is judged with: those of its norm and epsilon; without an epsilon it is alone."""
        return self.short if self.epsilon is None else f"{self.norm} {typed(self.epsilon, 'g')}"

    @property
    def name(self) -> str:
        """Unlike those of other arms of a suite."""
        return self.short if self.epsilon is None else f"{self.short} {self.norm} {typed(self.epsilon, 'g')}"

    def threat_model(self, *, bounds: tuple[float, float], values: int) -> ThreatModel:
        """Return the attack's threat model for inputs of this size; without a budget, the whole bounds."""
        norm = self.norm or "linf"
        fixed = self.epsilon is not None and not self.resolved.traits.minimum_norm
        widest = (bounds[1] - bounds[0]) * {"linf": 1.0, "l2": float(values) ** 0.5, "l1": float(values)}[norm]
        return ThreatModel(norm=norm, epsilon=self.epsilon if fixed and self.epsilon else widest, bounds=bounds)


def check_arms(arms: Iterable[Arm]) -> list[Arm]:
    """Arms with different names, at least one; InvalidArgumentError otherwise."""
    found = list(arms)
    for arm in found:
        if not isinstance(arm, Arm):
            raise InvalidArgumentError("arms", type(arm).__name__, "objects of the class Arm")
    if not found:
        raise InvalidArgumentError("arms", "none", "at least one arm")
    names = [arm.name for arm in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InvalidArgumentError("arms", f"several called {', '.join(twice)}", "a label of its own for each")
    return found
