"""A case study on the digits, trained once a session, and its recipes in a binarization test."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import robust_ext
from robust_ext.casestudies import load_case_study
from robust_ext.core.threat import ThreatModel
from robust_ext.datasets import load_dataset


@cache
def on_digits(name):
    """The study with its trained module, threat model and data; 200 test images, and 300 to calibrate detectors on."""
    study = load_case_study(name)
    train, test = load_dataset("digits", split="train"), load_dataset("digits")
    inputs, labels = train.take(train.choose(len(train), seed=0))
    some, classes = test.take(test.choose(len(test), seed=0))
    return SimpleNamespace(
        study=study,
        module=study.trained(inputs, labels),
        threat_model=ThreatModel(norm="linf", epsilon=study.epsilons["digits"]),
        train=(inputs, labels),
        inputs=some[:200],
        labels=classes[:200],
        calibration=some[200:],
    )


def measured(name, samples=200):
    """The measurement of the mechanism on the digits."""
    case = on_digits(name)
    return case.study.measure(case.module, case.inputs[:samples], case.labels[:samples], case.threat_model, seed=0)


def judged(name, kind, samples=32, **options):
    """What the binarization test says of the weak or the right recipe; without depths, which cost the most."""
    case = on_digits(name)
    recipe = getattr(case.study, kind)(case.threat_model)
    given = {**case.study.settings, **recipe.settings, "depths": (1.0,), **options}
    detector = case.study.detector(case.module, *case.train, seed=0)
    if detector is not None:
        given |= {"detector": detector, "detector_data": case.calibration}
    parts = case.study.parts(case.module)
    result = robust_ext.binarization_test(
        parts, {kind: recipe.attack}, case.inputs[:samples], case.threat_model, **given
    )
    return {**result.content["attacks"][0], "findings": result.content["findings"]}
