"""Scores of the points of a block by several detectors, which share a forward pass, and the form they are kept in."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from robust_ext.core.random import derive_seed, seeded_globals
from robust_ext.detectors.base import Detector
from robust_ext.detectors.observation import Observation, observe
from robust_ext.engine.differences import differences
from robust_ext.engine.progress import phase
from robust_ext.engine.store import Floats
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
