"""Causes that weaken the attacks on a test-time defense, and signs of masked gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from robust_ext.engine.run import Outcome
from robust_ext.evaluations.adaptive.cascade import OVER
from robust_ext.evaluations.adaptive.plan import EXPOSURES
from robust_ext.evaluations.adaptive.protocol import StepRun
from robust_ext.evaluations.causes.attaching import Attacked, as_entry, broke_none, find_causes, prober
from robust_ext.evaluations.causes.finding import Finding, ranked
from robust_ext.evaluations.causes.pasting import Caller
from robust_ext.evaluations.causes.probes import ModelProbe
from robust_ext.evaluations.causes.setup import find_setup

# What it means that attacks of the first kind are stronger than those of the second.
_STRONGER = {
    ("one step", "many steps"): (
        "One step (robust accuracy {low:.3f}) is stronger than many ({high:.3f}): the iterative attacks are led "
        "astray; average over more draws, or take smaller steps."
    ),
    ("black-box", "white-box"): (
        "Black-box attacks (robust accuracy {low:.3f}) are stronger than white-box ones ({high:.3f}): gradients "
        "through the defense are masked."
    ),
    ("transfer", "white-box"): (
        "Transfer from the static model (robust accuracy {low:.3f}) is stronger than white-box attacks ({high:.3f}): "
        "they do not get through the defense."
    ),
}


def find_signs(content: Mapping[str, Any], broken: Mapping[str, tuple[int, int]]) -> list[str]:
    """Signs that the evaluation, or the defense's own, is not to be trusted (Carlini et al. 2019; section 4).

    Attacks are compared where each was run on all samples. ``broken`` is of how many samples that stood each attack
    was run on, and how many it broke, in order.
    """
    attacks = [one for one in content["defended"]["attacks"] if one["robust_accuracy"] is not None]
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for one in attacks:
        step = ("one step" if one["name"].startswith("FGSM") else "many steps",) * (one["category"] == "white-box")
        for kind in (one["category"], *step):
            groups.setdefault(kind, []).append(one)
    strongest = {kind: min(chosen, key=lambda one: float(one["robust_accuracy"])) for kind, chosen in groups.items()}
    found = []
    for (first, second), words in _STRONGER.items():
        if first in strongest and second in strongest:
            low, high = strongest[first], strongest[second]
            # What is within the noise of a random defense, or one sample, means nothing.
            noise = low["deviation"] + high["deviation"] + 1.5 / content["samples"]
            if low["robust_accuracy"] < high["robust_accuracy"] - noise:
                found.append(words.format(low=low["robust_accuracy"], high=high["robust_accuracy"]))
    # Black-box attacks that broke what white-box ones, on the same samples, had left.
    every = content["defended"]["attacks"]
    last = max((place for place, one in enumerate(every) if one["category"] == "white-box"), default=len(every))
    for one in every[last + 1 :]:
        tried, lost = broken[one["name"]]
        # One sample means nothing.
        if one["category"] == "black-box" and one["exposure"] == "defense" and lost > 1:
            found.append(
                f"{one['name']} broke {lost} of {tried} samples that white-box attacks had left: gradients through the "
                "defense are masked."
            )
    if any(one["reason"].startswith(OVER) for one in content["not_run"]):
        found.append("The time was over before everything was run: robust accuracy is an upper bound.")
    if content["random"] and content["settings"]["draws"] == 1:
        found.append("The defense is random, and gradients are of a single draw: average over several (draws).")
    if content["defended"]["clean_accuracy"] < content["static"]["clean_accuracy"] - 0.1:
        found.append("The defense costs more than ten points of clean accuracy.")
    return found


def find_faults(ran: Sequence[Outcome[StepRun]]) -> list[Finding]:
    """Find causes that weaken steps; ranked. Steps of other exposures are not compared."""
    run, found = ran[0].run, list[Finding]()
    given, defense = run.given, run.defense
    if setup := find_setup(given, seed=run.settings.seed):
        attacks = {one.run.title: one.run.step.attack for one in ran if one.run.step is not None}
        return Caller(module=defense, attacks=attacks, images=given.inputs.dim() == 4).addressed(setup)
    for exposure in EXPOSURES:
        module = defense.classifier if exposure == "static" else defense
        probe = prober(module, given.inputs, given.labels, threat_model=given.threat_model, seed=run.settings.seed)
        steps = [
            _attacked(one, ran[0].records) for one in ran[1:] if one.run.step and one.run.step.exposure == exposure
        ]
        # Another backward pass than the defense's own is not what its probe is about; its draws are the same.
        used = probe if exposure in ("static", "defense") else partial(ModelProbe, random=defense.random)
        attacks = {one.name: one.attack for one in steps}
        caller = Caller(module=module, attacks=attacks, images=given.inputs.dim() == 4)
        found += caller.addressed(find_causes(steps, used, compared=False))
    known = {"random_output": defense.random, "batch_dependent": defense.batch_level}
    return ranked(one for one in found if not known.get(one.code))


def _attacked(one: Outcome[StepRun], clean: Sequence[Mapping[str, Any]]) -> Attacked:
    """Return the results of a step on its own samples."""
    step, given = one.run.step, one.run.given
    assert step is not None

    def right(record: Mapping[str, Any]) -> bool:
        return bool(record["static"] if step.exposure == "static" else np.mean(record["right"]) > 0.5)

    entries = {}
    for record in one.records:
        outcome, before = record["outcome"], clean[record["index"]]
        if outcome in ("found", "not_adversarial"):
            outcome = "not_adversarial" if right(record) else "found"
        entries[record["index"]] = as_entry({**record, "outcome": outcome}, correct=right(before))
    return Attacked(
        name=step.name,
        attack=step.attack,
        entries=entries,
        threat_model=given.threat_model,
        # What others left of the samples is hard to break, and no sign of a fault.
        failed=broke_none(entries.values()) and 2 * len(entries) >= sum(map(right, clean)),
        budgets={},
    )
