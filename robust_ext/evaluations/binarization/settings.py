"""Settings of the binarization test, checked at the door."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.threat import ThreatModel
from robust_ext.core.validation import check_choice, check_integer, check_number
from robust_ext.models.readouts import READOUTS

BOUNDARIES = ("auto", "corners", "surface")
CONVENTIONS = ("paper", "reference")
LOGIT_SCALES = ("original", "unit")


@dataclass(frozen=True, kw_only=True)
class BinarizationSettings:
    """How problems are built, attacked and judged; the defaults are those of the paper's appendix B.

    Args:
        threat_model: Norm, epsilon and bounds.
        inner_points: N_i, random points of class 0 beside the clean sample, at least 1.
        boundary_points: N_b, planted points of class 1, at least 1.
        boundary: Where they are planted: ``"corners"``, ``"surface"``, or ``"auto"`` (corners for linf, else surface).
        gap: Margin between inner points and the boundary, relative to epsilon, in [0, 1): inner points lie within
            ``(1 - gap) epsilon`` (section 3.1, equation 1).
        kappa: Closeness of the decision boundary to the planted points, in [0, 1): the share of the way from the
            closest inner point to the closest planted one (section 4.3). Harder towards 1.
        kappa_convention: ``"paper"``, as above; ``"reference"``: the paper's public code, which starts half way, so
            that the same kappa gives a boundary at ``(1 + kappa) / 2``.
        readout: ``"logistic"`` or ``"max-margin"``.
        C: Weight of the losses in logistic regression, see :func:`robust_ext.models.readouts.fit_directions`; raised
            for the samples that it keeps from being separated.
        logit_scale: ``"original"``: the two logits span the range of the network's own (section 3.1, footnote 3).
            ``"unit"``: they span [-1, 1].
        reference_points: N_r, points outside the ball in class 1 for attacks that imitate some; with a detector only.
        reference_distance: Where they lie, in units of epsilon, above 1 (the paper's xi, appendix B).
        planting_tries: Most points drawn for one that the detector lets pass (or detects, in the inverted test).
        detector_draws: How often a random detector is asked; the majority decides.
        random_inner: Points the random attack draws within the ball.
        random_corners: Points it draws from where points are planted.
        canaries: Samples that are also posed with the wrong label, see below.
        threshold: Test score that passes, in (0, 1).
        maximum_random_score: R-ASR above which a test is too easy to pass anything, in [0, 1].
        minimum_samples: Planted problems below which nothing passes.
        sequential: Stop drawing samples once each attack's score is above or below the threshold.
        error_rate: Of that decision, in (0, .5).
        confidence: Of the intervals, in (0, 1).
        seed: Of every draw.
        batch_size: Problems attacked at once, or ``"auto"`` (32, or 8 when sequential).
        forward_batch: Rows of a forward pass while points are measured, or ``"auto"`` (by the size of an input).
        fold: Measure points through a copy of the network with batch normalisation folded into convolutions, where
            there is any and the copy gives the same features, see :mod:`robust_ext.evaluations.binarization.forward`.

    A canary is a planted problem with label 1 although the clean sample is class 0: it starts misclassified, and an
    attack has nothing to do. One that moves it into class 1 attacks the predicted labels instead of the given ones,
    the integration bug of section 4.2.
    """

    threat_model: ThreatModel
    inner_points: int = 999
    boundary_points: int = 1
    boundary: str = "auto"
    gap: float = 0.05
    kappa: float = 0.999
    kappa_convention: str = "paper"
    readout: str = "logistic"
    C: float = 10.0
    logit_scale: str = "original"
    reference_points: int = 1
    reference_distance: float = 1.75
    planting_tries: int = 200
    detector_draws: int = 5
    random_inner: int = 200
    random_corners: int = 200
    canaries: int = 8
    threshold: float = 0.95
    maximum_random_score: float = 0.5
    minimum_samples: int = 10
    sequential: bool = False
    error_rate: float = 0.05
    confidence: float = 0.95
    seed: int = 0
    batch_size: int | str = "auto"
    forward_batch: int | str = "auto"
    fold: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.threat_model, ThreatModel):
            raise InvalidArgumentError("threat_model", type(self.threat_model).__name__, "a ThreatModel")
        check_integer("inner_points", self.inner_points, minimum=1)
        check_integer("boundary_points", self.boundary_points, minimum=1)
        check_choice("boundary", self.boundary, BOUNDARIES)
        check_number("gap", self.gap, minimum=0, maximum=1, open_maximum=True)
        check_number("kappa", self.kappa, minimum=0, maximum=1, open_maximum=True)
        check_choice("kappa_convention", self.kappa_convention, CONVENTIONS)
        check_choice("readout", self.readout, READOUTS)
        check_number("C", self.C, minimum=0, open_minimum=True)
        check_choice("logit_scale", self.logit_scale, LOGIT_SCALES)
        check_integer("planting_tries", self.planting_tries, minimum=1)
        check_integer("detector_draws", self.detector_draws, minimum=1)
        check_integer("reference_points", self.reference_points, minimum=0)
        check_number("reference_distance", self.reference_distance, minimum=1, open_minimum=True)
        for name in ("random_inner", "random_corners", "canaries", "minimum_samples", "seed"):
            check_integer(name, getattr(self, name), minimum=0)
        if self.random_inner + self.random_corners == 0:
            raise InvalidArgumentError("random_inner", 0, "at least one random point, inner or corner, for the R-ASR")
        check_number("threshold", self.threshold, minimum=0, maximum=1, open_minimum=True, open_maximum=True)
        check_number("maximum_random_score", self.maximum_random_score, minimum=0, maximum=1)
        check_number("error_rate", self.error_rate, minimum=0, maximum=0.5, open_minimum=True, open_maximum=True)
        check_number("confidence", self.confidence, minimum=0, maximum=1, open_minimum=True, open_maximum=True)
        for name in ("sequential", "fold"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidArgumentError(name, getattr(self, name), "True or False")
        for name in ("batch_size", "forward_batch"):
            if getattr(self, name) != "auto":
                if isinstance(getattr(self, name), str):
                    raise InvalidArgumentError(name, repr(getattr(self, name)), "'auto' or an integer of at least 1")
                check_integer(name, getattr(self, name), minimum=1)

    @property
    def corners(self) -> bool:
        """Whether points are planted in corners."""
        return self.boundary == "corners" or (self.boundary == "auto" and self.threat_model.norm == "linf")

    @property
    def boundary_position(self) -> float:
        """Share of the way from the closest inner point to the closest planted one at which the boundary lies."""
        return self.kappa if self.kappa_convention == "paper" else (1 + self.kappa) / 2

    @property
    def group_size(self) -> int:
        """Problems attacked at once."""
        if isinstance(self.batch_size, int):
            return self.batch_size
        return 8 if self.sequential else 32

    def to_dict(self) -> dict[str, Any]:
        """All settings as plain values, the threat model's among them."""
        values = asdict(self)
        threat = values.pop("threat_model")
        return {"norm": threat["norm"], "epsilon": threat["epsilon"], "bounds": list(threat["bounds"]), **values}


def make_settings(threat_model: ThreatModel, settings: Mapping[str, Any]) -> BinarizationSettings:
    """Settings from keyword arguments.

    Raises:
        InvalidArgumentError: One is unknown, or outside what is accepted.
    """
    known = {entry.name for entry in fields(BinarizationSettings)} - {"threat_model"}
    for name in settings:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ": " + ", ".join(sorted(known))
            raise InvalidArgumentError(name, "an unknown setting", f"a setting of the binarization test{hint}")
    return BinarizationSettings(threat_model=threat_model, **settings)
