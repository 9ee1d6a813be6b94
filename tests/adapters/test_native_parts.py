"""What the classes of this project's attacks take besides inputs: detectors, references, starts, masks, budgets."""

import numpy as np
import pytest
import torch
from torch import nn

from robust_ext import ThreatModel, robust_accuracy
from robust_ext.adapters.foolbox.models import Undetected
from robust_ext.adapters.native import search_module
from robust_ext.attacks.linear_region.attack import LinearRegion
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.models.defended import Defended
from robust_ext.testing.art_parts import margin_of
from robust_ext.testing.networks import small_network
from tests.adapters import hosts
from tests.adapters.common import art_classifier, uniform
from tests.adapters.hosts import HOSTS, ORDERS, SHAPE, EachNorm, art_attacks, by_hand, make, problem, scene
from tests.attacks.defenses import FarHidden

# Detectors


@pytest.mark.parametrize("inverted", [False, True])
@pytest.mark.parametrize("name", list(hosts.DETECTOR_AWARE))
def test_success_is_what_the_defended_classifier_decides(name, inverted):
    norm, epsilon = ("l2", 0.8) if inverted else ("linf", 0.3)
    at = scene(name, norm, rows=12, epsilon=epsilon, inverted=inverted)
    points = make("foolbox", name, norm, at, epsilon=epsilon, seed=0, **hosts.DETECTOR_AWARE[name])(at.x, at.y)
    assert torch.equal(Undetected(at.y)(points, at.model(points)), at.given.successes(points))
    points = make("art", name, norm, at, epsilon=epsilon, seed=0, **hosts.DETECTOR_AWARE[name])(at.x, at.y)
    outcomes = at.estimator.outcomes(points.numpy(), at.y.numpy())
    fooled = [outcome == "fooled" for outcome in outcomes]
    assert fooled == at.given.successes(points).tolist()
    assert any(fooled)


class Around(nn.Module):
    """A module that does more than its inner one."""

    def __init__(self, inner, change):
        super().__init__()
        self.inner, self.change = inner, change

    def forward(self, x):
        return self.change(self.inner, x)


rounded = lambda x: (x * 255).round() / 255  # noqa: E731
AROUND = {
    "mean": lambda inner, x: inner(x),
    "rounding": lambda inner, x: inner(rounded(x)),
    "shift": lambda inner, x: inner(x + 0.1),
    "after": lambda inner, x: inner(x).tanh(),
    "twice": lambda inner, x: inner(x) + 0 * inner(x),
}


@pytest.mark.parametrize("around", AROUND)
def test_what_lies_around_the_detector_is_refused(around):
    at, ways = scene("SelectivePGD", rows=3), {"seed": 1, **hosts.DETECTOR_AWARE["SelectivePGD"]}
    # These inputs are what rounding leaves as they are.
    x, plain = rounded(at.x), at.model
    module = Around(at.network, AROUND[around]).eval()
    at.model = hosts.foolbox_model(module, preprocessing={"mean": 0.1} if around == "mean" else None)
    preprocessing = (0.1, 1) if around == "mean" else (0, 1)
    at.estimator = art_classifier(module, (1, 3, 4), 4, preprocessing=preprocessing)
    for host in ("foolbox", "art"):
        with pytest.raises(InvalidArgumentError, match="model: got one that changes inputs or logits around its det"):
            make(host, "SelectivePGD", "linf", at, **ways)(x, at.y)
    # A module that changes nothing is passed by.
    at.model = hosts.foolbox_model(nn.Sequential(nn.Identity(), at.network).eval())
    passed = make("foolbox", "SelectivePGD", "linf", at, **ways)(x, at.y)
    at.model = plain
    assert torch.equal(passed, make("foolbox", "SelectivePGD", "linf", at, **ways)(x, at.y))


@HOSTS
def test_references_go_with_their_rows_and_may_be_shared(host):
    at, groups = scene("FeatureMatching"), scene("FeatureMatching").references

    def run(references, **more):
        at.references, ways = references, {**hosts.DETECTOR_AWARE["FeatureMatching"], "start": "input", "seed": 2}
        return make(host, "FeatureMatching", "linf", at, epsilon=0.3, **ways, **more)(at.x, at.y)

    whole = run(groups)
    if host == "art":
        torch.testing.assert_close(run(groups, batch_size=2), whole, atol=1e-6, rtol=0)
    assert not torch.allclose(run(groups.flip(0)), whole, atol=1e-3)
    assert torch.equal(run(groups[0]), run(groups[:1].expand(6, *groups.shape[1:])))


@pytest.mark.parametrize("name", list(hosts.DETECTOR_AWARE))
def test_exposures_and_all_forms_of_labels_are_attacked_alike(name):
    at, ways = scene(name), {"seed": 1, **hosts.DETECTOR_AWARE[name]}
    y = at.y.numpy()
    expected = make("art", name, "linf", at, **ways)(at.x, at.y)
    shown = at.estimator, hosts.detected_by("art", at.given, exposure="classifier")
    for at.estimator in shown:
        forms = [y[:, None], np.eye(4)[y], y] + [np.eye(5)[y]] * (at.estimator is shown[0])
        for labels in forms:
            assert torch.equal(make("art", name, "linf", at, **ways)(at.x, torch.from_numpy(labels)), expected)
        assert torch.equal(make("art", name, "linf", at, **ways)(at.x, None), expected)


class Noisy(FarHidden):
    random = True

    def score_of(self, seen):
        return super().score_of(seen) + 0.1 * torch.randn(len(seen.inputs))


@HOSTS
def test_random_detectors_draw_what_the_seed_decides(host):
    at = scene("SelectivePGD")
    detector = Noisy(at.network.classifier)
    detector.middle = at.network.detector.get_buffer("middle")
    detector.threshold = at.network.detector.threshold
    object.__setattr__(at.given, "defended", Defended(at.network.classifier, detector, exposure="reject"))
    at.model, at.estimator = (hosts.detected_by(one, at.given) for one in ("foolbox", "art"))

    def run(seed):
        if host == "art":
            return make(host, "SelectivePGD", "linf", at, seed=seed, **hosts.DETECTOR_AWARE["SelectivePGD"])(at.x, at.y)
        # A call of Foolbox queries the random detector once more, to judge.
        kind = hosts.class_of(host, "SelectivePGD")
        return kind(steps=12, rel_stepsize=0.2, seed=seed).run(at.model, at.x, at.y, epsilon=0.1)

    points = []
    for outer in (0, 1):
        torch.manual_seed(outer)
        state = torch.get_rng_state()
        points.append(run(4))
        assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(*points)
    assert not torch.equal(points[0], run(5))


# Starts

STILL = hosts.TINY | {"regions": 0, "starts": (), "start_steps": 0, "hops": 0}
REGION = hosts.TINY | {"regions": 1}


def region(norm="l2"):
    """A problem whose last label is wrong as it is, and distances to its inputs."""
    at = scene("LinearRegion", norm, rows=4)
    at.y[-1] = (at.y[-1] + 1) % 4
    at.reach = lambda points: np.linalg.norm((points.double() - at.x.double()).flatten(1), ord=ORDERS[norm], axis=1)
    return at


def aligned(points, x, starts):
    """The cosine between the way to each point and that to the start most in its direction."""
    way, ways = (points - x).flatten(1)[:, None].double(), (starts - x[:, None]).flatten(2).double()
    return torch.nn.functional.cosine_similarity(way, ways, dim=2).amax(1)


@HOSTS
@EachNorm
@pytest.mark.parametrize("count", [1, 3])
def test_no_point_is_farther_than_the_starting_points(host, norm, count):
    at, pool = region(norm), 1 - uniform(60, SHAPE)
    given = torch.stack([pool[at.network(pool).argmax(1) != label][:count] for label in at.y])
    points = given[:, 0] if count == 1 else given
    nearest = np.stack([at.reach(given[:, k]) for k in range(count)]).min(0)
    nearest[-1] = 0
    ways = {"epsilon": None if host == "foolbox" else 0.1, "starting_points": points}
    batches = {"batch_size": 3} if host == "art" else {}
    found = make(host, "LinearRegion", norm, at, **ways, **STILL, **batches)(at.x, at.y)
    assert bool((at.network(found).argmax(1) != at.y).all())
    assert (at.reach(found) <= nearest * (1 + 1e-6)).all()
    # With nothing to search, results lie on the way to a starting point.
    assert float(aligned(found[:-1], at.x[:-1], given[:-1]).min()) > 1 - 1e-6
    found = make(host, "LinearRegion", norm, at, **ways, **REGION, seed=5)(at.x, at.y)
    assert (at.reach(found) <= nearest * (1 + 1e-6)).all()
    assert torch.equal(found, by_hand("LinearRegion", norm, REGION, at, at.y, epsilon=0.01, starting_points=given))


# ART's masks and budgets


@EachNorm
def test_masks_are_searched_within(norm):
    at, mask = region(norm), torch.arange(4) % 4 != 2
    attack = art_attacks.LinearRegion(at.estimator, norm=ORDERS[norm], verbose=False, max_iter=1, seed=5, **hosts.TINY)
    found = torch.from_numpy(attack.generate(at.x.numpy(), at.y.numpy(), mask=mask.numpy()))
    assert torch.equal(found[..., 2], at.x[..., 2])
    moved = (found != at.x).flatten(1).any(1)
    assert bool(moved[:-1].any())
    assert bool((at.network(found).argmax(1) != at.y)[moved].all())
    generator = torch.Generator().manual_seed(5)
    for number in range(4):
        row = slice(number, number + 1)
        kept = lambda inner, values, x=at.x[row]: inner(torch.where(mask, values, x))  # noqa: E731
        whole = nn.Sequential(Around(nn.Identity(), kept), at.network).eval()
        ways = {"threat_model": ThreatModel(norm=norm, epsilon=1.0), "generator": generator}
        alone = search_module(LinearRegion(**REGION), whole, at.x[row], at.y[row], **ways)
        assert torch.equal(whole[0](alone)[0], found[number])


QUICK = {
    "APGD": {"max_iter": 6},
    "RandomSearch": {"max_iter": 30},
    "Square": {"max_iter": 30},
    "ObjectivePGD": {"max_iter": 6, "eps_step": 0.05},
    "RayS": {"max_iter": 120},
    "SpatialTransformation": {"translation": 2, "translation_steps": 3, "rotation_steps": 5},
    "CarliniWagnerLinf": {"max_iter": 10, "learning_rate": 0.1, "initial_const": 0.1},
}
# A search of many steps for each constant takes longer than all others together.
SLOW = pytest.param("CarliniWagnerLinf", marks=pytest.mark.exhaustive)
Budgeted = pytest.mark.parametrize("name", list(QUICK)[:4])


def in_art(name, estimator, **settings):
    kind = getattr(art_attacks, name)
    own = {"eps": 0.2, "seed": 5, "verbose": False, **QUICK[name], **settings}
    return kind(estimator, **{key: value for key, value in own.items() if key in kind.attack_params})


def arrays(*args, **ways):
    at = problem(*args, **ways)
    return at.estimator, at.x.numpy(), at.y.numpy()


def distances(points, x):
    return np.abs(points.astype(float) - x).reshape(len(x), -1).max(1)


@pytest.mark.parametrize("name", [*list(QUICK)[:-1], SLOW])
def test_masks_keep_values_as_they_are_and_rounding_outside_the_clip_values_is_clipped(name):
    estimator, x, y = arrays()
    mask = (np.random.default_rng(0).random(x.shape) < 0.5).astype(np.float32)
    attack = in_art(name, estimator)
    found = attack.generate(x, y, mask=mask)
    assert found.dtype == np.float32
    assert np.array_equal(found[mask == 0], x[mask == 0])
    assert not np.array_equal(found, x)
    assert "eps" not in attack.attack_params or name == "RayS" or distances(found, x).max() <= 0.2 + 1e-6
    # One mask for all inputs, in other forms; and a mask that keeps nothing changes nothing.
    shared = attack.generate(x, y, mask=mask[0])
    assert np.array_equal(shared, attack.generate(x, y, mask=mask[0].astype(bool)[None]))
    np.testing.assert_allclose(attack.generate(x, y, mask=2 * np.ones_like(x)), attack.generate(x, y), atol=1e-6)
    assert np.array_equal(attack.generate(x, y, mask=np.zeros(1)), x)
    x.flat[:2] = (-9e-6, 1 + 9e-6)
    assert np.array_equal(in_art(name, estimator).generate(x, y), in_art(name, estimator).generate(x.clip(0, 1), y))


def test_a_mask_of_the_threat_model_is_that_of_arts_own_attack():
    """FGSM on a linear model: through the interface, by ART's keyword, and the point that has the highest loss."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 2)).eval()
    x = np.random.default_rng(1).uniform(0.3, 0.7, (8, 1, 3, 4)).astype(np.float32)
    mask, weight = np.arange(12).reshape(1, 3, 4) % 3 > 0, np.random.default_rng(2).normal(size=(2, 12))
    with torch.no_grad():
        model[1].weight.copy_(torch.from_numpy(weight))
        model[1].bias.copy_(-model[1].weight @ torch.from_numpy(x).flatten(1).mean(0))
    y = model(torch.from_numpy(x)).argmax(1).numpy()
    direction = np.sign(weight[1 - y] - weight[y]).reshape(x.shape) * mask
    worst = np.clip(x + 0.2 * direction, 0, 1).astype(np.float32)
    estimator = art_classifier(model, (1, 3, 4), 2)
    own = hosts.art.attacks.evasion.FastGradientMethod(estimator, eps=0.2).generate(x, y, mask=mask.astype(np.float32))
    threat_model = ThreatModel(norm="linf", epsilon=0.2, mask=mask)
    found = robust_accuracy(model, "art:FastGradientMethod", x, y, threat_model, keep_candidates=True)
    np.testing.assert_allclose(own, worst, atol=1e-6)
    # Those that do not break the model come back as they were.
    wrong = estimator.predict(worst).argmax(1) != y
    assert wrong.any()
    assert found.robust_accuracy(0.2) == 1 - wrong.mean()
    np.testing.assert_allclose(found.candidates, np.where(wrong[:, None, None, None], worst, x), atol=1e-6)


@Budgeted
def test_each_input_may_have_a_budget(name):
    estimator, x, y = arrays()
    budgets = np.array([0.1, 0.3, 0.1, 0.0, 0.2, 0.3]).reshape(6, 1, 1, 1)
    found = in_art(name, estimator, eps=budgets).generate(x, y)
    assert (distances(found, x) <= budgets.ravel() + 1e-6).all()
    assert np.array_equal(found[3], x[3])
    # Rows of one budget are attacked as they would be alone.
    np.testing.assert_allclose(in_art(name, estimator, eps=0.1).generate(x[:3:2], y[:3:2]), found[:3:2], atol=1e-6)
    whole = in_art(name, estimator, eps=np.full((1,), 0.2)).generate(x, y)
    assert np.array_equal(whole, in_art(name, estimator, eps=0.2).generate(x, y))


@Budgeted
@pytest.mark.parametrize("shape", [(6, *SHAPE), SHAPE, (4, 4), (4,)])
def test_each_value_may_have_a_budget(name, shape):
    estimator, x, y = arrays((-1.0, 2.0))
    budgets = np.random.default_rng(0).random(shape) * 0.6
    budgets.flat[0] = 0
    steps = {"eps_step": budgets * 0.25 + (budgets == 0)} if name == "ObjectivePGD" else {}
    found = in_art(name, estimator, eps=budgets, **steps).generate(x, y)
    assert (np.abs(found - x) <= budgets + 1e-6).all()
    assert np.abs(found - x).max() > 0.15
    assert found.min() >= -1
    assert found.max() <= 2
    assert margin_of(estimator, found, y).mean() < margin_of(estimator, x, y).mean()
    masked = in_art(name, estimator, eps=budgets, **steps).generate(x, y, mask=np.arange(4) % 2 == 0)
    assert np.array_equal(masked[..., 1::2], x[..., 1::2])


@pytest.mark.parametrize("name", ["RandomSearch", "Square", "RayS", "SpatialTransformation"])
def test_attacks_without_gradients_take_black_boxes(name):
    estimator, x, y = arrays()

    def box(form):
        """The classifier as one of which predictions alone are known."""
        logits = lambda x: estimator.predict(x.astype(np.float32))  # noqa: E731
        predict = logits if form == "logits" else lambda x: np.eye(4)[logits(x).argmax(1)]
        kind = hosts.art.estimators.classification.BlackBoxClassifier
        return kind(predict, input_shape=SHAPE, nb_classes=4, clip_values=(0, 1))

    attack, expected = in_art(name, box("logits"), batch_size=4), in_art(name, estimator, batch_size=4).generate(x, y)
    for labels in (y, np.eye(4)[y], None):
        assert np.array_equal(attack.generate(x, labels), expected)
    labels = in_art(name, box("labels"), batch_size=4).generate(x, y)
    assert name != "RayS" or np.array_equal(labels, expected)
    # Preprocessing in numpy, to float64, is no obstacle either, as no gradients flow through it.
    squeezing = hosts.art.defences.preprocessor.FeatureSqueezing(clip_values=(0, 1), bit_depth=3)
    network = Around(small_network(SHAPE, 4), lambda inner, x: inner(x.float()))
    squeezed, x, y = arrays(network=network, preprocessing_defences=squeezing)
    found = in_art(name, squeezed).generate(x, y)
    assert found.shape == x.shape
    assert name == "SpatialTransformation" or (squeezed.predict(found).argmax(1) != y).any()
