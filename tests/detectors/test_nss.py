"""Natural scene statistics: coefficients, their distributions, the support vector machine on them."""

import math
from functools import partial

import numpy as np
import pytest
import scipy.ndimage
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.special import gamma
from scipy.stats import gennorm
from sklearn.calibration import CalibratedClassifierCV
from sklearn.svm import SVC

from robust_ext.detectors.nss import HIGHEST_SHAPE, LOWEST_SHAPE, NSSDetector, contrast_of, fit_aggd, natural_features
from tests.detectors.cases import flat

network = partial(flat, inputs=64)


def images(count, *shape, seed=0):
    """Smooth images with a little noise, in [0, 1]."""
    generator = np.random.default_rng(seed)
    rough = generator.random((count, *shape))
    smooth = scipy.ndimage.gaussian_filter(rough, (0, 0, 1.5, 1.5))
    return torch.tensor((0.2 + 0.6 * smooth + 0.1 * rough).clip(0, 1), dtype=torch.float32)


def drawn(shape, left, right, count=400_000):
    """Values of an asymmetric generalised Gaussian distribution with these scales."""
    generator = np.random.default_rng(3)
    sizes = np.abs(gennorm.rvs(shape, size=count, random_state=generator))
    return np.where(generator.random(count) < left / (left + right), -left * sizes, right * sizes)


def ratio(shape):
    return gamma(2 / shape) ** 2 / gamma(1 / shape) / gamma(3 / shape)


def fit_by_hand(values):
    """Shape, mean, left and right variance, by the published formulas."""
    left, right = values[values < 0], values[values >= 0]
    s_l, s_r = math.sqrt((left**2).mean()), math.sqrt((right**2).mean())
    g = s_l / s_r
    wanted = np.abs(values).mean() ** 2 / (values**2).mean() * (g**3 + 1) * (g + 1) / (g**2 + 1) ** 2
    wanted = np.clip(wanted, ratio(LOWEST_SHAPE), ratio(HIGHEST_SHAPE))
    shape = brentq(lambda a: ratio(a) - wanted, LOWEST_SHAPE, HIGHEST_SHAPE, xtol=1e-12)
    mean = (s_r - s_l) * math.sqrt(gamma(1 / shape) / gamma(3 / shape)) * gamma(2 / shape) / gamma(1 / shape)
    return [shape, mean, s_l**2, s_r**2]


def contrast_by_hand(grey):
    """By the filters of scipy; the image is black beyond its edges."""
    impulse = np.zeros((7, 7))
    impulse[3, 3] = 1
    window = scipy.ndimage.gaussian_filter(impulse, 7 / 6, mode="constant", radius=3)
    mean, square = (scipy.ndimage.correlate(grey**power, window, mode="constant") for power in (1, 2))
    return (grey - mean) / (np.sqrt(np.abs(mean**2 - square)) + 1 / 255)


def features_by_hand(image):
    grey = image[0] if len(image) == 1 else 0.2125 * image[0] + 0.7154 * image[1] + 0.0721 * image[2]
    field = contrast_by_hand(grey.astype(np.float64))
    shape, _, left, right = fit_by_hand(field.ravel())
    features = [shape, (left + right) / 2]
    height, width = field.shape
    for down, across in ((0, 1), (1, 0), (1, 1), (1, -1)):
        products = [
            field[row, column] * field[row + down, column + across]
            for row in range(height - down)
            for column in range(width)
            if 0 <= column + across < width
        ]
        features += fit_by_hand(np.array(products))
    return features


@pytest.mark.parametrize("shape", [0.4, 1.0, 2.0, 5.0])
@pytest.mark.parametrize(("left", "right"), [(1.0, 1.0), (0.3, 1.2), (2.0, 0.1)])
def test_parameters_of_a_known_distribution_are_found(shape, left, right):
    found = fit_aggd(torch.tensor(drawn(shape, left, right))[None])
    spread = gamma(3 / shape) / gamma(1 / shape)
    assert found.shape.item() == pytest.approx(shape, rel=0.05)
    assert [found.left.item(), found.right.item()] == pytest.approx([left**2 * spread, right**2 * spread], rel=0.06)
    mean = (right - left) * gamma(2 / shape) / gamma(1 / shape)
    assert found.mean.item() == pytest.approx(mean, rel=0.05, abs=0.02 * math.sqrt(spread))
    # The mean of the distribution itself.
    assert drawn(shape, left, right).mean() == pytest.approx(mean, rel=0.1, abs=0.03 * math.sqrt(spread))


@settings(max_examples=80, deadline=None)
@given(st.integers(2, 60), st.integers(0, 10_000), st.floats(0.2, 6))
def test_moments_are_matched(count, seed, power):
    generator = np.random.default_rng(seed)
    values = generator.normal(size=(3, count)) + 0.1
    values = np.sign(values) * np.abs(values) ** power
    values[:, 0], values[:, 1] = -0.3, 0.4
    found = fit_aggd(torch.tensor(values))
    mine = torch.stack([found.shape, found.mean, found.left, found.right], 1).numpy()
    np.testing.assert_allclose(mine, [fit_by_hand(row) for row in values], rtol=1e-6, atol=1e-9)


def test_rows_without_a_solution_get_the_nearest():
    ends = [[0.0] * 6, [2.0] * 6, [-2.0] * 6, [1.0, -1.0] * 3, [0.0] * 5 + [1.0], [-1e-200, 0, 0, 0, 0, 1e-200]]
    values = torch.tensor(ends, dtype=torch.float64, requires_grad=True)
    found = fit_aggd(values)
    # One size only has a ratio of 1, more than any of these distributions.
    assert found.shape[1:4].tolist() == pytest.approx([HIGHEST_SHAPE] * 3)
    assert found.shape[0].item() == pytest.approx(LOWEST_SHAPE)
    assert found.shape[4].item() == pytest.approx(brentq(lambda a: ratio(a) - 1 / 6, 0.1, 10))
    assert found.left.tolist() == pytest.approx([0, 0, 4, 1, 0, 0])
    assert found.right.tolist() == pytest.approx([0, 4, 0, 1, 1 / 6, 0])
    assert found.mean[[0, 3]].tolist() == [0, 0]
    (gradient,) = torch.autograd.grad(sum(part.sum() for part in found), values)
    assert bool(torch.isfinite(gradient).all())


def test_gradients_of_fits_are_those_of_finite_differences():
    values = torch.tensor(drawn(1.3, 0.5, 1.0, 90).reshape(3, 30), requires_grad=True)
    assert torch.autograd.gradcheck(lambda v: tuple(fit_aggd(v)), (values,))


@pytest.mark.parametrize(("height", "width"), [(2, 2), (3, 9), (7, 7), (11, 8), (40, 33)])
def test_contrast_is_that_of_the_formula(height, width):
    grey = images(3, 1, height, width)[:, 0].double()
    expected = [contrast_by_hand(image) for image in grey.numpy()]
    np.testing.assert_allclose(contrast_of(grey).numpy(), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 8, 8), (1, 5, 9), (3, 13, 7)])
def test_features_are_those_of_the_formula(shape):
    x = images(4, *shape)
    found = natural_features(x)
    assert found.shape == (4, 18)
    assert found.dtype == torch.float64
    expected = [features_by_hand(image) for image in x.double().numpy()]
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("level", [0.0, 1 / 255, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("side", [2, 8, 21])
def test_flat_images_have_features_and_gradients(channels, level, side):
    x = torch.full((2, channels, side, side), level)
    half = x.clone()
    half[..., : side // 2] = 1
    x = torch.cat([x, half]).requires_grad_()
    found = natural_features(x)
    assert bool(torch.isfinite(found).all())
    (gradient,) = torch.autograd.grad(found.sum(), x)
    assert bool(torch.isfinite(gradient).all())


def test_rounding_does_not_decide_the_side_of_flat_regions():
    field = contrast_of(torch.full((1, 21, 21), 0.7, dtype=torch.float64))
    assert not bool(field[:, 3:-3, 3:-3].any())
    assert bool((field[:, 0] > 1e-3).all())


@pytest.mark.parametrize("output", ["decision", "probability"])
def test_scores_are_those_of_the_machine(output):
    clean, bad, x = images(40, 1, 8, 8), images(30, 1, 8, 8, seed=5).sqrt(), images(20, 1, 8, 8, seed=6) ** 0.7
    detector, other = (NSSDetector(network(), output=output) for _ in range(2))
    detector.fit(clean, bad)
    other.fit(clean, bad, batch_size=7)
    torch.testing.assert_close(other.score(x), detector.score(x))
    rows, features = (
        np.array([features_by_hand(image) for image in part.double().numpy()]) for part in (torch.cat([clean, bad]), x)
    )
    low, high = rows.min(0), rows.max(0)
    scaled, scaled_x = (-1 + 2 * (each - low) / (high - low) for each in (rows, features))
    machine, targets = SVC(C=10, kernel="sigmoid", gamma=0.01), np.repeat([0, 1], [40, 30])
    decision = machine.fit(scaled, targets).decision_function(scaled_x)
    calibrated = CalibratedClassifierCV(machine, ensemble=False, cv=5).fit(scaled, targets)
    expected = decision if output == "decision" else calibrated.predict_proba(scaled_x)[:, 1]
    found = detector.score(x)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-4)
    assert found.dtype == torch.float32
    assert found.argsort().tolist() == decision.argsort().tolist()
