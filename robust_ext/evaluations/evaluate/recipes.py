"""Candidate recipes of a search, composed of factors: the view of the gradients, the loss, the length; or none of them.

The views come from findings, whose layer and remedies say where gradients die, and from what helps against any masking:
the mean over noisy inputs (Tramer et al., "On Adaptive Attacks to Adversarial Example Defenses", 2020, section 8) and
the straight-through gradient (Athalye, Carlini and Wagner, "Obfuscated Gradients Give a False Sense of Security", 2018,
section 4).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from robust_ext.attacks.adapted import FITTED, AdaptedAttack, adaptation_words
from robust_ext.attacks.apgd import APGD
from robust_ext.attacks.base import Attack
from robust_ext.attacks.random_search import RandomSearch
from robust_ext.attacks.rays import RayS
from robust_ext.attacks.square import Square
from robust_ext.core.errors import RobustExtError
from robust_ext.core.threat import ThreatModel
from robust_ext.evaluations.causes.finding import Finding
from robust_ext.evaluations.causes.remedies import BLUR
from robust_ext.evaluations.causes.rewriting import call_of
from robust_ext.registry.attack import as_attack

# The settings of an adapted attack that change the gradients or logits it sees.
_VIEW = ("bpda", "gradient_mode", "eot", "noise", "temperature")
# Steps of the first candidates, and of those that follow where these are too short.
SHORT, LONG = 20, 100
# Draws over which a first candidate averages, and over which later ones do.
FEW, MANY = 4, 16
# How often more a long recipe starts.
RESTARTS = 5
# Views of findings beyond the first few are rarely the right ones.
_MOST_VIEWS = 6
# What logits are divided by where they are too large for a loss, and where gradients are too small for their precision.
_LOUD, _QUIET = 100.0, 1e-3
_ANY = ThreatModel(norm="linf", epsilon=0.1)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """An attack that can be run again.

    Args:
        attack: What runs, under a name of its own.
        text: The attack as text, as :func:`robust_ext.as_attack` takes it.
        words: What differs from the standard attack, in a few words.
        cost: Passes a problem at most, backward ones counted twice; infinite where unknown.
        view, loss, steps, restarts: The factors that it is composed of; no steps for other attacks.
    """

    attack: Attack
    text: str
    words: str
    cost: float = inf
    view: Mapping[str, Any] = field(default_factory=dict)
    loss: str = ""
    steps: int = 0
    restarts: int = 1

    @classmethod
    def of(cls, attack: Attack, words: str, **factors: Any) -> Recipe | None:
        """Return an attack as a recipe, named by its words; None where it has no text."""
        call = call_of(attack)
        if call is None:
            return None
        # The norm decides how often some attacks take gradients, and not which is cheaper.
        cost = attack.cost(_ANY, classes=2)
        passes = inf if cost is None else float(cost.forward + 2 * cost.backward)
        return cls(attack=attack.named(words), text=call.changed(), words=words, cost=passes, **factors)


def compose(
    view: Mapping[str, Any] | None = None, *, loss: str = "margin", steps: int = SHORT, restarts: int = 1
) -> Recipe:
    """Return APGD with a loss and a length, through a view of the gradients.

    Example:
        >>> compose({"bpda": "quantise"}).words
        'margin, 20 steps, BPDA quantise'
        >>> compose(loss="ce").text
        'robust_ext:APGD(steps=20)'
    """
    view = dict(view or {})
    base = APGD(steps=steps, loss=loss, restarts=restarts)
    words = f"{loss}, {steps} steps{f' x {restarts}' if restarts > 1 else ''}"
    words = f"{words}, {adaptation_words(**view)}" if view else words
    attack = AdaptedAttack(attack=base, **view) if view else base
    made = Recipe.of(attack, words, view=view, loss=loss, steps=steps, restarts=restarts)
    assert made is not None
    return made


def first_recipes(findings: Sequence[Finding], *, random: bool = False) -> list[Recipe]:
    """Return a recipe for each view of the gradients, the cheapest first.

    A ``random`` model is averaged over draws in all of them.
    """
    found: list[dict[str, Any]] = [{}]
    for one in (one for one in findings if one.weight != "low"):
        found += [{name: remedy.view[name] for name in _VIEW if name in remedy.view} for remedy in one.remedies]
        if one.layer:
            found += [{"bpda": one.layer}, {"bpda": one.layer, "gradient_mode": "straight_through"}]
    any_model = (
        {"gradient_mode": "straight_through"},
        {"gradient_mode": FITTED},
        {"temperature": _QUIET},
        {"noise": BLUR},
    )
    found = [*found[: 1 + _MOST_VIEWS], *any_model]
    averaged = [{**view, "eot": FEW} if random or view.get("noise") else view for view in found]
    return sorted(_distinct(map(compose, averaged)), key=lambda one: one.cost)


def further_recipes(best: Sequence[Recipe]) -> list[Recipe]:
    """Return recipes that go further from the best ones so far: more draws, other noise, more steps, other losses."""
    made = list[Recipe]()
    for one in best:
        view = dict(one.view)
        if "eot" in view:
            made.append(compose({**view, "eot": MANY}, steps=one.steps))
        made += [
            compose({**view, "noise": BLUR, "eot": MANY}, steps=one.steps),
            compose({**view, "noise": BLUR / 4, "eot": MANY}, steps=one.steps),
            compose(view, steps=LONG),
            compose({**view, "temperature": _LOUD * float(view.get("temperature", 1.0))}, loss="ce"),
        ]
    return [one for one in _distinct(made) if one.text not in {old.text for old in best}]


def longer(recipe: Recipe) -> list[Recipe]:
    """Return the recipe with more restarts, and with more steps or smoother gradients; none where it is long already.

    Restarts come first: where a view of the gradients is only nearly right, more steps stay where they are.
    """
    view, call, more = dict(recipe.view), call_of(recipe.attack), recipe.restarts * RESTARTS
    if recipe.steps:
        if more > RESTARTS**2:
            return []
        found = [compose(view, loss=recipe.loss, steps=recipe.steps, restarts=more)]
        if recipe.steps < LONG:
            found.append(compose(view, loss=recipe.loss, steps=LONG, restarts=recipe.restarts))
        if "eot" in view:
            if view["eot"] <= MANY:
                draws = {**view, "eot": 4 * view["eot"]}
                found.append(compose(draws, loss=recipe.loss, steps=recipe.steps, restarts=recipe.restarts))
        elif "noise" not in view:
            smooth = {**view, "noise": BLUR, "eot": FEW}
            found.append(compose(smooth, loss=recipe.loss, steps=recipe.steps, restarts=recipe.restarts))
        return found
    restarts = None if call is None else call.value("restarts")
    if call is None or not isinstance(restarts, int) or restarts >= RESTARTS**2:
        return []
    made = as_attack(call.changed(restarts=restarts * RESTARTS))
    restarted = Recipe.of(made, f"{call.name}, {restarts * RESTARTS} restarts")
    return [] if restarted is None else [restarted]


def gradient_free(findings: Sequence[Finding], threat_model: ThreatModel, *, images: bool) -> list[Recipe]:
    """Return recipes without gradients, and the attacks that findings propose as they are."""
    made: list[Attack] = []
    for remedy in (remedy for one in findings if one.weight != "low" for remedy in one.remedies):
        if remedy.attack is not None:
            try:
                made.append(as_attack(remedy.attack))
            except RobustExtError:
                continue
    # Many short runs find more of what k winners hide than few long ones.
    made += [Square(queries=500, restarts=4)] if images else [RandomSearch(points=2000)]
    made += [RayS(queries=2000)] if threat_model.norm == "linf" else []
    recipes = [Recipe.of(one, one.description) for one in made if not one.refusal(threat_model=threat_model)]
    return _distinct(one for one in recipes if one is not None)


def _distinct(recipes: Iterable[Recipe]) -> list[Recipe]:
    found = dict[str, Recipe]()
    for one in recipes:
        found.setdefault(one.text, one)
    return list(found.values())
