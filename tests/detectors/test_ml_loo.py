"""Leave-one-out features against slow loops, the regression against scikit-learn, and what surrounds them."""

from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import softmax
from sklearn.metrics import roc_auc_score
from torch import nn

from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.detectors._features.regression import MEASURES, interquartile_range, quantile, standard_deviation
from robust_ext.detectors.ml_loo import MLLOODetector
from tests.detectors import cases
from tests.detectors.cases import weighted

MEASURES_BY_HAND = {
    "iqr": lambda values: np.percentile(values, 75) - np.percentile(values, 25),
    "std": np.std,
    "mad": lambda values: np.median(np.abs(values - np.median(values))),
}


def network():
    head = (nn.Flatten, partial(nn.Linear, 18, 5), nn.Tanh, partial(nn.Linear, 5, 4))
    return weighted(lambda: nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), *(part() for part in head)), among=data(50))


data = partial(cases.data, shape=(2, 4, 3))


def by_hand(classifier, x, layers, *, dispersion, output, fill, patch, stride, pool):
    """One forward pass for each input and each blanked square."""

    def units(one, label):
        values, found = one[None], []
        for position, part in enumerate(classifier):
            values = part(values)
            if position in layers:
                array = values[0].double().numpy()
                found.append(array.mean((1, 2)) if pool and array.ndim == 3 else array.reshape(-1))
        logits = values[0].double().numpy()
        return np.concatenate([*found, [(softmax(logits) if output == "probability" else logits)[label]]])

    rows = []
    with torch.no_grad():
        for one in x:
            label, differences = int(classifier(one[None]).argmax()), []
            channels, height, width = one.shape
            for channel, row, column in product(range(channels), range(0, height, stride), range(0, width, stride)):
                changed = one.clone()
                changed[channel, row : row + patch, column : column + patch] = fill
                differences.append(units(one, label) - units(changed, label))
            rows.append([MEASURES_BY_HAND[dispersion](unit) for unit in np.array(differences).T])
    return np.array(rows)


@settings(max_examples=30, deadline=None)
@given(
    st.builds(
        dict,
        dispersion=st.sampled_from(["iqr", "std", "mad"]),
        output=st.sampled_from(["probability", "logit"]),
        fill=st.sampled_from([0.0, 0.5, -1.0]),
        **{"patch": st.integers(1, 5), "stride": st.integers(1, 3), "pool": st.booleans()},
    ),
    st.sampled_from([[0, 4], [1], [], [0, 3]]),
    st.sampled_from([1, 5, 64, 1024]),
)
def test_features_are_those_of_the_definition(given, layers, size):
    classifier, x = network(), data(5)
    assert len(classifier(x).argmax(1).unique()) > 1
    detector = MLLOODetector(classifier, layers=list(map(str, layers)), batch_size=size, **given)
    with torch.no_grad():
        found = detector.features(x)
    np.testing.assert_allclose(found.numpy(), by_hand(classifier, x, layers, **given), atol=2e-6)


def test_published_settings_blank_each_value_alone():
    classifier, x = network(), data(2)
    rows = []
    handle = classifier.register_forward_pre_hook(lambda _module, args: rows.append(args[0]))
    MLLOODetector(classifier, layers=["0"]).features(x)
    handle.remove()
    seen = torch.cat(rows)
    assert len(seen) == 2 + 2 * x[0].numel()
    for position, changed in enumerate(seen[2:]):
        original = x[position // x[0].numel()]
        different = (changed != original).flatten().nonzero().flatten().tolist()
        assert different == [position % x[0].numel()]
        assert changed.flatten()[different[0]] == 0


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.floats(0, 1), st.integers(0, 99), st.booleans())
def test_quantiles_and_measures_are_those_of_numpy(count, share, seed, ties):
    values = torch.randn(2, 3, count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    values = values.round() if ties else values
    np.testing.assert_allclose(quantile(values, share), np.quantile(values, share, axis=-1), atol=1e-12)
    for name, measure in MEASURES.items():
        expected = np.apply_along_axis(MEASURES_BY_HAND[name], -1, values.numpy())
        np.testing.assert_allclose(measure(values), expected, atol=1e-12)


def test_a_unit_that_is_always_off_has_a_gradient():
    values = torch.zeros(1, 4, requires_grad=True)
    for measure in MEASURES.values():
        (gradient,) = torch.autograd.grad(measure(values).sum(), values)
        assert bool(torch.isfinite(gradient).all())
    assert float(standard_deviation(torch.tensor([1.0, 3.0]))) == 1


def test_vectors_and_grey_planes_are_blanked_too():
    flat, x = weighted(lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 3))), cases.data(2, shape=(6,))
    weight = flat[1].weight.detach()
    for shaped in (x, x.view(2, 2, 3), x.view(2, 1, 2, 3)):
        found = MLLOODetector(flat, layers=["1"]).features(shaped)[:, :3].detach()
        # For a linear unit the attribution of value i is w_i x_i.
        torch.testing.assert_close(found, interquartile_range(weight * x[:, None]))


def test_units_are_drawn_by_the_seed_and_kept(tmp_path):
    classifier, x = network(), data(4)
    drawing = partial(MLLOODetector, classifier, layers=["0", "4"], pool=False, units=4)
    whole, detector = MLLOODetector(classifier, layers=["0", "4"], pool=False).features(x), drawing(seed=3)
    part = detector.features(x)
    assert part.shape == (4, 4 + 4 + 1)
    chosen = [*detector.chosen_0.tolist(), *(18 + detector.chosen_1).tolist(), 23]
    assert len(set(chosen)) == 9
    torch.testing.assert_close(part, whole[:, chosen])
    assert torch.equal(drawing(seed=3).features(x), part)
    other = drawing(seed=4)
    other.features(x)
    assert other.chosen_0.tolist() != detector.chosen_0.tolist()
    # A file's units count, not those that would be drawn.
    detector.chosen_0 = torch.tensor([0, 1, 2, 3])
    detector.fit(data(20), data(20, 1) ** 3)
    detector.save(tmp_path / "d.safetensors")
    again = MLLOODetector.load(tmp_path / "d.safetensors", classifier)
    assert again.chosen_0.tolist() == [0, 1, 2, 3]
    assert torch.equal(again.score(x), detector.score(x))


def test_layers_may_be_one_feature_each():
    classifier, x = network(), data(4)
    whole = MLLOODetector(classifier, layers=["0", "4"]).features(x)
    grouped = MLLOODetector(classifier, layers=["0", "4"], group=True).features(x)
    expected = torch.stack([whole[:, :3].mean(1), whole[:, 3:8].mean(1), whole[:, 8]], 1)
    torch.testing.assert_close(grouped, expected)


@pytest.mark.parametrize(("dispersion", "size"), [("iqr", 25), ("std", 50), ("mad", 5000)])
def test_gradients_are_those_of_finite_differences(dispersion, size):
    detector = MLLOODetector(network(), layers=["0", "4"], dispersion=dispersion, batch_size=size)
    detector.fit(data(12), data(12, 1) ** 3)
    detector.double()
    x = data(2, 5).double().requires_grad_()
    assert torch.autograd.gradcheck(detector.features, x, eps=1e-7, atol=1e-4)
    assert torch.autograd.gradcheck(detector.score, x, eps=1e-7, atol=1e-3, rtol=1e-3)


def test_kinds_that_do_not_differ_are_not_told_apart():
    train, test = (load_dataset("digits", split=split).take(range(200))[0] for split in ("train", "test"))
    detector = MLLOODetector(digits_network(), layers=["1", "3", "6"])
    detector.fit(train[:75], train[75:150])
    with torch.no_grad():
        assert 0.35 < roc_auc_score([0] * 100 + [1] * 100, detector.score(test)) < 0.65
