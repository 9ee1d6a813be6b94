"""Hardness calibration: the hardest setting at which the best attack is near perfect (section 4.3).

It starts with the boundary as close to the planted points as possible. Where no attack is near perfect there, kappa is
eased; then, each by itself with all of kappa, the number of inner points, their radius (the gap), and the number of
planted points. Where one is, the boundary is moved the other way, to the deeper problems
that other attacks prove to have a solution. Either way ends in one setting.

The problems are the calibration's own, of other draws than those of the test: what a setting was chosen for is not what
is judged. The points of each sample are measured once; every hardness is another readout or another threshold on the
same features, and the random attack counts its points for all of them. Only the attacks are run again at each step.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from robust_ext.attacks.base import Attack
from robust_ext.core.random import derive_seed
from robust_ext.core.target import Counted
from robust_ext.engine.task import Work
from robust_ext.evaluations.binarization.attacking import Attacked, ProblemAttack
from robust_ext.evaluations.binarization.depth_scores import score_depths
from robust_ext.evaluations.binarization.forward import Forward
from robust_ext.evaluations.binarization.posing import random_reach
from robust_ext.evaluations.binarization.problems import Problems, fit, measure
from robust_ext.evaluations.binarization.reasons import explain_calibration
from robust_ext.evaluations.binarization.settings import BinarizationSettings
from robust_ext.evaluations.binarization.witnesses import Deepest, find_witnesses, pose_deeper

# Where the boundary is tried, next to where the settings put it; the parts of the inner points, and what is easier than
# the settings' gap and number of planted points.
_KAPPAS, _PARTS = (0.9999, 0.999, 0.99, 0.9, 0.5, 0.0), (1, 3, 10)
_GAPS, _PLANTED = (0.2, 0.5), (4, 10)
_POINTS = ("inner_points", "gap", "boundary_points")

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Problems of a few samples at several hardnesses, and the attacks that are run on them."""

    features: Counted
    readout: nn.Module
    attacks: Mapping[str, Attack]
    inputs: Tensor  # (B, ...)
    samples: Sequence[int]  # Their ids.
    given: BinarizationSettings
    forward: Forward

    def run(self) -> Work[Row]:
        """The ``chosen`` setting (None where nothing is easy enough), the ``reason``, and all ``rows`` on the way."""
        begin, before = time.perf_counter(), self.features.counter.snapshot()
        steps = [replace(points, kappa=kappa) for points in [*self.fewer, *self.other] for kappa in self.kappas]
        rows: list[Row] = []
        chosen: Row | None = None
        for tried in steps:
            results = yield from self._run(tried)
            rows += (found := self._rows(tried, results))
            if max(row["score"] or 0.0 for row in found) >= self.given.threshold:
                chosen = {"kappa": tried.kappa, **_points(tried), "depth": 1.0}
                break
        if chosen is not None and tried is steps[0]:
            deeper = yield from self._deeper(tried, results)
            rows += deeper
            chosen["depth"] = self._deepest(deeper)
        for points in () if chosen is None else self.fewer:
            if points.inner_points < tried.inner_points:
                fewer = replace(points, kappa=tried.kappa)
                rows += self._rows(fewer, (yield from self._run(fewer)))
        spent = self.features.counter.since(before)
        return {
            "chosen": chosen,
            "reason": explain_calibration(chosen, rows, self.given),
            "rows": rows,
            "seconds": time.perf_counter() - begin,
            "passes": {"forward": spent.forward, "backward": spent.backward},
        }

    @cached_property
    def settings(self) -> BinarizationSettings:
        """The settings of the test, with a seed for the calibration's draws."""
        return replace(self.given, judge_seed=derive_seed(self.given.seed_of_judge, "calibration"))

    @property
    def kappas(self) -> list[float]:
        """The hardest first."""
        return sorted({*_KAPPAS, self.given.kappa}, reverse=True)

    @property
    def fewer(self) -> list[BinarizationSettings]:
        """Settings with fewer inner points, the hardest first."""
        counts = {max(1, self.given.inner_points // part) for part in _PARTS}
        return [replace(self.settings, inner_points=count) for count in sorted(counts, reverse=True)]

    @property
    def other(self) -> list[BinarizationSettings]:
        """Settings with a smaller ball of inner points, then with more planted points."""
        gaps = [replace(self.settings, gap=gap) for gap in _GAPS if gap > self.given.gap]
        more = [count for count in _PLANTED if count > self.given.boundary_points]
        return [*gaps, *(replace(self.settings, boundary_points=count) for count in more)]

    @cached_property
    def _posed(self) -> dict[tuple[float, ...], tuple[Problems, dict[int, float]]]:
        """Results of :meth:`_problems`, by the numbers of points."""
        return {}

    def _problems(self, tried: BinarizationSettings) -> tuple[Problems, dict[int, float]]:
        """The problems at settings, and in each, by id, the best reach of random points, exact at all kappas.

        Those with fewer inner points are of the same measured points.
        """
        key = tuple(_points(tried).values())
        if key not in self._posed:
            fewer = [tuple(_points(one).values()) for one in self.fewer]
            alike = self.fewer if key in fewer else [tried]
            measured = measure(self.forward, self.inputs, self.samples, alike[0])
            problems = [fit(measured, self.readout, one, inner_points=one.inner_points) for one in alike]
            hardest = [replace(self.settings, kappa=self.kappas[0]).boundary_position] * len(alike)
            deepest = self.given.depths[-1]
            reach, _ = random_reach(self.forward, problems, hardest, self.settings, deepest=deepest)
            for one, posed, column in zip(alike, problems, reach.T.tolist(), strict=True):
                self._posed[tuple(_points(one).values())] = posed, dict(zip(self.samples, column, strict=True))
        return self._posed[key]

    def _attacks(self, tried: BinarizationSettings) -> dict[str, ProblemAttack]:
        return {
            name: ProblemAttack(attack=attack, features=self.features, settings=tried)
            for name, attack in self.attacks.items()
        }

    def _separable(self, tried: BinarizationSettings) -> Problems:
        problems, _ = self._problems(tried)
        return problems.select([row for row, separable in enumerate(problems.separable.tolist()) if separable])

    def _run(self, tried: BinarizationSettings) -> Work[dict[str, Attacked]]:
        """Run every attack at a setting."""
        results = {}
        for name, posed in self._attacks(tried).items():
            results[name] = yield from posed.run(self._separable(tried))
        return results

    def _rows(self, tried: BinarizationSettings, results: Mapping[str, Attacked]) -> list[Row]:
        """The scores of every attack at a setting."""
        (_, random), rows = self._problems(tried), []
        for name, result in results.items():
            planted = {id_: one["outcome"] for id_, one in result.records.items() if one["outcome"] != "not_planted"}
            hits = sum(random[sample] > tried.boundary_position for sample in planted)
            found = sum(outcome == "found" for outcome in planted.values())
            rows.append(_row(name, tried, 1.0, found, hits, len(planted)))
        return rows

    def _deeper(self, tried: BinarizationSettings, results: Mapping[str, Attacked]) -> Work[list[Row]]:
        """The scores of every attack at all depths beyond the planted points, of problems that others prove."""
        problems, posed = self._separable(tried), self._attacks(tried)
        if len(self.given.depths) < 2 or not problems.samples:
            return []
        known, proved = Deepest(), dict[str, dict[int, float]]()
        for one in find_witnesses(self.features, problems, tried):
            known.take(one)
            proved[one.name] = one.reach
        yield from pose_deeper(problems, posed, results, known, self.given.depths[1:])
        _, random = self._problems(tried)
        records: list[Row] = [
            {
                "attacks": {name: result.records[sample] for name, result in results.items()},
                "witnesses": {name: reach.get(sample) for name, reach in proved.items()},
                "random_reach": random[sample],
            }
            for sample in problems.samples
        ]
        rows = []
        for name in results:
            planted = [record for record in records if record["attacks"][name]["outcome"] != "not_planted"]
            for at in score_depths(name, planted, tried)[1:]:
                solved = at["found_by_others"], at["random_found_by_others"], at["problems_by_others"]
                rows.append(_row(name, tried, at["depth"], *solved))
        return rows

    def _deepest(self, deeper: Sequence[Row]) -> float:
        """The depth up to which an attack is near perfect, on problems of half of the samples or more."""
        deepest = 1.0
        for name in self.attacks:
            for row in (row for row in deeper if row["attack"] == name):
                if 2 * row["samples"] < len(self.samples) or row["score"] < self.given.threshold:
                    break
                deepest = max(deepest, row["depth"])
        return deepest


def _points(settings: BinarizationSettings) -> dict[str, Any]:
    """The settings of points that are varied, by name."""
    return {name: getattr(settings, name) for name in _POINTS}


def _row(attack: str, tried: BinarizationSettings, depth: float, found: int, random_found: int, samples: int) -> Row:
    """One attack at one setting."""
    return {
        "attack": attack,
        "kappa": tried.kappa,
        **_points(tried),
        "depth": depth,
        "score": found / samples if samples else None,
        "random_score": random_found / samples if samples else None,
        "samples": samples,
    }
