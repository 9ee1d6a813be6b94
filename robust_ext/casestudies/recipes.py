"""Recipes: attacks around other attacks."""

from __future__ import annotations

import copy
from abc import abstractmethod
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor, nn

from robust_ext.attacks._common.rows import query
from robust_ext.attacks.base import Attack, check_attack
from robust_ext.attacks.running import run_attack
from robust_ext.core.errors import AttackRefusedError
from robust_ext.core.settings import Settings, setting, settings_class
from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel


@settings_class
class _Wrapped(Settings, Attack):
    """An attack with a change around it.

    Attributes:
        words: The change, for the name.
    """

    words: ClassVar[str]

    attack: Attack = setting(help="The attack to run, see :func:`robust_ext.as_attack`.", check=check_attack)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set("name", f"{self.attack.name} {self.words}")
        self._set("traits", self.attack.traits)

    def refusal(self, *, threat_model: ThreatModel, detector: bool = False) -> str | None:
        """Return the attack's reason, if any."""
        return self.attack.refusal(threat_model=threat_model, detector=detector)


@settings_class
class PredictedLabels(_Wrapped):
    """Any attack, given the predicted classes of its inputs instead of their labels.

    It moves a misclassified input away from the wrong class, and may correct the error. Many attacks do so when they
    get no labels.

    Example:
        >>> from robust_ext.attacks.apgd import APGD
        >>> PredictedLabels(attack=APGD()).name
        'APGD-CE on predicted labels'
    """

    words: ClassVar[str] = "on predicted labels"

    def search(self, target: Target, inputs: Tensor, labels: Tensor, **given: Any) -> Tensor:
        """Query the whole batch once, then run the attack; see :meth:`Attack.search`."""
        return run_attack(self.attack, target, inputs, query(target, inputs).argmax(1), **given)


@settings_class
class ThroughOtherLogits(_Wrapped):
    """Any attack, run on other logits of a defense than those that decide; a subclass defines them.

    The attack sees another module, which shares all parts with the target except the exchanged ones; the target
    decides and does not change. A target without such parts refuses the attack.
    """

    @abstractmethod
    def other(self, part: nn.Module) -> nn.Module | None:
        """Return the module to show instead of a part of the target, or None to keep the part."""

    def search(self, target: Target, inputs: Tensor, labels: Tensor, **given: Any) -> Tensor:
        """See :meth:`Attack.search`."""
        shown = self._exchanged(target.module)
        if shown is None:
            raise AttackRefusedError(
                f"{self.name}: got {type(target.module).__name__}, in which there is nothing to exchange; run "
                f"{self.attack.name} on it instead"
            )
        return run_attack(self.attack, replace(target, module=shown), inputs, labels, **given)

    def _exchanged(self, module: nn.Module) -> nn.Module | None:
        """Return the module with its parts exchanged, which shares all others and its hooks; None if it has none."""
        made = self.other(module)
        if made is not None:
            return made
        parts = {name: self._exchanged(part) for name, part in module.named_children()}
        if all(part is None for part in parts.values()):
            return None
        made = copy.copy(module)
        children = {name: part or module._modules[name] for name, part in parts.items()}
        vars(made)["_modules"] = {**module._modules, **children}
        return made
