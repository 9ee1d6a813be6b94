"""Bad calls of the API: one argument of the wrong kind, shape or size."""

from hypothesis import strategies as st
from torch import nn

import robust_ext
from robust_ext.core.threat import ThreatModel
from robust_ext.datasets import load_dataset
from robust_ext.engine.context import RunContext
from robust_ext.evaluations.arms import Arm
from robust_ext.evaluations.mead.suites import load_suite
from robust_ext.registry.defense import as_defense
from tests.fuzz.judging import Case, words
from tests.fuzz.values import (
    ATTACK,
    ATTACKS,
    DEFENSES,
    DETECTORS,
    IDS,
    INPUTS,
    JUNK,
    LABELS,
    MODELS,
    X,
    Y,
    network,
    unchanged,
)

THREAT = ThreatModel(norm="linf", epsilon=0.1)


def _binarization(**changed):
    given = {"model": network(), "attacks": ATTACK, "inputs": X, "threat_model": THREAT, **changed}
    small = {"inner_points": 5, "random_inner": 1, "random_corners": 1, "canaries": 0}
    return robust_ext.binarization_test(**{**small, **given})


def _accuracy(**changed):
    return robust_ext.robust_accuracy(
        **{"model": network(), "attacks": ATTACK, "inputs": X, "labels": Y, "threat_model": THREAT, **changed}
    )


def _mead(**changed):
    given = {"model": network(), "attacks": ATTACK, "inputs": X, "labels": Y, "threat_model": THREAT, "resamples": 0}
    return robust_ext.mead(**{**given, "detectors": lambda x: x.flatten(1).std(1), **changed})


def _defense(**changed):
    given = {"defense": lambda x: x + 0, "attacks": ATTACK, "inputs": X, "labels": Y, "threat_model": THREAT}
    return robust_ext.evaluate_defense(**{**given, "classifier": network(), "draws": 1, "repeats": 1, **changed})


_COMMON = {
    "inputs": INPUTS,
    "threat_model": JUNK,
    "sample_ids": IDS,
    "attacks": ATTACKS,
    "seed": JUNK,
    "batch_size": JUNK,
    "settings": JUNK,
    "device": JUNK.filter(lambda device: device is not None),
}
_LABELLED = {**_COMMON, "labels": LABELS}
_CALLS = {
    "binarization_test": (
        _binarization,
        {
            **_COMMON,
            "model": MODELS,
            "kappa": JUNK,
            "gap": JUNK,
            "boundary": JUNK,
            "layer": JUNK,
            "C": JUNK,
            "threshold": JUNK,
            "inner_points": JUNK,
            "detector": DETECTORS,
            "detector_data": INPUTS,
            "exposure": JUNK,
            "nothing": JUNK,
        },
    ),
    "robust_accuracy": (_accuracy, {**_LABELLED, "model": MODELS, "epsilons": JUNK, "nothing": JUNK}),
    "mead": (
        _mead,
        {
            **_LABELLED,
            "model": MODELS,
            "detectors": DETECTORS,
            "detector_data": INPUTS,
            "combine": JUNK,
            "naturals": JUNK,
        },
    ),
    "evaluate_defense": (
        _defense,
        {**_LABELLED, "defense": DEFENSES, "classifier": MODELS, "surrogates": JUNK, "steps": JUNK},
    ),
    "ThreatModel": (
        lambda **given: ThreatModel(**{"norm": "linf", "epsilon": 0.1, **given}),
        {"norm": JUNK, "epsilon": JUNK, "bounds": JUNK},
    ),
    "Arm": (
        lambda **given: Arm(**{"attack": ATTACK, "epsilon": 0.1, **given}),
        {"attack": ATTACKS, "norm": JUNK, "epsilon": JUNK, "label": JUNK},
    ),
    "as_attack": (lambda **given: robust_ext.as_attack(**given), {"obj": ATTACKS}),
    "as_defense": (
        lambda **given: as_defense(**{"obj": "bit-depth", "classifier": network(), "inputs": X, **given}),
        {"obj": DEFENSES, "bounds": JUNK, "weights": JUNK},
    ),
    "load_suite": (lambda **given: load_suite(**{"name": "quick", **given}), {"name": JUNK, "bounds": JUNK}),
    "load_dataset": (
        lambda **given: load_dataset(**{"spec": "digits", **given}),
        {"spec": JUNK, "root": JUNK, "split": JUNK},
    ),
    "RunContext": (lambda **given: RunContext(**given), {"origin": JUNK, "command": JUNK}),
}


@st.composite
def cases(draw):
    """A call with one bad argument."""
    name = draw(st.sampled_from(sorted(_CALLS)))
    function, arguments = _CALLS[name]
    argument = draw(st.sampled_from(sorted(arguments)))
    value = draw(arguments[argument])
    return Case(
        category=f"API {name}",
        call=lambda: function(**{argument: value}),
        words=f"{argument}={ascii(value)[:200]}",
        meaning=_meaning(name, argument, value),
    )


def _meaning(name, argument, value):
    """Why a value is right after all; written without the project's own checks."""
    plain = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is None and argument in set(
        words(
            """
    sample_ids settings detector detector_data layer epsilons surrogates weights label root
"""
        )
    ):
        return "None: left out"
    if (name, argument) == ("evaluate_defense", "attacks") and (
        value is None or (isinstance(value, list) and value == [None])
    ):
        return "None: those recommended"
    if value is None and (name, argument) == ("Arm", "norm"):
        return ""
    if isinstance(value, (list, tuple)) and not value and argument == "combine":
        return "no combination"
    if isinstance(value, dict) and not value and argument in ("surrogates", "origin"):
        return "none of them"
    if argument == "bounds" and isinstance(value, (list, tuple)) and len(value) == 2:
        return "two numbers" if all(isinstance(one, int) for one in value) and value[0] < value[1] else ""
    if argument == "epsilon" and plain:
        return "a budget" if 0 < value <= 1e20 else ""
    if argument == "epsilons" and isinstance(value, (list, tuple, set)) and value:
        return "budgets" if all(isinstance(one, int) and one > 0 for one in value) else ""
    if argument in ("C",) and plain:
        return "a weight" if 0 < value <= 1e9 else ""
    return _meaning_of_objects(name, argument, value)


def _meaning_of_objects(name, argument, value):
    callable_ = callable(value) and not isinstance(value, (type, nn.Module))
    if (
        argument in ("attacks", "attack", "obj")
        and name != "as_defense"
        and (callable_ or isinstance(value, nn.Module))
    ):
        return "a callable, whose results count for nothing" if name in ("as_attack", "Arm") else ""
    if argument == "label" and isinstance(value, str):
        return "a text"
    if argument == "command" and isinstance(value, (list, tuple)):
        return "words" if all(isinstance(one, str) for one in value) else ""
    if argument == "origin" and isinstance(value, dict):
        return "words by name" if all(isinstance(one, str) for one in value.values()) else ""
    if argument in ("obj", "defense") and (isinstance(value, nn.Identity) or value is unchanged):
        return "a purifier that changes nothing"
    if isinstance(value, str) and argument == "root" and value:
        return "a folder that exists" if value in (".", "/", "..") else ""
    if argument in ("surrogates",) and value is None:
        return "none"
    return ""
