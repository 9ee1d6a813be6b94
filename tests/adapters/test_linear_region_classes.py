"""The Foolbox and ART classes of the linear-region attack, both from one table of cases."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from eagerpy import astensor
from torch import nn

from robust_ext.adapters.native import search_module
from robust_ext.attacks.linear_region.attack import LinearRegion
from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel
from tests.adapters.common import art_classifier
from tests.adapters.hosts import HOSTS, ORDERS, EachNorm, class_of, foolbox, foolbox_model, in_words_of
from tests.attacks.problems import affine_network

TINY = {"draws": 2, "target_classes": 1, "start_steps": 3, "hops": 1, "regions": 1}
STILL = TINY | {"starts": (), "start_steps": 0, "hops": 0, "regions": 0}
SHAPE = (1, 2, 3)


def images(count, bounds=(0.0, 1.0), *, seed=1):
    unit = torch.rand(count, *SHAPE, generator=torch.Generator().manual_seed(seed))
    return unit * (bounds[1] - bounds[0]) + bounds[0]


def labels_of(network, x):
    """The predictions, but for the last row, which is wrong as it is."""
    with torch.no_grad():
        labels = network(x).argmax(1)
    return torch.cat([labels[:-1], (labels[-1:] + 1) % 3])


def distances(norm, points, x):
    return np.linalg.norm((points.double() - x.double()).flatten(1).numpy(), ord=ORDERS[norm], axis=1)


def aligned(points, x, starts):
    """The cosine between the way to each point and that to the start most in its direction."""
    way, ways = (points - x).reshape(len(x), 1, -1), (starts - x[:, None]).reshape(*starts.shape[:2], -1)
    return ((way * ways).sum(2) / np.linalg.norm(way, axis=2) / np.linalg.norm(ways, axis=2)).max(1)


def build(host, norm, network, bounds=(0.0, 1.0), **settings):
    """The attack, and the model that it is called with in Foolbox."""
    if host == "foolbox":
        model = foolbox_model(network, bounds, preprocessing=settings.pop("mean", None))
        return class_of(host, "LinearRegion", norm)(**settings), model
    mean = settings.pop("mean", None)
    preprocessing = (0, 1) if mean is None else (mean["mean"].numpy(), mean["std"].numpy())
    estimator = art_classifier(network, SHAPE, 3, clip_values=bounds, preprocessing=preprocessing)
    kind = class_of(host, "LinearRegion")
    return kind(estimator, norm=ORDERS[norm], verbose=False, **in_words_of(kind, settings)), None


def run(host, norm, network, x, y, points=None, **settings):
    """Candidates of the attack in a host."""
    targeted = settings.pop("targeted", False)
    if host == "art" and targeted:
        settings["targeted"] = True
    attack, model = build(host, norm, network, **{**TINY, **settings})
    if host == "foolbox":
        criterion = foolbox.criteria.TargetedMisclassification(y) if targeted else y
        ways = {} if points is None else {"starting_points": points}
        return attack(model, x, criterion, epsilons=None, **ways)[0]
    ways = {} if points is None else {"x_adv_init": np.asarray(points)}
    return torch.from_numpy(attack.generate(x.numpy(), np.eye(3, dtype=np.float32)[y.numpy()], **ways))


def by_hand(network, x, y, norm, bounds=(0.0, 1.0), **ways):
    target = Target(module=network, bounds=bounds, classes=3, input_shape=SHAPE, device=torch.device("cpu"))
    target = replace(target, starting_points=ways.pop("starting_points", None))
    attack, generator = LinearRegion(**TINY | ways.pop("chosen", {})), torch.Generator().manual_seed(5)
    threat_model = ThreatModel(norm=norm, epsilon=0.01, bounds=bounds)
    return attack.search(target, x, y, threat_model=threat_model, generator=generator, **ways)


def test_epsilons_decide_what_is_success_but_not_where_points_lie():
    network, x = affine_network(SHAPE, 3), images(4)
    y = labels_of(network, x)
    attack, model = build("foolbox", "l2", network, **TINY, seed=5)
    raw, _, success = attack(model, x, y, epsilons=None)
    reach = distances("l2", raw, x)
    assert bool(success.all())
    assert reach[-1] == 0
    assert (reach[:-1] > 0).all()
    far = float(reach.max()) + 1e-4
    for epsilons in ([0.0, far], [1e-4, far]):
        points, _, over = attack(model, x, y, epsilons=epsilons)
        assert all(torch.equal(entry, raw) for entry in points)
        assert over.tolist() == [[False, False, False, True], [True] * 4]


@HOSTS
@EachNorm
@pytest.mark.parametrize("count", [1, 3])
def test_no_point_is_farther_than_the_starting_points(host, norm, count):
    network, x, pool = affine_network(SHAPE, 3), images(4), images(60, seed=7)
    y = labels_of(network, x)
    given = torch.stack([pool[network(pool).argmax(1) != label][:count] for label in y])
    points = given[:, 0] if count == 1 else given
    nearest = np.stack([distances(norm, given[:, k], x) for k in range(count)]).min(0)
    nearest[-1] = 0
    batches = {"batch_size": 3} if host == "art" else {}
    found = run(host, norm, network, x, y, points, **STILL, **batches)
    assert bool((network(found).argmax(1) != y).all())
    assert (distances(norm, found, x) <= nearest * (1 + 1e-6)).all()
    # With nothing to search, results lie on the way to a starting point.
    assert aligned(found[:-1].double().numpy(), x[:-1].double().numpy(), given[:-1].double().numpy()).min() > 1 - 1e-6
    found = run(host, norm, network, x, y, astensor(points) if host == "foolbox" else points, seed=5)
    assert (distances(norm, found, x) <= nearest * (1 + 1e-6)).all()
    assert torch.equal(found, by_hand(network, x, y, norm, starting_points=given))


@HOSTS
def test_images_of_a_pool_are_started_at(host):
    network, x, pool = affine_network(SHAPE, 3), images(3), images(30, seed=7)
    y = network(x).argmax(1)
    given = pool if host == "foolbox" else pool.numpy()
    found = run(host, "l2", network, x, y, starts=("nearest",), pool=given, seed=5)
    assert torch.equal(found, by_hand(network, x, y, "l2", chosen={"starts": ("nearest",), "pool": pool}))


@EachNorm
def test_masks_are_searched_within(norm):
    network, x = affine_network(SHAPE, 3), images(4)
    y = labels_of(network, x)
    mask = np.array([True, True, False])
    attack, _ = build("art", norm, network, **TINY, seed=5)
    found = torch.from_numpy(attack.generate(x.numpy(), y.numpy(), mask=mask))
    assert torch.equal(found[..., 2], x[..., 2])
    moved = (found != x).flatten(1).any(1)
    assert bool(moved[:-1].any())
    assert bool((network(found).argmax(1) != y)[moved].all())

    class Kept(nn.Module):
        def __init__(self, row):
            super().__init__()
            self.row = row

        def forward(self, values):
            kept = torch.from_numpy(mask).float()
            return values * kept + self.row * (1 - kept)

    generator = torch.Generator().manual_seed(5)
    for number in range(4):
        whole = nn.Sequential(Kept(x[number]), network).eval()
        threat_model, row = ThreatModel(norm=norm, epsilon=1.0), slice(number, number + 1)
        ways = {"threat_model": threat_model, "generator": generator}
        alone = search_module(LinearRegion(**TINY), whole, x[row], y[row], **ways)
        assert torch.equal(whole[0](alone)[0], found[number])
