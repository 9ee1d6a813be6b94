"""Runs whose points every detector scores, and stored scores."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from robust_ext.core.cost import Costs
from robust_ext.core.random import derive_seed, seeded_globals
from robust_ext.detectors.base import Detector
from robust_ext.detectors.observation import Observation, observe
from robust_ext.engine.copies import differences
from robust_ext.engine.inputs import EvaluationInputs
from robust_ext.engine.progress import phase
from robust_ext.engine.run import Block, Probe, Run
from robust_ext.engine.store import Floats, Record, Store
from robust_ext.engine.task import Work
from robust_ext.evaluations.detectors import NamedDetector

Scores = dict[str, tuple[Floats, float]]
"""By detector: scores, float64 ``(n,)``, and the seconds they took."""


def scores_name(start: int) -> str:
    """The name under which the scores of the block that begins at this index are kept."""
    return f"scores-{start:06d}"


def score_points(detectors: Sequence[NamedDetector], points: Tensor, *, seed: int, sample: int) -> Scores:
    """Scores of the points ``(n, ...)`` of a block that begins with this sample.

    Detectors that watch the same classifier see the same forward pass. Random ones draw from the global generators, by
    seed, sample and name; their draws do not depend on what other detectors there are.
    """
    found: Scores = {}
    for group in _beside(detectors):
        begun = time.perf_counter()
        with seeded_globals(derive_seed(seed, sample, "arm scores")), torch.no_grad():
            seen = _shared(group, points)
        # What they share is split between them.
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


def pack_scores(detectors: Sequence[NamedDetector], found: Scores) -> dict[str, Any]:
    """Arrays that hold scores of the points of a block."""
    return {
        "scores": np.stack([found[one.name][0] for one in detectors]),
        "seconds": np.array([found[one.name][1] for one in detectors]),
        "detectors": np.array(json.dumps([[one.digest, one.described] for one in detectors])),
    }


def unpack_scores(kept: Mapping[str, Any] | None, detectors: Sequence[NamedDetector]) -> Scores:
    """The scores in arrays of :func:`pack_scores` by those of these detectors that have not changed since."""
    if kept is None:
        return {}
    known = json.loads(str(kept["detectors"]))
    return {
        one.name: (kept["scores"][place].astype(np.float64), float(kept["seconds"][place]))
        for one in detectors
        for place, (digest, described) in enumerate(known)
        # Where a library that a detector is made of changed, it behaves differently though its own code is the same.
        if digest == one.digest and not differences(described, one.described)
    }


def _beside(detectors: Sequence[NamedDetector]) -> list[list[NamedDetector]]:
    """Detectors by classifier; alone where their score is of another kind than that of a forward pass."""
    groups: dict[int, list[NamedDetector]] = {}
    for one in detectors:
        of_pass = type(one.detector).score is Detector.score
        groups.setdefault(id(one.detector.classifier) if of_pass else id(one), []).append(one)
    return list(groups.values())


def _shared(group: Sequence[NamedDetector], points: Tensor) -> Observation | None:
    """One forward pass with the layers of all; None for a detector alone."""
    if len(group) == 1:
        return None
    layers = dict.fromkeys(layer for one in group for layer in one.detector.layers)
    return observe(group[0].detector.classifier, points, list(layers))


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
        """Scores by each detector of all points, float64 ``(N,)``, and the seconds they took.

        Those that are kept, and new ones.
        """
        points = store.digest()
        found = {one.name: kept for one in self.detectors if (kept := self._kept(one, store, points)) is not None}
        left = [one for one in self.detectors if one.name not in found]
        blocks = [self._scored(left, rows, store) for rows in self.given.blocks(self.batch_size)] if left else []
        for one in left:
            parts = [block[one.name] for block in blocks]
            found[one.name] = np.concatenate([scores for scores, _ in parts]), sum(seconds for _, seconds in parts)
            about = {"described": np.array(json.dumps(one.described)), "points": np.array(points)}
            scores, seconds = found[one.name]
            store.save(_file_of(one), scores=scores, seconds=np.float64(seconds), **about)
        return {one.name: found[one.name] for one in self.detectors}

    def _kept(self, one: NamedDetector, store: Store, points: str) -> tuple[Floats, float] | None:
        """The scores of all points that were put together before, of these points and by this detector."""
        kept = store.load(_file_of(one))
        if kept is None or str(kept["points"]) != points:
            return None
        if differences(json.loads(str(kept["described"])), one.described):
            return None
        return kept["scores"].astype(np.float64), float(kept["seconds"])

    def _scored(self, detectors: Sequence[NamedDetector], rows: range, store: Store) -> Scores:
        """The scores of a block: those that came with it, and new ones."""
        found = unpack_scores(store.load(scores_name(rows[0])), detectors)
        left = [one for one in detectors if one.name not in found]
        if left:
            points, sample = self.points(rows, store), self.given.ids[rows[0]]
            found |= score_points(left, points, seed=self.judge_seed, sample=sample)
        return found


def _file_of(one: NamedDetector) -> str:
    """The name under which scores of all points by a detector are kept."""
    return f"scores-{re.sub(r'[^A-Za-z0-9.]+', '-', one.name)[:40]}-{one.digest[:12]}"
