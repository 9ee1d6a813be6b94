"""The classes that Foolbox and ART have of this project's attacks, both from one table of cases."""

import itertools

import numpy as np
import pytest
import torch

from robust_ext.core.errors import InvalidArgumentError, ModelError
from robust_ext.registry import as_attack
from tests.adapters import hosts
from tests.adapters.hosts import CORE, EPSILONS, HOSTS, ORDERS, SHAPE, EachNorm, by_hand, make, problem, scene

CASES = [
    ("APGD", "linf", {"steps": 6}),
    ("APGD", "l2", {"steps": 5, "loss": "margin", "restarts": 2, "stop_early": True}),
    ("APGD", "l1", {"steps": 5, "start": "input"}),
    ("APGD", "linf", {"steps": 4, "loss": "targeted-dlr", "target_classes": 2}),
    ("RandomSearch", "linf", {"points": 9}),
    ("RandomSearch", "l2", {"points": 9, "outer": "surface"}),
    ("RandomSearch", "l1", {"points": 9, "outer_share": 1.0}),
    *(("Square", norm, {"queries": 25, "p": 0.5, "restarts": 2, "loss": "ce", "stop_early": False}) for norm in ORDERS),
    ("RayS", "linf", {"queries": 150, "tolerance": 0.01}),
    ("RayS", "linf", {"queries": 150, "tolerance": 0.01, "keep_rows": False}),
    ("CarliniWagnerLinf", "linf", {"steps": 10, "learning_rate": 0.1, "initial_const": 0.1}),
    ("SpatialTransformation", "linf", {"translation": 1, "translation_steps": 3, "rotation_steps": 3}),
    ("SpatialTransformation", "linf", {"translation": 1, "mode": "random", "samples": 4}),
    *(("LinearRegion", norm, {**hosts.TINY, "regions": 1}) for norm in ORDERS),
    ("BoundarySearch", "l2", hosts.TINY),
    *(
        (name, norm, settings)
        for (name, settings), norm in itertools.product(hosts.DETECTOR_AWARE.items(), ORDERS)
        if (norm, name) != ("l1", "OrthogonalPGD")
    ),
]
EACH = itertools.product(ORDERS, hosts.OBJECTIVES)
CLIMBS = [("ObjectivePGD", norm, {"objective": name, "steps": 5}) for norm, name in EACH]
BIM = {"algorithm": "bim", "steps": 4, "best": True, "projection": "scaled"}
FURTHER = ({"algorithm": "fgsm"}, BIM, {"steps": 5, "step_size": 0.05})
CLIMBS += [("ObjectivePGD", norm, settings) for norm, settings in itertools.product(ORDERS, FURTHER)]


@HOSTS
@pytest.mark.parametrize(("name", "norm", "settings"), CASES + CLIMBS, ids=str)
@pytest.mark.parametrize("aims", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_points_are_those_of_the_attack_itself(host, name, norm, settings, aims):
    if aims and (name == "RayS" or settings.get("objective", "ace") != "ace"):
        pytest.skip("it cannot aim")
    at = scene(name, norm, (-1.0, 2.0) if aims else (0.0, 1.0))
    y = (at.y + 1) % 4 if aims else at.y
    epsilon = EPSILONS[norm] * (3 if aims else 2 if CORE[name].traits.detector else 1)
    ways = settings if CORE[name].traits.seeds == "none" else {**settings, "seed": 5}
    found = make(host, name, norm, at, epsilon=epsilon, targeted=aims, **ways)(at.x, y)
    assert torch.equal(found, by_hand(name, norm, settings, at, y, epsilon=epsilon, targeted=aims))
    assert not torch.equal(found, at.x)


@HOSTS
@pytest.mark.parametrize(("name", "norm", "settings"), CASES, ids=str)
def test_as_attacks_of_this_project_they_are_the_core_attacks(host, name, norm, settings):
    kind = hosts.class_of(host, name, norm)
    own = {"norm": ORDERS[norm]} if host == "art" and "norm" in kind.attack_params else {}
    made = kind(*[scene(name, norm).estimator] * (host == "art"), **own, **hosts.in_words_of(kind, settings))
    attack, core = as_attack(made, name="mine"), CORE[name](**settings)
    assert type(attack) is CORE[name]
    assert (attack.name, attack.description, attack.traits) == ("mine", core.description, core.traits)


EACH_VALUE = np.linspace(0.1, 0.2, 16).reshape(SHAPE)


def test_arguments_of_generate_raise():
    at = problem()
    for name, settings, ways, words in [
        ("APGD", {"eps": np.array([0.1, 0.2])}, {}, r"eps: got shape \(2,\).*\(6, 1, 1, 1\)"),
        ("APGD", {"eps": EACH_VALUE, "norm": 2}, {}, r"eps: got an array of shape \(1, 4, 4"),
        ("RayS", {"eps": EACH_VALUE}, {}, "eps: got an array"),
        ("ObjectivePGD", {"eps": np.linspace(0.1, 0.2, 4), "eps_step": 0.01}, {}, "eps_step: got shares"),
        ("APGD", {}, {"mask": np.ones((2, 4, 4))}, r"mask: got shape \(2, 4, 4\)"),
        ("APGD", {}, {"mask": np.ones(SHAPE, dtype=int)}, "mask: got dtype"),
        *(("APGD", {}, {"mask": np.full(SHAPE, value)}, "mask: got values") for value in (-1.0, np.nan)),
        ("RandomSearch", {}, {"maks": np.ones(SHAPE)}, r"'maks', expected x, y, mask, x_init"),
        *(("APGD", {}, {"y": wrong}, "y: got") for wrong in (np.arange(3), np.array([0, 1, 2, 3, 4, 0]), np.eye(6))),
        ("APGD", {}, {"y": np.array([0, 1, 2, 3, -1, 0])}, "y: got labels in -1..3"),
        ("APGD", {}, {"x": np.full((6, *SHAPE), -1e-4, dtype=np.float32)}, "bounds"),
    ]:
        attack = getattr(hosts.art_attacks, name)(at.estimator, verbose=False, **settings)
        with pytest.raises(InvalidArgumentError, match=words):
            attack.generate(**{"x": at.x.numpy(), "y": at.y.numpy(), **ways})


def test_estimators_need_clip_values_gradients_and_preprocessing_in_pytorch():
    squeezing = hosts.art.defences.preprocessor.FeatureSqueezing(clip_values=(0, 1))
    for ways, error, words in (
        ({"bounds": None}, InvalidArgumentError, "clip_values=None"),
        ({"preprocessing_defences": squeezing}, ModelError, "FeatureSqueezing"),
    ):
        at = problem(**ways)
        with pytest.raises(error, match=words):
            hosts.art_attacks.APGD(at.estimator, verbose=False).generate(at.x.numpy(), at.y.numpy())
    blind = hosts.art.estimators.classification.BlackBoxClassifier(lambda x: x, SHAPE, 4, clip_values=(0, 1))
    for kind in (hosts.art_attacks.APGD, hosts.art_attacks.ObjectivePGD, hosts.art_attacks.CarliniWagnerLinf):
        with pytest.raises(hosts.art.exceptions.EstimatorError):
            kind(blind)


@pytest.mark.parametrize("objective", [None, *hosts.OBJECTIVES[1:]])
def test_attacks_that_cannot_aim_refuse_to(objective):
    at, name, settings, words = problem(), "RayS", {}, "cannot aim"
    if objective is not None:
        name, settings, words = "ObjectivePGD", {"objective": objective}, f"'{objective}'.*'ace'"
    criterion = hosts.foolbox.criteria.TargetedMisclassification(at.y)
    for epsilon in (0.1, 0.0):
        with pytest.raises(InvalidArgumentError, match=f"criterion: got Targeted.*{words}"):
            hosts.class_of("foolbox", name)(**settings)(at.model, at.x, criterion, epsilons=epsilon)
    with pytest.raises(InvalidArgumentError, match=f"targeted: got True.*{words}"):
        hosts.class_of("art", name)(at.estimator, targeted=True, **settings)


def test_rays_stops_at_the_smallest_epsilon_alone():
    at, ways = problem((-1.0, 2.0)), {"queries": 150, "tolerance": 0.01}
    attack = hosts.foolbox_attacks.LinfRaySAttack(**ways)
    stopped = by_hand("RayS", "linf", ways, at, at.y, epsilon=0.25)
    whole = by_hand("RayS", "linf", {**ways, "stop": False}, at, at.y, epsilon=0.25)
    assert not torch.equal(stopped, whole)
    for epsilons, expected in ((0.25, stopped), ([0.5, 0.25], stopped), (None, whole), ([0.0, 0.25], whole)):
        raw = attack(at.model, at.x, at.y, epsilons=epsilons)[0]
        assert torch.equal(raw[0] if isinstance(raw, list) else raw, expected)
    reach = float((whole - at.x).abs().max())
    assert attack(at.model, at.x, at.y, epsilons=[0.0, reach + 1e-4])[2].tolist() == [[False] * 6, [True] * 6]


@EachNorm
def test_step_sizes_are_foolboxes(norm):
    at, epsilons = problem(), [EPSILONS[norm], 2 * EPSILONS[norm]]

    def run(epsilons, **ways):
        attack = hosts.class_of("foolbox", "ObjectivePGD", norm)(steps=5, seed=1, **ways)
        return attack(at.model, at.x, at.y, epsilons=epsilons)[0]

    relative = run(epsilons, rel_stepsize=0.25)
    for points, epsilon in zip(relative, epsilons, strict=True):
        for ways in ({}, {"rel_stepsize": 9.0}):
            assert torch.equal(points, run(epsilon, abs_stepsize=0.25 * epsilon, **ways))
    assert not torch.equal(relative[1], run(epsilons[1]))


def test_double_precision_points_stay_in_bounds_that_float32_rounds():
    at = problem((-1.0, 0.3))
    model = hosts.foolbox_model(at.network.double(), at.bounds)
    raw = hosts.foolbox_attacks.LinfAPGD(steps=5, seed=1)(model, at.x.double().clamp(-1, 0.3), at.y, epsilons=0.5)[0]
    assert raw.dtype == torch.float64
    assert float(raw.max()) == 0.3 < float(torch.tensor(0.3))


def test_spatial_transformations_ignore_epsilons():
    at = problem()
    attack = hosts.foolbox_attacks.SpatialTransformationAttack(translation=2, translation_steps=3, rotation_steps=3)
    raw, clipped, success = attack(at.model, at.x, at.y, epsilons=1e-3)
    assert torch.equal(raw, clipped)
    assert torch.equal(success, at.network(raw).argmax(1) != at.y)
    many = attack(at.model, at.x, at.y, epsilons=[1e-3, None])
    assert all(torch.equal(points, raw) for points in (*many[0], *many[1]))
    with pytest.raises(InvalidArgumentError, match="times"):
        attack.repeat(3)
