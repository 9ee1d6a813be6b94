"""From what the runs left to ``result.json``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robust_ext.engine.context import current_context
from robust_ext.engine.identity import describe, versions
from robust_ext.engine.run import Outcome
from robust_ext.evaluations.arm_runs import ArmRun
from robust_ext.evaluations.robust_accuracy.curves import Floats, curve, differences


def make_content(
    outcomes: Sequence[Outcome[ArmRun]], names: Sequence[str], epsilons: Sequence[float], *, total: float
) -> dict[str, Any]:
    """Everything ``result.json`` holds."""
    run, given = outcomes[0].run, outcomes[0].run.given
    values = given.inputs[0].numel()
    # What a candidate may lie beyond each budget, as its verification allowed.
    slack = [replace(run.threat_model, epsilon=epsilon).tolerance(values) for epsilon in epsilons]
    attacks, everything = [], np.where(given.correct, np.inf, 0.0)
    for name in names:
        mine = [left for left in outcomes if left.run.arms[0].short == name]
        smallest = _smallest(mine, given.correct)
        everything = np.minimum(everything, smallest)
        attacks.append(_attack(name, mine, smallest, curve(smallest, epsilons, slack=slack)))
    for entry, difference in zip(attacks, differences([one["robust_accuracy"] for one in attacks]), strict=True):
        entry["difference"] = difference
    return {
        "kind": "robust_accuracy",
        "samples": len(given.ids),
        "norm": run.threat_model.norm,
        "clean_accuracy": float(given.correct.mean()),
        "attacks": attacks,
        "worst_case": curve(everything, epsilons, slack=slack),
        "settings": {
            "epsilons": list(epsilons),
            "bounds": list(given.bounds),
            **given.described,
            "batch_size": run.batch_size,
            "seed": run.seed,
            **current_context().origins,
        },
        "versions": versions(),
        "seed": run.seed,
        "seconds": {
            "attack": sum(entry["seconds"] for entry in attacks),
            "verify": sum(left.total("seconds", "verify") for left in outcomes),
            "total": total,
        },
    }


def _attack(name: str, mine: Sequence[Outcome[ArmRun]], smallest: Floats, rows: list[dict[str, Any]]) -> dict[str, Any]:
    attack = mine[0].run.attack
    distances = [float(value) if np.isfinite(value) else None for value in smallest]
    return {
        "name": name,
        "description": describe(attack),
        "kind": attack.traits.kind,
        "robust_accuracy": rows,
        "distances": distances if attack.traits.minimum_norm else None,
        "outcomes": dict(sorted(Counter(record["outcome"] for left in mine for record in left.records).items())),
        "seconds": sum(left.total("seconds", "attack") for left in mine),
        "passes": {way: sum(left.total("passes", way) for left in mine) for way in ("forward", "backward")},
    }


def _smallest(mine: Sequence[Outcome[ArmRun]], correct: NDArray[np.bool_]) -> Floats:
    """The smallest perturbation of each sample that any of the runs found."""
    smallest: Floats = np.where(correct, np.inf, 0.0)
    for left in mine:
        found = [record["distance"] if record["outcome"] == "found" else np.inf for record in left.records]
        smallest = np.minimum(smallest, np.array(found, dtype=np.float64))
    return smallest
