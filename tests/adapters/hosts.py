"""What the tests of the Foolbox and ART classes of this project's attacks share: both hosts, and a problem in both."""

from types import SimpleNamespace

import numpy as np
import pytest

from robust_ext.attacks.catalogue import ATTACKS
from robust_ext.models.defended import Defended
from robust_ext.testing.networks import small_batch, small_network
from tests.adapters.common import art_classifier

pytest.importorskip("eagerpy", reason="Foolbox is not installed")
pytest.importorskip("art", reason="ART is not installed")
from robust_ext.adapters.art import attacks as art_attacks
from robust_ext.adapters.art.estimators import DefendedPyTorchClassifier
from robust_ext.adapters.art.library import art
from robust_ext.adapters.foolbox import attacks as foolbox_attacks
from robust_ext.adapters.foolbox.library import foolbox
from robust_ext.adapters.foolbox.models import DefendedPyTorchModel

__all__ = ["art", "art_attacks", "foolbox", "foolbox_attacks"]

CORE = {attack.__name__: attack for attack in ATTACKS}
OBJECTIVES = ("ace", "kl", "gini", "fisher-rao")
ORDERS = {"linf": np.inf, "l2": 2, "l1": 1}
EPSILONS = {"linf": 0.1, "l2": 0.4, "l1": 1.6}
STEMS = {"APGD": "AutoProjectedGradientDescent", "CarliniWagnerLinf": "CarliniWagner"}
HOSTS = pytest.mark.parametrize("host", ["foolbox", "art"])
EachNorm = pytest.mark.parametrize("norm", list(ORDERS))
SHAPE = (1, 4, 4)
DETECTOR_AWARE = {
    "OrthogonalPGD": {"steps": 12, "rel_step_size": 0.2},
    "SelectivePGD": {"steps": 12, "rel_step_size": 0.2},
    "JointLoss": {"steps": 8, "restarts": 2},
    "FeatureMatching": {"features": "2", "steps": 12, "rel_step_size": 0.1},
    "LogitMatching": {"steps": 12, "rel_step_size": 0.1, "samples": 2, "level": 0.02, "check_every": 2},
}


def class_of(host, name, norm="linf"):
    """The class of an attack in a host."""
    if host == "art":
        return getattr(art_attacks, name)
    title = "" if name == "SpatialTransformation" else norm.capitalize()
    return getattr(foolbox_attacks, f"{title}{STEMS.get(name, name)}Attack")


def in_words_of(kind, settings):
    """Settings of the core attack under the names of a host's class."""
    names = {entry.setting: entry.name for entry in kind.parameters}
    found = {names.get(key, key): value for key, value in settings.items()}
    if "random_start" in found:
        found["random_start"] = found["random_start"] == "random"
    return found


def foolbox_model(network, bounds=(0.0, 1.0), **settings):
    return foolbox.PyTorchModel(network, bounds=bounds, device="cpu", **settings)


def problem(bounds=(0.0, 1.0), classes=4, rows=6, *, network=None, **ways):
    """A network, inputs, their predictions, and the network as a model of Foolbox and of ART (with ``ways``)."""
    inside = bounds or (0.0, 1.0)
    network = small_network(SHAPE, classes, bounds=inside) if network is None else network.eval()
    x = small_batch(rows, SHAPE, bounds=inside)
    return SimpleNamespace(
        network=network,
        bounds=bounds,
        x=x,
        y=network(x).argmax(1),
        model=None if bounds is None else foolbox_model(network, bounds),
        estimator=art_classifier(network, SHAPE, classes, clip_values=bounds, **ways),
    )


def detected_by(host, given, *, exposure="reject"):
    """The classifier with its detector of :func:`small_defense` as a model of a host."""
    defended, bounds = given.defended, given.threat_model.bounds
    shown = Defended(defended.classifier, defended.detector, inverted=defended.inverted, exposure=exposure)
    if host == "foolbox":
        return DefendedPyTorchModel(shown, bounds=bounds)
    return DefendedPyTorchClassifier(shown, input_shape=tuple(given.inputs.shape[1:]), nb_classes=4, clip_values=bounds)


def art_problem(*args, **ways):
    """Network, ART's classifier, inputs and labels in numpy."""
    at = problem(*args, **ways)
    return at.network, at.estimator, at.x.numpy(), at.y.numpy()


def foolbox_problem(*args, **ways):
    """Network, Foolbox's model, inputs and labels."""
    at = problem(*args, **ways)
    return at.network, at.model, at.x, at.y
