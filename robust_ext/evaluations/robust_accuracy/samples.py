"""The outcome of each run of an attack on each sample, and the nearest adversarial example of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robust_ext.core.tabular import Row
from robust_ext.engine.run import Outcome
from robust_ext.engine.verify import BROKEN
from robust_ext.evaluations.arms import ArmRun

Outcomes = Sequence[Outcome[ArmRun]]


def sample_rows(outcomes: Outcomes, epsilons: Sequence[float]) -> list[Row]:
    """Return a row for each run and sample, see :attr:`RobustAccuracyResult.records`."""
    rows: list[Row] = []
    for one in outcomes:
        run, given = one.run, one.run.given
        minimum, values = run.attack.traits.minimum_norm, given.inputs[0].numel()
        limits = [(at, at + replace(run.threat_model, epsilon=at).tolerance(values)) for at in epsilons]
        correct = given.correct.tolist()
        for record in one.records:
            index, distance = record["index"], record["distance"]
            broken = correct[index] and record["outcome"] in BROKEN
            trace = record.get("trace") or {}
            first = trace.get("adversarial_at")
            rows.append(
                {
                    "attack": run.arms[0].short,
                    "epsilon": None if minimum else run.arms[0].epsilon,
                    "index": index,
                    "sample": record["sample"],
                    "correct": correct[index],
                    "outcome": record["outcome"],
                    "predicted": record["predicted"],
                    "distance": distance,
                    "broken_at": next((at for at, most in limits if broken and (distance or 0.0) <= most), None),
                    # For the smallest perturbation the first point found is no evidence.
                    "queries": trace.get("queries") if not broken or first is None or minimum else first + 1,
                }
            )
    return rows


def nearest_examples(outcomes: Outcomes) -> NDArray[np.float32]:
    """Return the nearest verified adversarial example of each sample ``(N, ...)``; the input where there is none."""
    given = outcomes[0].run.given
    points: NDArray[Any] = given.inputs.cpu().numpy().copy()
    nearest = np.where(given.correct, np.inf, -np.inf)
    for one in outcomes:
        records = {record["index"]: record for record in one.records if record["outcome"] in BROKEN}
        for rows in one.run.blocks:
            better = [row for row in rows if row in records and (records[row]["distance"] or 0.0) < nearest[row]]
            if better:
                found = one.run.points(rows, one.store).cpu().numpy()
                points[better] = found[[row - rows[0] for row in better]]
                nearest[better] = [records[row]["distance"] or 0.0 for row in better]
    return points
