"""The odds detector against a loop over its formula, with the same draws."""

from functools import partial

import numpy as np
import pytest
import torch

from robust_ext.core.random import seeded_globals
from robust_ext.detectors.odds import OddsDetector
from tests.detectors import cases
from tests.detectors.cases import NOISES as MIXED
from tests.detectors.cases import score

data = partial(cases.data, shape=(2, 3))
network = partial(cases.flat, hidden=8, among=data(300))


def fitted(classifier, inputs, **given):
    detector = OddsDetector(classifier, **{"noises": MIXED, "draws": 5, **given})
    with seeded_globals(1):
        detector.fit(inputs)
    return detector


def draw(kind, level, shape):
    """The draws of one input under one noise, from torch's generator as the detector takes them."""
    out = torch.empty(shape)
    if kind == "normal":
        return (level * out.normal_()).numpy()
    if kind == "sign":
        return (level * (2 * out.bernoulli_(0.5) - 1)).numpy()
    return out.uniform_(-level, level).numpy()


def alignments(classifier, x, noises, draws, bounds, seed):
    """(w_z - w_y) . (phi(x + noise) - phi(x)) by loops in numpy, as the paper writes it, and the predictions."""
    w1, b1 = (p.detach().double().numpy() for p in classifier[1].parameters())
    w2, b2 = (p.detach().double().numpy() for p in classifier[3].parameters())

    def features(point):
        return np.tanh(w1 @ point.astype(np.float64).ravel() + b1)

    rows, predictions = [], []
    with seeded_globals(seed):
        for point in x.numpy():
            clean = features(point)
            y = int(np.argmax(w2 @ clean + b2))
            table = []
            for kind, level in noises:
                noisy = point + draw(kind, level, (draws, *point.shape))
                if bounds is not None:
                    noisy = np.clip(noisy, *bounds)
                moves = [features(copy) - clean for copy in noisy]
                table.append([[(w2[z] - w2[y]) @ move for z in range(len(w2))] for move in moves])
            rows.append(table)
            predictions.append(y)
    return np.array(rows), np.array(predictions)


def reference_scores(classifier, train, x, noises, draws, bounds):
    """Standardise each draw, then average over draws, then over noises, then take the largest."""
    collected, classes = alignments(classifier, train, noises, draws, bounds, 1)
    values, predicted = alignments(classifier, x, noises, draws, bounds, 2)
    scores = []
    for row, y in zip(values, predicted, strict=True):
        clean, others = collected[classes == y].mean(2), [z for z in range(values.shape[3]) if z != y]
        means, deviations = (part[:, None, others] for part in (clean.mean(0), clean.std(0)))
        scores.append(((row[..., others] - means) / deviations).mean(1).mean(0).max())
    return np.array(scores)


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("batch_size", [3, 5, 10_000])
def test_scores_are_those_of_the_formula(classes, batch_size):
    classifier, train, x = network(classes=classes), data(60), data(9, seed=5)
    scores = []
    for bounds in ((0.0, 1.0), None):
        scores.append(score(fitted(classifier, train, bounds=bounds, batch_size=batch_size), x).numpy())
        expected = reference_scores(classifier, train, x, MIXED, 5, bounds)
        np.testing.assert_allclose(scores[-1], expected, rtol=2e-3, atol=2e-3)
    # Clipping changes them.
    assert abs(scores[0] - scores[1]).max() > 0.05


def test_passes_are_as_large_as_allowed():
    sizes = []
    classifier = network()
    detector = fitted(classifier, data(40), draws=4, batch_size=24)
    classifier.register_forward_hook(lambda _module, _args, out: sizes.append(len(out)))
    score(detector, data(5))
    assert sizes == [5, 24, 24, 12]
    detector.batch_size, sizes[:] = 3, []
    score(detector, data(1))
    assert sizes == [1] + [3, 1] * 3


def test_going_back_draws_nothing_new():
    detector, x = fitted(network(), data(40), batch_size=5), data(4).requires_grad_()
    torch.manual_seed(0)
    scores = detector.score(x)
    state = torch.get_rng_state()
    scores.sum().backward()
    assert torch.equal(torch.get_rng_state(), state)


def test_labels_leave_out_what_is_misclassified():
    classifier, train = network(), data(90)
    predicted = classifier(train).argmax(1)
    labels = predicted.clone()
    labels[::3] = (labels[::3] + 1) % 3
    detector = OddsDetector(classifier, noises=MIXED, draws=5)
    with seeded_globals(1):
        detector.fit(train, labels)
    values, classes = alignments(classifier, train, MIXED, 5, (0.0, 1.0), 1)
    for y in range(3):
        mine = values[(classes == y) & (labels.numpy() == y)].mean(2)
        others = [z for z in range(3) if z != y]
        np.testing.assert_allclose(detector.means[y].numpy()[:, others], mine.mean(0)[:, others], rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(detector.deviations[y].numpy()[:, others], mine.std(0)[:, others], rtol=1e-3)
