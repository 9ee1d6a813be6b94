"""Kernel density and dropout variance: against scikit-learn and direct loops, and the traps around them."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score
from sklearn.neighbors import KernelDensity
from torch import nn

from robust_ext.core.errors import RobustExtWarning
from robust_ext.core.random import seeded_globals
from robust_ext.detectors.kd_bu import KDBUDetector, dropout_layers, dropout_variance, dropping, log_density
from robust_ext.detectors.observation import observe
from tests.detectors import cases
from tests.detectors.cases import weighted


def network(*, drop=0.3):
    parts = (nn.Flatten, partial(nn.Linear, 6, 8), partial(nn.BatchNorm1d, 8), nn.Tanh, partial(nn.Dropout, drop))
    return weighted(lambda: nn.Sequential(*(part() for part in parts), nn.Linear(8, 3)), among=data(50))


data = partial(cases.data, shape=(2, 3))


def fitted(classifier, **given):
    detector = KDBUDetector(classifier, **{"bandwidth": 0.4, "passes": 7, **given})
    detector.fit(data(80), 1 - data(80) ** 3, folds=3)
    return detector


def hidden_of(classifier, x):
    return classifier[:4](x).detach().double().numpy()


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 6), st.integers(1, 30), st.integers(1, 20), st.floats(0.05, 5), st.integers(1, 40), st.integers(0, 9)
)
def test_densities_are_those_of_scikit_learn(points, references, size, bandwidth, chunk, seed):
    random = np.random.default_rng(seed)
    x, r = random.normal(size=(points, size)), random.normal(size=(references, size))
    expected = KernelDensity(kernel="gaussian", bandwidth=bandwidth).fit(r).score_samples(x)
    found = log_density(torch.tensor(x), torch.tensor(r), bandwidth=bandwidth, chunk=chunk)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-9, atol=1e-8)


def test_far_points_have_a_density_and_chunks_change_nothing():
    far = torch.full((2, 3), 1e3, requires_grad=True)
    density = log_density(far, torch.zeros(5, 3), bandwidth=0.1, chunk=2)
    assert bool((density < -1e8).all())
    (gradient,) = torch.autograd.grad(density.sum(), far)
    # Of -|x|^2 / 2 h^2.
    torch.testing.assert_close(gradient, torch.full((2, 3), -1e5))
    points = torch.randn(4, 5, generator=torch.Generator().manual_seed(0), requires_grad=True)
    references = torch.randn(23, 5, generator=torch.Generator().manual_seed(1))
    found = [log_density(points, references, bandwidth=0.7, chunk=chunk) for chunk in (1, 4, 100)]
    both = [(values, *torch.autograd.grad(values.sum(), points)) for values in found]
    torch.testing.assert_close(both[1:], [both[0]] * 2)


def test_variance_is_that_of_the_passes():
    classifier, x = network(), data(4)
    with seeded_globals(3), torch.no_grad():
        found = dropout_variance(classifier, x, passes=9)
    part = classifier[4]
    part.train()
    with seeded_globals(3), torch.no_grad():
        for row, value in zip(x, found.tolist(), strict=True):
            table = classifier(row[None].repeat(9, 1, 1)).double().softmax(1).numpy()
            variances = [np.mean((table[:, label] - table[:, label].mean()) ** 2) for label in range(3)]
            assert value == pytest.approx(np.mean(variances), rel=1e-4)
            assert value > 1e-6
    part.eval()


def test_only_dropout_is_switched_on_and_it_is_restored():
    classifier = network()
    classifier.append(nn.Dropout(0.0).eval())
    assert dropout_layers(classifier) == [classifier[4]]
    statistics = classifier[2].running_mean.clone()
    with dropping(classifier):
        assert [part.training for part in classifier] == [False, False, False, False, True, False, False]
    assert not any(part.training for part in classifier.modules())
    with pytest.raises(RuntimeError, match="shapes"):
        dropout_variance(classifier, torch.zeros(2, 5), passes=3)
    assert not any(part.training for part in classifier.modules())
    x = data(3).requires_grad_(True)
    variance = dropout_variance(classifier, x, passes=5)
    torch.autograd.grad(variance.sum(), x)
    assert not any(part.training for part in classifier.modules())
    assert torch.equal(classifier[2].running_mean, statistics)


def test_gradients_of_the_variance_use_the_masks_of_the_way_there():
    classifier = network().double()
    x = data(3).double().requires_grad_(True)

    def variance(values):
        with seeded_globals(1):
            return dropout_variance(classifier, values, passes=6)

    assert torch.autograd.gradcheck(variance, (x,))


def test_without_dropout_the_density_decides_alone(recwarn):
    classifier = network(drop=0.0)
    with pytest.warns(RobustExtWarning, match="no dropout modules"):
        detector = fitted(classifier)
    assert not detector.random
    features = detector.features_of(observe(classifier, data(5, 2)))
    assert torch.equal(features[:, 1], torch.zeros(5))
    assert (detector.regression.weight == 0).tolist() == [False, True]
    assert fitted(network()).random
    assert not recwarn


@pytest.mark.parametrize("layer", [None, "3"])
def test_features_are_those_of_the_definition(layer):
    classifier, references, x = network(), data(60), data(9, seed=5)
    labels = torch.arange(60) % 3
    detector = KDBUDetector(classifier, layer=layer, bandwidth=0.3, passes=5, chunk=7)
    detector.fit(data(20, 1), 1 - data(20, 2), references=references, labels=labels, noise=0.1, folds=3)
    predicted = classifier(x).argmax(1).tolist()
    assert len(set(predicted)) > 1
    with torch.no_grad():
        found = detector.density_of(observe(classifier, x, detector.layers))
    for row, value in enumerate(found.tolist()):
        own = hidden_of(classifier, references)[labels.numpy() == predicted[row]]
        at = hidden_of(classifier, x)[row]
        kernels = [np.exp(-((at - one) ** 2).sum() / (2 * 0.3**2)) / (2 * np.pi * 0.3**2) ** 4 for one in own]
        assert value == pytest.approx(np.log(np.mean(kernels)), abs=1e-4)
    detector.fit(data(20, 1), 1 - data(20, 2), references=references, noise=0.1, folds=3)
    assert detector.reference_labels.bincount().tolist() == classifier(references).argmax(1).bincount().tolist()


def test_labels_follow_the_clean_inputs_that_become_references():
    classifier, clean = network(), data(60)
    labels = torch.randint(3, (60,), generator=torch.Generator().manual_seed(1))
    detector = KDBUDetector(classifier, layer="3", bandwidth=0.4, passes=2)
    detector.fit(clean, 1 - clean, labels=labels, folds=3, seed=2)
    assert len(detector.reference_labels) == 30
    hidden = classifier[:4](clean).detach()
    for reference, owner in zip(detector.references, detector.reference_labels.tolist(), strict=True):
        nearest = int((hidden - reference).norm(dim=1).argmin())
        torch.testing.assert_close(hidden[nearest], reference)
        assert int(labels[nearest]) == owner


def test_an_input_of_the_density_would_not_look_like_later_inputs():
    # Why references are kept apart: at small bandwidths an input lies on its own peak.
    classifier, references = network(drop=0.0), data(40)
    detector = KDBUDetector(classifier, bandwidth=0.02)
    detector.fit(data(30, 1), 1 - data(30, 1), references=references, noise=0.1, folds=3)
    with torch.no_grad():
        own, later = (detector.density_of(observe(classifier, x)) for x in (references, data(40, 2)))
    assert roc_auc_score([0] * 40 + [1] * 40, torch.cat([later, own])) == 1


class _Concatenating(nn.Module):
    """Its batch cannot grow at the dropout: the other branch would stay behind."""

    def __init__(self):
        super().__init__()
        self.drop, self.last = nn.Dropout(0.4), nn.Linear(12, 3)

    def forward(self, x):
        return self.last(torch.cat([x, self.drop(x)], 1))


@pytest.mark.parametrize(
    "network",
    [
        nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 3)),
        nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.3, inplace=True), nn.Linear(8, 3)),
        _Concatenating(),
    ],
    ids=["two dropouts", "in place", "concatenating"],
)
def test_sharing_what_lies_before_the_first_dropout_changes_nothing(network):
    """The masks, and so the variances, are those of passes that are whole."""
    x = torch.rand(4, 6)
    torch.manual_seed(1)
    found = dropout_variance(network.eval(), x, passes=7)
    torch.manual_seed(1)
    with dropping(network), torch.no_grad():
        whole = torch.stack([network(row.repeat(7, 1)).softmax(1).var(0, correction=0).mean() for row in x[:, None]])
    torch.testing.assert_close(found, whole)
