"""Feature squeezing: the squeezers, and how far they move the probabilities."""

import math

import numpy as np
import pytest
import scipy.ndimage
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import softmax

from robust_ext.detectors._features.squeezers import (
    BitDepth,
    Median,
    NonLocalMeans,
    OpenCVNonLocalMeans,
    from_lab,
    to_lab,
)
from robust_ext.detectors.feature_squeezing import PRESETS, FeatureSqueezingDetector
from tests.detectors.cases import flat

CHANNELS = pytest.mark.parametrize("channels", [1, 3])


def images(count, *shape, seed=0):
    """Smooth images with a little noise, in 8 bits on [0, 1]."""
    rough = np.random.default_rng(seed).random((count, *shape))
    smooth = scipy.ndimage.gaussian_filter(rough, (0, 0, 2.5, 2.5))
    smooth = (smooth - smooth.min()) / np.ptp(smooth)
    return torch.tensor(np.rint(255 * (0.02 * rough + 0.98 * smooth)) / 255, dtype=torch.float32)


def network(channels=1, side=8):
    made = flat(inputs=channels * side * side, hidden=16, classes=4)
    made[3].weight.data.mul_(5)
    return made


def averaged_by_hand(image, search, patch, strength):
    """Non-local means of an image (H, W, C) in grey levels, pixel by pixel."""
    height, width, channels = image.shape
    around, edge = search // 2, patch // 2
    wide = np.pad(image, ((around + edge,) * 2, (around + edge,) * 2, (0, 0)), mode="reflect")
    made = np.empty_like(image)
    for row, column in np.ndindex(height, width):
        here = wide[row + around : row + around + patch, column + around : column + around + patch]
        total, weights = np.zeros(channels), 0.0
        for i, j in np.ndindex(search, search):
            there = wide[row + i : row + i + patch, column + j : column + j + patch]
            weight = math.exp(-((here - there) ** 2).sum() / (patch**2 * channels * strength**2))
            total, weights = total + weight * there[edge, edge], weights + weight
        made[row, column] = total / weights
    return made


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.integers(0, 999), st.sampled_from([(0.0, 1.0), (-1.0, 1.0), (0.0, 255.0)]))
def test_values_are_rounded_to_the_nearest_level(bits, seed, bounds):
    low, high = bounds
    x = low + (high - low) * torch.rand(3, 1, 4, 4, generator=torch.Generator().manual_seed(seed))
    levels = np.linspace(low, high, 2**bits)
    found = BitDepth(bits=bits, bounds=bounds)(x)
    nearest = levels[np.abs(x.numpy()[..., None] - levels).argmin(-1)]
    np.testing.assert_allclose(found.numpy(), nearest, atol=1e-5 * (high - low))
    assert len(found.unique()) <= 2**bits


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 7), st.integers(1, 9), st.integers(1, 9), st.integers(1, 3), st.booleans())
def test_medians_are_those_of_scipy(size, height, width, channels, ties):
    x = torch.rand(2, channels, height, width, generator=torch.Generator().manual_seed(size))
    x = (x * 3).round() if ties else x
    expected = scipy.ndimage.median_filter(x.numpy(), size=(1, 1, size, size), mode="reflect")
    assert np.array_equal(Median(size=size)(x).numpy(), expected)
    assert np.array_equal(Median(size=size)(x[0]).numpy(), expected[0])


@CHANNELS
def test_averages_are_those_of_the_formula(channels):
    x = images(2, channels, 9, 7).double()
    squeezer = NonLocalMeans(search=5, patch=3, strength=6)
    for image, found in zip(255 * x, 255 * squeezer(x), strict=True):
        if channels == 1:
            expected = averaged_by_hand(image.permute(1, 2, 0).numpy(), 5, 3, 6)
        else:
            lab = to_lab(image[None])[0].permute(1, 2, 0).numpy()
            parts = [averaged_by_hand(part, 5, 3, 6) for part in (lab[..., :1], lab[..., 1:])]
            expected = from_lab(torch.tensor(np.concatenate(parts, 2)).permute(2, 0, 1)[None])[0].permute(1, 2, 0)
        np.testing.assert_allclose(found.permute(1, 2, 0).numpy(), expected, atol=1e-6)
    assert (255 * (squeezer(x) - x)).abs().mean() > 0.3


@pytest.mark.parametrize("strength", [2.0, 6.0])
@pytest.mark.parametrize(("height", "width"), [(32, 32), (21, 40)])
def test_averages_are_close_to_those_of_opencv(strength, height, width):
    pytest.importorskip("cv2")
    given = {"search": 13, "patch": 3, "strength": strength}
    # One channel: OpenCV rounds to 8 bits at the end; three: also after the change of colours.
    for channels, most, mean in ((1, 0.8, 0.3), (3, 8.0, 1.2)):
        x = images(3, channels, height, width)
        apart = 255 * (NonLocalMeans(**given)(x) - OpenCVNonLocalMeans(**given)(x)).abs()
        assert apart.max() < most
        assert apart.mean() < mean


def test_lab_is_that_of_opencv():
    cv2 = pytest.importorskip("cv2")
    pixels = np.random.default_rng(0).random((40, 40, 3)).astype(np.float32)
    pixels[:5] *= 0.02
    # Of floating point numbers OpenCV gives lightness in [0, 100], and colours that are not shifted.
    expected = cv2.cvtColor(pixels, cv2.COLOR_LBGR2Lab) * np.array([2.55, 1, 1]) + np.array([0, 128, 128])
    levels = 255 * torch.tensor(pixels).permute(2, 0, 1)[None].double()
    found = to_lab(levels)
    np.testing.assert_allclose(found[0].permute(1, 2, 0).numpy(), expected, atol=0.03)
    torch.testing.assert_close(from_lab(found), levels, rtol=0, atol=1e-3)


@pytest.mark.parametrize("squeezer", [Median(size=2), Median(size=3), NonLocalMeans(search=3, patch=3, strength=9)])
@CHANNELS
def test_gradients_of_squeezers_are_those_of_finite_differences(squeezer, channels):
    x = 0.1 + 0.8 * torch.rand(1, channels, 4, 4, generator=torch.Generator().manual_seed(0)).double() / 4
    assert torch.autograd.gradcheck(squeezer, (x.requires_grad_(),), eps=1e-7, atol=1e-4)


@CHANNELS
def test_scores_are_those_of_the_formula(channels):
    classifier, x = network(channels), images(9, channels, 8, 8)
    x[:4] = (x[:4] * 3).round() / 3
    own = [("bit_depth", {"bits": 2}), ("median", {"size": 3}), lambda x: x * 0.9]
    detector = FeatureSqueezingDetector(classifier, squeezers=own)
    weights = [p.detach().double().numpy() for p in classifier.parameters()]

    def probabilities(image):
        hidden = np.tanh(weights[0] @ image.ravel() + weights[1])
        return softmax(weights[2] @ hidden + weights[3])

    winners = set()
    for image, score in zip(x.numpy(), detector.score(x).tolist(), strict=True):
        squeezed = [np.rint(image * np.float32(3)) / 3, scipy.ndimage.median_filter(image, size=(1, 3, 3)), image * 0.9]
        distances = [np.abs(probabilities(image) - probabilities(each)).sum() for each in squeezed]
        winners.add(int(np.argmax(distances)))
        assert score == pytest.approx(max(distances), abs=1e-5)
        assert 0 <= score <= 2
    assert len(winners) > 1


def test_published_choices():
    assert PRESETS["mnist"] == (("bit_depth", {"bits": 1}), ("median", {"size": 2}))
    pytest.importorskip("cv2")
    classifier, x = network(3, 16), images(5, 3, 16, 16)
    found = FeatureSqueezingDetector(classifier, squeezers="cifar10").score(x)
    squeezers = [BitDepth(bits=5), Median(size=2), OpenCVNonLocalMeans(search=13, patch=3, strength=2)]
    before = classifier(x).softmax(1)
    expected = [(before - classifier(squeezer(x)).softmax(1)).abs().sum(1) for squeezer in squeezers]
    torch.testing.assert_close(found, torch.stack(expected).amax(0))


def test_squeezed_inputs_go_through_in_one_pass():
    classifier, x = network(), images(6, 1, 8, 8)
    sizes = []
    classifier.register_forward_hook(lambda _module, args, _out: sizes.append(len(args[0])))
    whole = FeatureSqueezingDetector(classifier, squeezers="mnist").score(x)
    assert sizes == [6, 12]
    parts = FeatureSqueezingDetector(classifier, squeezers="mnist", batch_size=5).score(x)
    assert sizes[2:] == [6, 5, 5, 2]
    torch.testing.assert_close(parts, whole)


@pytest.mark.parametrize("named", [("bit_depth", {"bits": 1}), ("opencv_non_local_means", {})])
def test_rounding_is_passed_straight_through(named):
    if named[0] != "bit_depth":
        pytest.importorskip("cv2")
    classifier, x = network(), images(4, 1, 8, 8)
    scores, gradients = [], []
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


def test_squeezers_keep_their_own_bounds():
    squeezers = [BitDepth(bits=3), ("median", {"size": 3}), ["non_local_means", {"search": 3, "strength": 3.5}]]
    detector = FeatureSqueezingDetector(network(), squeezers=squeezers, bounds=(-1, 1))
    assert detector.settings["squeezers"] == [
        ["bit_depth", {"bits": 3, "bounds": [0, 1]}],
        ["median", {"size": 3, "bounds": [-1, 1]}],
        ["non_local_means", {"search": 3, "patch": 3, "strength": 3.5, "bounds": [-1, 1]}],
    ]
    again = FeatureSqueezingDetector(network(), **detector.settings)
    assert again.settings == detector.settings
    x = images(4, 1, 8, 8) * 2 - 1
    assert torch.equal(again.score(x), detector.score(x))
