"""The plan of attacks on a test-time defense, and their exposures.

Source: Croce et al., "Evaluating the Adversarial Robustness of Adaptive Test-time Defenses" (2022), section 4:
transfer from the static model, black-box attacks, white-box attacks through plain gradients where there are some, BPDA
in several forms, and EoT where there is randomness; the worst case over all of them, sample by sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from robust_ext.attacks._common.objectives import OBJECTIVES
from robust_ext.attacks.apgd import APGD
from robust_ext.attacks.base import Attack
from robust_ext.attacks.transfer import Transfer
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.settings import declared
from robust_ext.core.threat import ThreatModel
from robust_ext.core.validation import check_choice
from robust_ext.evaluations.adaptive.settings import CATEGORIES, AdaptiveSettings
from robust_ext.models.adaptive import AdaptiveDefense
from robust_ext.models.bpda import BPDA
from robust_ext.models.eot import EoT
from robust_ext.registry.attack import as_attack

EXPOSURES = ("static", "defense", "identity", "frozen", "trajectory")


class View(NamedTuple):
    """A step's view of a defense: averaged over draws, with one draw held, with fewer inner steps."""

    averaged: bool = True
    held: bool = False
    inner_steps: int | None = None


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
        held: Whether a random defense makes one and the same draw at every query instead (section 4, recommendation 5).
        inner_steps: Inner steps of the defense that is attacked; its own when left out. It is judged with its own.
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
    held: bool = False
    inner_steps: int | None = None
    after: str = ""
    warm: bool = False

    def __post_init__(self) -> None:
        check_choice("category", self.category, CATEGORIES)
        check_choice("exposure", self.exposure, EXPOSURES)

    def module(self, defense: AdaptiveDefense, settings: AdaptiveSettings) -> nn.Module:
        """Return the module under attack, from inputs to logits."""
        if self.exposure == "static":
            return defense.classifier
        if self.inner_steps is not None:
            defense = defense.with_steps(self.inner_steps)
        exposed: nn.Module = defense if self.exposure == "defense" else BPDA(defense, backward=self.exposure)
        if defense.random and self.held:
            return EoT(exposed, draws=1, seed=settings.seed, fixed=True)
        return EoT(exposed, draws=settings.draws) if defense.random and self.view.averaged else exposed

    @property
    def view(self) -> View:
        """The attack's view, next to the exposure."""
        averaged = self.averaged and not self.held and self.category == "white-box"
        return View(averaged, self.held, self.inner_steps)


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
        elif one is None or (isinstance(one, str) and one == "recommended"):
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
        raise InvalidArgumentError("attacks", f"several named {', '.join(twice)}", "steps with names of their own")
    return steps


def plan_steps(
    defense: AdaptiveDefense,
    settings: AdaptiveSettings,
    *,
    threat_model: ThreatModel,
    surrogates: Mapping[str, nn.Module] | None = None,
) -> list[Step]:
    """The recommended attacks on a defense, as hard as the settings say.

    Label-only RayS and Square are run where they work for the threat model's norm. Points are transferred from the
    static model, and from further networks (``surrogates``) by name.
    """
    # The length that many defenses' own evaluations took.
    naive = as_attack(f"robust_ext:ObjectivePGD(steps=20, step_size={threat_model.epsilon / 4})", name="PGD-20")
    planned = [
        _step("PGD-20 on the static model", "naive", naive),
        _step("PGD-20 on the defense", "naive", naive, "defense"),
    ]
    apgd = _apgd(settings, settings.transfer_steps)
    planned += [_step(f"APGD-{loss} on the static model", "transfer", attack) for loss, attack in apgd.items()]
    planned += [
        _step(f"APGD-{loss} on {name}", "transfer", Transfer(surrogates={name: network}, attacks=[attack]))
        for name, network in (surrogates or {}).items()
        for loss, attack in apgd.items()
    ]
    planned += _black_box(threat_model.norm, settings, in_groups=defense.batch_level)
    # What breaks a row of these is judged by the same logits: it may stop there.
    alone = not (settings.full or defense.random or defense.batch_level)
    apgd = _apgd(settings, settings.steps, stop_early=alone)
    exposures = {"defense": "plain gradients", "identity": "BPDA identity"}
    # Holding the change of the input has the identity's gradient, where a defense does not define another.
    if defense.steps > 0 and type(defense).frozen is not AdaptiveDefense.frozen:
        exposures["frozen"] = "BPDA frozen"
    # Without points in between it is the identity again.
    if defense.steps > 0 and defense.has_trajectory:
        exposures["trajectory"] = "BPDA trajectory"
    for exposure, words in exposures.items():
        after = "" if settings.full or exposure == "identity" else f"APGD-{next(iter(apgd))}, BPDA identity"
        planned += [
            _step(f"APGD-{loss}, {words}", "white-box", attack, exposure, after=after) for loss, attack in apgd.items()
        ]
    for words, view in _views(defense).items() if settings.full else ():
        planned += [
            _step(f"APGD-{loss}, BPDA identity, {words}", "white-box", attack, "identity", **view)
            for loss, attack in apgd.items()
        ]
    single = as_attack("robust_ext:ObjectivePGD(algorithm='fgsm')", name="FGSM")
    return [*planned, _step("FGSM, BPDA identity", "white-box", single, "identity")]


def _apgd(settings: AdaptiveSettings, steps: int, *, stop_early: bool = False) -> dict[str, Attack]:
    """APGD by its loss."""
    losses = settings.losses or ("ce", "margin", *(["targeted-dlr"] if settings.full else []))
    shared: dict[str, Any] = {"steps": steps, "restarts": settings.restarts, "stop_early": stop_early}
    aims: dict[str, Any] = {"target_classes": settings.target_classes}
    return {loss: APGD(loss=loss, **shared, **(aims if OBJECTIVES[loss].aims else {})) for loss in losses}


def _views(defense: AdaptiveDefense) -> dict[str, dict[str, Any]]:
    """Other views of a defense than its own draws and inner steps, where there are some."""
    views: dict[str, dict[str, Any]] = {"one draw held": {"held": True}} if defense.random else {}
    # A quarter, as the paper takes 5 of HD's 20 (section 3.4); fewer than two are no path.
    if "steps" in declared(type(defense)) and (few := defense.steps // 4) > 1:
        views[f"{few} inner steps"] = {"inner_steps": few}
    return views


def _black_box(norm: str, settings: AdaptiveSettings, *, in_groups: bool) -> list[Step]:
    """Attacks by labels or logits alone; where not everything is run, Square with few queries comes before them.

    What that comes nearest to, from where it begins, is what more queries break from there. Few queries with windows
    that shrink as over all of them break more than with a schedule of their own, which soon leaves single pixels. Of
    batch-level defenses few samples are left out, as groups are attacked whole, and so little would be left for what
    follows: there they are fewer.
    """
    kinds = ("Square", "RayS") if norm == "linf" else ("Square",)
    whole = {kind: as_attack(f"robust_ext:{kind}(queries={settings.queries})", name=kind) for kind in kinds}
    few = max(settings.queries // (10 if in_groups else 5), 1)
    short = f"robust_ext:Square(queries={few}, schedule={None if in_groups else settings.queries})"
    first, planned = as_attack(short, name=f"Square ({few} queries)"), list[Step]()
    for exposure, words in (("static", "static model"), ("defense", "defense")):
        after = "" if settings.full else f"{first.name} on the {words}"
        if not settings.full and exposure == "defense":
            warm = f"{first.name}, warm start"
            planned.append(_step(warm, "black-box", first, exposure, warm=True))
            planned.append(_step("Square, warm start", "black-box", whole["Square"], exposure, after=warm, warm=True))
        if after:
            planned.append(_step(after, "black-box", first, exposure))
        planned += [
            _step(f"{kind} on the {words}", "black-box", attack, exposure, after=after)
            for kind, attack in whole.items()
        ]
    return planned


def _step(name: str, category: str, attack: Attack, exposure: str = "static", **more: Any) -> Step:
    return Step(name=name, category=category, attack=attack, exposure=exposure, **more)
