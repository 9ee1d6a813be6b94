"""Which attacks are run on a test-time defense, and through what view of it.

Source: Croce et al., "Evaluating the Adversarial Robustness of Adaptive Test-time Defenses" (2022), section 4:
transfer from the static model, black-box attacks, white-box attacks through plain gradients where there are some, BPDA
in several forms, and EoT where there is randomness; the worst case over all of them, sample by sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from robust_ext.attacks.base import Attack
from robust_ext.attacks.transfer import Transfer
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.threat import ThreatModel
from robust_ext.core.validation import check_choice
from robust_ext.evaluations.adaptive.settings import AdaptiveSettings
from robust_ext.models.adaptive import AdaptiveDefense
from robust_ext.models.bpda import BPDA
from robust_ext.models.eot import EoT
from robust_ext.registry.attack import as_attack

CATEGORIES = ("naive", "transfer", "black-box", "white-box")
VIEWS = ("static", "defense", "identity", "frozen", "trajectory")


@dataclass(frozen=True, kw_only=True)
class Step:
    """One attack through one view of a defense.

    Args:
        name: Unlike those of other steps.
        category: ``"naive"``: as a static model is attacked, with small effort. ``"transfer"``: on the static model
            or another network, with full effort. ``"black-box"``: by labels or logits alone. ``"white-box"``: through
            the defense.
        attack: The attack.
        view: What it sees: the ``"static"`` model, the ``"defense"`` with its own gradients, or with those of
            :class:`robust_ext.models.bpda.BPDA`, ``"identity"``, ``"frozen"`` or ``"trajectory"``.
        averaged: Whether a random defense is averaged over draws.
    """

    name: str
    category: str
    attack: Attack
    view: str
    averaged: bool = True

    def __post_init__(self) -> None:
        check_choice("category", self.category, CATEGORIES)
        check_choice("view", self.view, VIEWS)

    def module(self, defense: AdaptiveDefense, settings: AdaptiveSettings) -> nn.Module:
        """What the attack sees, from inputs to logits."""
        if self.view == "static":
            return defense.classifier
        seen: nn.Module = defense if self.view == "defense" else BPDA(defense, backward=self.view)
        if defense.random and self.averaged and self.category == "white-box":
            return EoT(seen, draws=settings.draws)
        return seen


def plan_steps(
    defense: AdaptiveDefense,
    settings: AdaptiveSettings,
    *,
    threat_model: ThreatModel,
    attacks: Sequence[Step] = (),
    surrogates: Mapping[str, nn.Module] | None = None,
) -> list[Step]:
    """The recommended attacks on a defense, and further ones.

    Args:
        defense: What is attacked.
        settings: How hard.
        threat_model: Label-only RayS and Square are run where they know its norm.
        attacks: Further steps.
        surrogates: Networks by name from which points are transferred besides those of the static model.

    Raises:
        InvalidArgumentError: Two steps have one name.
    """
    steps, queries, norm = settings.steps, settings.queries, threat_model.norm
    # The length that many defenses' own evaluations took.
    naive = as_attack(f"robust_ext:ObjectivePGD(steps=20, step_size={threat_model.epsilon / 4})", name="PGD-20")
    apgd = {loss: as_attack(f"robust_ext:APGD(steps={steps}, loss='{loss}')") for loss in ("ce", "margin")}
    single = as_attack("robust_ext:ObjectivePGD(algorithm='fgsm')", name="FGSM")
    planned = [
        Step(name="PGD-20 on the static model", category="naive", attack=naive, view="static"),
        Step(name="PGD-20 on the defense", category="naive", attack=naive, view="defense"),
    ]
    planned += [
        Step(name=f"APGD-{loss} on the static model", category="transfer", attack=attack, view="static")
        for loss, attack in apgd.items()
    ]
    planned += [
        Step(
            name=f"APGD-{loss} on {name}",
            category="transfer",
            attack=Transfer(surrogates={name: network}, attacks=[attack]),
            view="static",
        )
        for name, network in (surrogates or {}).items()
        for loss, attack in apgd.items()
    ]
    if norm in ("linf", "l2"):
        square = as_attack(f"robust_ext:Square(queries={queries})", name="Square")
        planned += _black_box("Square", square)
    if norm == "linf":
        planned += _black_box("RayS", as_attack(f"robust_ext:RayS(queries={queries})", name="RayS"))
    views = {"defense": "plain gradients", "identity": "BPDA identity"}
    if defense.steps > 0:
        views |= {"frozen": "BPDA frozen", "trajectory": "BPDA trajectory"}
    if type(defense).frozen is AdaptiveDefense.frozen:
        # Holding the change of the input has the identity's gradient, where a defense does not say otherwise.
        views.pop("frozen", None)
    for view, words in views.items():
        planned += [
            Step(name=f"APGD-{loss}, {words}", category="white-box", attack=attack, view=view)
            for loss, attack in apgd.items()
        ]
    planned.append(Step(name="FGSM, BPDA identity", category="white-box", attack=single, view="identity"))
    planned += attacks
    names = [step.name for step in planned]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InvalidArgumentError("attacks", f"several called {', '.join(twice)}", "steps with names of their own")
    return planned


def _black_box(name: str, attack: Attack) -> list[Step]:
    return [
        Step(name=f"{name} on the static model", category="black-box", attack=attack, view="static"),
        Step(name=f"{name} on the defense", category="black-box", attack=attack, view="defense"),
    ]
