"""Settings of all attacks: those that do not go together, and the traits that follow."""

import pytest
from torch import nn

from robust_ext.attacks.adapted import AdaptedAttack
from robust_ext.attacks.apgd import APGD
from robust_ext.attacks.carlini_linf import CarliniWagnerLinf
from robust_ext.attacks.feature_matching import FeatureMatching
from robust_ext.attacks.logit_matching import LogitMatching
from robust_ext.attacks.objective_pgd import ObjectivePGD
from robust_ext.attacks.rays import RayS
from robust_ext.attacks.spatial import SpatialTransformation
from robust_ext.attacks.transfer import Transfer
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.threat import NORMS

REQUIRED = {Transfer: {"surrogates": {"a": nn.Identity()}}, AdaptedAttack: {"attack": APGD()}}
BOUNDARY = {"minimum_norm": True, "norms": ("linf",), "leaves_ball": True, "failure": "input", "seeds": "none"}
SPATIAL = {"norms": NORMS, "leaves_ball": True, "gradients": False, "batching": "full"}
SPATIAL |= {"one_by_one": False, "failure": "best"}


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
