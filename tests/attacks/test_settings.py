"""Settings of all attacks: what is refused, and the traits that follow."""

import math
import types
import typing

import pytest
from torch import nn

from robust_ext.attacks.adapted import AdaptedAttack
from robust_ext.attacks.apgd import APGD
from robust_ext.attacks.carlini_linf import CarliniWagnerLinf
from robust_ext.attacks.catalogue import ATTACKS
from robust_ext.attacks.feature_matching import FeatureMatching
from robust_ext.attacks.logit_matching import LogitMatching
from robust_ext.attacks.objective_pgd import ObjectivePGD
from robust_ext.attacks.rays import RayS
from robust_ext.attacks.spatial import SpatialTransformation
from robust_ext.attacks.transfer import Transfer
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.settings import declared, setting_types
from robust_ext.core.threat import NORMS

REQUIRED = {Transfer: {"surrogates": {"a": nn.Identity()}}, AdaptedAttack: {"attack": APGD()}}
BOUNDARY = {"minimum_norm": True, "norms": ("linf",), "leaves_ball": True, "failure": "input", "seeds": "none"}
SPATIAL = {"norms": NORMS, "leaves_ball": True, "gradients": False, "batching": "full"}
SPATIAL |= {"one_by_one": False, "failure": "best"}
SETTINGS = [
    pytest.param(each, name, info, id=f"{each.__name__} {name}")
    for each in (*ATTACKS, Transfer, AdaptedAttack)
    for name, info in declared(each).items()
]


def outside(kinds, info):
    """Values that are not accepted, those just outside of the range among them."""
    if bool in kinds:
        return [1, "yes"]
    if info.choices is not None:
        return ["nonsense", 3]
    numeric = kinds & {int, float}
    step = 1 if int in kinds else 1e-9
    values = [math.nan, math.inf, "8", True] if numeric else []
    if int in kinds:
        values += [1.5]
    for end, sign in ((info.minimum, -1), (info.maximum, 1)):
        values += [] if end is None else [end + sign * step]
    return values + [end for end in (info.above, info.below) if end is not None]


def kinds_of(attack_class, name):
    kind = setting_types(attack_class)[name]
    return set(typing.get_args(kind)) if isinstance(kind, types.UnionType) else {kind}


@pytest.mark.parametrize(("attack_class", "name", "info"), SETTINGS)
def test_values_outside_what_is_declared_are_refused_by_name(attack_class, name, info):
    assert info.help
    required = REQUIRED.get(attack_class, {})
    for value in outside(kinds_of(attack_class, name), info):
        with pytest.raises(InvalidArgumentError, match=f"^{name}: got .*expected "):
            attack_class(**{**required, name: value})


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (APGD(), {"batching": "full", "minimum_classes": 2}),
        (APGD(stop_early=True), {"batching": "any"}),
        (APGD(loss="targeted-dlr"), {"minimum_classes": 4}),
        (ObjectivePGD(algorithm="bim"), {"seeds": "none", "batching": "full", "failure": "last"}),
        (ObjectivePGD(objective="fisher-rao", algorithm="bim"), {"seeds": "generator", "batch_dependent": False}),
        (ObjectivePGD(best=True), {"failure": "best"}),
        (CarliniWagnerLinf(), {**BOUNDARY, "batching": "any", "one_by_one": True, "minimum_classes": 2}),
        (RayS(), {**BOUNDARY, "batching": "full", "gradients": False, "one_by_one": False}),
        (RayS(keep_rows=False), {**BOUNDARY, "batching": "any", "gradients": False}),
        (SpatialTransformation(), {**SPATIAL, "seeds": "none"}),
        (SpatialTransformation(mode="random"), {**SPATIAL, "seeds": "generator"}),
        (LogitMatching(), {"leaves_ball": True}),
        (LogitMatching(level=0), {"leaves_ball": False}),
        (Transfer(**REQUIRED[Transfer]), {"batching": "full", "gradients": False, "failure": "best"}),
    ],
)
def test_traits_follow_the_settings(made, expected):
    assert {name: getattr(made.traits, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("attack_class", "chosen", "message"),
    [
        (ObjectivePGD, {"algorithm": "fgsm", "steps": 2}, "steps: got 2, expected 1, or nothing, for FGSM"),
        (CarliniWagnerLinf, {"largest_const": 1e-6}, "largest_const: got 1e-06, expected at least initial_const"),
        (SpatialTransformation, {"translation_steps": 4}, "translation_steps: got 4, expected an odd integer, as 3"),
        (SpatialTransformation, {"rotation_steps": 30}, "rotation_steps: got 30, expected an odd integer"),
        (FeatureMatching, {"features": 3}, "features: got 3, expected names of layers"),
        (FeatureMatching, {"features": []}, "features: got "),
        (FeatureMatching, {"features": ["1", 2]}, "features: got "),
    ],
)
def test_settings_that_do_not_go_together_are_refused(attack_class, chosen, message):
    with pytest.raises(InvalidArgumentError, match=f"^{message}"):
        attack_class(**chosen)
