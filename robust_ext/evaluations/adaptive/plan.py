"""The plan of attacks on a test-time defense, and their exposures.

Source: Croce et al., "Evaluating the Adversarial Robustness of Adaptive Test-time Defenses" (2022), section 4:
transfer from the static model, black-box attacks, white-box attacks through plain gradients where there are some, BPDA
in several forms, and EoT where there is randomness; the worst case over all of them, sample by sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from robust_ext.attacks.base import Attack
from robust_ext.attacks.transfer import Transfer
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.threat import ThreatModel
from robust_ext.core.validation import check_choice
from robust_ext.evaluations.adaptive.settings import CATEGORIES, AdaptiveSettings
from robust_ext.models.adaptive import AdaptiveDefense
from robust_ext.models.bpda import BPDA
from robust_ext.models.eot import EoT
from robust_ext.registry.attack import as_attack

EXPOSURES = ("static", "defense", "identity", "frozen", "trajectory")


@dataclass(frozen=True, kw_only=True)
class Step:
    """One attack on one exposure of a defense.

    Args:
        name: Unlike those of other steps.
        category: ``"naive"``: as a static model is attacked, with small effort. ``"transfer"``: on the static model
            or another network, with full effort. ``"black-box"``: by labels or logits alone. ``"white-box"``: through
            the defense.
        attack: The attack.
        exposure: What it is run on: the ``"static"`` model, the ``"defense"`` with its own gradients, or with those of
            :class:`robust_ext.models.bpda.BPDA`, ``"identity"``, ``"frozen"`` or ``"trajectory"``.
        averaged: Whether a random defense is averaged over draws.
        after: Name of a step that is run first; unless all are run on all, this one is then run on as many samples as
            passes are left for, by it and all others that follow one: those that the other came nearest to breaking,
            or, where this one is ``warm``, all so far.
        warm: Whether it begins, unless all are run, at each sample's best point of the steps before it.
    """

    name: str
    category: str
    attack: Attack
    exposure: str
    averaged: bool = True
    after: str = ""
    warm: bool = False

    def __post_init__(self) -> None:
        check_choice("category", self.category, CATEGORIES)
        check_choice("exposure", self.exposure, EXPOSURES)

    def module(self, defense: AdaptiveDefense, settings: AdaptiveSettings) -> nn.Module:
        """Return the module under attack, from inputs to logits."""
        if self.exposure == "static":
            return defense.classifier
        exposed: nn.Module = defense if self.exposure == "defense" else BPDA(defense, backward=self.exposure)
        if defense.random and self.averaged and self.category == "white-box":
            return EoT(exposed, draws=settings.draws)
        return exposed


def as_steps(
    attacks: object,
    defense: AdaptiveDefense,
    settings: AdaptiveSettings,
    *,
    threat_model: ThreatModel,
    surrogates: Mapping[str, nn.Module],
) -> list[Step]:
    """Steps of attacks as :func:`robust_ext.evaluate_defense` takes them.

    Attacks that are no steps are run on the defense with its own gradients. None at all, or two of one name, raise
    InvalidArgumentError.
    """
    steps: list[Step] = []
    for one in attacks if isinstance(attacks, (list, tuple)) else [attacks]:
        if isinstance(one, Step):
            steps.append(one)
        elif one is None or one == "recommended":
            steps += plan_steps(defense, settings, threat_model=threat_model, surrogates=surrogates)
        else:
            attack = as_attack(one, argument="attacks")
            category = "white-box" if attack.traits.gradients else "black-box"
            steps.append(Step(name=attack.name, category=category, attack=attack, exposure="defense"))
    if not steps:
        raise InvalidArgumentError("attacks", attacks, "at least one attack, or None for those that are recommended")
    names = [step.name for step in steps]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InvalidArgumentError("attacks", f"several called {', '.join(twice)}", "steps with names of their own")
    return steps


def plan_steps(
    defense: AdaptiveDefense,
    settings: AdaptiveSettings,
    *,
    threat_model: ThreatModel,
    surrogates: Mapping[str, nn.Module] | None = None,
) -> list[Step]:
    """The recommended attacks on a defense.

    Args:
        defense: The attacked defense.
        settings: How hard.
        threat_model: Label-only RayS and Square are run where they work for its norm.
        surrogates: Networks by name from which points are transferred besides those of the static model.
    """
    # The length that many defenses' own evaluations took.
    naive = as_attack(f"robust_ext:ObjectivePGD(steps=20, step_size={threat_model.epsilon / 4})", name="PGD-20")
    planned = [
        _step("PGD-20 on the static model", "naive", naive),
        _step("PGD-20 on the defense", "naive", naive, "defense"),
    ]
    apgd = _apgd(settings.transfer_steps)
    planned += [_step(f"APGD-{loss} on the static model", "transfer", attack) for loss, attack in apgd.items()]
    planned += [
        _step(f"APGD-{loss} on {name}", "transfer", Transfer(surrogates={name: network}, attacks=[attack]))
        for name, network in (surrogates or {}).items()
        for loss, attack in apgd.items()
    ]
    planned += _black_box(threat_model.norm, settings, in_groups=defense.batch_level)
    # What breaks a row of these is judged by the same logits: it may stop there.
    sure = not (settings.full or defense.random or defense.batch_level)
    apgd = _apgd(settings.steps, stop_early=sure)
    for exposure, words in _exposures(defense).items():
        after = "" if settings.full or exposure == "identity" else "APGD-ce, BPDA identity"
        planned += [
            _step(f"APGD-{loss}, {words}", "white-box", attack, exposure, after=after) for loss, attack in apgd.items()
        ]
    single = as_attack("robust_ext:ObjectivePGD(algorithm='fgsm')", name="FGSM")
    planned.append(_step("FGSM, BPDA identity", "white-box", single, "identity"))
    return planned


def _apgd(steps: int, *, stop_early: bool = False) -> dict[str, Attack]:
    """APGD by its loss."""
    return {
        loss: as_attack(f"robust_ext:APGD(steps={steps}, loss='{loss}', stop_early={stop_early})")
        for loss in ("ce", "margin")
    }


def _black_box(norm: str, settings: AdaptiveSettings, *, in_groups: bool) -> list[Step]:
    """Attacks by labels or logits alone; where not everything is run, Square with few queries comes before them.

    What that comes nearest to, from where it begins, is what more queries break from there. Few queries with windows
    that shrink as over all of them break more than with a schedule of their own, which soon leaves single pixels. Of
    batch-level defenses few samples are left out, as groups are attacked whole, and so little would be left for what
    follows: there they are fewer.
    """
    kinds = {"linf": ("Square", "RayS"), "l2": ("Square",)}.get(norm, ())
    few, planned = max(settings.queries // (10 if in_groups else 5), 1), list[Step]()
    schedule = None if in_groups else settings.queries
    for exposure, words in (("static", "static model"), ("defense", "defense")) if kinds else ():
        whole = {kind: as_attack(f"robust_ext:{kind}(queries={settings.queries})", name=kind) for kind in kinds}
        short = f"robust_ext:Square(queries={few}, schedule={schedule})"
        first, after = as_attack(short, name=f"Square ({few} queries)"), ""
        if not settings.full:
            if exposure == "defense":
                after = f"{first.name}, warm start"
                planned.append(_step(after, "black-box", first, exposure, warm=True))
                planned.append(
                    _step("Square, warm start", "black-box", whole["Square"], exposure, after=after, warm=True)
                )
            after = f"{first.name} on the {words}"
            planned.append(_step(after, "black-box", first, exposure))
        planned += [
            _step(f"{kind} on the {words}", "black-box", attack, exposure, after=after)
            for kind, attack in whole.items()
        ]
    return planned


def _step(name: str, category: str, attack: Attack, exposure: str = "static", **more: Any) -> Step:
    return Step(name=name, category=category, attack=attack, exposure=exposure, **more)


def _exposures(defense: AdaptiveDefense) -> dict[str, str]:
    """Exposures of white-box attacks, as text."""
    found = {"defense": "plain gradients", "identity": "BPDA identity"}
    if defense.steps > 0:
        # Holding the change of the input has the identity's gradient, where a defense does not define another.
        if type(defense).frozen is not AdaptiveDefense.frozen:
            found["frozen"] = "BPDA frozen"
        # Without points in between it is the identity again.
        if defense.has_trajectory:
            found["trajectory"] = "BPDA trajectory"
    return found
