"""Runs whose points every detector scores, and stored scores."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from robust_ext.core.cost import Costs
from robust_ext.core.random import derive_seed, seeded_globals
from robust_ext.detectors.base import Detector
from robust_ext.detectors.observation import observe
from robust_ext.engine.copies import differences
from robust_ext.engine.inputs import EvaluationInputs
from robust_ext.engine.progress import phase
from robust_ext.engine.run import Block, Probe, Run
from robust_ext.engine.store import Floats, Record, Store
from robust_ext.engine.task import Work
from robust_ext.evaluations.detectors import NamedDetector

Scores = dict[str, tuple[Floats, float]]
"""By detector: scores, float64 ``(n,)``, and the seconds they took."""

# The scores of runs that were read once; a store holds one run, and is opened again in each call.
_READ: WeakKeyDictionary[Store, Scores] = WeakKeyDictionary()


def score_points(detectors: Sequence[NamedDetector], points: Tensor, *, seed: int, sample: int) -> Scores:
    """Scores of the points ``(n, ...)`` of a block that begins with this sample.

    Detectors that watch the same classifier see the same forward pass. Random ones draw from the global generators, by
    seed, sample and name; their draws do not depend on what other detectors there are.
    """
    groups: dict[int, list[NamedDetector]] = {}
    for one in detectors:
        of_pass = type(one.detector).score is Detector.score
        groups.setdefault(id(one.detector.classifier) if of_pass else id(one), []).append(one)
    found: Scores = {}
    for group in groups.values():
        begun, seen = time.perf_counter(), None
        if len(group) > 1:
            layers = list(dict.fromkeys(layer for one in group for layer in one.detector.layers))
            with seeded_globals(derive_seed(seed, sample, "arm scores")), torch.no_grad():
                seen = observe(group[0].detector.classifier, points, layers)
        shared = (time.perf_counter() - begun) / len(group)
        for one in group:
            phase(f"scores by {one.name}")
            begun = time.perf_counter()
            with seeded_globals(derive_seed(seed, sample, "arm scores", one.name)), torch.no_grad():
                # A copy, as a detector may work on its input in place.
                own = points.clone()
                scores = one.detector.score(own) if seen is None else one.detector.checked(replace(seen, inputs=own))
                found[one.name] = scores.double().cpu().numpy(), shared + time.perf_counter() - begun
    return found


@dataclass(frozen=True, kw_only=True)
class ScoredRun(Run):
    """Points of every sample, and every detector's scores of them; by itself, the clean inputs."""

    kind: ClassVar[str] = "attack"

    given: EvaluationInputs
    detectors: Sequence[NamedDetector]
    batch_size: int  # Samples attacked at once
    seed: int  # Of every draw
    judge_seed: int  # Of those of random detectors while they score

    @property
    def holds(self) -> dict[str, str]:
        """The run, and every detector."""
        return {**super().holds, **{f"detector {one.name}": f"detector {one.name}" for one in self.detectors}}

    def work(self, rows: range, needs: Mapping[str, Any]) -> Work[Block]:
        """Nothing: it has no blocks."""
        raise NotImplementedError

    def place(self) -> torch.device:
        """The inputs' device."""
        return self.given.inputs.device

    def common(self) -> Sequence[object]:
        """The classifier and the detectors."""
        return (self.given.module, *(one.detector for one in self.detectors))

    def samples(self) -> Sequence[Tensor]:
        """Return the samples of the evaluation."""
        return self.given.samples

    def digests(self) -> dict[str, Any]:
        """Return the digests of classifier and samples."""
        return self.given.digests

    def costs(self) -> Costs:
        """Nothing is attacked."""
        return {}

    def kept(self) -> int:
        """Nothing of each sample."""
        return 0

    def probe(self) -> Probe:
        """The classifier, at the first inputs."""
        return self.given.module, self.given.inputs, min(self.batch_size, len(self.given.ids))

    def points(self, rows: range, store: Store) -> Tensor:
        """Return the scored points."""
        return self.given.rows(rows)[0]

    def finish(self, store: Store) -> tuple[Sequence[Record], Sequence[Record]]:
        """Score what is not scored yet."""
        self.scores(store)
        return super().finish(store)

    def scores(self, store: Store) -> Scores:
        """Scores by each detector of all points, float64 ``(N,)``, and the seconds they took; new ones are stored."""
        if store not in _READ:
            blocks = [self._block_scores(rows, store) for rows in self.given.blocks(self.batch_size)]
            _READ[store] = {
                one.name: (np.concatenate([of[one.name][0] for of in blocks]), sum(of[one.name][1] for of in blocks))
                for one in self.detectors
            }
        return _READ[store]

    def score_block(self, rows: range, points: Tensor, known: Scores) -> tuple[Scores, dict[str, dict[str, Any]]]:
        """Scores of a block's points by every detector that has none yet, and the arrays that hold them."""
        missing = [one for one in self.detectors if one.name not in known]
        found = known | score_points(missing, points, seed=self.judge_seed, sample=self.given.ids[rows[0]])
        arrays = {
            "scores": np.stack([found[one.name][0] for one in self.detectors]),
            "seconds": np.array([found[one.name][1] for one in self.detectors]),
            "detectors": np.array(json.dumps([[one.digest, one.described] for one in self.detectors])),
        }
        return found, {_scores_name(rows): arrays}

    def _block_scores(self, rows: range, store: Store) -> Scores:
        found: Scores = {}
        if (stored := store.load(_scores_name(rows))) is not None:
            found = {
                one.name: (stored["scores"][place].astype(np.float64), float(stored["seconds"][place]))
                for place, (digest, described) in enumerate(json.loads(str(stored["detectors"])))
                for one in self.detectors
                # A library that a detector is made of may have changed, though its own code is the same.
                if digest == one.digest and not differences(described, one.described)
            }
        if len(found) < len(self.detectors):
            found, arrays = self.score_block(rows, self.points(rows, store), found)
            for name, parts in arrays.items():
                store.save(name, **parts)
        return found


def plan_clean(
    given: EvaluationInputs,
    *,
    batch_size: int,
    seed: int,
    judge_seed: int | None = None,
    detectors: Sequence[NamedDetector] = (),
) -> ScoredRun:
    """The run of the clean inputs: their scores; the judge's seed is ``seed`` where none is given."""
    judge_seed = seed if judge_seed is None else judge_seed
    return ScoredRun(
        key="attacks/clean",
        title="clean",
        blocks=(),
        identity={"batch_size": batch_size, "seed": seed, "judge_seed": judge_seed},
        given=given,
        detectors=detectors,
        batch_size=batch_size,
        seed=seed,
        judge_seed=judge_seed,
    )


def _scores_name(rows: range) -> str:
    return f"scores-{rows[0]:06d}"
