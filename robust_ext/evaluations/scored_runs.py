"""Runs whose points every detector scores; by themselves, those of the clean inputs."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from robust_ext.core.cost import Costs
from robust_ext.engine.differences import differences
from robust_ext.engine.inputs import EvaluationInputs
from robust_ext.engine.run import Block, Probe, Run
from robust_ext.engine.store import Floats, Record, Store
from robust_ext.engine.task import Work
from robust_ext.evaluations.detector_scores import Scores, score_points, scores_name, unpack_scores
from robust_ext.evaluations.detectors import NamedDetector


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
        """Those of the evaluation."""
        return self.given.samples

    def digests(self) -> dict[str, Any]:
        """Those of the classifier and the samples."""
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
        """What is scored."""
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
