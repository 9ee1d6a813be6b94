"""Case studies on the digits, trained once a session, and their recipes in a binarization test."""

from functools import cache

import robust_ext
from robust_ext.casestudies import Trained, load_case_study
from robust_ext.datasets import load_dataset


def data(split):
    """All images and labels of a split, shuffled."""
    images = load_dataset("digits", split=split)
    return images.take(images.choose(len(images), seed=0))


@cache
def on_digits(name):
    """The study and the trained defense, with all test images."""
    study = load_case_study(name)
    inputs, labels = data("test")
    module = study.trained(*data("train"))
    return study, Trained(
        module=module, inputs=inputs, labels=labels, threat_model=study.threat_model("digits"), seed=0
    )


def some(case, samples):
    """The case with its first samples only."""
    return Trained(**{**vars(case), "inputs": case.inputs[:samples], "labels": case.labels[:samples]})


def measured(name, samples=200):
    """The measurement of the mechanism on the digits."""
    study, case = on_digits(name)
    return study.measure(some(case, samples))


def judged(name, kind, samples=32, **options):
    """The binarization test of the weak or the right recipe, at depth 1, as deeper problems cost the most."""
    study, case = on_digits(name)
    attacks, given = {kind: getattr(study, kind).attack}, {**study.settings, "depths": (1.0,), **options}
    detector = study.detector(case.module, *data("train"), seed=0)
    if detector is not None:
        given |= {"detector": detector, "detector_data": case.inputs[200:]}
    inputs, parts = case.inputs[:samples], study.parts(case.module)
    content = robust_ext.binarization_test(parts, attacks, inputs, case.threat_model, **given).content
    return {**content["attacks"][0], "findings": content["findings"]}
