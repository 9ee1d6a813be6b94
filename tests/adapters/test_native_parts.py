"""What the classes of this project's attacks take besides inputs: detectors, references, starts, masks, budgets."""

import numpy as np
import pytest
import torch
from torch import nn

from robust_ext import ThreatModel, robust_accuracy
from robust_ext.adapters.native import search_module
from robust_ext.attacks.linear_region.attack import LinearRegion
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.testing.art_parts import margin_of
from robust_ext.testing.networks import small_network
from tests.adapters import hosts
from tests.adapters.common import art_classifier, uniform
from tests.adapters.hosts import HOSTS, ORDERS, SHAPE, EachNorm, art_attacks, by_hand, make, problem, scene

# Detectors


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
    at = scene("SelectivePGD", rows=3)
    # These inputs are what rounding leaves as they are.
    x, plain, module = rounded(at.x), at.model, Around(at.network, AROUND[around]).eval()

    def run(host):
        return make(host, "SelectivePGD", "linf", at, seed=1, **hosts.DETECTOR_AWARE["SelectivePGD"])(x, at.y)

    at.model = hosts.foolbox_model(module, preprocessing={"mean": 0.1} if around == "mean" else None)
    preprocessing = (0.1, 1) if around == "mean" else (0, 1)
    at.estimator = art_classifier(module, (1, 3, 4), 4, preprocessing=preprocessing)
    for host in ("foolbox", "art"):
        with pytest.raises(InvalidArgumentError, match="model: got one that changes inputs or logits around its det"):
            run(host)
    # A module that changes nothing is passed by.
    at.model = hosts.foolbox_model(nn.Sequential(nn.Identity(), at.network).eval())
    passed, at.model = run("foolbox"), plain
    assert torch.equal(passed, run("foolbox"))


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


# Starts

REGION = hosts.TINY | {"regions": 1}


def region(norm="l2"):
    """A problem whose last label is wrong as it is."""
    at = scene("LinearRegion", norm, rows=4)
    at.y[-1] = (at.y[-1] + 1) % 4
    return at


@HOSTS
@EachNorm
@pytest.mark.parametrize("count", [1, 3])
def test_starting_points_go_with_their_rows(host, norm, count):
    at, pool = region(norm), 1 - uniform(60, SHAPE)
    given = torch.stack([pool[at.network(pool).argmax(1) != label][:count] for label in at.y])
    ways = {"epsilon": None} if host == "foolbox" else {"batch_size": 3}
    ways |= {"starting_points": given[:, 0] if count == 1 else given, "seed": 5}
    found = make(host, "LinearRegion", norm, at, **ways, **REGION)(at.x, at.y)
    expected = by_hand("LinearRegion", norm, REGION, at, at.y, epsilon=0.01, starting_points=given)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    # With nothing to search, results lie on the way to a starting point.
    still = {**ways, **REGION, "regions": 0, "starts": (), "start_steps": 0, "hops": 0}
    ways_there, way = given - at.x[:, None], make(host, "LinearRegion", norm, at, **still)(at.x, at.y) - at.x
    along = nn.functional.cosine_similarity(way.flatten(1)[:, None], ways_there.flatten(2), dim=2).amax(1)
    assert float(along[:-1].min()) > 1 - 1e-5


# ART's masks and budgets


@EachNorm
def test_masks_are_searched_within(norm):
    at, mask = region(norm), torch.arange(4) % 4 != 2
    attack = art_attacks.LinearRegion(at.estimator, norm=ORDERS[norm], verbose=False, max_iter=1, seed=5, **hosts.TINY)
    found = torch.from_numpy(attack.generate(at.x.numpy(), at.y.numpy(), mask=mask.numpy()))
    assert bool((found != at.x).any())
    ways = {"threat_model": ThreatModel(norm=norm, epsilon=1.0), "generator": torch.Generator().manual_seed(5)}
    for number in range(4):
        row = slice(number, number + 1)
        kept = lambda inner, values, x=at.x[row]: inner(torch.where(mask, values, x))  # noqa: E731
        whole = nn.Sequential(Around(nn.Identity(), kept), at.network).eval()
        alone = search_module(LinearRegion(**REGION), whole, at.x[row], at.y[row], **ways)
        assert torch.equal(whole[0](alone)[0], found[number])


QUICK = {
    "APGD": {"max_iter": 6},
    "RandomSearch": {"max_iter": 30},
    "Square": {"max_iter": 30},
    "ObjectivePGD": {"max_iter": 6, "eps_step": 0.05},
    "RayS": {"max_iter": 120},
    "SpatialTransformation": {"translation": 2, "translation_steps": 3, "rotation_steps": 5},
    "CarliniWagnerLinf": {"max_iter": 5, "learning_rate": 0.1, "initial_const": 0.1},
}
Budgeted = pytest.mark.parametrize("name", list(QUICK)[:4])


def in_art(name, estimator, **settings):
    kind = getattr(art_attacks, name)
    own = {"eps": 0.2, "seed": 5, "verbose": False, **QUICK[name], **settings}
    return kind(estimator, **{key: value for key, value in own.items() if key in kind.attack_params})


def arrays(*args, **ways):
    at = problem(*args, **ways)
    return at.estimator, at.x.numpy(), at.y.numpy()


@pytest.mark.parametrize("name", QUICK)
def test_masks_keep_values_as_they_are_and_rounding_outside_the_clip_values_is_clipped(name):
    estimator, x, y = arrays()
    mask = (np.random.default_rng(0).random(x.shape) < 0.5).astype(np.float32)
    attack = in_art(name, estimator)
    found = attack.generate(x, y, mask=mask)
    assert np.array_equal(found[mask == 0], x[mask == 0])
    assert not np.array_equal(found, x)
    assert "eps" not in attack.attack_params or name == "RayS" or np.abs(found - x).max() <= 0.2 + 1e-6
    # One mask for all inputs, in other forms; and a mask that keeps nothing changes nothing.
    shared = attack.generate(x, y, mask=mask[0])
    assert np.array_equal(shared, attack.generate(x, y, mask=mask[0].astype(bool)[None]))
    np.testing.assert_allclose(attack.generate(x, y, mask=2 * np.ones_like(x)), attack.generate(x, y), atol=1e-6)
    assert np.array_equal(attack.generate(x, y, mask=np.zeros(1)), x)
    x.flat[:2] = (-9e-6, 1 + 9e-6)
    assert np.array_equal(attack.generate(x, y), attack.generate(x.clip(0, 1), y))


@Budgeted
@pytest.mark.parametrize("shape", [(6, *SHAPE), (6, 1, 1, 1), SHAPE, (4, 4), (4,)])
def test_each_value_may_have_a_budget(name, shape):
    estimator, x, y = arrays((-1.0, 2.0))
    budgets = np.random.default_rng(0).random(shape) * 0.6
    budgets.flat[0] = 0
    steps = {"eps_step": budgets * 0.25 + (budgets == 0)} if name == "ObjectivePGD" else {}
    found = in_art(name, estimator, eps=budgets, **steps).generate(x, y)
    assert (np.abs(found - x) <= budgets + 1e-6).all()
    assert np.abs(found - x).max() > 0.15
    assert np.array_equal(found, found.clip(-1, 2))
    assert margin_of(estimator, found, y).mean() < margin_of(estimator, x, y).mean()
    masked = in_art(name, estimator, eps=budgets, **steps).generate(x, y, mask=np.arange(4) % 2 == 0)
    assert np.array_equal(masked[..., 1::2], x[..., 1::2])


@pytest.mark.parametrize("name", ["RandomSearch", "Square", "RayS", "SpatialTransformation"])
def test_attacks_without_gradients_take_black_boxes(name):
    estimator, x, y = arrays()

    def boxed(to_output, labels=y):
        """Points of the attack on the classifier as one of which predictions alone are known."""
        kind = hosts.art.estimators.classification.BlackBoxClassifier
        ways = {"input_shape": SHAPE, "nb_classes": 4, "clip_values": (0, 1)}
        box = kind(lambda x: to_output(estimator.predict(x.astype(np.float32))), **ways)
        return in_art(name, box, batch_size=4).generate(x, labels)

    expected = in_art(name, estimator, batch_size=4).generate(x, y)
    for labels in (y, np.eye(4)[y], None):
        assert np.array_equal(boxed(np.array, labels), expected)
    by_labels = boxed(lambda logits: np.eye(4)[logits.argmax(1)])
    assert name != "RayS" or np.array_equal(by_labels, expected)
    # Preprocessing in numpy, to float64, is no obstacle either, as no gradients flow through it.
    squeezing = hosts.art.defences.preprocessor.FeatureSqueezing(clip_values=(0, 1), bit_depth=3)
    network = Around(small_network(SHAPE, 4), lambda inner, x: inner(x.float()))
    squeezed, x, y = arrays(network=network, preprocessing_defences=squeezing)
    found = in_art(name, squeezed).generate(x, y)
    assert name == "SpatialTransformation" or (squeezed.predict(found).argmax(1) != y).any()


def test_a_mask_of_the_threat_model_is_that_of_arts_own_attack():
    """FGSM on a linear model: through the interface, by ART's keyword, and the point that has the highest loss."""
    model, x = nn.Sequential(nn.Flatten(), nn.Linear(12, 2)).eval(), uniform(8, (1, 3, 4)) * 0.4 + 0.3
    mask, weight = torch.arange(12).view(1, 3, 4) % 3 > 0, uniform(2, (12,)) - 0.5
    with torch.no_grad():
        model[1].weight.copy_(weight)
        model[1].bias.copy_(-weight @ x.flatten(1).mean(0))
    y = model(x).argmax(1)
    worst = (x + 0.2 * (weight[1 - y] - weight[y]).sign().view_as(x) * mask).clamp(0, 1)
    attack = hosts.art.attacks.evasion.FastGradientMethod(art_classifier(model, (1, 3, 4), 2), eps=0.2)
    np.testing.assert_allclose(attack.generate(x.numpy(), y.numpy(), mask=mask.float().numpy()), worst, atol=1e-6)
    threat_model = ThreatModel(norm="linf", epsilon=0.2, mask=mask.numpy())
    found = robust_accuracy(model, "art:FastGradientMethod", x, y, threat_model, keep_candidates=True)
    # Those that do not break the model come back as they were.
    wrong = model(worst).argmax(1) != y
    assert found.robust_accuracy(0.2) == 1 - wrong.double().mean() < 1
    np.testing.assert_allclose(found.candidates, torch.where(wrong[:, None, None, None], worst, x), atol=1e-6)
