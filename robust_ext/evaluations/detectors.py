"""Detectors that evaluations are given: made ready for one classifier, calibrated, and identified."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.core.devices import on_device, tolerance_of
from robust_ext.core.errors import InconsistentModelError, InvalidArgumentError
from robust_ext.core.random import derive_seed, seeded_globals, stream
from robust_ext.core.validation import Array, check_inputs, check_name
from robust_ext.detectors.base import Detector
from robust_ext.detectors.calibration import Calibration
from robust_ext.engine.code_digest import code_digest, module_code
from robust_ext.engine.copies import behaviour
from robust_ext.engine.identity import model_digest
from robust_ext.engine.inputs import EvaluationInputs
from robust_ext.registry.detector import as_detector

# Rows whose scores are compared, and how far these may differ, as a share of how scores vary (or nearly the largest).
_ROWS, _TOLERANCE = 3, 1e-2
# Points of other classes that an attack on a detector imitates, for each row.
_REFERENCES = 4
_INCONSISTENT = {
    "random": "its score of the same rows differs by up to {:.3g} when it is called again; fix its random numbers, or "
    "declare it by the attribute random = True, so that it is judged by several draws",
    "batch": "its score of a row differs by up to {:.3g} with the rows next to it. Thresholds and attacks meet "
    "batches of other sizes, so no rate would mean anything; compute the score from each row alone, with means or "
    "ranges from clean data in place of those of the batch",
}


@dataclass(frozen=True, kw_only=True)
class NamedDetector:
    """A detector that is judged."""

    name: str
    detector: Detector
    digest: str  # Its fingerprint, see detector_digest
    # Its code and how it behaves
    described: Mapping[str, Any] = field(default_factory=dict)


def detector_digest(detector: Detector) -> str:
    """Fingerprint of a detector: its code, weights, threshold and settings, and those of its classifier."""
    text = model_digest(detector) + repr(sorted(detector.settings.items())) + code_digest(module_code(detector))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def has_threshold(detector: Detector) -> bool:
    """Return whether a detector has a threshold."""
    return not bool(detector.threshold.isnan().any())


def calibrate_detector(
    detector: Detector,
    data: Array,
    *,
    false_positive_rate: float,
    bounds: tuple[float, float],
    seed: int,
) -> Calibration:
    """Give a detector its threshold by clean inputs ``(M, ...)``; its draws depend on the seed alone."""
    clean = check_inputs("detector_data", data, bounds=bounds)
    with seeded_globals(derive_seed(seed, "detector calibration")):
        return detector.calibrate(clean, false_positive_rate=false_positive_rate)


def detector_beside(detector: object, module: nn.Module, inputs: Tensor) -> Detector:
    """A detector next to a classifier, on the device of some inputs ``(n, ...)``; a copy of one that lies elsewhere.

    One whose score of a row changes with chance, undeclared, or with other rows raises InconsistentModelError.
    """
    if isinstance(detector, nn.Module):
        detector = on_device(detector, inputs.device, argument="detector")
    found = as_detector(detector, module, inputs=inputs)
    if not found.random:
        _check_rows(found, inputs[:_ROWS])
    return found


def _check_rows(detector: Detector, inputs: Tensor) -> None:
    """Refuse a detector whose scores of inputs ``(n, ...)`` do not follow from each row alone."""
    # And a row of half the contrast, so that there are two where there is only one.
    rows = torch.cat([inputs, (inputs[:1].flip(-1) + inputs[:1].mean()) / 2])
    with torch.no_grad(), seeded_globals(0):
        first, again = detector.score(rows.clone()), detector.score(rows.clone())
        alone = torch.cat([detector.score(rows[row : row + 1].clone()) for row in range(len(rows))])
        others = detector.score(rows.flip(0)).flip(0)
    finite = first[first.isfinite()]
    largest = float(finite.abs().max()) if len(finite) else 0.0
    spread = float(finite.max() - finite.min()) if len(finite) else 0.0
    limit = tolerance_of(detector.classifier, first, single=_TOLERANCE) * max(spread, _TOLERANCE * largest)
    name = getattr(detector, "name", type(detector).__name__)
    for kind, one, other in (("random", first, again), ("batch", first, others), ("batch", first, alone)):
        # Scores that are no numbers have errors of their own.
        away = float((one - other).abs().nan_to_num(0, 0).max())
        if away > limit:
            raise InconsistentModelError(f"detector {name}: {_INCONSISTENT[kind].format(away)}", kind, away, largest)


def as_detectors(
    detectors: object,
    module: nn.Module,
    inputs: Tensor,
    *,
    data: Tensor | None,
    false_positive_rate: float,
    bounds: tuple[float, float],
    seed: int,
    digests: bool = True,
) -> list[NamedDetector]:
    """Detectors by name, of one, a list or a dict; given clean inputs (data), those without a threshold are calibrated.

    Without ``digests`` they are told apart by their names alone, which is enough where no run folder keeps scores.

    Raises InvalidArgumentError without any, or with two of one name.
    """
    given = detectors if isinstance(detectors, (list, tuple, Mapping)) else [detectors]
    labels = [check_name("detectors", str(name)) for name in given] if isinstance(given, Mapping) else [""] * len(given)
    if not labels:
        raise InvalidArgumentError("detectors", detectors, "at least one detector")
    found: dict[str, NamedDetector] = {}
    for label, one in zip(labels, given.values() if isinstance(given, Mapping) else given, strict=True):
        detector = detector_beside(one, module, inputs[:4])
        name = label or str(getattr(detector, "name", type(detector).__name__))
        if name in found:
            raise InvalidArgumentError("detectors", f"several named {name}", "a dict of detectors by different names")
        if data is not None and not has_threshold(detector):
            calibrate_detector(detector, data, false_positive_rate=false_positive_rate, bounds=bounds, seed=seed)
        found[name] = NamedDetector(name=name, detector=detector, digest=name)
        if digests:
            code, behaves = module_code(detector), behaviour(detector, inputs, bounds)
            described = {"detector_code": code, "detector_behaviour": behaves}
            found[name] = replace(found[name], digest=detector_digest(detector), described=described)
    return list(found.values())


def flagged(detector: NamedDetector, points: Tensor, *, seed: int, sample: int) -> Tensor:
    """Return which points ``(n, ...)`` a detector flags, bool ``(n,)``; a random one draws by seed and sample."""
    with seeded_globals(derive_seed(seed, sample, "member detection", detector.name)):
        return torch.cat([detector.detector.decide(part.clone()) for part in torch.split(points, 250)])


def accepted_inputs(detector: NamedDetector, inputs: Tensor, *, seed: int) -> Tensor:
    """Return a mask of the clean inputs that an attacked detector accepts, bool ``(N,)``."""
    with seeded_globals(derive_seed(seed, "arm references")):
        return ~torch.cat([detector.detector.decide(batch) for batch in torch.split(inputs, 250)])


def draw_references(given: EvaluationInputs, accepted: Tensor, rows: Sequence[int], *, seed: int) -> Tensor | None:
    """Draw points that attacks imitate, ``(n, 4, ...)``: accepted inputs of other classes; None with too few.

    With targets they are of the target class where there are enough. A row's points depend on the seed and the row,
    not on the rows next to it.
    """
    predicted, drawn = given.logits.argmax(1), []
    for row in rows:
        others = (accepted & (predicted != predicted[row])).nonzero().squeeze(1)
        if given.criterion.aims:
            aimed = (accepted & (predicted == given.goals[row])).nonzero().squeeze(1)
            others = others if len(aimed) < _REFERENCES else aimed
        if len(others) < _REFERENCES:
            return None
        order = torch.randperm(len(others), generator=stream(seed, row, "arm references"))[:_REFERENCES]
        drawn.append(given.inputs[others[order.to(others.device)]])
    return torch.stack(drawn)
