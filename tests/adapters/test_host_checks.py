"""What the hosts' own test suites check of every attack, on all classes of this project's attacks at trial settings."""

import numpy as np
import pytest
import torch

from robust_ext.attacks.catalogue import ATTACKS
from robust_ext.core.settings import trial_settings
from robust_ext.testing.networks import small_batch
from tests.adapters.common import art_classifier
from tests.adapters.hosts import CORE, SHAPE, art_attacks, foolbox, foolbox_attacks, foolbox_model, in_words_of
from tests.attacks.defenses import small_defense
from tests.attacks.problems import affine_network

FOOLBOX = [
    kind
    for name, kind in sorted(vars(foolbox_attacks).items())
    if name.endswith("Attack") and isinstance(kind, type) and getattr(kind, "core", None) in ATTACKS
]
# An epsilon that a trial of each norm finds something in.
EPSILONS = {"linf": 0.4, "l2": 1.6, "l1": 8.0}


def quick_settings(kind):
    """Trial settings in the host's words; the small detector's network has no linear layer whose inputs to match."""
    settings = trial_settings(kind.core) | ({"features": "2"} if kind.core.__name__ == "FeatureMatching" else {})
    return in_words_of(kind, settings)


def problem(kind):
    """A network of four classes, inputs, labels and the keywords that a call of the attack needs."""
    if not kind.core.traits.detector:
        network, x = affine_network(SHAPE, 4), small_batch(8, SHAPE)
        return network, x, network(x).argmax(1), {}
    given = small_defense(8)
    ways = {"references": given.target.references} if kind.core.traits.references else {}
    return given.defended, given.inputs, given.labels, ways


@pytest.mark.parametrize(
    ("kind", "targeted"),
    [
        # With and without an aim in turns, from one class of the list to the next.
        pytest.param(kind, targeted, marks=() if number % 2 == targeted else pytest.mark.exhaustive)
        for number, kind in enumerate(FOOLBOX)
        for targeted in (False, True)
    ],
    ids=lambda part: getattr(part, "__name__", str(part)),
)
def test_foolboxes_checks(kind, targeted):
    network, x, y, ways = problem(kind)
    model = foolbox_model(network)
    if not kind.core.traits.detector:
        model = model.transform_bounds((-1, 3)).transform_bounds((0, 1))
    if targeted and kind.core.__name__ == "RayS":
        pytest.skip("RayS cannot aim")
    aims = (y + 1) % 4
    criterion = foolbox.criteria.TargetedMisclassification(aims) if targeted else y
    attack = kind(**quick_settings(kind))
    epsilon = EPSILONS[attack._norm]
    torch.manual_seed(0)
    raw, clipped, success = attack(model, x, criterion, epsilons=epsilon, **ways)
    hit = model(clipped).argmax(1) == aims if targeted else model(clipped).argmax(1) != y
    assert torch.equal(success, hit)
    if kind.core.__name__ != "SpatialTransformation":
        assert bool(success.any())
        torch.manual_seed(0)
        often = attack.repeat(2)(model, x, criterion, epsilons=[epsilon], **ways)[2]
        assert often.shape == (1, 8)
        assert bool((often[0] | ~success).all())
    assert raw.shape == x.shape
    assert repr(attack) == repr(kind(**vars(attack)))


@pytest.mark.parametrize("name", list(CORE))
def test_arts_checks(name):
    kind = getattr(art_attacks, name)
    network, x, y, ways = problem(kind)
    ways = {key: value.numpy() for key, value in ways.items()}
    estimator = art_classifier(network, tuple(x.shape[1:]), 4)
    attack = kind(estimator, **quick_settings(kind))
    # Every parameter has a value, and can be set.
    for parameter in attack.attack_params:
        attack.set_params(**{parameter: getattr(attack, parameter) if parameter != "summary_writer" else False})
    own = {"verbose": False, "batch_size": 3} | ({"eps": 0.4} if "eps" in attack.attack_params else {})
    attack.set_params(**own)
    before, labels = x.numpy().copy(), np.eye(4, dtype=np.float32)[y.numpy()]
    found = attack.generate(before, labels, **ways)
    assert np.array_equal(before, x.numpy())
    assert (found.dtype, found.shape) == (np.float32, x.shape)
    assert found.min() >= 0
    assert found.max() <= 1
    if name not in ("SpatialTransformation", "RayS"):
        attack.set_params(targeted=True)
        aims = np.eye(4, dtype=np.float32)[(y.numpy() + 1) % 4]
        aimed = attack.generate(before, y=aims, x_init=np.zeros((20, *x.shape[1:])), **ways)
        assert not np.array_equal(aimed, before)
    if name != "SpatialTransformation":
        assert (network(torch.from_numpy(found)).argmax(1) != y).any()

    class Named(kind):
        pass

    again = Named(estimator, **{key: getattr(attack, key) for key in attack.attack_params if key != "summary_writer"})
    assert repr(again).startswith("Named(")
    assert again.native().description == attack.native().description
