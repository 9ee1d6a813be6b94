"""From what the runs left to ``result.json``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from robust_ext.engine.identity import describe, versions
from robust_ext.engine.subject import Finished, RunOutcome, Subject
from robust_ext.evaluations.robust_accuracy.curves import Floats, curve, differences


def make_content(
    finished: Finished,
    names: Sequence[str],
    epsilons: Sequence[float],
    subject: Subject,
    *,
    norm: str,
    origin: Mapping[str, str],
    total: float,
) -> dict[str, Any]:
    """Everything ``result.json`` holds.

    Args:
        finished: What the runs left.
        names: Of the attacks.
        epsilons: Budgets, rising.
        subject: What was attacked.
        norm: Of the budgets.
        origin: Where things came from.
        total: Seconds of this call.
    """
    correct = (subject.logits.argmax(1) == subject.labels).cpu().numpy()
    slack = _slack(finished, epsilons, subject)
    attacks, everything = [], np.where(correct, np.inf, 0.0)
    for name in names:
        runs = [left for left in finished.outcomes.values() if left.run.arms[0].short == name]
        smallest = _smallest(runs, correct)
        everything = np.minimum(everything, smallest)
        attack = runs[0].run.attack
        attacks.append(
            {
                "name": name,
                "description": describe(attack),
                "kind": attack.traits.kind,
                "robust_accuracy": curve(smallest, epsilons, slack=slack),
                "distances": _plain(smallest) if attack.traits.minimum_norm else None,
                "outcomes": dict(
                    sorted(Counter(record["outcome"] for left in runs for record in left.records).items())
                ),
                "seconds": _sum(runs, "seconds", "attack"),
                "passes": {way: _sum(runs, "passes", way) for way in ("forward", "backward")},
            }
        )
    for attack_entry, difference in zip(
        attacks, differences([entry["robust_accuracy"] for entry in attacks]), strict=True
    ):
        attack_entry["difference"] = difference
    return {
        "kind": "robust_accuracy",
        "samples": len(subject.samples),
        "norm": norm,
        "clean_accuracy": float(correct.mean()),
        "attacks": attacks,
        "worst_case": curve(everything, epsilons, slack=slack),
        "settings": {
            "epsilons": list(epsilons),
            "bounds": list(subject.bounds),
            **subject.described,
            **{f"{name}_origin": words for name, words in origin.items()},
        },
        "versions": versions(),
        "seed": subject.seed,
        "seconds": {
            "attack": sum(entry["seconds"] for entry in attacks),
            "verify": _sum(list(finished.outcomes.values()), "seconds", "verify"),
            "total": total,
        },
    }


def _slack(finished: Finished, epsilons: Sequence[float], subject: Subject) -> list[float]:
    """What a candidate may lie beyond each budget, as its verification allowed."""
    values = subject.inputs[0].numel()
    model = next(iter(finished.outcomes.values())).run.threat_model
    return [replace(model, epsilon=epsilon).tolerance(values) for epsilon in epsilons]


def _smallest(runs: Sequence[RunOutcome], correct: np.ndarray[Any, np.dtype[np.bool_]]) -> Floats:
    """The smallest perturbation of each sample that any of the runs found."""
    smallest: Floats = np.where(correct, np.inf, 0.0)
    for left in runs:
        found = [record["distance"] if record["outcome"] == "found" else np.inf for record in left.records]
        smallest = np.minimum(smallest, np.array(found, dtype=np.float64))
    return smallest


def _plain(distances: Floats) -> list[float | None]:
    return [float(value) if np.isfinite(value) else None for value in distances]


def _sum(runs: Sequence[RunOutcome], part: str, name: str) -> Any:
    return sum(timing[part][name] for left in runs for timing in left.timings)
