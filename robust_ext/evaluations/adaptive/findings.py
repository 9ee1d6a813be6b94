"""What weakens the attacks on a test-time defense, by what each was run on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from robust_ext.engine.run import Outcome
from robust_ext.evaluations.adaptive.plan import EXPOSURES
from robust_ext.evaluations.adaptive.protocol import StepRun
from robust_ext.evaluations.causes.attaching import Attacked, as_entry, broke_none, find_causes, prober
from robust_ext.evaluations.causes.finding import Finding, ranked
from robust_ext.evaluations.causes.pasting import Caller
from robust_ext.evaluations.causes.probes import ModelProbe
from robust_ext.evaluations.causes.setup import find_setup


def find_faults(ran: Sequence[Outcome[StepRun]]) -> list[Finding]:
    """What weakens the steps, by what each is run on; ranked. Steps of other exposures are not compared."""
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
    """What a step left of the samples, judged by what it was run on."""
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
