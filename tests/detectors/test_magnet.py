"""MagNet: reconstruction errors and divergences against direct loops and scipy, training, and calibration."""

from copy import deepcopy
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.signal import correlate2d
from scipy.spatial.distance import jensenshannon
from torch import nn

from robust_ext.core.errors import InvalidArgumentError, RobustExtWarning
from robust_ext.core.random import seeded_globals
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.detectors._features.autoencoder import Autoencoder
from robust_ext.detectors.magnet import MagNetDetector, jensen_shannon
from robust_ext.detectors.training import minimise
from tests.detectors import cases
from tests.detectors.cases import weighted

ready = partial(weighted, lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(48, 3)))
data = partial(cases.data, shape=(2, 5, 6))
train = partial(minimise, batch_size=256, learning_rate=1e-3)


def convolved(image, part):
    """Sigmoid of a convolution of ``(C, H, W)``, by scipy."""
    weight, bias = part.weight.detach().double().numpy(), part.bias.detach().double().numpy()
    planes = [
        sum(correlate2d(plane, kernel, mode="same") for plane, kernel in zip(image, kernels, strict=True)) + shift
        for kernels, shift in zip(weight, bias, strict=True)
    ]
    return 1 / (1 + np.exp(-np.stack(planes)))


def pooled(image):
    rows, columns = (range(0, length, 2) for length in image.shape[1:])
    means = [[image[:, row : row + 2, column : column + 2].mean((1, 2)) for column in columns] for row in rows]
    return np.array(means).transpose(2, 0, 1)


def rebuilt(image, autoencoder):
    """One image in [0, 1] through the published structures, step by step."""
    height, width = image.shape[1:]
    pools = len(autoencoder.convolutions) == 5
    for position, part in enumerate(autoencoder.convolutions):
        image = convolved(image, part)
        if pools and position == 0:
            image = pooled(image)
        if pools and position == 2:
            image = image.repeat(2, 1).repeat(2, 2)[:, :height, :width]
    return image


def test_autoencoders_are_the_published_ones():
    published = {(3, "average", 3): [(3, 1), (3, 3), (3, 3), (3, 3), (1, 3)], (3,): [(3, 1), (3, 3), (1, 3)]}
    for structure, shapes in published.items():
        made = Autoencoder(structure, channels=1, bounds=(0, 1))
        assert [tuple(part.weight.shape) for part in made.convolutions] == [(*shape, 3, 3) for shape in shapes]


@pytest.mark.parametrize("bounds", [(0.0, 1.0), (-1.0, 3.0)])
def test_parts_are_those_of_the_definition(bounds):
    classifier, (low, high) = ready(), bounds
    x = data(5, 3) * (high - low) + low
    detector = MagNetDetector(classifier, temperatures=(10, 0.5), reformer=1, bounds=bounds)
    detector.fit(data(20) * (high - low) + low, epochs=1)
    found = detector.parts(x).detach().numpy()
    assert found.shape == (5, 4)
    for row, image in enumerate(data(5, 3).double().numpy()):
        both = [rebuilt(image, autoencoder) for autoencoder in detector.autoencoders]
        assert found[row, 0] == pytest.approx(np.mean((image - both[0]) ** 2), rel=1e-4)
        assert found[row, 1] == pytest.approx(np.mean(np.abs(image - both[1])), rel=1e-4)
        other = torch.tensor(both[1] * (high - low) + low).float()[None]
        with torch.no_grad():
            first, second = classifier(x[row : row + 1])[0].double(), classifier(other)[0].double()
        for column, temperature in ((2, 10), (3, 0.5)):
            p, q = (np.exp(z.numpy() / temperature) for z in (first, second))
            # The distance of scipy is the root of the divergence.
            assert found[row, column] == pytest.approx(jensenshannon(p, q) ** 2, rel=1e-3, abs=1e-7)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(2, 12), st.floats(0.01, 40), st.integers(0, 99))
def test_divergences_are_those_of_scipy(rows, classes, spread, seed):
    random = np.random.default_rng(seed)
    first, second = random.normal(size=(2, rows, classes)) * spread
    found = jensen_shannon(torch.tensor(first), torch.tensor(second))
    # By rounding scipy takes the root of a number below 0 where both are sure of the same class.
    with np.errstate(invalid="ignore"):
        expected = np.nan_to_num(jensenshannon(np.exp(first), np.exp(second), axis=1)) ** 2
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6, atol=1e-12)
    assert bool((found <= np.log(2) + 1e-12).all())


def test_divergence_of_sure_predictions_is_finite():
    sure = torch.tensor([[1e4, 0.0], [0.0, 0.0]], requires_grad=True)
    found = jensen_shannon(sure, sure.detach().flip(1))
    torch.testing.assert_close(found, torch.tensor([np.log(2), 0.0]).float())
    (gradient,) = torch.autograd.grad(found.sum(), sure)
    assert bool(torch.isfinite(gradient).all())


@pytest.mark.parametrize("bounds", [(0.0, 1.0), (-2.0, 2.0)])
def test_the_first_step_is_that_of_adam_on_the_published_loss(bounds):
    low, high = bounds
    clean = data(6)
    with seeded_globals(0):
        trained = Autoencoder((3,), channels=2, bounds=bounds)
        twin = Autoencoder((3,), channels=2, bounds=bounds)
        twin.load_state_dict(trained.state_dict())
        # Noise of no size, and a penalty large enough to see.
        x = clean * (high - low) + low
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
    seen = []
    clean = torch.tensor([0.5, 0.0]).repeat_interleave(100).view(200, 1, 1, 1).expand(-1, -1, 8, 8)
    autoencoder = Autoencoder((3,), channels=1, bounds=(0, 1))
    autoencoder.convolutions[0].register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    with seeded_globals(0):
        train(autoencoder, lambda rows: autoencoder.loss(clean[rows], noise=0.1), rows=200, epochs=2, batch_size=64)
    assert [len(batch) for batch in seen] == [64, 64, 64, 8] * 2
    noisy = torch.cat(seen)
    grey = noisy[noisy.flatten(1).mean(1) > 0.25]
    assert len(grey) == 200
    assert float(grey.std()) == pytest.approx(0.1, rel=0.03)
    assert float(noisy.min()) == 0


def test_training_reduces_the_error_and_is_seeded():
    inputs, _ = load_dataset("digits", split="train").take(range(256))
    first, second = MagNetDetector(digits_network()), MagNetDetector(digits_network())
    errors = first.fit(inputs, epochs=30, batch_size=32, learning_rate=0.01)
    assert all(len(found) == 30 and found[-1] < 0.6 * found[0] for found in errors)
    # The second autoencoder is trained with the generator as the first one leaves it.
    again = second.fit(inputs, epochs=3, batch_size=32, learning_rate=0.01)
    assert again[0] == errors[0][:3]


def test_autoencoders_that_learned_nothing_are_warned_of(recwarn):
    inputs, _ = load_dataset("digits", split="train").take(range(256))
    with pytest.warns(RobustExtWarning, match="no better than their mean"):
        MagNetDetector(digits_network()).fit(inputs, epochs=1)
    MagNetDetector(digits_network(), structures=[[3]], powers=[1]).fit(inputs, epochs=40, learning_rate=0.02)
    assert not recwarn


@pytest.fixture(scope="module")
def trained():
    inputs, _ = load_dataset("digits", split="train").take(range(500))
    detector = MagNetDetector(digits_network(), temperatures=(10,), reformer=1)
    detector.fit(inputs, epochs=30, batch_size=32, learning_rate=0.01)
    return detector


def test_score_is_the_largest_part_in_units_of_its_limit(trained):
    held, _ = load_dataset("digits", split="test").take(range(200))
    calibration = trained.calibrate(held, false_positive_rate=0.1, batch_size=64)
    with torch.no_grad():
        parts, scores = trained.parts(held), trained.score(held)
    assert parts.shape == (200, 3)
    limits = np.sort(parts.numpy(), axis=0)[-21]
    np.testing.assert_allclose(trained.limits.numpy(), limits, rtol=1e-5)
    np.testing.assert_allclose(scores.numpy(), (parts.numpy() / limits).max(1), rtol=1e-4)
    assert calibration.achieved == 0.1
    assert int(trained.decide(held).sum()) == 20
    # Each part alone flags that share, all together flag more: so the threshold of the maximum lies above 1.
    above = parts.numpy() > limits * (1 + 1e-6)
    assert above.sum(0).tolist() == [20, 20, 20]
    assert float(trained.threshold) > 1
    trained.threshold = torch.tensor(1.0)
    assert above.any(1).sum() > 20
    assert np.mean(trained.decide(held).numpy() == above.any(1)) > 0.98


def test_limits_follow_the_rate_and_stay_when_calibration_fails():
    detector = MagNetDetector(ready(), temperatures=(10, 2), reformer=1)
    detector.fit(data(40), epochs=2, batch_size=16)
    x = data(3, seed=7).double().requires_grad_()
    assert torch.autograd.gradcheck(deepcopy(detector).double().parts, x, eps=1e-6, atol=1e-5)
    detector.calibrate(data(100, 1), false_positive_rate=0.05)
    strict = detector.limits.clone()
    detector.calibrate(data(100, 1), false_positive_rate=0.5)
    assert bool((detector.limits < strict).all())
    kept = detector.limits.clone()
    for few, message in ((data(10, 1), "false_positive_rate"), (data(0), "inputs")):
        with pytest.raises(InvalidArgumentError, match=message):
            detector.calibrate(few, false_positive_rate=0.01)
    assert torch.equal(detector.limits, kept)
    predicted = detector.classifier(data(300, 2)).argmax(1)
    some = data(300, 2)[predicted == predicted.mode().values]
    assert len(some) >= 20
    assert detector.calibrate(some, false_positive_rate=0.1).achieved <= 0.1
