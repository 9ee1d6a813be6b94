"""The classes that Foolbox and ART have of this project's attacks, both from one table of cases."""

import inspect
import itertools
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from robust_ext.adapters.art.attacks import art_class
from robust_ext.adapters.art.estimators import BinarizedPyTorchClassifier
from robust_ext.adapters.foolbox.attacks import foolbox_classes
from robust_ext.adapters.foolbox.models import BinarizedPyTorchModel, Undetected
from robust_ext.adapters.native import host_parameters, search_module
from robust_ext.attacks.native import NativeAttack
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.settings import default_of, setting, settings_class
from robust_ext.core.threat import ThreatModel
from robust_ext.registry import as_attack
from robust_ext.testing.networks import small_batch, small_network
from tests.adapters.common import art_classifier
from tests.adapters.hosts import (
    CORE,
    DETECTOR_AWARE,
    EPSILONS,
    HOSTS,
    OBJECTIVES,
    ORDERS,
    SHAPE,
    EachNorm,
    class_of,
    detected_by,
    foolbox,
    foolbox_attacks,
    foolbox_model,
    in_words_of,
    problem,
)
from tests.attacks.defenses import small_defense
from tests.attacks.problems import affine_network

TINY = {"draws": 2, "target_classes": 1, "start_steps": 3, "hops": 1}
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
    *(("LinearRegion", norm, {**TINY, "regions": 1}) for norm in ORDERS),
    ("BoundarySearch", "l2", TINY),
    *(
        (name, norm, settings)
        for name, settings in DETECTOR_AWARE.items()
        for norm in ORDERS
        if (norm, name) != ("l1", "OrthogonalPGD")
    ),
]
CLIMBS = [
    ("ObjectivePGD", norm, {"objective": name, **ways})
    for norm, name in itertools.product(ORDERS, OBJECTIVES)
    for ways in (
        {"steps": 5},
        {"algorithm": "fgsm"},
        {"algorithm": "bim", "steps": 4, "best": True, "projection": "scaled"},
    )
] + [("ObjectivePGD", norm, {"steps": 5, "step_size": 0.05}) for norm in ORDERS]
EachCase = pytest.mark.parametrize(("name", "norm", "settings"), CASES + CLIMBS, ids=str)
EachBounds = pytest.mark.parametrize("bounds", [(0.0, 1.0), pytest.param((-1.0, 2.0), marks=pytest.mark.exhaustive)])


def scene(name, norm, bounds=(0.0, 1.0)):
    """A problem that an attack is made for, in both hosts."""
    if CORE[name].traits.detector:
        given = small_defense(6, norm=norm, bounds=bounds)
        references = given.target.references if CORE[name].traits.references else None
        models = {host: detected_by(host, given) for host in ("foolbox", "art")}
        parts = {"network": given.defended, "bounds": bounds, "x": given.inputs, "y": given.labels}
        return SimpleNamespace(**parts, references=references, model=models["foolbox"], estimator=models["art"])
    piecewise = affine_network(SHAPE, 4, bounds=bounds) if name in ("LinearRegion", "BoundarySearch") else None
    return problem(bounds, network=piecewise)


def make(host, name, norm, at, *, epsilon=0.1, **settings):
    """A function from inputs and labels to candidates: an attack in a host."""
    kind, targeted = class_of(host, name, norm), settings.pop("targeted", False)
    chosen, references = in_words_of(kind, settings), getattr(at, "references", None)
    if host == "foolbox":
        judged = (
            foolbox.criteria.TargetedMisclassification
            if targeted
            else Undetected
            if hasattr(at, "references")
            else None
        )
        ways = {} if references is None else {"references": references}
        return lambda x, y: kind(**chosen)(at.model, x, judged(y) if judged else y, epsilons=epsilon, **ways)[0]
    known = inspect.signature(kind).parameters
    own = {"norm": ORDERS[norm], "eps": epsilon, "targeted": targeted, "verbose": False}
    attack = kind(at.estimator, **{key: value for key, value in own.items() if key in known}, **chosen)
    ways = {} if references is None else {"references": references.numpy()}
    return lambda x, y: torch.from_numpy(attack.generate(x.numpy(), y.numpy(), **ways))


def by_hand(name, norm, settings, at, y, **ways):
    epsilon = ways.pop("epsilon", EPSILONS[norm] * (at.bounds[1] - at.bounds[0]))
    ways["threat_model"] = ThreatModel(norm=norm, epsilon=epsilon, bounds=at.bounds)
    ways["generator"] = torch.Generator().manual_seed(5)
    if getattr(at, "references", None) is not None:
        ways["references"] = at.references
    return search_module(CORE[name](**settings), at.network, ways.pop("x", at.x), y, **ways)


def seeded(name, settings):
    return settings if CORE[name].traits.seeds == "none" else {**settings, "seed": 5}


@HOSTS
@EachCase
@EachBounds
def test_points_are_those_of_the_attack_itself(host, name, norm, settings, bounds):
    at = scene(name, norm, bounds)
    epsilon = EPSILONS[norm] * (bounds[1] - bounds[0]) * (2 if CORE[name].traits.detector else 1)
    found = make(host, name, norm, at, epsilon=epsilon, **seeded(name, settings))(at.x, at.y)
    assert torch.equal(found, by_hand(name, norm, settings, at, at.y, epsilon=epsilon))
    assert not torch.equal(found, at.x)


@HOSTS
@pytest.mark.parametrize(("name", "norm", "settings"), [case for case in CASES if case[0] != "RayS"], ids=str)
def test_targeted_points_are_those_of_the_attack_itself(host, name, norm, settings):
    at = scene(name, norm, (-1.0, 2.0))
    aims = (at.y + 1) % 4
    ways = {**seeded(name, settings), "targeted": True}
    found = make(host, name, norm, at, epsilon=3 * EPSILONS[norm], **ways)(at.x, aims)
    assert torch.equal(found, by_hand(name, norm, settings, at, aims, targeted=True))


@HOSTS
@pytest.mark.parametrize("name", list(CORE))
def test_parameters_are_those_of_the_declaration(host, name):
    kind = class_of(host, name, CORE[name].traits.norms[0])
    own = inspect.signature(kind).parameters
    for entry in host_parameters(CORE[name], host):
        if entry.name != "random_start":
            assert own[entry.name].default == default_of(CORE[name], str(entry.setting))
        assert f"    {entry.name}: " in kind.__doc__
    assert ("seed" in own) == (CORE[name].traits.seeds != "none")
    assert inspect.signature(kind.__init__).parameters.keys() - own.keys() == {"self"}
    if host == "art":
        assert set(kind.attack_params) == own.keys() - {"estimator"}
        assert all(f"    {parameter}: " in kind.__doc__ for parameter in kind.attack_params)
    assert pickle.loads(pickle.dumps(kind)) is kind  # noqa: S301
    if host == "foolbox":
        assert all(entry.kind is inspect.Parameter.KEYWORD_ONLY for entry in own.values())
        with pytest.raises(TypeError, match="positional"):
            kind(1)
    else:
        order = ["estimator", "norm", "eps", "eps_step", "max_iter", "targeted", "num_random_init", "batch_size"]
        assert list(own)[: len(order)][: len(set(order) & set(own))] == [key for key in order if key in own]
        assert list(own)[-2:] == ["summary_writer", "verbose"]


@settings_class
class Shift(NativeAttack):
    """Adds a share of epsilon to every value.

    Example:
        >>> Shift().share
        1.0
    """

    name = "Shift"
    traits = CORE["RayS"].traits.__class__(batching="full", gradients=False, norms=("linf",), seeds="none")

    share: float = setting(default=1.0, help="Of epsilon.", minimum=0, maximum=1, art="part", foolbox="portion")

    def search(self, target, inputs, labels, **ways):
        return (inputs + self.share * ways["threat_model"].epsilon).clamp(*target.bounds)


def test_a_new_attack_is_a_class_of_both_hosts():
    at = problem()
    expected = (at.x + 0.05).clamp(0, 1)
    made = foolbox_classes(Shift)
    assert list(made) == ["BaseShift", "LinfShiftAttack"]
    assert torch.equal(made["LinfShiftAttack"](portion=0.5)(at.model, at.x, at.y, epsilons=0.1)[0], expected)
    attack = art_class(Shift)(at.estimator, np.inf, 0.1, part=0.5, verbose=False)
    assert np.array_equal(attack.generate(at.x.numpy()), expected.numpy())
    for kind in (made["LinfShiftAttack"], type(attack)):
        assert "Of epsilon." in kind.__doc__
        assert ">>>" not in kind.__doc__


@HOSTS
def test_a_seed_overrides_the_hosts(host):
    at, runs = problem(), []
    for seed in (None, 7):
        for outer in (0, 1):
            torch.manual_seed(outer)
            np.random.seed(outer)
            runs.append(make(host, "RandomSearch", "linf", at, epsilon=0.01, points=3, seed=seed)(at.x, at.y))
    assert not torch.equal(runs[0], runs[1])
    assert torch.equal(runs[2], runs[3])


@HOSTS
@pytest.mark.parametrize(("name", "norm", "settings"), CASES, ids=str)
def test_as_attacks_of_this_project_they_are_the_core_attacks(host, name, norm, settings):
    kind = class_of(host, name, norm)
    own = {"norm": ORDERS[norm]} if host == "art" and "norm" in kind.attack_params else {}
    made = kind(*[scene(name, norm).estimator] * (host == "art"), **own, **in_words_of(kind, settings))
    attack = as_attack(made, name="mine")
    assert type(attack) is CORE[name]
    assert attack.description == CORE[name](**settings).description
    assert attack.name == "mine"
    assert attack.traits == CORE[name](**settings).traits


@HOSTS
@pytest.mark.parametrize("loss", ["ce", "targeted-dlr"])
def test_planted_points_are_found(host, loss):
    network, x = small_network((1, 8, 8), 4), small_batch(6, (1, 8, 8))
    if host == "foolbox":
        plain = foolbox_model(network)
        planted = BinarizedPyTorchModel.from_model(plain, x, epsilon=0.1)
        begin, labels = planted.inputs, planted.labels
    else:
        plain = art_classifier(network, (1, 8, 8), 4)
        planted = BinarizedPyTorchClassifier.from_classifier(plain, x.numpy(), eps=0.1)
        begin, labels = torch.from_numpy(planted.x), torch.from_numpy(planted.y)
    at = SimpleNamespace(model=planted, estimator=planted)
    score = lambda points: planted.score(points if host == "foolbox" else points.numpy())  # noqa: E731
    assert score(make(host, "APGD", "linf", at, steps=30, loss=loss)(begin, labels)) == 1.0
    assert score(make(host, "RandomSearch", "linf", at, points=40)(begin, labels)) < 1.0


# Foolbox


def test_rays_stops_at_the_smallest_epsilon_alone():
    at = problem((-1.0, 2.0))
    attack = foolbox_attacks.LinfRaySAttack(queries=150, tolerance=0.01)
    ways = {"queries": 150, "tolerance": 0.01}
    stopped = by_hand("RayS", "linf", ways, at, at.y, epsilon=0.25)
    whole = by_hand("RayS", "linf", {**ways, "stop": False}, at, at.y, epsilon=0.25)
    assert not torch.equal(stopped, whole)
    for epsilons, expected in ((0.25, stopped), ([0.5, 0.25], stopped), (None, whole), ([0.0, 0.25], whole)):
        raw = attack(at.model, at.x, at.y, epsilons=epsilons)[0]
        assert torch.equal(raw[0] if isinstance(raw, list) else raw, expected)
    assert bool((at.network(whole).argmax(1) != at.y).all())
    reach = (whole - at.x).flatten(1).abs().amax(1)
    _, _, over = attack(at.model, at.x, at.y, epsilons=[0.0, float(reach.max()) + 1e-4])
    assert over.tolist() == [[False] * 6, [True] * 6]


@EachNorm
def test_step_sizes_are_foolboxes(norm):
    at, epsilons = problem(), [EPSILONS[norm], 2 * EPSILONS[norm]]
    make_it = class_of("foolbox", "ObjectivePGD", norm)
    relative = make_it(steps=5, seed=1, rel_stepsize=0.25)(at.model, at.x, at.y, epsilons=epsilons)[0]
    for points, epsilon in zip(relative, epsilons, strict=True):
        for ways in ({}, {"rel_stepsize": 9.0}):
            attack = make_it(steps=5, seed=1, abs_stepsize=0.25 * epsilon, **ways)
            assert torch.equal(points, attack(at.model, at.x, at.y, epsilons=epsilon)[0])
    assert not torch.equal(relative[1], make_it(steps=5, seed=1)(at.model, at.x, at.y, epsilons=epsilons[1])[0])


def test_double_precision_points_stay_in_bounds_that_float32_rounds():
    at = problem((-1.0, 0.3))
    model = foolbox_model(at.network.double(), at.bounds)
    raw = foolbox_attacks.LinfAPGD(steps=5, seed=1)(model, at.x.double().clamp(-1, 0.3), at.y, epsilons=0.5)[0]
    assert raw.dtype == torch.float64
    assert float(raw.max()) == 0.3 < float(torch.tensor(0.3))


def test_spatial_transformations_ignore_epsilons():
    at = problem()
    attack = foolbox_attacks.SpatialTransformationAttack(translation=2, translation_steps=3, rotation_steps=3)
    raw, clipped, success = attack(at.model, at.x, at.y, epsilons=1e-3)
    assert torch.equal(raw, clipped)
    assert torch.equal(success, at.network(raw).argmax(1) != at.y)
    many = attack(at.model, at.x, at.y, epsilons=[1e-3, None])
    assert all(torch.equal(points, raw) for points in (*many[0], *many[1]))
    assert many[2].shape == (2, 6)
    with pytest.raises(InvalidArgumentError, match="times"):
        attack.repeat(3)
