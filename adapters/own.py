"""This project's own attacks under the name ``robust_ext``, as in ``robust_ext:APGD(steps=50)``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from robust_ext.attacks.apgd import APGD
from robust_ext.attacks.base import Attack
from robust_ext.attacks.carlini_linf import CarliniWagnerLinf
from robust_ext.attacks.feature_matching import FeatureMatching
from robust_ext.attacks.joint_loss import JointLoss
from robust_ext.attacks.linear_region.attack import LinearRegion
from robust_ext.attacks.logit_matching import LogitMatching
from robust_ext.attacks.native import NativeAttack
from robust_ext.attacks.objective_pgd import ObjectivePGD
from robust_ext.attacks.orthogonal import OrthogonalPGD, SelectivePGD
from robust_ext.attacks.random_search import RandomSearch
from robust_ext.attacks.rays import RayS
from robust_ext.attacks.spatial import SpatialTransformation
from robust_ext.attacks.square import Square
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.specification import check_keywords, did_you_mean
from robust_ext.registry.base import AdaptedModel, Adapter, AttackListing

_TRIALS: Mapping[type[NativeAttack], Mapping[str, Any]] = {
    APGD: {"steps": 20},
    RandomSearch: {"points": 40},
    ObjectivePGD: {"steps": 20},
    CarliniWagnerLinf: {
        "steps": 20,
        "learning_rate": 0.05,
        "initial_const": 0.1,
        "const_factor": 8,
        "decrease_factor": 0.8,
    },
    LinearRegion: {"starts": 4, "walk": 10, "hops": 2, "hop_steps": 5, "regions": 4},
    RayS: {"queries": 100},
    Square: {"queries": 40},
    SpatialTransformation: {"translation": 2, "translation_steps": 3, "rotation_steps": 5},
    FeatureMatching: {"steps": 20},
    LogitMatching: {"steps": 20, "samples": 2},
    OrthogonalPGD: {"steps": 20},
    SelectivePGD: {"steps": 20},
    JointLoss: {"steps": 10, "restarts": 3},
}
_CLASSES = {attack_class.__name__: attack_class for attack_class in _TRIALS}


class OwnAdapter(Adapter):
    """Adapter of this project's own attacks, which need no adapting."""

    name = "robust_ext"

    def list_attacks(self) -> list[AttackListing]:
        """Every attack of this project."""
        return [
            AttackListing(name=name, traits=attack_class().traits, trial=_TRIALS[attack_class])
            for name, attack_class in _CLASSES.items()
        ]

    def build_attack(self, attack: str, settings: Mapping[str, Any], *, name: str) -> Attack:
        """Make the attack of that class name, with these settings."""
        if attack not in _CLASSES:
            expected = f"one of {', '.join(_CLASSES)}{did_you_mean(attack, _CLASSES)}"
            raise InvalidArgumentError("attack", f"robust_ext:{attack}", expected)
        check_keywords(_CLASSES[attack], settings, argument="attack", label=attack)
        built = _CLASSES[attack](**settings)
        built.name = name
        return built

    def adapt_attack(self, attack: object, *, name: str | None = None) -> Attack | None:
        """Make an attack of one of the classes, or of a tuple (class, settings)."""
        settings: object = {}
        if isinstance(attack, tuple) and len(attack) == 2:
            attack, settings = attack
        if not isinstance(attack, type) or attack not in _TRIALS:
            return None
        if not isinstance(settings, Mapping):
            raise InvalidArgumentError(
                "attack", f"settings of type {type(settings).__name__}", "a dict of keyword arguments"
            )
        return self.build_attack(attack.__name__, settings, name=name or attack.__name__)

    def adapt_model(self, model: object) -> AdaptedModel | None:
        """None: models of this project are modules."""
        return None


ADAPTER = OwnAdapter()
