"""DLA, ML-LOO, odds and trapdoors: against slow loops over their formulas, and how they are trained."""

from functools import partial
from itertools import product

import numpy as np
import pytest
import scipy.ndimage
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import softmax
from torch import nn

from robust_ext.core.random import seeded_globals
from robust_ext.detectors._features.regression import MEASURES, interquartile_range
from robust_ext.detectors.dla import DLADetector
from robust_ext.detectors.ml_loo import MLLOODetector
from robust_ext.detectors.odds import OddsDetector
from robust_ext.detectors.trapdoor import TrapdoorDetector, make_triggers, train_epoch
from tests.detectors import cases
from tests.detectors.cases import NOISES, data, fitted, network, score, weighted
from tests.models.cases import Net


@pytest.mark.parametrize("layers", [["5"], ["2", "5"], []])
def test_scores_of_dla_are_those_of_the_formula(layers):
    classifier, x = network(), data(6, seed=4)
    detector = fitted("dla", classifier, layers=layers)
    *parameters, last, shift = (p.double().numpy() for p in detector.alarm.parameters())
    seen = [classifier[: int(end) + 1](x).flatten(1) for end in (*layers, 7)]
    values = torch.cat(seen, 1).detach().double().numpy()
    for weight, bias in zip(parameters[::2], parameters[1::2], strict=True):
        values = values @ weight.T + bias
        # The scaled exponential linear unit (Klambauer et al. 2017).
        values = 1.0507009873554805 * np.where(values > 0, values, 1.6732632423543772 * (np.exp(values) - 1))
    np.testing.assert_allclose(detector.score(x).tolist(), (values @ last.T + shift).ravel(), atol=1e-5)


def test_sizes_and_training_of_dla():
    with torch.random.fork_rng(devices=[]):
        classifier = nn.Sequential(nn.Flatten(), nn.Linear(30, 512), nn.ReLU(), nn.Linear(512, 10)).eval()
    detector = DLADetector(classifier, layers=["2"])
    detector.fit(data(8), data(8, 1), epochs=1)
    shapes = [tuple(p.shape) for p in detector.alarm.parameters() if p.dim() == 2]
    # Those of the reference.
    assert shapes == [(100, 522), (50, 100), (10, 50), (1, 10)]
    # Both kinds weigh the same: without anything to tell them apart the best output is the log-odds, which is 0.
    detector, same = DLADetector(network(), layers=[], widths=[4]), data(1)
    detector.fit(same.expand(90, 1, 6, 5), same.expand(10, 1, 6, 5), epochs=300, batch_size=100, learning_rate=0.01)
    assert abs(detector.score(same).item()) < 0.05


MEASURES_BY_HAND = {
    "iqr": lambda values: np.percentile(values, 75) - np.percentile(values, 25),
    "std": np.std,
    "mad": lambda values: np.median(np.abs(values - np.median(values))),
}
planes = partial(data, shape=(2, 4, 3))


def left_out():
    head = (nn.Flatten, partial(nn.Linear, 18, 5), nn.Tanh, partial(nn.Linear, 5, 4))
    return weighted(lambda: nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), *(part() for part in head)), among=planes(50))


@torch.no_grad()
def features_by_hand(classifier, x, layers, *, dispersion, output, fill, patch, stride, pool):
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
    for one in x:
        label, differences = int(classifier(one[None]).argmax()), []
        channels, height, width = one.shape
        for channel, row, column in product(range(channels), range(0, height, stride), range(0, width, stride)):
            changed = one.clone()
            changed[channel, row : row + patch, column : column + patch] = fill
            differences.append(units(one, label) - units(changed, label))
        rows.append([MEASURES_BY_HAND[dispersion](unit) for unit in np.array(differences).T])
    return np.array(rows)


@settings(max_examples=30)
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
def test_features_of_ml_loo_are_those_of_the_definition(given, layers, size):
    classifier, x = left_out(), planes(5)
    detector = MLLOODetector(classifier, layers=list(map(str, layers)), batch_size=size, **given)
    found, expected = detector.features(x).detach(), features_by_hand(classifier, x, layers, **given)
    np.testing.assert_allclose(found, expected, atol=2e-6)


def test_a_unit_that_is_always_off_has_a_gradient():
    for measure in MEASURES.values():
        off = torch.zeros(1, 4, requires_grad=True)
        assert bool(torch.isfinite(torch.autograd.grad(measure(off).sum(), off)[0]).all())


def test_vectors_and_grey_planes_are_blanked_too():
    linear, x = weighted(lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 3))), data(2, shape=(6,))
    for shaped in (x, x.view(2, 2, 3), x.view(2, 1, 2, 3)):
        found = MLLOODetector(linear, layers=["1"]).features(shaped)[:, :3].detach()
        # For a linear unit the attribution of value i is w_i x_i.
        torch.testing.assert_close(found, interquartile_range(linear[1].weight.detach() * x[:, None]))


def test_units_are_drawn_by_the_seed_and_layers_may_be_one_feature_each():
    classifier, x = left_out(), planes(4)
    make = partial(MLLOODetector, classifier, layers=["0", "4"])
    whole, detector, other = make(pool=False).features(x), *(make(pool=False, units=4, seed=s) for s in (3, 4))
    part, _ = detector.features(x), other.features(x)
    chosen = [*detector.chosen_0.tolist(), *(18 + detector.chosen_1).tolist(), 23]
    assert (len(set(chosen)), other.chosen_0.tolist() != detector.chosen_0.tolist()) == (9, True)
    torch.testing.assert_close(part, whole[:, chosen])
    # Units that are kept, as those of a file, count, and not those that would be drawn.
    detector.chosen_0 = torch.tensor([0, 1, 2, 3])
    torch.testing.assert_close(detector.features(x)[:, :4], whole[:, :4])
    pooled = make().features(x)
    expected = torch.stack([pooled[:, :3].mean(1), pooled[:, 3:8].mean(1), pooled[:, 8]], 1)
    torch.testing.assert_close(make(group=True).features(x), expected)


vectors = partial(data, shape=(2, 3))
linear_head = partial(cases.flat, hidden=8, among=vectors(300))


def fitted_odds(classifier, inputs, *labels, **given):
    detector = OddsDetector(classifier, **{"noises": NOISES, "draws": 5, **given})
    with seeded_globals(1):
        detector.fit(inputs, *labels)
    return detector


def draw(kind, level, shape):
    """The draws of one input under one noise, from torch's generator as the detector takes them."""
    out = torch.empty(shape)
    if kind == "uniform":
        return out.uniform_(-level, level).numpy()
    return (level * (out.normal_() if kind == "normal" else 2 * out.bernoulli_(0.5) - 1)).numpy()


def alignments(classifier, x, bounds, seed):
    """(w_z - w_y) . (phi(x + noise) - phi(x)) by loops in numpy, as the paper writes it, and the predictions."""
    w1, b1, w2, b2 = (p.detach().double().numpy() for p in classifier.parameters())

    def features(point):
        return np.tanh(w1 @ point.astype(np.float64).ravel() + b1)

    rows, predictions = [], []
    with seeded_globals(seed):
        for point in x.numpy():
            clean, table = features(point), []
            y = int(np.argmax(w2 @ clean + b2))
            for kind, level in NOISES:
                noisy = point + draw(kind, level, (5, *point.shape))
                noisy = noisy if bounds is None else np.clip(noisy, *bounds)
                moves = [features(copy) - clean for copy in noisy]
                table.append([[(w2[z] - w2[y]) @ move for z in range(len(w2))] for move in moves])
            rows.append(table)
            predictions.append(y)
    return np.array(rows), np.array(predictions)


@pytest.mark.parametrize(("classes", "batch_size"), [(2, 10_000), (3, 3)])
def test_scores_of_odds_are_those_of_the_formula(classes, batch_size):
    """Standardise each draw, then average over draws, then over noises, then take the largest."""
    classifier, train, x = linear_head(classes=classes), vectors(60), vectors(9, seed=5)
    for bounds in ((0.0, 1.0), None):
        found = score(fitted_odds(classifier, train, bounds=bounds, batch_size=batch_size), x).numpy()
        collected, own = alignments(classifier, train, bounds, 1)
        for row, y, one in zip(*alignments(classifier, x, bounds, 2), found, strict=True):
            clean, others = collected[own == y].mean(2), [z for z in range(classes) if z != y]
            means, deviations = (part[:, None, others] for part in (clean.mean(0), clean.std(0)))
            expected = ((row[..., others] - means) / deviations).mean(1).mean(0).max()
            assert one == pytest.approx(expected, rel=2e-3, abs=2e-3)


def test_labels_leave_out_what_is_misclassified():
    classifier, train = linear_head(), vectors(90)
    labels = classifier(train).argmax(1)
    labels[::3] = (labels[::3] + 1) % 3
    detector = fitted_odds(classifier, train, labels)
    values, classes = alignments(classifier, train, (0.0, 1.0), 1)
    for y in range(3):
        mine, others = values[(classes == y) & (labels.numpy() == y)].mean(2), [z for z in range(3) if z != y]
        for found, expected in ((detector.means, mine.mean(0)), (detector.deviations, mine.std(0))):
            np.testing.assert_allclose(found[y].numpy()[:, others], expected[:, others], rtol=1e-3, atol=1e-5)


def stream(seed=0):
    return torch.Generator().manual_seed(seed)


def small_triggers(channels=1):
    return make_triggers(3, (channels, 6, 5), generator=stream(), clusters=2, size=2)


def cosine(a, b):
    return a @ b / np.linalg.norm(a) / np.linalg.norm(b)


@settings(max_examples=40)
@given(
    *(st.integers(1, 9), st.integers(1, 5), st.floats(0.01, 1), st.sampled_from([(0.0, 1.0), (-1.0, 1.0), (0.2, 0.7)])),
    *(st.integers(1, 4), st.integers(1, 3), st.integers(0, 99)),
)
def test_triggers_are_squares_within_bounds(clusters, size, ratio, bounds, classes, channels, seed):
    given = {"clusters": clusters, "size": size, "mask_ratio": ratio, "bounds": bounds}
    triggers, again = (make_triggers(classes, (channels, 7, 5), generator=stream(seed), **given) for _ in range(2))
    assert torch.equal(triggers.masks, again.masks) & torch.equal(triggers.patterns, again.patterns)
    assert len(triggers) == classes
    assert torch.tensor(bounds[0]) <= triggers.patterns.min() <= triggers.patterns.max() <= torch.tensor(bounds[1])
    for mask in triggers.masks:
        inside = mask > 0
        assert bool((mask[inside] == torch.tensor(ratio)).all() & (inside == inside[:1]).all())
        assert size**2 <= int(inside[0].sum()) <= clusters * size**2
        # What squares of that side cover is what remains after erosion and dilation by one.
        plane = inside[0].numpy()
        assert (scipy.ndimage.binary_opening(plane, np.ones((size, size))) == plane).all()
    assert bool((triggers.patterns[triggers.masks == 0] == torch.tensor(bounds[0])).all())


def test_triggers_differ_by_class_and_injection_is_that_of_the_formula():
    published = make_triggers(10, (1, 28, 28), generator=stream())
    assert float(published.masks.max()) == pytest.approx(0.1)
    areas = (published.masks > 0).flatten(1).sum(1)
    assert 9 < areas.min() <= areas.max() <= 63
    assert len(published.masks.unique(dim=0)) == 10
    triggers, x, targets = small_triggers(channels=2), torch.rand(5, 2, 6, 5), torch.tensor([2, 0, 1, 1, 2])
    masks, patterns = triggers.masks[targets], triggers.patterns[targets]
    torch.testing.assert_close(triggers.inject(x, targets), masks * patterns + (1 - masks) * x)
    assert triggers.inject(x[:0], targets[:0]).shape == (0, 2, 6, 5)


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_an_epoch_shows_each_input_once_some_of_them_triggered(ratio, monkeypatch):
    targets, plain = [], nn.functional.cross_entropy
    monkeypatch.setattr(nn.functional, "cross_entropy", lambda out, y: targets.append(y) or plain(out, y))

    def run(net, x):
        assert net.training
        net.seen.append(x.detach().clone())
        return net.level.expand(len(x), -1)

    x, y, triggers = data(400), torch.arange(400) % 3, small_triggers()
    recorder = Net(run, level=nn.Parameter(torch.zeros(3)), seen=[])
    optimizer, drawn = torch.optim.SGD(recorder.parameters(), lr=0.1), torch.get_rng_state()
    loss = train_epoch(recorder, optimizer, x, y, triggers, generator=stream(), injection_ratio=ratio, batch_size=64)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert not recorder.training
    assert [len(batch) for batch in recorder.seen] == [64] * 6 + [16]
    assert loss == pytest.approx(np.log(3), abs=0.1)
    seen, wanted = torch.cat(recorder.seen), torch.cat(targets)
    shown = torch.stack([x, *(triggers.inject(x, torch.full((400,), target)) for target in range(3))])
    apart = (shown[:, None] - seen[:, None]).flatten(3).abs().amax(3)
    plain, planted = apart[0] == 0, apart[1 + wanted, torch.arange(400)] < 1e-7
    source, own = (plain | planted).float().argmax(1), plain.any(1)
    assert sorted(source.tolist()) == list(range(400))
    assert torch.equal(wanted[own], y[source[own]])
    assert float((~own).float().mean()) == pytest.approx(ratio, abs=0.08)
    assert ratio < 1 or min(wanted.bincount(minlength=3)) > 100


def test_training_is_repeatable_dropout_included():
    def trained(seed):
        model = weighted(lambda: nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(30, 3)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train_epoch(model, optimizer, data(50), torch.arange(50) % 3, small_triggers(), generator=stream(seed))
        return model[2].weight.detach()

    assert [torch.equal(trained(1), trained(seed)) for seed in (1, 2)] == [True, False]


@pytest.mark.parametrize(("layer", "pool"), [("5", False), ("2", False), ("2", True)])
def test_signatures_and_scores_are_those_of_the_formulas(layer, pool):
    classifier, x, test, triggers = network(), data(30), data(12, 3), small_triggers()

    def activation(one):
        values = classifier[: int(layer) + 1](one[None])[0].detach().double().numpy()
        return values.mean((1, 2)) if pool else values.reshape(-1)

    detector = TrapdoorDetector(classifier, layer=layer, pool=pool)
    success, signatures = detector.fit(x, triggers, batch_size=7), []
    for label in range(3):
        made = [triggers.masks[label] * triggers.patterns[label] + (1 - triggers.masks[label]) * one for one in x]
        signatures.append(np.mean([activation(one) for one in made], 0))
        hits = [int(classifier(one[None]).argmax()) == label for one in made]
        assert float(success[label]) == pytest.approx(np.mean(hits))
    np.testing.assert_allclose(detector.signatures, signatures, atol=1e-6)
    predicted = classifier(test).argmax(1).tolist()
    assert len(set(predicted)) == 3
    expected = [cosine(activation(one), signatures[label]) for one, label in zip(test, predicted, strict=True)]
    np.testing.assert_allclose(detector.score(test).tolist(), expected, atol=1e-5)


def test_some_neurons_may_be_compared_and_those_that_are_off():
    classifier, x = network(), data(6, 3)
    detector = fitted("trapdoor", classifier, layer="5", pool=False, neurons=0.25)
    assert (detector.random, TrapdoorDetector(classifier, layer="5").random) == (True, False)
    scores, signatures = score(detector, x, 7), detector.signatures[classifier(x).argmax(1)]
    with seeded_globals(7):
        kept = [torch.randperm(8)[:2] for _ in range(6)]
    for own, other, chosen, found in zip(classifier[:6](x).detach(), signatures, kept, scores, strict=True):
        assert float(found) == pytest.approx(cosine(own[chosen].numpy(), other[chosen].numpy()), abs=1e-5)
    classifier = nn.Sequential(nn.Flatten(), nn.Linear(30, 4), nn.ReLU(), nn.Linear(4, 3)).eval()
    nn.init.constant_(classifier[1].weight, 1.0)
    nn.init.constant_(classifier[1].bias, 0.0)
    detector = TrapdoorDetector(classifier, layer="2")
    detector.fit(data(5), small_triggers())
    scores = detector.score(black := torch.zeros(2, 1, 6, 5, requires_grad=True))
    assert scores.tolist() == [0, 0]
    assert bool(torch.isfinite(torch.autograd.grad(scores.sum(), black)[0]).all())
