"""What several recipes have in common: attacks on predicted labels, and attacks that are shown other logits."""

from __future__ import annotations

import copy
from abc import abstractmethod
from dataclasses import replace

import torch
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
    """An attack with something changed around it."""

    attack: Attack = setting(help="What is run, see :func:`robust_ext.as_attack`.", check=check_attack)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set("name", f"{self.attack.name} {self.words}")
        self._set("traits", self.attack.traits)

    @property
    def words(self) -> str:
        """What is changed, for its name."""
        raise NotImplementedError

    def refusal(self, *, threat_model: ThreatModel, detector: bool = False) -> str | None:
        """The attack's reason, if any."""
        return self.attack.refusal(threat_model=threat_model, detector=detector)


@settings_class
class PredictedLabels(_Wrapped):
    """Any attack, given the predicted classes of its inputs in the place of their labels.

    Where an input is misclassified, it moves it away from the wrong class, and may correct the error. Many attacks do
    so where they are given no labels.

    Example:
        >>> from robust_ext.attacks.apgd import APGD
        >>> PredictedLabels(attack=APGD()).name
        'APGD-CE on predicted labels'
    """

    @property
    def words(self) -> str:
        """See the base."""
        return "on predicted labels"

    def search(
        self,
        target: Target,
        inputs: Tensor,
        labels: Tensor,
        *,
        threat_model: ThreatModel,
        generator: torch.Generator,
    ) -> Tensor:
        """See :meth:`Attack.search`; one query of the whole batch goes before."""
        predicted = query(target, inputs).argmax(1)
        return run_attack(self.attack, target, inputs, predicted, threat_model=threat_model, generator=generator)


@settings_class
class ThroughOtherLogits(_Wrapped):
    """Any attack, shown other logits of a defense than those that decide; a subclass states which.

    The module that is attacked, and judged, stays as it is: what is shown is another one that shares all parts with it
    but those that are exchanged. Where the target has none of them the attack is refused.
    """

    @abstractmethod
    def other(self, part: nn.Module) -> nn.Module | None:
        """What is shown in the place of a part of the target, or None where it stays."""

    def search(
        self,
        target: Target,
        inputs: Tensor,
        labels: Tensor,
        *,
        threat_model: ThreatModel,
        generator: torch.Generator,
    ) -> Tensor:
        """See :meth:`Attack.search`."""
        shown = self._exchanged(target.module)
        if shown is None:
            raise AttackRefusedError(
                f"{self.name}: got {type(target.module).__name__}, in which there is nothing to exchange; run "
                f"{self.attack.name} on it as it is"
            )
        other = replace(target, module=shown)
        return run_attack(self.attack, other, inputs, labels, threat_model=threat_model, generator=generator)

    def _exchanged(self, module: nn.Module) -> nn.Module | None:
        """The module with its parts exchanged, which shares all others and its hooks; None where there are none."""
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
