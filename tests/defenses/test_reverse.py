import colorsys
import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from robust_ext import BPDA, EoT
from robust_ext.core.random import seeded_globals, stream
from robust_ext.datasets.load import load_dataset
from robust_ext.defenses.reverse import ContrastiveEncoder, ContrastiveReversal, ContrastiveTraining, contrastive_losses
from robust_ext.defenses.training.views import RandomViews, View
from robust_ext.demo.network import digits_network
from robust_ext.models.features import split
from robust_ext.models.rows import RowRNG

SHAPE = (3, 5, 4)


def networks(dtype=torch.float64):
    """A classifier, and a linear encoder."""
    with seeded_globals(0):
        classifier = nn.Sequential(nn.Flatten(), nn.Linear(60, 3)).eval().to(dtype)
        encoder = nn.Sequential(nn.Flatten(), nn.Linear(60, 4)).eval().to(dtype)
    return classifier, encoder


def data(rows, dtype=torch.float64, shape=SHAPE):
    return torch.rand(rows, *shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def defense(**keywords):
    return ContrastiveReversal(*networks(), **{"group_size": 3, "steps": 3, **keywords})


def loss_by_loop(embeddings, temperature, positives):
    views, rows, _ = embeddings.shape
    unit = embeddings / np.linalg.norm(embeddings, axis=2, keepdims=True)
    losses = np.zeros(rows)
    for row in range(rows):
        for view in range(views):
            terms = {}
            for other in range(rows):
                for seen in range(views):
                    if (other, seen) != (row, view):
                        terms[other, seen] = math.exp(unit[view, row] @ unit[seen, other] / temperature)
            same = [terms[row, seen] for seen in range(views) if seen != view]
            same = same[:1] if positives == "first" else same
            losses[row] += np.mean([-math.log(term / sum(terms.values())) for term in same]) / views
    return losses


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 4), st.integers(1, 4), st.integers(1, 5), st.floats(0.1, 2), st.sampled_from(["first", "all"]))
def test_the_loss_is_that_of_a_loop(views, rows, size, temperature, positives):
    embeddings = torch.randn(views, rows, size, dtype=torch.float64, generator=stream(views * 10 + rows, "z"))
    found = contrastive_losses(embeddings, temperature=temperature, positives=positives)
    np.testing.assert_allclose(found, loss_by_loop(embeddings.numpy(), temperature, positives), rtol=1e-6, atol=1e-12)


def test_steps_go_down_the_loss_of_their_own_views():
    model, x = defense(views=4), data(3)
    seeds = torch.tensor([5, 6, 7])
    trace = model.trace(x, seeds=seeds)
    rng, encoder = RowRNG(seeds), model.encoder
    point = (x + rng.uniform(x, "start", low=-16 / 255, high=16 / 255)).clamp(0, 1)
    assert len(trace.iterates) == 4
    for number in range(3):
        torch.testing.assert_close(trace.iterates[number], point)
        gradient = torch.zeros_like(x)
        views = [model.augment.draw((5, 4), rng.generator(0, "view", number, view)) for view in range(4)]

        def loss(leaf, views=views):
            unit = torch.stack([nn.functional.normalize(encoder(view.apply(leaf))) for view in views])
            total = torch.zeros((), dtype=torch.float64)
            for row in range(3):
                for view in range(4):
                    likeness = torch.einsum("vnd,d->vn", unit, unit[view, row]) / 0.2
                    rest = torch.ones(4, 3, dtype=torch.bool)
                    rest[view, row] = False
                    total = total + likeness[rest].logsumexp(0) - likeness[1 if view == 0 else 0, row]
            return total

        leaf = point.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(leaf), leaf)
        point = point - 2 / 255 * gradient.sign()
        point = torch.minimum(torch.maximum(point, x - 16 / 255), x + 16 / 255).clamp(0, 1)
    torch.testing.assert_close(trace.final, point)
    torch.testing.assert_close(trace.logits, model.classifier(point))


def test_gradients_by_bpda_and_by_expectation():
    model, x = defense(seed=0), data(3).requires_grad_()
    for backward in ("identity", "frozen"):
        with model.seeded(0):
            (found,) = torch.autograd.grad(BPDA(model, backward=backward)(x)[:, 1].sum(), x)
        torch.testing.assert_close(found, model.classifier[1].weight[1].detach().view(SHAPE).expand(3, *SHAPE))
    averaged = EoT(BPDA(model), draws=4, chunk=2, seed=0)
    (mean,) = torch.autograd.grad(averaged(x)[:, 1].sum(), x)
    torch.testing.assert_close(mean, found)


def test_groups_stay_together_where_each_row_has_views_of_its_own():
    model, x, seeds = defense(augment=RandomViews(shared=False)), data(6), torch.arange(6)
    whole = model.trace(x, seeds=seeds).final
    torch.testing.assert_close(whole[3:], model.trace(x[3:], seeds=seeds[3:]).final)
    mixed = model.trace(x[[0, 4, 5]], seeds=seeds[[0, 4, 5]]).final
    assert not torch.allclose(mixed[0], whole[0])


def test_views_are_crops_flips_and_colours():
    x = data(2)
    whole = View(crop=(0, 0, 5, 4))
    assert torch.equal(whole.apply(x), x)
    assert torch.equal(View(crop=(0, 0, 5, 4), flip=True).apply(x), x.flip(3))
    # Twice as large: each new pixel lies a quarter of a pixel from an old one.
    row = torch.tensor([[[[1.0, 3.0, 5.0, 0.0]]]]).repeat(1, 1, 4, 1) / 5
    wide = View(crop=(0, 0, 4, 2)).apply(row)[0, 0, 0]
    torch.testing.assert_close(wide, torch.tensor([1.0, 1.5, 2.5, 3.0]) / 5)
    values = x.numpy()
    grey = np.einsum("c,nchw->nhw", [0.2989, 0.587, 0.114], values)[:, None]
    for colours, wanted in (
        ((("brightness", 1.5),), np.clip(1.5 * values, 0, 1)),
        ((("contrast", 0.4),), 0.4 * values + 0.6 * grey.mean((1, 2, 3), keepdims=True)),
        ((("saturation", 1.8),), np.clip(1.8 * values - 0.8 * grey, 0, 1)),
    ):
        found = View(crop=(0, 0, 5, 4), colours=colours).apply(x)
        np.testing.assert_allclose(found.numpy(), wanted, atol=1e-7)
    plain = View(crop=(0, 0, 5, 4), grey=True).apply(x)
    np.testing.assert_allclose(plain.numpy(), np.repeat(grey, 3, 1), atol=1e-7)
    single = data(2, shape=(1, 5, 4))
    odd = View(crop=(0, 0, 5, 4), colours=(("hue", 0.1), ("saturation", 0.3)), grey=True)
    assert torch.equal(odd.apply(single), single)


@settings(max_examples=40, deadline=None)
@given(st.tuples(*[st.integers(0, 8)] * 3), st.floats(-0.5, 0.5))
def test_hues_turn_as_in_the_standard_library(colour, turn):
    values = [part / 8 for part in colour]
    hue, saturation, value = colorsys.rgb_to_hsv(*values)
    wanted = colorsys.hsv_to_rgb((hue + turn) % 1, saturation, value)
    pixel = torch.tensor(values, dtype=torch.float64).view(1, 3, 1, 1).requires_grad_()
    found = View(crop=(0, 0, 1, 1), colours=(("hue", turn),)).apply(pixel)
    np.testing.assert_allclose(found.detach().flatten(), wanted, atol=1e-9)
    assert bool(torch.isfinite(torch.autograd.grad(found.sum(), pixel)[0]).all())


def test_views_are_drawn_from_their_ranges():
    drawn = [RandomViews().draw((32, 32), stream(0, number)) for number in range(400)]
    areas = np.array([view.crop[2] * view.crop[3] for view in drawn]) / 32**2
    assert 0.05 < areas.min() < 0.15
    assert areas.max() > 0.9
    ratios = np.array([view.crop[3] / view.crop[2] for view in drawn])
    assert 0.65 < ratios.min() < 0.8
    assert 1.25 < ratios.max() < 1.5
    crops = [view.crop for view in drawn]
    assert all(top >= 0 and left >= 0 and top + h <= 32 and left + w <= 32 for top, left, h, w in crops)
    assert abs(np.mean([view.flip for view in drawn]) - 0.5) < 0.1
    assert abs(np.mean([view.grey for view in drawn]) - 0.2) < 0.08
    for kind in ("brightness", "contrast", "saturation", "hue"):
        low, high = (-0.2, 0.2) if kind == "hue" else (0.2, 1.8)
        amounts = [dict(view.colours)[kind] for view in drawn]
        assert low <= min(amounts) < low + 0.1 * (high - low)
        assert high >= max(amounts) > high - 0.1 * (high - low)
    assert len({tuple(kind for kind, _ in view.colours) for view in drawn}) == 24
    plain = RandomViews(area=1, flip=0, jitter=0, grey=0).draw((3, 7), stream(0))
    assert plain == View(crop=(0, 0, 3, 7))
    # No crop of an allowed ratio is that large: the middle is taken.
    assert RandomViews(area=0.999).draw((10, 40), stream(0)).crop == (0, 13, 10, 13)
    own = RandomViews(shared=False)(x := data(2), RowRNG(torch.tensor([4, 5])), "a")
    rng = RowRNG(torch.tensor([4, 5]))
    for row in range(2):
        view = RandomViews().draw((5, 4), rng.generator(row, "a"))
        torch.testing.assert_close(own[row : row + 1], view.apply(x[row : row + 1]))


def test_training_learns():
    net = digits_network()
    inputs, _ = load_dataset("digits", split="train").take(range(200))
    features = split(net, inputs[:2]).features
    views = RandomViews(area=0.8, flip=0, jitter=0.2)
    trained = ContrastiveTraining(seed=0, views=views, width=32, epochs=10, batch_size=50).fit(net, inputs)
    x, _ = load_dataset("digits").take(range(40))
    rows = torch.arange(40)
    seen = [torch.cat([views(x, RowRNG(rows + 100 * pair), number) for number in range(2)]) for pair in range(5)]

    def loss(of):
        return float(torch.cat([contrastive_losses(of(pair).view(2, 40, -1)) for pair in seen]).mean())

    with seeded_globals(3):
        fresh = nn.Sequential(nn.Linear(128, 32), nn.ReLU(), nn.Linear(32, 16))
    with torch.no_grad():
        assert loss(ContrastiveEncoder(features, trained)) < loss(nn.Sequential(features, fresh)) - 0.2
