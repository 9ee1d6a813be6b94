"""Hardness calibration: start as hard as possible, ease until the attack is near perfect (section 4.3).

The points of each sample are measured once; every hardness is another readout or another bias on the same features,
and the random attack counts its points for all of them. Only the attack itself is run again at each step.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from robust_ext.attacks.base import Attack
from robust_ext.core.target import Counted
from robust_ext.engine.task import Work
from robust_ext.evaluations.binarization.attacking import ProblemAttack
from robust_ext.evaluations.binarization.forward import Forward
from robust_ext.evaluations.binarization.problems import Problems, fit, measure
from robust_ext.evaluations.binarization.random_attack import random_reach
from robust_ext.evaluations.binarization.settings import BinarizationSettings


def calibrate(
    features: Counted,
    readout: nn.Module,
    attacks: Mapping[str, Attack],
    inputs: Tensor,
    samples: Sequence[int],
    settings: BinarizationSettings,
    *,
    forward: Forward,
) -> Work[dict[str, Any]]:
    """Find the hardest setting at which the best attack is near perfect, and the curves on the way there.

    Kappa is eased first, with all inner points; when no kappa suffices, a third and a tenth of the inner points are
    tried. At the ``chosen`` kappa (None when nothing was easy enough) the score against the number of inner points
    completes the picture.
    """
    begin, before = time.perf_counter(), features.counter.snapshot()
    kappas = sorted({0.9999, 0.999, 0.99, 0.9, 0.5, 0.0, settings.kappa}, reverse=True)
    counts = sorted({max(1, settings.inner_points // part) for part in (1, 3, 10)}, reverse=True)
    measured = measure(forward, inputs, samples, settings)
    problems = {count: fit(measured, readout, settings, inner_points=count) for count in counts}
    hardest = [replace(settings, kappa=kappas[0]).boundary_position] * len(counts)
    reach, _ = random_reach(forward, list(problems.values()), hardest, settings)
    random = dict(zip(counts, reach.unbind(1), strict=True))
    rows: list[dict[str, Any]] = []
    chosen: dict[str, Any] | None = None

    def score(kappa: float, count: int) -> Work[float]:
        tried, best = replace(settings, kappa=kappa, inner_points=count), 0.0
        for name, attack in attacks.items():
            posed = ProblemAttack(attack=attack, features=features, settings=tried)
            row = yield from _row(name, posed, problems[count], random[count])
            rows.append(row)
            best = max(best, row["score"] or 0.0)
        return best

    for count, kappa in ((count, kappa) for count in counts for kappa in kappas):
        if (yield from score(kappa, count)) >= settings.threshold:
            chosen = {"kappa": kappa, "inner_points": count}
            break
    for count in () if chosen is None else [count for count in counts if count < chosen["inner_points"]]:
        yield from score(kappa, count)
    spent = features.counter.since(before)
    return {
        "chosen": chosen,
        "rows": rows,
        "seconds": time.perf_counter() - begin,
        "passes": {"forward": spent.forward, "backward": spent.backward},
    }


def _row(name: str, posed: ProblemAttack, problems: Problems, random: Tensor) -> Work[dict[str, Any]]:
    settings = posed.settings
    rows = [row for row, separable in enumerate(problems.separable.tolist()) if separable]
    done = (yield from posed.run(problems.select(rows))).records
    planted = [row for row in rows if done[problems.samples[row]]["outcome"] != "not_planted"]
    found = [done[problems.samples[row]]["outcome"] == "found" for row in planted]
    hits = [float(random[row]) > settings.boundary_position for row in planted]
    return {
        "attack": name,
        "kappa": settings.kappa,
        "inner_points": settings.inner_points,
        "score": sum(found) / len(found) if found else None,
        "random_score": sum(hits) / len(hits) if hits else None,
        "samples": len(planted),
    }
