"""The classes of this project's attacks keep to what every attack of their library keeps to.

Attacks that imitate references need some in each call; what they promise is tested with the other detector-aware ones.
"""

from typing import Any, ClassVar

import pytest
import torch

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.models.defended import Defended
from robust_ext.testing import art_invariants, foolbox_invariants
from robust_ext.testing.networks import small_batch
from tests.adapters.hosts import DETECTOR_AWARE, ORDERS, TINY, art_attacks, class_of, in_words_of
from tests.attacks.defenses import FarHidden
from tests.attacks.problems import affine_network

ArtBase = art_invariants.ArtAttackInvariants
FoolboxBase = foolbox_invariants.FoolboxAttackInvariants


class RaysInFoolbox(FoolboxBase):
    can_aim = False


class RaysInArt(ArtBase):
    # It refuses to aim.
    test_targeted_points_go_to_their_targets = None


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

    @pytest.mark.parametrize("device", foolbox_invariants.DEVICES)
    def test_type_and_device_are_kept(self, device):
        """float32 is kept; other types are refused."""
        super().test_type_and_device_are_kept(torch.float32, device)
        with pytest.raises(InvalidArgumentError, match="float64, expected float32"):
            super().test_type_and_device_are_kept(torch.float64, device)

    def test_models_may_be_wrapped(self):
        """One with other bounds is refused."""
        with pytest.raises(InvalidArgumentError, match="model: got one that changes inputs or logits"):
            super().test_models_may_be_wrapped((0.0, 1.0))


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
# An attack, a norm, settings in the words of its declaration, both hosts' invariants, and what ART's are told besides.
ROWS = [
    ("APGD", "linf", {"steps": 8}, FoolboxBase, ArtBase, {}),
    ("APGD", "l1", {"steps": 8, "loss": "margin", "restarts": 2}, FoolboxBase, ArtBase, {}),
    ("Square", "l2", {"queries": 40}, FoolboxBase, ArtBase, {}),
    ("RayS", "linf", {"queries": 400}, RaysInFoolbox, RaysInArt, {"wrong_settings": ({"norm": 2}, {"eps": 0.0})}),
    ("ObjectivePGD", "linf", {"steps": 10, "step_size": 0.04}, FoolboxBase, ArtBase, {}),
    ("LinearRegion", "l2", {**TINY, "regions": 1}, RegionInFoolbox, RegionInArt, {"wrong_settings": WRONG[1:5]}),
    (
        *("OrthogonalPGD", "linf", DETECTOR_AWARE["OrthogonalPGD"], DefendedInFoolbox, DefendedInArt),
        {"wrong_settings": (*WRONG, {"norm": 1}, {"norm": 2, "step": "sign"})},
    ),
    ("JointLoss", "l1", DETECTOR_AWARE["JointLoss"], DefendedInFoolbox, DefendedInArt, {}),
]


def in_foolbox(kind, settings):
    return lambda self: kind(**in_words_of(kind, settings))


def in_art(kind, norm, settings):
    def make_attack(self, estimator, **chosen):
        known = {key: value for key, value in chosen.items() if key != "eps" or "eps" in kind.attack_params}
        return kind(estimator, **{"norm": ORDERS[norm], **in_words_of(kind, settings), **known})

    return make_attack


for name, norm, ways, foolbox_base, art_base, told in ROWS:
    title, kind = f"{name}{norm.capitalize()}", getattr(art_attacks, name)
    members = {"make_attack": in_foolbox(class_of("foolbox", name, norm), ways), "__module__": __name__}
    globals()[f"TestFoolbox{title}"] = type(f"TestFoolbox{title}", (foolbox_base,), members)
    members = {"make_attack": in_art(kind, norm, ways), "norm": ORDERS[norm], "wrong_settings": WRONG, **told}
    globals()[f"TestArt{title}"] = type(f"TestArt{title}", (art_base,), {**members, "__module__": __name__})
