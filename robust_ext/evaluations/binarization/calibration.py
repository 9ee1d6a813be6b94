"""Hardness calibration: the hardest setting at which the best attack is near perfect (section 4.3).

It starts with the boundary as close to the planted points as possible. Where no attack is near perfect there, kappa is
eased, and then the number of inner points. Where one is, the boundary is moved the other way, to the deeper problems
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

# Where the boundary is tried, next to where the settings put it, and the parts of the inner points.
_KAPPAS, _PARTS = (0.9999, 0.999, 0.99, 0.9, 0.5, 0.0), (1, 3, 10)

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
        steps = [(kappa, count) for count in self.counts for kappa in self.kappas]
        rows: list[Row] = []
        chosen: Row | None = None
        for kappa, count in steps:
            results = yield from self._run(kappa, count)
            rows += (tried := self._rows(kappa, count, results))
            if max(row["score"] or 0.0 for row in tried) >= self.given.threshold:
                chosen = {"kappa": kappa, "inner_points": count, "depth": 1.0}
                break
        if chosen is not None and (kappa, count) == steps[0]:
            deeper = yield from self._deeper(kappa, count, results)
            rows += deeper
            chosen["depth"] = self._deepest(deeper)
        for fewer in () if chosen is None else [one for one in self.counts if one < count]:
            rows += self._rows(kappa, fewer, (yield from self._run(kappa, fewer)))
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
    def counts(self) -> list[int]:
        """Numbers of inner points, the hardest first."""
        return sorted({max(1, self.given.inner_points // part) for part in _PARTS}, reverse=True)

    @cached_property
    def problems(self) -> dict[int, Problems]:
        """The problems by number of inner points."""
        measured = measure(self.forward, self.inputs, self.samples, self.settings)
        return {count: fit(measured, self.readout, self.settings, inner_points=count) for count in self.counts}

    @cached_property
    def random(self) -> dict[int, dict[int, float]]:
        """The best reach of random points by the number of inner points and the sample's id, exact at all settings."""
        hardest = [replace(self.settings, kappa=self.kappas[0]).boundary_position] * len(self.counts)
        versions, deepest = [self.problems[count] for count in self.counts], self.given.depths[-1]
        reach, _ = random_reach(self.forward, versions, hardest, self.settings, deepest=deepest)
        found = zip(self.counts, reach.T.tolist(), strict=True)
        return {count: dict(zip(self.samples, column, strict=True)) for count, column in found}

    def _posed(self, kappa: float, count: int) -> dict[str, ProblemAttack]:
        tried = replace(self.settings, kappa=kappa, inner_points=count)
        return {
            name: ProblemAttack(attack=attack, features=self.features, settings=tried)
            for name, attack in self.attacks.items()
        }

    def _separable(self, count: int) -> Problems:
        problems = self.problems[count]
        return problems.select([row for row, separable in enumerate(problems.separable.tolist()) if separable])

    def _run(self, kappa: float, count: int) -> Work[dict[str, Attacked]]:
        """Run every attack at a setting."""
        results = {}
        for name, posed in self._posed(kappa, count).items():
            results[name] = yield from posed.run(self._separable(count))
        return results

    def _rows(self, kappa: float, count: int, results: Mapping[str, Attacked]) -> list[Row]:
        """The scores of every attack at a setting."""
        position, rows = replace(self.settings, kappa=kappa).boundary_position, []
        for name, result in results.items():
            planted = {id_: one["outcome"] for id_, one in result.records.items() if one["outcome"] != "not_planted"}
            hits = sum(self.random[count][sample] > position for sample in planted)
            found = sum(outcome == "found" for outcome in planted.values())
            rows.append(_row(name, kappa, count, 1.0, found, hits, len(planted)))
        return rows

    def _deeper(self, kappa: float, count: int, results: Mapping[str, Attacked]) -> Work[list[Row]]:
        """The scores of every attack at all depths beyond the planted points, of problems that others prove."""
        problems, posed = self._separable(count), self._posed(kappa, count)
        if len(self.given.depths) < 2 or not problems.samples:
            return []
        tried = next(iter(posed.values())).settings
        known, proved = Deepest(), dict[str, dict[int, float]]()
        for one in find_witnesses(self.features, problems, tried):
            known.take(one.reach, one.points)
            proved[one.name] = one.reach
        yield from pose_deeper(problems, posed, results, known, self.given.depths[1:])
        records: list[Row] = [
            {
                "attacks": {name: result.records[sample] for name, result in results.items()},
                "witnesses": {name: reach.get(sample) for name, reach in proved.items()},
                "random_reach": self.random[count][sample],
            }
            for sample in problems.samples
        ]
        rows = []
        for name in results:
            planted = [record for record in records if record["attacks"][name]["outcome"] != "not_planted"]
            for at in score_depths(name, planted, tried)[1:]:
                solved = at["found_by_others"], at["random_found_by_others"], at["problems_by_others"]
                rows.append(_row(name, kappa, count, at["depth"], *solved))
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


def _row(attack: str, kappa: float, count: int, depth: float, found: int, random_found: int, samples: int) -> Row:
    """One attack at one setting."""
    return {
        "attack": attack,
        "kappa": kappa,
        "inner_points": count,
        "depth": depth,
        "score": found / samples if samples else None,
        "random_score": random_found / samples if samples else None,
        "samples": samples,
    }
