"""A classifier with a detector: attacks that know it, and a certificate in both directions.

Sources: Granese et al., "MEAD: A Multi-Armed Approach for Evaluation of Adversarial Examples Detectors" (2022), for the
worst case over attacks; Zimmermann et al. 2022, section 3.2, for the two tests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from robust_ext.attacks.base import Attack
from robust_ext.attacks.feature_matching import FeatureMatching
from robust_ext.attacks.joint_loss import JointLoss
from robust_ext.attacks.orthogonal import OrthogonalPGD, SelectivePGD
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.statistics import proportion_interval
from robust_ext.core.threat import ThreatModel
from robust_ext.core.validation import Array, check_inputs
from robust_ext.engine.inputs import EvaluationInputs
from robust_ext.engine.run import Outcome
from robust_ext.evaluations.adaptive.plan import Step
from robust_ext.evaluations.detectors import NamedDetector, as_detectors, flagged, has_threshold
from robust_ext.evaluations.evaluate.cascade import MemberRun, within
from robust_ext.evaluations.evaluate.settings import EvaluateSettings
from robust_ext.evaluations.evaluate.suite import Member

# Steps of attacks that know the detector.
_STEPS = {"quick": 30, "standard": 100, "thorough": 300}


def prepare_detector(
    detector: object,
    data: Array | None,
    given: EvaluationInputs,
    settings: EvaluateSettings,
    *,
    digests: bool,
) -> tuple[NamedDetector, ...]:
    """Check a detector, and calibrate one without a threshold on clean inputs ``(M, ...)``; none without one.

    Without ``digests`` no run folder keeps what it decides.
    """
    if detector is None:
        if data is not None:
            raise InvalidArgumentError("detector_data", type(data).__name__, "none where there is no detector")
        return ()
    clean = None if data is None else check_inputs("detector_data", data, bounds=given.bounds)
    (found,) = as_detectors(
        [detector],
        given.module,
        given.inputs,
        data=clean,
        false_positive_rate=settings.detector_fpr,
        bounds=given.bounds,
        seed=settings.seed,
        digests=digests,
    )
    if not has_threshold(found.detector):
        expected = "clean inputs to calibrate it on, or a detector whose calibrate() was called"
        raise InvalidArgumentError("detector_data", "nothing, and a detector without a threshold", expected)
    return (found,)


def aware_members(threat_model: ThreatModel, *, budget: str) -> list[Member]:
    """Return the attacks that know the detector, in the order in which they run."""
    steps = _STEPS[budget]
    attacks: list[Attack] = [
        OrthogonalPGD(steps=steps),
        SelectivePGD(steps=steps),
        JointLoss(steps=steps),
        FeatureMatching(steps=2 * steps, rel_step_size=0.1),
    ]
    return [Member(attack=one, white_box=True) for one in attacks if threat_model.norm in one.traits.norms]


def aware_steps(threat_model: ThreatModel, *, budget: str) -> list[Step]:
    """Return the steps on a test-time defense that know the detector, which looks at what the defense is given."""
    attacks = [one.attack for one in aware_members(threat_model, budget=budget)]
    exposures = {"static": "on the static model", "identity": "BPDA identity", "defense": "plain gradients"}
    return [
        Step(
            name=f"{one.name}{' ' if exposure == 'static' else ', '}{words}",
            category="transfer" if exposure == "static" else "white-box",
            attack=one,
            exposure=exposure,
        )
        for exposure, words in exposures.items()
        for one in attacks
    ]


def strongest_aware(outcomes: Sequence[Outcome[MemberRun]], members: Sequence[Member]) -> Attack:
    """Return the attack to certify: the last that knows the detector and broke a sample, else the first of these.

    Attacks that ignore the detector fail one of the two tests.
    """
    ran = [one for one in outcomes if one.run.adaptive_to is not None and one.refusal is None]
    broke = [one for one in ran if within(one.run, one.records)]
    if ran:
        return (broke[-1] if broke else ran[0]).run.attack
    return next(one.attack for one in members if one.attack.traits.detector)


def describe_detector(
    detector: NamedDetector, given: EvaluationInputs, settings: EvaluateSettings, correct: Sequence[bool]
) -> dict[str, Any]:
    """Return what the detector does to the clean samples, of which some are classified as they should be."""
    found = flagged(detector, given.inputs, seed=settings.seed_of_judge, sample=given.ids[0]).tolist()
    hits, samples = sum(found), len(found)
    interval = proportion_interval(hits, samples)
    both = [good and not bad for good, bad in zip(correct, found, strict=True)]
    return {
        "name": detector.name,
        "false_positive_rate": hits / samples,
        "interval": None if interval is None else list(interval),
        "accepted_accuracy": sum(both) / samples,
    }


def joined(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry of an attack in the regular and the inverted test as that of one test: counts of both."""
    tests = list(entry["tests"].values())
    depths = [one["depth"] for one in tests if one["depth"] is not None]
    randoms = [one["random_score"] for one in tests if one["random_score"] is not None]
    hits, samples = (
        sum(parts) for parts in zip(*((one["outcomes"]["found"], one["samples"]) for one in tests), strict=True)
    )
    interval = proportion_interval(hits, samples)
    return {
        **entry,
        "outcomes": {"found": hits},
        "samples": samples,
        "score_interval": None if interval is None else list(interval),
        "random_score": max(randoms, default=None),
        "depth": min(depths, default=0.0),
    }
