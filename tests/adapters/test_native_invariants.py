"""The classes of this project's attacks keep to what every attack of their library keeps to.

Attacks that imitate references need some in each call; what they promise is tested with the other detector-aware ones.
"""

from typing import Any, ClassVar

import pytest
import torch

from robust_ext.attacks.catalogue import ATTACKS
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.models.defended import Defended
from robust_ext.testing import art_invariants, foolbox_invariants
from robust_ext.testing.networks import small_batch
from tests.adapters.hosts import (
    DETECTOR_AWARE,
    ORDERS,
    TINY,
    art_attacks,
    class_of,
    foolbox,
    foolbox_attacks,
    in_words_of,
)
from tests.attacks.defenses import FarHidden
from tests.attacks.problems import affine_network

ArtBase = art_invariants.ArtAttackInvariants
FoolboxBase = foolbox_invariants.FoolboxAttackInvariants


class RaysInFoolbox(FoolboxBase):
    can_aim = False


class RaysInArt(ArtBase):
    """Refuses to aim."""

    @pytest.mark.parametrize("bounds", [(0.0, 1.0)])
    def test_targeted_points_go_to_their_targets(self, bounds):
        estimator, _, _ = self._problem(bounds)
        with pytest.raises(InvalidArgumentError, match=r"targeted: got True.*cannot aim"):
            self._make(estimator, targeted=True)
        with pytest.raises(InvalidArgumentError, match="targeted"):
            self._make(estimator).set_params(targeted=True)


class Region:
    """On a small network that the attack takes little time on."""

    shape = (1, 2, 3)
    epsilon = 0.9

    def make_network(self, bounds, classes=FoolboxBase.classes):
        return affine_network(self.shape, classes, bounds=bounds)


class RegionInFoolbox(Region, FoolboxBase):
    epsilon = 0.5


class RegionInArt(Region, ArtBase):
    pass


def defend(network, shape, bounds):
    """A network whose hidden units are watched, by a detector that lets most points pass."""
    points = small_batch(64, shape, bounds=bounds)
    detector = FarHidden(network)
    with torch.no_grad():
        detector.middle = network[:3](points).mean(0)
    detector.calibrate(points, false_positive_rate=0.05)
    return Defended(network, detector)


class DefendedInFoolbox(FoolboxBase):
    """On models whose detector is watched, with logits of the classifier alone."""

    epsilon = 0.25

    def make_network(self, bounds):
        return defend(super().make_network(bounds), self.shape, bounds)

    @pytest.mark.parametrize("dtype", [torch.float64])
    @pytest.mark.parametrize("device", foolbox_invariants.DEVICES)
    def test_type_and_device_are_kept(self, dtype, device):
        """float32 is kept; other types are refused."""
        super().test_type_and_device_are_kept(torch.float32, device)
        with pytest.raises(InvalidArgumentError, match="float64, expected float32"):
            super().test_type_and_device_are_kept(dtype, device)

    @foolbox_invariants.EachBounds
    def test_models_may_be_wrapped(self, bounds):
        """A wrapper that changes nothing may be there; one with other bounds is refused."""
        model, x, y = self._problem(bounds)
        plain = self._attack(model, x, y, self._epsilon(bounds))
        same = self._attack(model.transform_bounds(bounds, wrapper=True), x, y, self._epsilon(bounds))
        assert torch.equal(plain[1], same[1])
        with pytest.raises(InvalidArgumentError, match="model: got one that changes inputs or logits"):
            super().test_models_may_be_wrapped(bounds)


class DefendedInArt(ArtBase):
    epsilon = 0.25
    # All rows of a batch draw after the detector's.
    repeatable: ClassVar[dict[str, Any]] = {"start": "input", "num_random_init": 1}

    def make_network(self, bounds, classes):
        return defend(super().make_network(bounds, classes), self.shape, bounds)

    def test_preprocessing_of_the_estimator_is_attacked_through(self):
        """It is refused: the detector could not see what it does."""
        with pytest.raises(InvalidArgumentError, match="model: got one that changes inputs or logits"):
            super().test_preprocessing_of_the_estimator_is_attacked_through()


WRONG = (*ArtBase.wrong_settings, {"seed": -1}, {"eps": float("inf")})
BASES = {
    "RayS": (RaysInFoolbox, RaysInArt),
    "LinearRegion": (RegionInFoolbox, RegionInArt),
    "BoundarySearch": (RegionInFoolbox, RegionInArt),
    **{attack.__name__: (DefendedInFoolbox, DefendedInArt) for attack in ATTACKS if attack.traits.detector},
}
# An attack, a norm, settings in the words of its declaration, and what ART's invariants are told besides.
CARLINI = {"steps": 20, "learning_rate": 0.05, "initial_const": 0.1, "const_factor": 8.0}
FEWER = {"wrong_settings": ArtBase.wrong_settings[1:]}
ROWS = [
    ("APGD", "Linf", {"steps": 8}, {}),
    ("APGD", "L1", {"steps": 8, "loss": "margin", "restarts": 2}, {}),
    ("RandomSearch", "L2", {"points": 60, "outer": "surface"}, {}),
    ("Square", "L2", {"queries": 40}, {}),
    ("RayS", "Linf", {"queries": 400}, {"wrong_settings": (*WRONG[:-2], {"norm": 2}, {"eps": 0.0}, {"stop": 1})}),
    # It has no class for ART that these tests are for.
    ("CarliniWagnerLinf", "Linf", CARLINI, None),
    ("ObjectivePGD", "Linf", {"steps": 10, "step_size": 0.04}, {}),
    ("LinearRegion", "L2", {**TINY, "regions": 1}, FEWER),
    # Where points of a region are nearly as near, rounding chooses between them.
    ("LinearRegion", "Linf", {**TINY, "regions": 1}, {**FEWER, "repeatable": {"max_iter": 0}}),
    ("BoundarySearch", "L2", TINY, FEWER),
    *(
        (name, norm, DETECTOR_AWARE[name], told)
        for name, norm, told in (
            ("OrthogonalPGD", "Linf", {"wrong_settings": (*WRONG, {"norm": 1}, {"norm": 2, "step": "sign"})}),
            ("SelectivePGD", "L2", {}),
            ("JointLoss", "L1", {}),
        )
    ),
]


def add(name, base, make_attack, *, quick, **parts):
    made = type(f"Test{name}", (base,), {"make_attack": make_attack, "__module__": __name__, **parts})
    globals()[f"Test{name}"] = made if quick else pytest.mark.exhaustive(made)


def in_foolbox(kind, settings):
    return lambda self: kind(**settings)


def in_art(kind, norm, settings):
    def make_attack(self, estimator, **chosen):
        known = {key: value for key, value in chosen.items() if key != "eps" or "eps" in kind.attack_params}
        return kind(estimator, **{"norm": ORDERS[norm.lower()], **settings, **known})

    return make_attack


# The first row of each attack is among the quick tests, in the one host and the other in turns.
seen = set()
for position, (name, norm, ways, told) in enumerate(ROWS):
    turn = "" if name in seen else "foolbox" if told is None else ("foolbox", "art")[len(seen) % 2]
    seen.add(name)
    foolbox_base, art_base = BASES.get(name, (FoolboxBase, ArtBase))
    kind, twin = class_of("foolbox", name, norm.lower()), getattr(art_attacks, name)
    add(f"Foolbox{name}{position}", foolbox_base, in_foolbox(kind, in_words_of(kind, ways)), quick=turn == "foolbox")
    if told is not None:
        own = {"norm": ORDERS[norm.lower()], "wrong_settings": WRONG, **told}
        add(f"Art{name}{position}", art_base, in_art(twin, norm, in_words_of(twin, ways)), quick=turn == "art", **own)
WITH_ACE = foolbox_attacks.with_objective(foolbox.attacks.LinfPGD, "ace")
add("LinfPGDWithAce", FoolboxBase, in_foolbox(WITH_ACE, {"steps": 10}), quick=False)
