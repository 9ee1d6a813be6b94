"""NSS, feature squeezing and MagNet: against scipy, scikit-learn, OpenCV, and loops over their formulas."""

import math
from copy import deepcopy
from functools import partial
from itertools import product

import numpy as np
import pytest
import scipy.ndimage
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.signal import correlate2d
from scipy.spatial.distance import jensenshannon
from scipy.special import gamma, softmax
from sklearn.calibration import CalibratedClassifierCV
from sklearn.svm import SVC
from torch import nn

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.random import seeded_globals
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.detectors._features import squeezers
from robust_ext.detectors._features.autoencoder import Autoencoder
from robust_ext.detectors._features.squeezers import BitDepth, Median, NonLocalMeans, OpenCVNonLocalMeans
from robust_ext.detectors.feature_squeezing import FeatureSqueezingDetector
from robust_ext.detectors.magnet import MagNetDetector, jensen_shannon
from robust_ext.detectors.nss import HIGHEST_SHAPE, LOWEST_SHAPE, NSSDetector, contrast_of, fit_aggd, natural_features
from robust_ext.detectors.training import minimise
from tests.detectors import cases
from tests.detectors.cases import flat, weighted

CHANNELS = pytest.mark.parametrize("channels", [1, 3])


def images(count, *shape, seed=0, noise=0.02):
    """Smooth images with a little noise, in 8 bits on [0, 1]."""
    rough = np.random.default_rng(seed).random((count, *shape))
    smooth = scipy.ndimage.gaussian_filter(rough, (0, 0, 2.5, 2.5))
    smooth = (smooth - smooth.min()) / np.ptp(smooth)
    return torch.tensor(np.rint(255 * (noise * rough + (1 - noise) * smooth)) / 255, dtype=torch.float32)


# Natural scene statistics: coefficients, their distributions, the support vector machine on them.


def ratio(shape):
    return gamma(2 / shape) ** 2 / gamma(1 / shape) / gamma(3 / shape)


def fit_by_hand(values):
    """Shape, mean, left and right variance, by the published formulas."""
    s_l, s_r = (math.sqrt((side**2).mean()) for side in (values[values < 0], values[values >= 0]))
    g = s_l / s_r
    wanted = np.abs(values).mean() ** 2 / (values**2).mean() * (g**3 + 1) * (g + 1) / (g**2 + 1) ** 2
    wanted = np.clip(wanted, ratio(LOWEST_SHAPE), ratio(HIGHEST_SHAPE))
    shape = brentq(lambda a: ratio(a) - wanted, LOWEST_SHAPE, HIGHEST_SHAPE, xtol=1e-12)
    mean = (s_r - s_l) * math.sqrt(gamma(1 / shape) / gamma(3 / shape)) * gamma(2 / shape) / gamma(1 / shape)
    return [shape, mean, s_l**2, s_r**2]


def features_by_hand(image):
    grey = image[0] if len(image) == 1 else 0.2125 * image[0] + 0.7154 * image[1] + 0.0721 * image[2]
    # The contrast by the filters of scipy; the image is black beyond its edges.
    grey, impulse = grey.astype(np.float64), np.zeros((7, 7))
    impulse[3, 3] = 1
    window = scipy.ndimage.gaussian_filter(impulse, 7 / 6, mode="constant", radius=3)
    mean, square = (scipy.ndimage.correlate(grey**power, window, mode="constant") for power in (1, 2))
    field = (grey - mean) / (np.sqrt(np.abs(mean**2 - square)) + 1 / 255)
    shape, _, left, right = fit_by_hand(field.ravel())
    features = [shape, (left + right) / 2]
    height, width = field.shape
    for down, across in ((0, 1), (1, 0), (1, 1), (1, -1)):
        columns = [column for column in range(width) if 0 <= column + across < width]
        pairs = [(row, column) for row in range(height - down) for column in columns]
        features += fit_by_hand(np.array([field[i, j] * field[i + down, j + across] for i, j in pairs]))
    return features


@settings(max_examples=80)
@given(st.integers(2, 60), st.integers(0, 10_000), st.floats(0.2, 6))
def test_moments_are_matched(count, seed, power):
    values = np.random.default_rng(seed).normal(size=(3, count)) + 0.1
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
    assert found.shape[:4].tolist() == pytest.approx([LOWEST_SHAPE, *[HIGHEST_SHAPE] * 3])
    assert found.shape[4].item() == pytest.approx(brentq(lambda a: ratio(a) - 1 / 6, 0.1, 10))
    assert found.left.tolist() == pytest.approx([0, 0, 4, 1, 0, 0])
    assert found.right.tolist() == pytest.approx([0, 4, 0, 1, 1 / 6, 0])
    assert found.mean[[0, 3]].tolist() == [0, 0]
    (gradient,) = torch.autograd.grad(sum(part.sum() for part in found), values)
    assert bool(torch.isfinite(gradient).all())
    values = torch.randn(3, 30, generator=torch.Generator().manual_seed(0)).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda v: tuple(fit_aggd(v)), (values,))


@pytest.mark.parametrize("side", [2, 21])
def test_flat_images_have_features_and_gradients(side):
    for channels, level in product((1, 3), (0.0, 1 / 255, 0.7, 1.0)):
        x = torch.full((2, channels, side, side), level)
        x[1, ..., : side // 2] = 1
        found = natural_features(x.requires_grad_())
        (gradient,) = torch.autograd.grad(found.sum(), x)
        assert bool(torch.isfinite(found).all() & torch.isfinite(gradient).all())
    # Rounding does not decide the side of flat regions.
    field = contrast_of(torch.full((1, 21, 21), 0.7, dtype=torch.float64))
    assert not bool(field[:, 3:-3, 3:-3].any())
    assert bool((field[:, 0] > 1e-3).all())


@pytest.mark.parametrize("output", ["decision", "probability"])
def test_scores_are_those_of_the_machine(output):
    clean, bad, x = (images(count, 3, 9, 7, seed=seed, noise=0.3) for count, seed in ((40, 0), (30, 5), (20, 6)))
    bad, x = bad.sqrt(), x**0.7
    detector, other = (NSSDetector(flat(inputs=189), output=output) for _ in range(2))
    detector.fit(clean, bad)
    other.fit(clean, bad, batch_size=7)
    found = detector.score(x)
    torch.testing.assert_close(other.score(x), found)
    rows, features = (
        np.array([features_by_hand(i) for i in part.double().numpy()]) for part in (torch.cat([clean, bad]), x)
    )
    low, high = rows.min(0), rows.max(0)
    scaled, scaled_x = (-1 + 2 * (each - low) / (high - low) for each in (rows, features))
    machine, targets = SVC(C=10, kernel="sigmoid", gamma=0.01), np.repeat([0, 1], [40, 30])
    decision = machine.fit(scaled, targets).decision_function(scaled_x)
    calibrated = CalibratedClassifierCV(machine, ensemble=False, cv=5).fit(scaled, targets)
    expected = decision if output == "decision" else calibrated.predict_proba(scaled_x)[:, 1]
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-4)


# Feature squeezing: the squeezers, and how far they move the probabilities.


def squeezed_network(channels=1, side=8):
    made = flat(inputs=channels * side * side, hidden=16, classes=4)
    made[3].weight.data.mul_(5)
    return made


def averaged_by_hand(image, search, patch, strength):
    """Non-local means of an image (H, W, C) in grey levels, pixel by pixel."""
    around, edge, made = search // 2, patch // 2, np.empty_like(image)
    wide = np.pad(image, ((around + edge,) * 2, (around + edge,) * 2, (0, 0)), mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(wide, (patch, patch), axis=(0, 1))
    for row, column in np.ndindex(image.shape[:2]):
        there = windows[row : row + search, column : column + search]
        weights = np.exp(-((there - there[around, around]) ** 2).mean((2, 3, 4)) / strength**2)
        made[row, column] = np.average(there[..., edge, edge], axis=(0, 1), weights=weights)
    return made


@settings(max_examples=60)
@given(st.integers(2, 7), st.integers(1, 9), st.integers(1, 9), st.integers(1, 3), st.booleans())
def test_medians_are_those_of_scipy(size, height, width, channels, ties):
    x = cases.data(2, size, (channels, height, width))
    x = (x * 3).round() if ties else x
    expected = scipy.ndimage.median_filter(x.numpy(), size=(1, 1, size, size), mode="reflect")
    assert np.array_equal(Median(size=size)(x).numpy(), expected)


@CHANNELS
def test_averages_are_those_of_the_formula(channels):
    x = images(2, channels, 9, 7).double()
    for image, found in zip(255 * x, 255 * NonLocalMeans(search=5, patch=3, strength=6)(x), strict=True):
        planes = image[None] if channels == 1 else squeezers.to_lab(image[None])
        parts = planes[0].permute(1, 2, 0).numpy().astype(np.float64)
        averaged = [averaged_by_hand(part, 5, 3, 6) for part in (parts[..., :1], parts[..., 1:]) if part.size]
        expected = torch.tensor(np.concatenate(averaged, 2)).permute(2, 0, 1)[None]
        expected = expected if channels == 1 else squeezers.from_lab(expected)
        torch.testing.assert_close(found, expected[0], atol=1e-6, rtol=0)
        assert (found - image).abs().mean() > 0.3


def test_lab_is_that_of_opencv():
    cv2 = pytest.importorskip("cv2")
    pixels = np.random.default_rng(0).random((40, 40, 3)).astype(np.float32)
    pixels[:5] *= 0.02
    # Of floating point numbers OpenCV gives lightness in [0, 100], and colours that are not shifted.
    expected = cv2.cvtColor(pixels, cv2.COLOR_LBGR2Lab) * np.array([2.55, 1, 1]) + np.array([0, 128, 128])
    levels = 255 * torch.tensor(pixels).permute(2, 0, 1)[None].double()
    found = squeezers.to_lab(levels)
    np.testing.assert_allclose(found[0].permute(1, 2, 0).numpy(), expected, atol=0.03)
    torch.testing.assert_close(squeezers.from_lab(found), levels, rtol=0, atol=1e-3)


@CHANNELS
def test_scores_of_squeezing_are_those_of_the_formula(channels):
    classifier, x, winners = squeezed_network(channels), images(9, channels, 8, 8), set()
    x[:4] = (x[:4] * 3).round() / 3
    own = [("bit_depth", {"bits": 2}), ("median", {"size": 3}), lambda x: x * 0.9]
    detector = FeatureSqueezingDetector(classifier, squeezers=own)
    w1, b1, w2, b2 = (p.detach().double().numpy() for p in classifier.parameters())
    for image, score in zip(x.numpy(), detector.score(x).tolist(), strict=True):
        squeezed = [np.rint(image * np.float32(3)) / 3, scipy.ndimage.median_filter(image, size=(1, 3, 3)), image * 0.9]
        before, *after = (softmax(w2 @ np.tanh(w1 @ one.ravel() + b1) + b2) for one in (image, *squeezed))
        distances = [np.abs(before - one).sum() for one in after]
        winners.add(int(np.argmax(distances)))
        assert score == pytest.approx(max(distances), abs=1e-5)
    assert len(winners) > 1


@pytest.mark.parametrize("named", [("bit_depth", {"bits": 1}), ("opencv_non_local_means", {})])
def test_rounding_is_passed_straight_through(named):
    if named[0] != "bit_depth":
        pytest.importorskip("cv2")
    classifier, x, scores, gradients = squeezed_network(), images(4, 1, 8, 8), [], []
    for straight in (True, False):
        detector = FeatureSqueezingDetector(classifier, squeezers=[named], straight_through=straight)
        moved = x.clone().requires_grad_()
        scores.append(detector.score(moved))
        gradients += torch.autograd.grad(scores[-1].sum(), moved)
    assert torch.equal(*scores)
    before, after = x.clone().requires_grad_(), detector.squeezers[0](x).requires_grad_()
    distance = (classifier(before).softmax(1) - classifier(after).softmax(1)).abs().sum()
    first, second = torch.autograd.grad(distance, [before, after])
    torch.testing.assert_close(gradients, [first + second, first])
    assert float(second.abs().max()) > 1e-3


# MagNet: reconstruction errors and divergences, training, and calibration.

classifier_of = partial(weighted, lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(48, 3)))
data = partial(cases.data, shape=(2, 5, 6))
train = partial(minimise, batch_size=256, learning_rate=1e-3)


def rebuilt(image, autoencoder):
    """One image in [0, 1] through the published structures, step by step, with the convolutions of scipy."""
    _, height, width = image.shape
    pools = len(autoencoder.convolutions) == 5
    for position, part in enumerate(autoencoder.convolutions):
        planes = []
        for kernels, shift in zip(part.weight.detach().double().numpy(), part.bias.tolist(), strict=True):
            both = zip(image, kernels, strict=True)
            planes.append(sum(correlate2d(plane, kernel, mode="same") for plane, kernel in both) + shift)
        image = 1 / (1 + np.exp(-np.stack(planes)))
        if pools and position == 0:
            corners = product(range(0, height, 2), range(0, width, 2))
            means = [image[:, row : row + 2, column : column + 2].mean((1, 2)) for row, column in corners]
            image = np.array(means).T.reshape(len(image), -(-height // 2), -(-width // 2))
        if pools and position == 2:
            image = image.repeat(2, 1).repeat(2, 2)[:, :height, :width]
    return image


def test_parts_are_those_of_the_definition():
    classifier, x = classifier_of(), 4 * data(5, 3) - 1
    detector = MagNetDetector(classifier, temperatures=(10, 0.5), reformer=1, bounds=(-1, 3))
    detector.fit(4 * data(20) - 1, epochs=1)
    found = detector.parts(x).detach().numpy()
    for row, image in enumerate(data(5, 3).double().numpy()):
        both = [rebuilt(image, autoencoder) for autoencoder in detector.autoencoders]
        other = torch.tensor(4 * both[1] - 1).float()[None]
        logits = [classifier(one)[0].detach().double().numpy() for one in (x[row : row + 1], other)]
        expected = [np.mean((image - both[0]) ** 2), np.mean(np.abs(image - both[1]))]
        # The distance of scipy is the root of the divergence.
        expected += [jensenshannon(*(np.exp(z / temperature) for z in logits)) ** 2 for temperature in (10, 0.5)]
        np.testing.assert_allclose(found[row], expected, rtol=1e-3, atol=1e-7)


@settings(max_examples=60)
@given(st.integers(1, 4), st.integers(2, 12), st.floats(0.01, 40), st.integers(0, 99))
def test_divergences_are_those_of_scipy(rows, classes, spread, seed):
    first, second = np.random.default_rng(seed).normal(size=(2, rows, classes)) * spread
    found = jensen_shannon(torch.tensor(first), torch.tensor(second))
    # By rounding scipy takes the root of a number below 0 where both are sure of the same class.
    with np.errstate(invalid="ignore"):
        expected = np.nan_to_num(jensenshannon(np.exp(first), np.exp(second), axis=1)) ** 2
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6, atol=1e-12)
    # That of sure predictions is finite.
    sure = torch.tensor([[1e4, 0.0], [0.0, 0.0]], requires_grad=True)
    found = jensen_shannon(sure, sure.detach().flip(1))
    torch.testing.assert_close(found, torch.tensor([np.log(2), 0.0]).float())
    (gradient,) = torch.autograd.grad(found.sum(), sure)
    assert bool(torch.isfinite(gradient).all())


def test_the_first_step_is_that_of_adam_on_the_published_loss():
    clean = data(6)
    with seeded_globals(0):
        trained = Autoencoder((3,), channels=2, bounds=(-2, 2))
        twin, x = deepcopy(trained), 4 * clean - 2
        # Noise of no size, and a penalty large enough to see.
        errors = train(trained, lambda rows: trained.loss(x[rows], noise=0.0, activity=0.1), rows=6, epochs=1)
    values, penalty = clean, torch.zeros(())
    for part in twin.convolutions:
        values = torch.sigmoid(part(values))
        penalty = penalty + values.square().sum()
    error = (values - clean).square().mean()
    (error + 0.1 * penalty / 6).backward()
    assert errors == [pytest.approx(error.item(), rel=1e-5)]
    for before, after in zip(twin.parameters(), trained.parameters(), strict=True):
        # Adam's first step is the learning rate times the sign, where the gradient is not tiny.
        torch.testing.assert_close(after, before - 1e-3 * before.grad.sign(), rtol=0, atol=2e-6)


def test_noise_is_clipped_and_of_the_given_size():
    seen, autoencoder = [], Autoencoder((3,), channels=1, bounds=(0, 1))
    clean = torch.tensor([0.5, 0.0]).repeat_interleave(100).view(200, 1, 1, 1).expand(-1, -1, 8, 8)
    autoencoder.convolutions[0].register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    with seeded_globals(0):
        train(autoencoder, lambda rows: autoencoder.loss(clean[rows], noise=0.1), rows=200, epochs=2, batch_size=64)
    assert [len(batch) for batch in seen] == [64, 64, 64, 8] * 2
    noisy = torch.cat(seen)
    grey = noisy[noisy.flatten(1).mean(1) > 0.25]
    assert len(grey) == 200
    assert float(grey.std()) == pytest.approx(0.1, rel=0.03)
    assert float(noisy.min()) == 0


def test_score_is_the_largest_part_in_units_of_its_limit(recwarn):
    inputs, _ = load_dataset("digits", split="train").take(range(500))
    trained = MagNetDetector(digits_network(), temperatures=(10,), reformer=1)
    errors = trained.fit(inputs, epochs=10, batch_size=32, learning_rate=0.02)
    assert all(len(found) == 10 and found[-1] < 0.6 * found[0] for found in errors)
    assert not recwarn
    held, _ = load_dataset("digits", split="test").take(range(200))
    calibration = trained.calibrate(held, false_positive_rate=0.1, batch_size=64)
    parts, scores = trained.parts(held).detach().numpy(), trained.score(held).detach().numpy()
    limits = np.sort(parts, axis=0)[-21]
    np.testing.assert_allclose(trained.limits.numpy(), limits, rtol=1e-5)
    np.testing.assert_allclose(scores, (parts / limits).max(1), rtol=1e-4)
    assert (calibration.achieved, int(trained.decide(held).sum())) == (0.1, 20)
    # Each part alone flags that share, all together flag more: so the threshold of the maximum lies above 1.
    assert (parts > limits * (1 + 1e-6)).sum(0).tolist() == [20, 20, 20]
    assert float(trained.threshold) > 1


def test_limits_follow_the_rate_and_stay_when_calibration_fails():
    detector = MagNetDetector(classifier_of(), temperatures=(10, 2), reformer=1)
    detector.fit(data(40), epochs=2, batch_size=16)
    detector.calibrate(data(100, 1), false_positive_rate=0.05)
    strict = detector.limits.clone()
    detector.calibrate(data(100, 1), false_positive_rate=0.5)
    kept = detector.limits.clone()
    assert bool((kept < strict).all())
    for few, message in ((data(10, 1), "false_positive_rate"), (data(0), "inputs")):
        with pytest.raises(InvalidArgumentError, match=message):
            detector.calibrate(few, false_positive_rate=0.01)
    assert torch.equal(detector.limits, kept)


@settings(max_examples=60)
@given(st.integers(1, 8), st.integers(0, 999), st.sampled_from([(0.0, 1.0), (-1.0, 1.0), (0.0, 255.0)]))
def test_values_are_rounded_to_the_nearest_level(bits, seed, bounds):
    low, high = bounds
    x, levels = low + (high - low) * cases.data(3, seed, (1, 4, 4)), np.linspace(low, high, 2**bits)
    found = BitDepth(bits=bits, bounds=bounds)(x)
    nearest = levels[np.abs(x.numpy()[..., None] - levels).argmin(-1)]
    np.testing.assert_allclose(found.numpy(), nearest, atol=1e-5 * (high - low))


@pytest.mark.parametrize("strength", [2.0, 6.0])
def test_averages_are_close_to_those_of_opencv(strength):
    pytest.importorskip("cv2")
    given = {"search": 13, "patch": 3, "strength": strength}
    # One channel: OpenCV rounds to 8 bits at the end; three: also after the change of colours.
    for channels, most, mean in ((1, 0.8, 0.3), (3, 8.0, 1.2)):
        x = images(3, channels, 21, 40)
        apart = 255 * (NonLocalMeans(**given)(x) - OpenCVNonLocalMeans(**given)(x)).abs()
        assert (apart.max() < most, apart.mean() < mean) == (True, True)
