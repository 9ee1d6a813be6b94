"""A detector in the binarization test: the points that it accepts, and accepted points for planting.

Zimmermann et al. 2022, section 3.2 and algorithm 2. In the regular test adversarial examples are to go undetected; in
the inverted test they are to be detected. Planted points and references are redrawn until the detector agrees.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from robust_ext.attacks.apgd import APGD
from robust_ext.core.classifier import check_classifier
from robust_ext.core.devices import on_device, run_device
from robust_ext.core.errors import InvalidArgumentError, ModelError
from robust_ext.core.random import derive_seed, seeded_globals, stream
from robust_ext.core.target import Counted, PassCounter, Target
from robust_ext.core.threat import ThreatModel
from robust_ext.core.validation import Array, check_labels
from robust_ext.detectors.base import Detector, rejected
from robust_ext.detectors.calibration import Calibration
from robust_ext.engine.classifiers import as_classifier, parts_in_precision
from robust_ext.engine.inputs import PROBES, bounded_module, check_model
from robust_ext.evaluations.binarization.settings import BinarizationSettings
from robust_ext.evaluations.detectors import calibrate_detector, detector_beside, has_threshold
from robust_ext.models.adaptive import AdaptiveDefense
from robust_ext.models.adaptive_features import split_defense
from robust_ext.models.company import in_company
from robust_ext.models.defended import Defended, SuccessMargin
from robust_ext.models.features import as_parts, split


class Parts(NamedTuple):
    """A verified classifier and its two halves."""

    features: Counted
    readout: nn.Module
    classifier: nn.Module
    device: torch.device


def counted_parts(
    model: object,
    inputs: Tensor,
    settings: BinarizationSettings,
    counter: PassCounter,
    *,
    labels: Tensor | None = None,
    device: str | torch.device | None = None,
) -> Parts:
    """The network's features (counted) and readout, verified.

    Models of no known kind or of other bounds, and features that the settings' readout does not take, raise
    InvalidArgumentError, models that cannot be split ModelError.
    """
    threat_model, layer = settings.threat_model, settings.layer
    if not len(inputs):
        raise InvalidArgumentError("inputs", "no samples", "at least one sample")
    pair = as_parts(model)
    module: nn.Module | tuple[nn.Module, nn.Module]
    if pair is None:
        given = bounded_module(model, threat_model, device=device)
        where = run_device(given, device)
        probes = inputs[:PROBES].to(where)
        module = classifier = as_classifier(given, inputs.to(where), None if labels is None else labels.to(where))
        if isinstance(module, AdaptiveDefense) and module.batch_level:
            module = classifier = in_company(module, inputs.to(where), threat_model)
    else:
        if layer is not None:
            expected = (
                "none for a model that is a pair of features and readout; of a Keras model, name it in "
                "robust_ext.adapters.keras.keras_model(model, layer=...)"
            )
            raise InvalidArgumentError("layer", repr(layer), expected)
        where = run_device(nn.ModuleList(pair), device)
        probes = inputs[:PROBES].to(where)
        module = parts_in_precision((on_device(pair[0], where), on_device(pair[1], where)), probes)
        classifier = nn.Sequential(*module)
        classifier.training = any(part.training for part in module)
    random = settings.draws > 1
    logits = check_classifier(classifier, probes)
    if labels is not None:
        check_labels("labels", labels, samples=len(inputs), classes=logits.shape[1])
    check_model(classifier, probes, bounds=threat_model.bounds, draws=True, random=random)
    if isinstance(module, AdaptiveDefense):
        parts = split_defense(module, probes, layer=layer, held=not random)
    else:
        parts = split(module, probes, layer=layer)
    settings.fitting.shown.check(parts.shape)
    return Parts(Counted(parts.features, counter), parts.readout, classifier, where)


def prepare_detector(
    detector: object, classifier: nn.Module, inputs: Tensor, *, data: Array | None, settings: BinarizationSettings
) -> tuple[Detector, Calibration | None]:
    """A detector of a classifier with a threshold, and its calibration where clean inputs ``data`` gave it one here.

    Without a threshold and data, InvalidArgumentError; where it detects all of the inputs, ModelError.
    """
    found, calibration = detector_beside(detector, classifier, inputs[:PROBES]), None
    if not has_threshold(found):
        if data is None:
            raise InvalidArgumentError(
                "detector_data",
                "nothing, and a detector without a threshold",
                "clean inputs to calibrate it on, or a detector whose calibrate() was called",
            )
        rate, bounds = settings.detector_fpr, settings.threat_model.bounds
        calibration = calibrate_detector(found, data, false_positive_rate=rate, bounds=bounds, seed=settings.seed)
    some = inputs[:64]
    with seeded_globals(derive_seed(settings.seed, "detector probe")), torch.no_grad():
        margins = found.score_margin(some)
    if bool(margins.isnan().any()):
        raise found.error(
            f"scored NaN on {int(margins.isnan().sum())} of {len(some)} clean inputs; fix its score, which divides by "
            "zero or overflows there"
        )
    if len(some) >= 10 and bool(rejected(margins).all()):
        raise ModelError(
            f"detector {type(found).__name__}: rejects all of {len(some)} clean inputs, so that no attack is "
            "needed; calibrate it on clean inputs like these"
        )
    return found, calibration


TESTS = ("regular", "inverted")

# Points queried at once while one is sought.
_BLOCK = 16
# Runs of an attack on the original classifier, where random points are never detected.
_ATTACKS = 8

_Key = tuple[int, int, str, str, str]


@dataclass(frozen=True, kw_only=True)
class Defense:
    """A detector with a threshold next to the network that is tested; inverted, it rejects what the detector accepts.

    Exposure and draws of a random detector are those of :class:`BinarizationSettings`.
    """

    detector: Detector
    inverted: bool
    exposure: str = "classifier"
    draws: int = 1

    @property
    def test(self) -> str:
        """One of :data:`TESTS`."""
        return TESTS[self.inverted]

    def rejects(self, points: Tensor, *, seed: int) -> Tensor:
        """Return a mask of rejected points ``(n, ...)``, bool ``(n,)``; a random detector is queried several times."""
        times = self.draws if self.detector.random else 1
        with seeded_globals(seed), torch.no_grad():
            margins = torch.stack([self.detector.score_margin(points) for _ in range(times)])
        detected = (margins > 0).sum(0) * 2 > times
        # NaN scores reject in both tests.
        return (detected ^ self.inverted) | margins.isnan().any(0)

    def accepts(self, points: Tensor, *, seed: int) -> Tensor:
        """Return a mask of surely accepted points ``(n, ...)``, bool ``(n,)``: by every query of a random detector.

        It is queried twice as often, so that a planted point keeps its kind when it is queried again.
        """
        times = 2 * self.draws if self.detector.random else 1
        accepted = torch.ones(len(points), dtype=torch.bool, device=points.device)
        with seeded_globals(seed):
            for _ in range(times):
                # Only those that are not rejected yet are queried again.
                left = accepted.nonzero().squeeze(1)
                if not len(left):
                    break
                with torch.no_grad():
                    accepted[left] = ~rejected(self.detector.score_margin(points[left]), inverted=self.inverted)
        return accepted

    def defended(self, classifier: nn.Module) -> Defended:
        """A classifier together with the detector."""
        exposure = "classifier" if self.exposure == "margin" else self.exposure
        return Defended(classifier, self.detector, inverted=self.inverted, exposure=exposure)

    def exposed(self, defended: Defended) -> tuple[nn.Module, int]:
        """Return the binarized classifier that attacks on logits see with the detector, and its number of classes."""
        if self.exposure == "margin":
            return SuccessMargin(defended, 0), 2
        return (defended, 3) if self.exposure == "reject" else (defended.classifier, 2)


@dataclass(frozen=True)
class Drawn:
    """Points for one sample among which those to be planted are chosen."""

    candidates: Tensor | None  # (n, ...), at least N_b; None where too few were found that are not rejected.
    references: Tensor | None  # (N_r, ...), outside the ball; None likewise.
    source: str  # "random", or "attack" where random points were all rejected.
    tries: int  # Points queried.


def draw_accepted(x: Tensor, sample: int, settings: BinarizationSettings, defense: Defense) -> Drawn:
    """Draw what is to be planted for one sample, by rejection sampling.

    Random points come first. In the inverted test, where none is detected among ``settings.planting_tries``, points
    that an attack on the original classifier found are tried (the paper takes such examples from the first).
    """
    tries = 0
    for source in ("random", "attack") if defense.inverted else ("random",):
        parts: list[Tensor] = []
        for purpose, count, spare, radius in (
            ("boundary", settings.boundary_points, settings.planted_candidates, 1.0),
            ("reference", settings.reference_points, 1, settings.reference_distance),
        ):
            key = (settings.seed_of_judge, sample, purpose, defense.test, source)
            found, queried = _accepted(x, settings, defense, count, radius, key)
            tries += queried
            if len(found) < count:
                break
            # No more are queried to have more to choose from.
            parts.append(found[: count * spare])
        else:
            return Drawn(parts[0], parts[1], source, tries)
    return Drawn(None, None, source, tries)


def _accepted(
    x: Tensor, settings: BinarizationSettings, defense: Defense, count: int, radius: float, key: _Key
) -> tuple[Tensor, int]:
    """Points that are not rejected, of blocks until they are ``count`` or more, and how many were queried."""
    threat_model = settings.threat_model
    ball = replace(threat_model, epsilon=threat_model.epsilon * radius)
    if key[-1] == "random":
        candidates = _random_points(x, settings, ball, key)
    else:
        candidates = _attacked_points(x, defense.detector.classifier, ball, key)
    kept, queried, block = x[None][:0], 0, 0
    while len(kept) < count and (points := next(candidates, None)) is not None:
        good = points[defense.accepts(points, seed=derive_seed(*key, "detector", block))]
        # In the ball for the planted points; never in it for references, which would give the planted point away.
        distance = threat_model.distance(good, x[None].expand_as(good)) / threat_model.epsilon
        kept = torch.cat([kept, good[distance > 1.02] if radius > 1 else good[distance <= 1 + 1e-5]])
        queried += len(points)
        block += 1
    return kept, queried


def _random_points(x: Tensor, settings: BinarizationSettings, ball: ThreatModel, key: _Key) -> Iterator[Tensor]:
    draw = ball.sample_corners if settings.corners else ball.sample_surface
    for start in range(0, settings.planting_tries, _BLOCK):
        yield draw(x, min(_BLOCK, settings.planting_tries - start), key=derive_seed(*key), start=start)


def _attacked_points(x: Tensor, network: nn.Module, ball: ThreatModel, key: _Key) -> Iterator[Tensor]:
    rows = x[None].repeat(_ATTACKS, *[1] * x.dim())
    with torch.no_grad():
        logits = network(rows[:1])
    shape, classes = tuple(x.shape), logits.shape[1]
    target = Target(module=network, bounds=ball.bounds, classes=classes, input_shape=shape, device=x.device)
    path: list[Tensor] = []
    APGD(steps=40, loss="margin").run(
        target,
        rows,
        logits.argmax(1).expand(_ATTACKS).clone(),
        threat_model=ball,
        generator=stream(*key, 0),
        watch=lambda step: path.append(step.points.clone()),
    )
    # The path too: the highest detector score need not be where the loss is highest.
    yield torch.cat(path[::4])
