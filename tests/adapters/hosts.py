"""What the tests of the Foolbox and ART classes of this project's attacks share: both hosts, and a problem in both."""

import inspect
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from robust_ext.adapters.native import search_module
from robust_ext.attacks.catalogue import ATTACKS
from robust_ext.core.threat import ThreatModel
from robust_ext.models.defended import Defended
from robust_ext.testing.networks import small_batch, small_network
from tests.adapters.common import art_classifier
from tests.attacks.defenses import small_defense
from tests.attacks.problems import affine_network

pytest.importorskip("eagerpy", reason="Foolbox is not installed")
pytest.importorskip("art", reason="ART is not installed")
from robust_ext.adapters.art import attacks as art_attacks
from robust_ext.adapters.art.estimators import DefendedPyTorchClassifier
from robust_ext.adapters.art.library import art
from robust_ext.adapters.foolbox import attacks as foolbox_attacks
from robust_ext.adapters.foolbox.library import foolbox
from robust_ext.adapters.foolbox.models import DefendedPyTorchModel, Undetected

__all__ = ["art", "art_attacks", "foolbox", "foolbox_attacks"]

CORE = {attack.__name__: attack for attack in ATTACKS}
OBJECTIVES = ("ace", "kl", "gini", "fisher-rao")
ORDERS = {"linf": np.inf, "l2": 2, "l1": 1}
EPSILONS = {"linf": 0.1, "l2": 0.4, "l1": 1.6}
STEMS = {"APGD": "AutoProjectedGradientDescent", "CarliniWagnerLinf": "CarliniWagner"}
HOSTS = pytest.mark.parametrize("host", ["foolbox", "art"])
EachNorm = pytest.mark.parametrize("norm", list(ORDERS))
SHAPE = (1, 4, 4)
TINY = {"draws": 2, "target_classes": 1, "start_steps": 3, "hops": 1}
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


def scene(name, norm="linf", bounds=(0.0, 1.0), *, rows=6, **ways):
    """A problem that an attack is made for, in both hosts."""
    if CORE[name].traits.detector:
        given = small_defense(rows, norm=norm, bounds=bounds, **ways)
        references = given.target.references if CORE[name].traits.references else None
        models = {"model": detected_by("foolbox", given), "estimator": detected_by("art", given)}
        parts = {"network": given.defended, "bounds": bounds, "x": given.inputs, "y": given.labels}
        return SimpleNamespace(**parts, **models, references=references, given=given)
    piecewise = affine_network(SHAPE, 4, bounds=bounds) if name in ("LinearRegion", "BoundarySearch") else None
    return problem(bounds, rows=rows, network=piecewise)


def make(host, name, norm, at, *, epsilon=0.1, starting_points=None, **settings):
    """A function from inputs and labels (None for predictions) to candidates: an attack in a host."""
    kind, targeted = class_of(host, name, norm), settings.pop("targeted", False)
    chosen, ways = in_words_of(kind, settings), {"references": getattr(at, "references", None)}
    ways["starting_points" if host == "foolbox" else "x_adv_init"] = starting_points
    ways = {key: value for key, value in ways.items() if value is not None}
    if host == "foolbox":
        judged = Undetected if hasattr(at, "references") else lambda y: y
        judged = foolbox.criteria.TargetedMisclassification if targeted else judged
        return lambda x, y: kind(**chosen)(at.model, x, judged(y), epsilons=epsilon, **ways)[0]
    known = inspect.signature(kind).parameters
    own = {"norm": ORDERS[norm], "eps": epsilon, "targeted": targeted, "verbose": False}
    attack = kind(at.estimator, **{key: value for key, value in own.items() if key in known}, **chosen)
    ways = {key: value.numpy() for key, value in ways.items()}
    return lambda x, y: torch.from_numpy(attack.generate(x.numpy(), None if y is None else y.numpy(), **ways))


def by_hand(name, norm, settings, at, y, **ways):
    """Candidates of the core attack."""
    epsilon = ways.pop("epsilon", EPSILONS[norm] * (at.bounds[1] - at.bounds[0]))
    ways["threat_model"] = ThreatModel(norm=norm, epsilon=epsilon, bounds=at.bounds)
    ways["generator"] = torch.Generator().manual_seed(5)
    if getattr(at, "references", None) is not None:
        ways["references"] = at.references
    return search_module(CORE[name](**settings), at.network, at.x, y, **ways)
