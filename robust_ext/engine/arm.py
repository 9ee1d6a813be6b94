"""Arms: attack configurations, each with the group of attacks it is judged with; and the runs they need."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from robust_ext.attacks.base import Attack
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.threat import NORMS, ThreatModel
from robust_ext.core.validation import check_choice, check_number
from robust_ext.engine.identity import describe
from robust_ext.registry.attack import as_attack


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
        if self.norm is not None:
            check_choice("norm", self.norm, NORMS)
        if self.epsilon is not None:
            if self.norm is None:
                raise InvalidArgumentError("epsilon", self.epsilon, "none for an arm without a norm")
            object.__setattr__(self, "epsilon", check_number("epsilon", self.epsilon, minimum=0, open_minimum=True))
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
        return self.short if self.epsilon is None else f"{self.norm} {self.epsilon:g}"

    @property
    def name(self) -> str:
        """Unlike those of other arms of a suite."""
        return self.short if self.epsilon is None else f"{self.short} {self.norm} {self.epsilon:g}"

    @property
    def knows_detector(self) -> bool:
        """Whether it attacks a detector together with the classifier."""
        return self.resolved.traits.detector

    def threat_model(self, *, bounds: tuple[float, float], values: int) -> ThreatModel:
        """What the attack is given: an arm without a budget may go anywhere in the bounds.

        Args:
            bounds: Of the inputs.
            values: Numbers in one input.
        """
        norm = self.norm or "linf"
        fixed = self.epsilon is not None and not self.resolved.traits.minimum_norm
        widest = (bounds[1] - bounds[0]) * {"linf": 1.0, "l2": float(values) ** 0.5, "l1": float(values)}[norm]
        return ThreatModel(norm=norm, epsilon=self.epsilon if fixed and self.epsilon else widest, bounds=bounds)


@dataclass(frozen=True, kw_only=True)
class ArmRun:
    """One run of an attack; minimum-norm attacks are run once for all the budgets they are judged by.

    Args:
        attack: The attack.
        threat_model: What it is given.
        arms: The arms that are judged by what it returns.
        knows: Name of the detector it attacks too, or None.
    """

    attack: Attack
    threat_model: ThreatModel
    arms: tuple[Arm, ...]
    knows: str | None = None

    @property
    def title(self) -> str:
        """For people."""
        arm = self.arms[0]
        # The same whatever budgets a minimum-norm attack is judged by.
        name = arm.name if arm.epsilon is None or not self.attack.traits.minimum_norm else f"{arm.short} {arm.norm}"
        return name if self.knows is None else f"{name}, knowing {self.knows}"

    @property
    def described(self) -> dict[str, Any]:
        """All that decides what it returns, beside model, inputs and seed; plain values."""
        model = self.threat_model
        return {
            "attack": describe(self.attack),
            "norm": model.norm,
            "epsilon": model.epsilon,
            "bounds": list(model.bounds),
            "knows": self.knows,
        }

    @property
    def stream_keys(self) -> tuple[str, ...]:
        """What its draws depend on beside seed and sample: names, but not how settings are written down."""
        model = self.threat_model
        return self.arms[0].short, model.norm, f"{model.epsilon:g}", self.knows or ""

    @property
    def key(self) -> str:
        """A name for files, the same for the same run in any suite."""
        digest = hashlib.blake2b(repr(sorted(self.described.items())).encode(), digest_size=5).hexdigest()
        return f"{re.sub(r'[^A-Za-z0-9.]+', '-', self.title)[:60].strip('-.')}-{digest}"


def check_arms(arms: Iterable[Arm]) -> list[Arm]:
    """Arms with different names, at least one.

    Raises:
        InvalidArgumentError: They are not.
    """
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


def plan_runs(
    arms: Sequence[Arm], *, bounds: tuple[float, float], values: int, detectors: Sequence[str] = ()
) -> list[ArmRun]:
    """The runs that arms need.

    One an arm, but one for all budgets of a minimum-norm attack, and one a detector for attacks that know it.

    Args:
        arms: With different names.
        bounds: Of the inputs.
        values: Numbers in one input.
        detectors: Names of the detectors that can be attacked.
    """
    grouped: dict[tuple[str, str, str, float], list[Arm]] = {}
    for arm in arms:
        model = arm.threat_model(bounds=bounds, values=values)
        # By label too: two functions may say the same of themselves.
        grouped.setdefault((arm.short, describe(arm.resolved), model.norm, model.epsilon), []).append(arm)
    runs = []
    for found in grouped.values():
        model = found[0].threat_model(bounds=bounds, values=values)
        for knows in detectors if found[0].knows_detector else (None,):
            runs.append(ArmRun(attack=found[0].resolved, threat_model=model, arms=tuple(found), knows=knows))
    return runs
