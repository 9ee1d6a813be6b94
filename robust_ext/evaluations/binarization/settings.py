"""Settings of the binarization test."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from typing_extensions import Self

from robust_ext.attacks.base import Attack
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.settings import setting, settings_class
from robust_ext.core.threat import ThreatModel
from robust_ext.evaluations.binarization.readout_settings import ReadoutSettings


@settings_class
class BinarizationSettings(ReadoutSettings):
    """Settings of problems, attacks and verdicts; the defaults are those of the paper's appendix B.

    ``threat_model`` holds the norm, epsilon and bounds.

    A canary is a planted problem with label 1 although the clean sample is class 0: it starts misclassified, and an
    attack has nothing to do. One that moves it into class 1 attacks the predicted labels instead of the given ones,
    the integration bug of section 4.2.
    """

    label = "the binarization test"

    threat_model: ThreatModel
    inner_points: int = setting(
        default=149,
        help="N_i, random points of class 0 for each sample, in addition to the clean sample (the paper's are 999).",
        minimum=1,
        maximum=1_000_000,
        panel="planting",
    )
    inner: float | str = setting(
        default=0.5,
        help="Share of the inner points that are corners of the smaller ball (l1: vertices, l2: sign directions), as "
        'long as a planted corner; the others are uniform in it. ``"uniform"``: all of them, as in the paper, and '
        "always in l1 and l2 where points are planted on the surface, beside which corners are too long.",
        minimum=0,
        maximum=1,
        choices=("uniform",),
        panel="planting",
    )
    boundary_points: int = setting(
        default=1,
        help="N_b, planted points of class 1 for each sample.",
        minimum=1,
        maximum=1_000_000,
        panel="planting",
    )
    planted_candidates: int = setting(
        default=64,
        help="Points drawn for each that is planted, of which the one whose features lie farthest from the inner "
        "points' is chosen. 1: the first, as in the paper. With a detector, no more than it lets pass of those it is "
        "queried for.",
        minimum=1,
        maximum=1_000_000,
        panel="planting",
    )
    boundary: str = setting(
        default="auto",
        help='Where points are planted: ``"corners"``, ``"surface"``, or ``"auto"`` (corners for linf, else surface).',
        choices=("auto", "corners", "surface"),
        panel="planting",
    )
    gap: float = setting(
        default=0.05,
        help="Margin between inner points and the boundary, relative to epsilon, in [0, 1): inner points lie within "
        "``(1 - gap) epsilon`` (section 3.1, equation 1).",
        minimum=0,
        below=1,
        panel="planting",
    )
    kappa: float = setting(
        default=0.999,
        help="Closeness of the decision boundary to the planted points, in [0, 1): the share of the way from the "
        "closest inner point to the closest planted one (section 4.3). Harder towards 1.",
        minimum=0,
        below=1,
        panel="planting",
    )
    kappa_convention: str = setting(
        default="paper",
        help='``"paper"``, as above; ``"reference"``: the paper\'s public code, which starts half way, so that the '
        "same kappa gives a boundary at ``(1 + kappa) / 2``.",
        choices=("paper", "reference"),
        panel="planting",
    )
    logit_scale: str = setting(
        default="original",
        help='``"original"``: the two logits span the range of the network\'s own (section 3.1, footnote 3). '
        '``"unit"``: they span [-1, 1].',
        choices=("original", "unit"),
        panel="readout",
    )
    exposure: str = setting(
        default="classifier",
        help='View of a classifier with a detector for attacks on logits: ``"classifier"`` (they ignore the '
        'detector), ``"reject"`` (being rejected is a class) or ``"margin"`` (class 1 only where both are fooled).',
        choices=("classifier", "reject", "margin"),
        panel="detector",
    )
    detector_fpr: float = setting(
        default=0.05,
        help="Share of clean inputs that a detector without a threshold may detect, in (0, 1).",
        above=0,
        below=1,
        panel="detector",
    )
    reference_points: int = setting(
        default=1,
        help="N_r, points outside the ball in class 1 for attacks that imitate some; with a detector only.",
        minimum=0,
        maximum=1_000_000,
        panel="detection",
    )
    reference_distance: float = setting(
        default=1.75,
        help="Distance of the reference points, in units of epsilon, above 1 (the paper's xi, appendix B).",
        above=1,
        panel="detection",
    )
    planting_tries: int = setting(
        default=200,
        help="Most points drawn for one that the detector accepts (or detects, in the inverted test).",
        minimum=1,
        panel="detection",
    )
    detector_draws: int = setting(
        default=5,
        help="Queries of a random detector for each point; the majority decides.",
        minimum=1,
        panel="detection",
    )
    random: str = setting(
        default="fixed",
        help='How many points random search has: ``"fixed"``, as many as ``random_inner`` and ``random_corners`` say; '
        '``"match"``: as many as the attack has queries (of several the one with most), in the same proportion '
        "(section 3.1). An attack that does not state how many counts as fixed.",
        choices=("fixed", "match"),
        panel="verdict",
    )
    random_inner: int = setting(
        default=20,
        help="Points the random attack draws within the ball. They add next to nothing to those at its edge.",
        minimum=0,
        maximum=1_000_000,
        panel="verdict",
    )
    random_corners: int = setting(
        default=200,
        help="Points that it draws where examples are planted.",
        minimum=0,
        maximum=1_000_000,
        panel="verdict",
    )
    canaries: int = setting(
        default=8, help="Samples that are also posed with the wrong label.", minimum=0, panel="verdict"
    )
    threshold: float = setting(
        default=0.95, help="Test score that passes, in (0, 1).", above=0, below=1, panel="verdict"
    )
    proven_rate: float = setting(
        default=0.9,
        help="A pass needs samples that show a rate above it, with ``error_rate``, and a score of the threshold; 0: "
        "the score alone.",
        minimum=0,
        below=1,
        panel="verdict",
    )
    maximum_random_score: float = setting(
        default=0.5,
        help="A pass needs samples that show an R-ASR of at most this, with ``error_rate``; 1: any.",
        above=0,
        maximum=1,
        panel="verdict",
    )
    random_stops: bool = setting(
        default=True,
        help="End random search once 8 or 16 planted problems (with ``sequential``, any group of samples) show that "
        "its rate is at most ``maximum_random_score``. R-ASR is then that of these problems. False: search all.",
        panel="verdict",
    )
    calibrate_on: int = setting(
        default=0,
        help="Number of samples on which the hardness is calibrated first (section 4.3); 0 for no calibration.",
        minimum=0,
        cli=None,
    )
    sequential: bool = setting(
        default=False,
        help="Stop drawing samples once they show of each attack that it fails or passes, and deeper problems once "
        "they show enough of these; False: all samples. On the command line, where it is the default, ``--samples`` is "
        "then the most that are drawn.",
    )
    error_rate: float = setting(
        default=0.05,
        help="Error rate of a pass, in (0, .5): with several attacks, the probability that any of those passes whose "
        "rate is not above ``proven_rate``.",
        above=0,
        below=0.5,
        panel="verdict",
    )
    confidence: float = setting(
        default=0.95, help="Confidence level of the intervals, in (0, 1).", above=0, below=1, panel="verdict"
    )
    batch_size: int | str = setting(
        default="auto",
        help='Problems attacked at once, or ``"auto"`` (32, or 8 when sequential).',
        minimum=1,
        choices=("auto",),
        panel="run",
    )
    forward_batch: int | str = setting(
        default="auto",
        help='Rows of a forward pass while points are measured, or ``"auto"`` (by the size of an input).',
        minimum=1,
        choices=("auto",),
        panel="cost",
    )
    fold: bool = setting(
        default=True,
        help="Measure points through a copy of the network with batch normalisation folded into convolutions, where "
        "there is any and the copy gives the same features, see "
        ":mod:`robust_ext.evaluations.binarization.forward`.",
        panel="cost",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.threat_model, ThreatModel):
            raise InvalidArgumentError("threat_model", type(self.threat_model).__name__, "a ThreatModel")
        if self.random_inner + self.random_corners == 0:
            raise InvalidArgumentError("random_inner", 0, "at least one random point, inner or corner, for the R-ASR")

    @property
    def corners(self) -> bool:
        """True if points are planted in corners."""
        return self.boundary == "corners" or (self.boundary == "auto" and self.threat_model.norm == "linf")

    @property
    def inner_corners(self) -> float:
        """Share of the inner points that are corners of the smaller ball."""
        even = self.threat_model.norm != "linf" and not self.corners
        return 0.0 if isinstance(self.inner, str) or even else self.inner

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

    def matched(self, attacks: Iterable[Attack]) -> Self:
        """Return settings with as many random points as an attack has queries; these, where the number is fixed."""
        given = self.random_inner + self.random_corners
        costs = [attack.cost(self.threat_model, classes=2) for attack in attacks] if self.random == "match" else []
        if not costs:
            return self
        queries = max(given if cost is None or cost.unknown else math.ceil(cost.forward) for cost in costs)
        inner = round(queries * self.random_inner / given)
        return replace(self, random_inner=inner, random_corners=queries - inner)

    def to_dict(self) -> dict[str, Any]:
        """All settings as plain values, the threat model's among them."""
        return {**self.threat_model.described, **super().to_dict()}
