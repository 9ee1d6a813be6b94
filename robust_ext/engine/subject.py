"""What arms are run on, and what their runs leave."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from robust_ext.detectors.base import Detector
from robust_ext.engine.arm import ArmRun
from robust_ext.engine.identity import inputs_digest, model_digest
from robust_ext.engine.store import Floats, RunStore


@dataclass(frozen=True, kw_only=True)
class Watched:
    """A detector that is judged.

    Args:
        name: Of the detector.
        detector: Beside the classifier.
        digest: What identifies it.
    """

    name: str
    detector: Detector
    digest: str

    @property
    def calibrated(self) -> bool:
        """Whether it has a threshold, which attacks that know it need."""
        return not bool(self.detector.threshold.isnan().any())


def watch(name: str, detector: Detector) -> Watched:
    """A detector with what identifies it: its weights, threshold and settings, and those of its classifier."""
    text = model_digest(detector, nn.Module()) + repr(sorted(detector.settings.items()))
    return Watched(name=name, detector=detector, digest=hashlib.blake2b(text.encode(), digest_size=16).hexdigest())


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is attacked and judged.

    Args:
        module: The classifier.
        logits: Of the clean inputs, ``(N, K)``.
        inputs: Clean samples ``(N, ...)``, float32, on the classifier's device.
        labels: Their classes.
        samples: Their ids, which with the seed decide every draw.
        bounds: Of inputs.
        watched: The detectors.
        batch_size: Samples attacked at once.
        seed: Of every draw.
    """

    module: nn.Module
    logits: Tensor
    inputs: Tensor
    labels: Tensor
    samples: Sequence[int]
    bounds: tuple[float, float]
    watched: Sequence[Watched]
    batch_size: int
    seed: int

    @property
    def described(self) -> dict[str, Any]:
        """What identifies it, beside the detectors."""
        return {
            "model": model_digest(self.module, nn.Module()),
            "inputs": inputs_digest(self.inputs, self.samples),
            "labels": inputs_digest(self.labels, self.samples),
            "batch_size": self.batch_size,
            "seed": self.seed,
        }

    def find(self, name: str) -> Watched:
        """The detector of that name."""
        return next(one for one in self.watched if one.name == name)

    def blocks(self) -> list[range]:
        """Rows that are attacked together."""
        rows, size = len(self.inputs), self.batch_size
        return [range(start, min(start + size, rows)) for start in range(0, rows, size)]


@dataclass(frozen=True, kw_only=True)
class NaturalScores:
    """What detectors say of the clean inputs.

    Args:
        scores: Of each detector, float64 ``(N,)``.
        score_seconds: What they took.
    """

    scores: Mapping[str, Floats]
    score_seconds: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """What a run of an attack left.

    Args:
        run: The run of the attack.
        records: One a sample.
        timings: One a block.
        scores: Of each detector, float64 ``(N,)``.
        score_seconds: What they took.
        refusal: Why it could not be run on the detector it attacks; the rest is then empty.
    """

    run: ArmRun
    records: Sequence[Mapping[str, Any]]
    timings: Sequence[Mapping[str, Any]]
    scores: Mapping[str, Floats]
    score_seconds: Mapping[str, float]
    refusal: str | None = None


@dataclass(frozen=True, kw_only=True)
class Finished:
    """What all runs left.

    Args:
        natural: Scores of the clean inputs.
        outcomes: By key of the run.
        stores: Where they are kept, by key of the run.
    """

    natural: NaturalScores
    outcomes: Mapping[str, RunOutcome]
    stores: Mapping[str, RunStore]

    def all(self) -> list[NaturalScores | RunOutcome]:
        """The clean inputs, and all runs."""
        return [self.natural, *self.outcomes.values()]
