"""KD-BU, LID and what is learned with references beside: scikit-learn and direct loops."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegressionCV
from sklearn.neighbors import KernelDensity
from torch import nn

from robust_ext.core.errors import ModelError, RobustExtWarning
from robust_ext.core.random import seeded_globals
from robust_ext.detectors import observe
from robust_ext.detectors._features.references import three_sets
from robust_ext.detectors._features.regression import Regression
from robust_ext.detectors.kd_bu import KDBUDetector, dropout_layers, dropout_variance, dropping, log_density
from robust_ext.detectors.lid import LARGEST, LIDDetector, local_dimension
from tests.detectors.cases import data, made, network, weighted
from tests.models.cases import Net


@pytest.mark.parametrize("name", ["kd-bu", "lid", "ml-loo"])
def test_score_is_the_regression_of_scikit_learn_on_clean_and_adversarial_features(name):
    classifier, clean, adversarial, references = network(), data(30, 1), 1 - data(40, 2) ** 2, data(60, 9)
    # Its other measures of dispersion are the same for all inputs of this network.
    detector, negatives = made(name, classifier, **({"dispersion": "std"} if name == "ml-loo" else {})), [clean]
    given = {"references": references, "noise": 0.2, "folds": 4, "seed": 3}
    detector.fit(clean, adversarial, **({"folds": 4} if name == "ml-loo" else given))
    if name != "ml-loo":
        sets = three_sets(clean, adversarial, apart=0, bounds=(0, 1), **given)
        assert torch.equal(sets.clean, clean)
        negatives.append(sets.noisy)
    with seeded_globals(3), torch.no_grad():
        seen = [observe(classifier, part, detector.layers) for part in (*negatives, adversarial)]
        rows = torch.cat([detector.features_of(one) for one in seen]).double().numpy()
        found = detector.regression(torch.tensor(rows).float())
    low, high = rows.min(0), rows.max(0)
    scaled = (rows - rows.mean(0)) / rows.std(0) if name != "lid" else (rows - low) / (high - low)
    # The last two settings are the defaults, of which scikit-learn 1.8 announces others.
    defaults = {"max_iter": 2000, "use_legacy_attributes": False, "l1_ratios": (0.0,)}
    model = LogisticRegressionCV(cv=4, class_weight="balanced", scoring="accuracy", **defaults)
    model.fit(scaled, np.repeat([0, 1], [len(rows) - 40, 40]))
    np.testing.assert_allclose(found.numpy(), model.decision_function(scaled).ravel(), atol=2e-3)


@pytest.mark.parametrize("scaling", ["standard", "minmax"])
def test_scalings_leave_constant_features_alone(scaling):
    generator, regression = torch.Generator().manual_seed(0), Regression(scaling=scaling)
    clean, adversarial = torch.randn(30, 3, generator=generator), torch.randn(20, 3, generator=generator) + 1
    clean[:, 1] = adversarial[:, 1] = 0.1
    regression.fit([clean[:10], clean[10:]], adversarial)
    rows = torch.cat([clean, adversarial]).double().numpy()
    expected = (rows.mean(0), rows.std(0)) if scaling == "standard" else (rows.min(0), rows.max(0) - rows.min(0))
    expected[1][1] = 1
    np.testing.assert_allclose([*regression.center, *regression.scale], np.ravel(expected), atol=1e-6, rtol=1e-6)
    with pytest.raises(ModelError, match=r"not finite \(features \[2\]\)"):
        regression.fit([clean * torch.tensor([1, 1, torch.inf])], adversarial)


def test_noise_is_as_large_as_the_perturbations_after_clipping_and_as_the_bounds_allow():
    dark = (data(400) - 0.7).clamp_min(0)
    sets = partial(three_sets, references=None, noise=None, folds=2, seed=0)
    given, free = (sets(dark, (dark + 0.1).clamp(0, 1), apart=100, bounds=bounds) for bounds in ((0, 1), None))
    noise, moved = ((one - given.clean).square().mean().sqrt() for one in (given.noisy, given.adversarial))
    assert float(noise) == pytest.approx(float(moved), rel=1e-3)
    assert (float(given.noisy.min()), given.noise > 0.12, float(free.noisy.min()) < 0) == (0, True, True)
    assert free.noise == pytest.approx(0.1, abs=1e-3)
    grey, black = torch.full((40, 2, 3), 0.5), torch.zeros(40, 2, 3)
    for clean, adversarial in ((grey, black), (black, 1 - black), (grey, grey)):
        given = sets(clean, adversarial, apart=5, bounds=(0, 1))
        assert np.isfinite(given.noise)
        assert bool(((given.noisy >= 0) & (given.noisy <= 1)).all())
    assert given.noise == 0


def test_references_are_apart_from_what_is_trained_on():
    clean = data(40)
    given = three_sets(clean, clean / 2, references=None, apart=15, noise=0.1, bounds=(0, 1), folds=2, seed=4)
    assert torch.equal(given.references, clean[given.apart])
    assert (len(given.references), len(given.clean)) == (15, 25)
    torch.testing.assert_close(given.adversarial, given.clean / 2)
    assert len(torch.cat([given.references, given.clean]).flatten(1).unique(dim=0)) == 40


vectors = partial(data, shape=(2, 3))


def with_dropout(drop=0.3):
    parts = (nn.Flatten, partial(nn.Linear, 6, 8), partial(nn.BatchNorm1d, 8), nn.Tanh, partial(nn.Dropout, drop))
    return weighted(lambda: nn.Sequential(*(part() for part in parts), nn.Linear(8, 3)), among=vectors(50))


@settings(max_examples=40)
@given(
    *(st.integers(1, 6), st.integers(1, 30), st.integers(1, 20)),
    *(st.floats(0.05, 5), st.integers(1, 40), st.integers(0, 9)),
)
def test_densities_are_those_of_scikit_learn(points, references, size, bandwidth, chunk, seed):
    random = np.random.default_rng(seed)
    x, r = random.normal(size=(points, size)), random.normal(size=(references, size))
    expected = KernelDensity(kernel="gaussian", bandwidth=bandwidth).fit(r).score_samples(x)
    found = log_density(torch.tensor(x), torch.tensor(r), bandwidth=bandwidth, chunk=chunk)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-9, atol=1e-8)


def test_far_points_have_a_density_and_chunks_change_no_gradient():
    far = torch.full((2, 3), 1e3, requires_grad=True)
    density = log_density(far, torch.zeros(5, 3), bandwidth=0.1, chunk=2)
    assert bool((density < -1e8).all())
    (gradient,) = torch.autograd.grad(density.sum(), far)
    # Of -|x|^2 / 2 h^2.
    torch.testing.assert_close(gradient, torch.full((2, 3), -1e5))
    points, references = data(4, shape=(5,)).requires_grad_(), data(23, 1, (5,))
    found = [log_density(points, references, bandwidth=0.7, chunk=chunk) for chunk in (1, 4, 100)]
    both = [(values, *torch.autograd.grad(values.sum(), points)) for values in found]
    torch.testing.assert_close(both[1:], [both[0]] * 2)


SHARING = {
    "two": [nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 3)],
    "in place": [nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.3, inplace=True), nn.Linear(8, 3)],
    # A batch that cannot grow at the dropout: the other branch would stay behind.
    "concatenating": [
        Net(lambda net, x: net.last(torch.cat([x, net.drop(x)], 1)), drop=nn.Dropout(0.4), last=nn.Linear(12, 3))
    ],
}


@pytest.mark.parametrize("name", SHARING)
def test_variance_is_that_of_whole_passes_whatever_is_shared_before_the_first_dropout(name):
    network, x = nn.Sequential(*SHARING[name]).eval(), torch.rand(4, 6)
    with seeded_globals(1):
        found = dropout_variance(network, x, passes=7)
    with seeded_globals(1), dropping(network), torch.no_grad():
        whole = torch.stack([network(row.repeat(7, 1)).softmax(1).var(0, correction=0).mean() for row in x[:, None]])
    torch.testing.assert_close(found, whole)


def test_only_dropout_is_switched_on_and_it_is_restored():
    classifier = with_dropout()
    classifier.append(nn.Dropout(0.0).eval())
    assert dropout_layers(classifier) == [classifier[4]]
    statistics = classifier[2].running_mean.clone()
    with dropping(classifier):
        assert [place for place, part in enumerate(classifier) if part.training] == [4]
    with pytest.raises(RuntimeError, match="shapes"):
        dropout_variance(classifier, torch.zeros(2, 5), passes=3)
    assert not any(part.training for part in classifier.modules())
    x = vectors(3).requires_grad_(True)
    torch.autograd.grad(dropout_variance(classifier, x, passes=5).sum(), x)
    assert not any(part.training for part in classifier.modules())
    assert torch.equal(classifier[2].running_mean, statistics)


def test_without_dropout_the_density_decides_alone():
    classifier = with_dropout(drop=0.0)
    detector = KDBUDetector(classifier, bandwidth=0.4, passes=7)
    with pytest.warns(RobustExtWarning, match="no dropout modules"):
        detector.fit(vectors(80), 1 - vectors(80) ** 3, folds=3)
    assert not detector.random
    assert torch.equal(detector.features_of(observe(classifier, vectors(5, 2)))[:, 1], torch.zeros(5))
    assert (detector.regression.weight == 0).tolist() == [False, True]


@pytest.mark.parametrize("layer", [None, "3"])
def test_densities_are_those_of_the_references_of_the_predicted_class(layer):
    classifier, references, x = with_dropout(), vectors(60), vectors(9, seed=5)
    labels = torch.arange(60) % 3
    detector = KDBUDetector(classifier, layer=layer, bandwidth=0.3, passes=5, chunk=7)
    fit = partial(detector.fit, vectors(20, 1), 1 - vectors(20, 2), references=references, noise=0.1, folds=3)
    fit(labels=labels)
    predicted = classifier(x).argmax(1).tolist()
    assert len(set(predicted)) > 1
    among, at = (classifier[:4](part).detach().double().numpy() for part in (references, x))
    found = detector.density_of(observe(classifier, x, detector.layers))
    for row, value in enumerate(found.tolist()):
        apart = ((at[row] - among[labels.numpy() == predicted[row]]) ** 2).sum(1)
        kernels = np.exp(-apart / (2 * 0.3**2)) / (2 * np.pi * 0.3**2) ** 4
        assert value == pytest.approx(np.log(np.mean(kernels)), abs=1e-4)
    fit()
    assert detector.reference_labels.bincount().tolist() == classifier(references).argmax(1).bincount().tolist()


def test_labels_follow_the_clean_inputs_that_become_references():
    classifier, clean = with_dropout(), vectors(60)
    labels = torch.randint(3, (60,), generator=torch.Generator().manual_seed(1))
    detector = KDBUDetector(classifier, layer="3", bandwidth=0.4, passes=2)
    detector.fit(clean, 1 - clean, labels=labels, folds=3, seed=2)
    hidden = classifier[:4](clean).detach()
    apart, nearest = torch.cdist(detector.references.double(), hidden.double()).min(1)
    assert (len(detector.reference_labels), float(apart.max()) < 1e-4) == (30, True)
    assert detector.reference_labels.tolist() == labels[nearest].tolist()


def by_hand(point, references, neighbours):
    """The formula among the references that are elsewhere."""
    distances = sorted(math.dist(point, reference) for reference in references)
    near = [distance for distance in distances if distance > 0][:neighbours]
    return -len(near) / sum(math.log(distance / near[-1]) for distance in near)


@settings(max_examples=60)
@given(st.integers(1, 5), st.integers(3, 40), st.integers(1, 30), st.integers(2, 40), st.integers(0, 9))
@example(1, 4, 2, 2, 7)  # Beyond the largest
def test_dimensions_are_those_of_the_definition(points, references, size, neighbours, seed):
    random = np.random.default_rng(seed)
    x, r, neighbours = (*(random.normal(size=(count, size)) for count in (points, references)), neighbours)
    found = local_dimension(torch.tensor(x), torch.tensor(r), neighbours=min(neighbours, references))
    expected = [by_hand(point, r, min(neighbours, references)) for point in x]
    np.testing.assert_allclose(found.numpy(), np.minimum(expected, LARGEST), rtol=1e-9)


@pytest.mark.parametrize("copies", [1, 8])
def test_duplicates_of_the_point_are_not_its_neighbours(copies):
    random = np.random.default_rng(0)
    point, others = random.normal(size=(1, 4)), random.normal(size=(10, 4))
    r = np.concatenate([others[:3], np.repeat(point, copies, 0), others[3:]])
    for neighbours in (2, 6, 10, 10 + copies):
        x = torch.tensor(point, requires_grad=True)
        found = local_dimension(x, torch.tensor(r), neighbours=neighbours)
        assert found.item() == pytest.approx(by_hand(point[0], others, neighbours), rel=1e-9)
        (gradient,) = torch.autograd.grad(found.sum(), x)
        assert torch.isfinite(gradient).all() & gradient.any()


def test_rounding_makes_no_neighbour_of_a_duplicate_and_no_other_dimension():
    r = data(20, shape=(50,)) + 10
    point = r[:1] * (1 + 1e-7 * torch.randn(1, 50, generator=torch.Generator().manual_seed(1)))
    assert float(torch.dist(point, r[:1])) > 0
    expected = by_hand(r[0].numpy(), r.numpy(), 10)
    assert float(local_dimension(point, r, neighbours=10)) == pytest.approx(expected, rel=1e-3)
    # More values than are compared at once, far from 0, and so near to each other that float32 products cancel.
    points, references = (100 + 0.01 * data(count, seed, (9000,)) for seed, count in enumerate((3, 12)))
    exact = local_dimension(points.double(), references.double(), neighbours=10)
    for graph in (False, True):
        found = local_dimension(points.requires_grad_(graph), references, neighbours=10)
        torch.testing.assert_close(found.detach().double(), exact, rtol=1e-3, atol=0)


def test_dimensions_are_finite_where_the_formula_is_not():
    same, corners, x = torch.zeros(6, 3), torch.eye(3).repeat(2, 1), torch.zeros(1, 3, requires_grad=True)
    for references, expected in ((same, 0.0), (corners, LARGEST), (torch.cat([same[:5], corners[:1]]), 0.0)):
        found = local_dimension(x, references, neighbours=6)
        assert found.item() == expected
        (gradient,) = torch.autograd.grad(found.sum(), x)
        assert bool(torch.isfinite(gradient).all())
    assert local_dimension(x, torch.cat([same[:4], corners[:2]]), neighbours=3).item() == LARGEST
    assert bool(local_dimension(x * torch.nan, corners, neighbours=3).isnan().all())


def test_features_are_the_dimensions_in_the_layers_among_fixed_references():
    classifier, references, x = network(), data(20, 9), data(6, 5)
    detector = LIDDetector(classifier, layers=["2", "5"], neighbours=7, size=20)
    detector.fit(data(30, 1), 1 - data(30, 2), references=references, noise=0.1, folds=3)
    found, expected = detector.features_of(observe(classifier, x, detector.layers)).detach().numpy(), []
    for part in (nn.Flatten(), classifier[:3], classifier[:6]):
        points, among = (part(values).detach().flatten(1).double().numpy() for values in (x, references))
        expected.append([by_hand(point, among, 7) for point in points])
    np.testing.assert_allclose(found, np.transpose(expected), rtol=1e-3)
