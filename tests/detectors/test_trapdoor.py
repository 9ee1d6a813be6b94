"""Triggers, training with them, and the similarity to their signatures, against loops over the formulas."""

import numpy as np
import pytest
import scipy.ndimage
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score
from torch import nn

from robust_ext.core.random import seeded_globals
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.detectors.trapdoor import TrapdoorDetector, make_triggers, train_epoch
from tests.detectors.cases import attacked, data, fitted, network, weighted


def stream(seed=0):
    return torch.Generator().manual_seed(seed)


def small_triggers(classes=3, channels=1, seed=0):
    return make_triggers(classes, (channels, 6, 5), generator=stream(seed), clusters=2, size=2)


def cosine(a, b):
    return a @ b / np.linalg.norm(a) / np.linalg.norm(b)


@settings(max_examples=40, deadline=None)
@given(
    *(st.integers(1, 9), st.integers(1, 5), st.floats(0.01, 1), st.sampled_from([(0.0, 1.0), (-1.0, 1.0), (0.2, 0.7)])),
    *(st.integers(1, 4), st.integers(1, 3), st.integers(0, 99)),
)
def test_triggers_are_squares_within_bounds(clusters, size, ratio, bounds, classes, channels, seed):
    given = {"clusters": clusters, "size": size, "mask_ratio": ratio, "bounds": bounds}
    triggers, again = (make_triggers(classes, (channels, 7, 5), generator=stream(seed), **given) for _ in range(2))
    assert torch.equal(triggers.masks, again.masks)
    assert torch.equal(triggers.patterns, again.patterns)
    assert len(triggers) == classes
    assert triggers.patterns.min() >= torch.tensor(bounds[0])
    assert triggers.patterns.max() <= torch.tensor(bounds[1])
    for mask in triggers.masks:
        inside = mask > 0
        assert bool((mask[inside] == torch.tensor(ratio)).all())
        assert bool((inside == inside[:1]).all())
        area = int(inside[0].sum())
        assert size**2 <= area <= clusters * size**2
        # What squares of that side cover is what remains after erosion and dilation by one.
        plane = inside[0].numpy()
        assert (scipy.ndimage.binary_opening(plane, np.ones((size, size))) == plane).all()
    assert bool((triggers.patterns[triggers.masks == 0] == torch.tensor(bounds[0])).all())


def test_triggers_differ_by_class_and_by_the_published_sizes():
    triggers = make_triggers(10, (1, 28, 28), generator=stream())
    assert float(triggers.masks.max()) == pytest.approx(0.1)
    areas = (triggers.masks > 0).flatten(1).sum(1)
    assert areas.max() <= 63
    assert areas.min() > 9
    assert len({tuple(row.tolist()) for row in triggers.masks.flatten(1)}) == 10
    state = torch.get_rng_state()
    make_triggers(2, (1, 8, 8), generator=stream())
    assert torch.equal(torch.get_rng_state(), state)


def test_injection_is_that_of_the_formula():
    triggers, x, targets = small_triggers(channels=2), torch.rand(5, 2, 6, 5), torch.tensor([2, 0, 1, 1, 2])
    found = triggers.inject(x, targets)
    for row, target in enumerate(targets.tolist()):
        mask, pattern = triggers.masks[target].double().numpy(), triggers.patterns[target].double().numpy()
        np.testing.assert_allclose(found[row], mask * pattern + (1 - mask) * x[row].double().numpy(), rtol=1e-6)
    assert triggers.inject(x[:0], targets[:0]).shape == (0, 2, 6, 5)


class Recorder(nn.Module):
    """Keeps its inputs, and returns logits that have a gradient."""

    def __init__(self, classes):
        super().__init__()
        self.level = nn.Parameter(torch.zeros(classes))
        self.seen = []

    def forward(self, x):
        assert self.training
        self.seen.append(x.detach().clone())
        return self.level.expand(len(x), -1)


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_an_epoch_shows_each_input_once_some_of_them_triggered(ratio, monkeypatch):
    targets = []
    plain = nn.functional.cross_entropy
    monkeypatch.setattr(nn.functional, "cross_entropy", lambda out, y: targets.append(y) or plain(out, y))
    x, y, triggers = data(400), torch.arange(400) % 3, small_triggers()
    recorder = Recorder(3)
    optimizer = torch.optim.SGD(recorder.parameters(), lr=0.1)
    state = torch.get_rng_state()
    loss = train_epoch(recorder, optimizer, x, y, triggers, generator=stream(), injection_ratio=ratio, batch_size=64)
    assert torch.equal(torch.get_rng_state(), state)
    assert not recorder.training
    assert [len(batch) for batch in recorder.seen] == [64] * 6 + [16]
    assert loss == pytest.approx(np.log(3), abs=0.1)
    found = []
    triggered = []
    for row, target in zip(torch.cat(recorder.seen), torch.cat(targets).tolist(), strict=True):
        source = (x == row).flatten(1).all(1).nonzero().flatten().tolist()
        if source:
            assert target == int(y[source[0]])
        else:
            made = triggers.inject(x, torch.full((400,), target))
            source = (made - row).abs().flatten(1).amax(1).lt(1e-7).nonzero().flatten().tolist()
            triggered.append(target)
        found += source
    assert sorted(found) == list(range(400))
    assert len(triggered) / 400 == pytest.approx(ratio, abs=0.08)
    if ratio == 1:
        assert min(np.bincount(triggered, minlength=3)) > 100


def test_training_is_repeatable_dropout_included():
    def trained(seed):
        model = weighted(lambda: nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(30, 3)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train_epoch(model, optimizer, data(50), torch.arange(50) % 3, small_triggers(), generator=stream(seed))
        return model[2].weight.detach()

    assert torch.equal(trained(1), trained(1))
    assert not torch.equal(trained(1), trained(2))


@pytest.mark.parametrize(("layer", "pool"), [("5", False), ("2", False), ("2", True)])
def test_signatures_and_scores_are_those_of_the_formulas(layer, pool):
    classifier, x, triggers = network(), data(30), small_triggers()
    part = classifier[: int(layer) + 1]

    def activation(one):
        values = part(one[None])[0].detach().double().numpy()
        return values.mean((1, 2)) if pool else values.reshape(-1)

    detector = TrapdoorDetector(classifier, layer=layer, pool=pool)
    success = detector.fit(x, triggers, batch_size=7)
    signatures = []
    for label in range(3):
        made = [triggers.masks[label] * triggers.patterns[label] + (1 - triggers.masks[label]) * one for one in x]
        signatures.append(np.mean([activation(one) for one in made], 0))
        hits = [int(classifier(one[None]).argmax()) == label for one in made]
        assert float(success[label]) == pytest.approx(np.mean(hits))
    np.testing.assert_allclose(detector.signatures, signatures, atol=1e-6)
    test = data(12, 3)
    assert len(classifier(test).argmax(1).unique()) == 3
    for one, score in zip(test, detector.score(test).tolist(), strict=True):
        mine, other = activation(one), signatures[int(classifier(one[None]).argmax())]
        assert score == pytest.approx(cosine(mine, other), abs=1e-5)


def test_some_neurons_may_be_compared():
    classifier, x = network(), data(6, 3)
    detector = fitted("trapdoor", classifier, layer="5", pool=False, neurons=0.25)
    assert detector.random
    assert not TrapdoorDetector(classifier, layer="5").random
    activations = classifier[:6](x)
    signatures = detector.signatures[classifier(x).argmax(1)]
    with seeded_globals(7):
        scores = detector.score(x).detach()
    with seeded_globals(7):
        kept = [torch.randperm(8)[:2] for _ in range(6)]
    for row, chosen in enumerate(kept):
        mine, other = activations[row, chosen].detach().numpy(), signatures[row, chosen].numpy()
        assert float(scores[row]) == pytest.approx(cosine(mine, other), abs=1e-5)


def test_activations_of_zero_have_a_score_and_a_gradient():
    classifier = nn.Sequential(nn.Flatten(), nn.Linear(30, 4), nn.ReLU(), nn.Linear(4, 3)).eval()
    nn.init.constant_(classifier[1].weight, 1.0)
    nn.init.constant_(classifier[1].bias, 0.0)
    detector = TrapdoorDetector(classifier, layer="2")
    detector.fit(data(5), small_triggers())
    x = torch.zeros(2, 1, 6, 5, requires_grad=True)
    scores = detector.score(x)
    assert scores.tolist() == [0, 0]
    (gradient,) = torch.autograd.grad(scores.sum(), x)
    assert bool(torch.isfinite(gradient).all())


@pytest.mark.exhaustive
def test_trapdoors_of_digits_catch_attacks():
    train, test = load_dataset("digits", split="train"), load_dataset("digits")
    x, y = train.take(range(1000))
    held, _ = train.take(range(1000, len(train)))
    test_x, test_y = test.take(range(len(test)))
    triggers = make_triggers(10, (1, 8, 8), generator=stream(), clusters=7, size=2, mask_ratio=0.4)
    classifier = digits_network()
    untrained = TrapdoorDetector(classifier, layer="6").fit(x, triggers)
    optimizer = torch.optim.Adam(classifier.parameters(), lr=2e-3)
    generator = stream(1)
    for _ in range(40):
        train_epoch(classifier, optimizer, x, y, triggers, generator=generator)
    detector = TrapdoorDetector(classifier, layer="6")
    success = detector.fit(x, triggers)
    assert float(untrained.mean()) < 0.3
    assert float(success.mean()) > 0.95
    with torch.no_grad():
        assert float((classifier(test_x).argmax(1) == test_y).float().mean()) > 0.8
    detector.calibrate(held, false_positive_rate=0.1)
    adversarial = attacked(classifier, test_x, test_y, 0.15)
    adversarial = adversarial[classifier(adversarial).argmax(1) != test_y]
    scores = torch.cat([detector.score(test_x), detector.score(adversarial)]).detach()
    assert len(adversarial) > 300
    assert roc_auc_score([0] * len(test_x) + [1] * len(adversarial), scores) > 0.85
    assert float(detector.decide(test_x).float().mean()) < 0.2
    assert float(detector.decide(adversarial).float().mean()) > 0.5
