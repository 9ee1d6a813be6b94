"""Defenses that step along signs against loops by hand, transformations against ART; discriminators."""

import importlib
import io
import itertools
import warnings

import numpy as np
import pytest
import scipy.ndimage
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from robust_ext import BPDA, ThreatModel
from robust_ext.attacks.objective_pgd import ObjectivePGD
from robust_ext.attacks.running import run_attack
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.random import seeded_globals
from robust_ext.datasets import load_dataset
from robust_ext.defenses import IMF, AIDPurifier, AntiAdversary, DiscriminatorTraining, HedgeDefense
from robust_ext.defenses.input_transformations import BitDepthReduction, JPEGCompression, MedianSmoothing
from robust_ext.defenses.randomized_smoothing import RandomizedSmoothing
from robust_ext.defenses.resize_pad import RandomResizePad
from robust_ext.defenses.soap import SOAP, flipped_crop
from robust_ext.demo.network import digits_network
from robust_ext.models.rows import RowRNG
from tests.attacks.problems import Lambda, target_of


def linear(weights, bias=None):
    layer = nn.Linear(weights.shape[1], weights.shape[0]).double()
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(weights))
        layer.bias.copy_(torch.from_numpy(np.zeros(len(weights)) if bias is None else bias))
    return nn.Sequential(nn.Flatten(), layer).eval()


def weighted(*weights, shift=0.0, column=False):
    """A discriminator that is linear in what it sees."""

    def value(*seen):
        total = sum((values @ w for values, w in zip(seen, weights, strict=True)), torch.tensor(shift))
        return total[:, None] if column else total

    return Lambda(value)


def shares(logits):
    powers = np.exp(logits - logits.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


# A defense, its step by hand and its radius, for logits ``x @ weights.T + bias`` and two choices.
def hedge(weights, bias, x, rng, steps, one, two):
    defense = HedgeDefense(linear(weights, bias), steps=steps, radius=0.1, step_size=0.04, random_start=one, seed=1)
    # The cross-entropies of all classes sum up to K logsumexp(z) - sum(z).
    return defense, lambda point: 0.04 * np.sign((4 * shares(point @ weights.T + bias) - 1) @ weights), 0.1


def anti(weights, bias, x, rng, steps, one, two):
    radius = 0.2 if one else None
    wanted = np.eye(4)[(x @ weights.T + bias).argmax(1)]
    defense = AntiAdversary(linear(weights, bias), steps=steps, radius=radius, clip=one)
    return defense, lambda point: -0.15 * np.sign((shares(point @ weights.T + bias) - wanted) @ weights), radius


def imf(weights, bias, x, rng, steps, one, two):
    direction = rng.normal(size=4)
    shift = -float(((x @ weights.T + bias) @ direction).mean())
    judge = weighted(torch.from_numpy(direction), shift=shift, column=one)

    def move(point):
        clean = 1 / (1 + np.exp(-((point @ weights.T + bias) @ direction + shift)))
        share = np.where((clean > 0.3) & (clean < 0.7), 0.5, 1.0)[:, None]
        # Of -log(clean), by the input: (clean - 1) W^T v.
        return -0.08 * share * np.sign((clean - 1)[:, None] * (direction @ weights))

    return IMF(linear(weights, bias), judge, steps=steps, radius=0.1, step_size=0.08, saturating=two), move, 0.1


def aid(weights, bias, x, rng, steps, one, two):
    first, low, high = rng.normal(size=(6, 6)), 0.1 * rng.normal(size=6), 0.1 * rng.normal(size=4)
    net = nn.Sequential(linear(first), linear(weights, bias)).eval()
    judge = weighted(torch.from_numpy(low), torch.from_numpy(high))
    # The sigmoid rises with what it is taken of, so the sign of the slope is that of the weights everywhere.
    step = 0.031 / 4 * np.sign(low @ first + high @ weights @ first)
    return AIDPurifier(net, judge, layers=["0", "1"], steps=steps, saturating=one), lambda point: step, 0.031


@pytest.mark.parametrize("case", [hedge, anti, imf, aid])
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 10), st.integers(1, 5), st.booleans(), st.booleans())
def test_the_steps_are_those_of_a_loop_by_hand(case, seed, steps, rows, one, two):
    rng = np.random.default_rng(seed)
    weights, bias, x = rng.normal(size=(4, 6)), rng.normal(size=4), rng.random((rows, 6))
    defense, move, radius = case(weights, bias, x, rng, steps, one, two)
    trace = defense.trace(torch.from_numpy(x))
    assert len(trace.iterates) == steps + 1
    point = trace.iterates[0].numpy()
    assert np.array_equal(point, x) != defense.random
    for number in range(steps):
        point = point + move(point)
        if radius is not None:
            point = np.clip(np.clip(point, x - radius, x + radius), 0, 1)
        np.testing.assert_allclose(trace.iterates[number + 1].numpy(), point, atol=1e-12)
    torch.testing.assert_close(trace.logits, defense.classifier(torch.from_numpy(point)), rtol=0, atol=1e-10)
    if case is anti:
        np.testing.assert_array_equal(trace.state["predicted"].numpy(), (x @ weights.T + bias).argmax(1))


def test_hedge_starts_are_uniform_in_the_ball_and_are_clipped_unless_not_wanted():
    net, x, reach = nn.Sequential(nn.Flatten(), nn.Linear(100, 2)), torch.full((60, 100), 0.5), 8 / 255
    first = HedgeDefense(net, steps=0, seed=3).trace(x).final - x
    assert 0.999 * reach < float(first.abs().max()) <= reach + 1e-7
    assert abs(float(first.std()) - reach / 3**0.5) < 0.03 * reach
    free = HedgeDefense(net, steps=0, seed=0, clip_start=False).trace(torch.zeros(4, 100)).final
    assert float(free.min()) < 0
    assert torch.equal(HedgeDefense(net, steps=0, seed=0).trace(torch.zeros(4, 100)).final, free.clamp(0, 1))


def test_rows_stay_where_losses_have_no_gradient_unless_not_wanted():
    net = linear(np.array([[1e3, 0.0], [0.0, 0.0]])).float()
    x = torch.tensor([[1.0, 0.5], [0.0, 0.5]])
    assert torch.equal(AntiAdversary(net).trace(x).final[0], x[0])
    assert torch.equal(AntiAdversary(net, steps=1).trace(x).final[1], torch.tensor([0.15, 0.5]))
    # Where the probability is rounded to one.
    x, judge = torch.full((1, 2), 0.5), weighted(torch.tensor([60.0, 0.0]))
    layer = nn.Sequential(nn.Identity(), nn.Linear(2, 2))
    for kind, net, more, reach in ((IMF, nn.Identity(), {}, 16 / 255), (AIDPurifier, layer, {"layers": ["0"]}, 0.031)):
        assert torch.equal(kind(net, judge, **more).trace(x).final, x)
        moved = kind(net, judge, saturating=False, **more).trace(x).final - x
        torch.testing.assert_close(moved, torch.tensor([[reach, 0.0]]))


def view_matrix(height, width, crop):
    """SOAP's view as a matrix on flattened images of one channel."""
    matrix = np.zeros((height * width, height * width))
    for row in range(height):
        for column in range(width):
            r = crop + row * (height - 2 * crop) // height
            c = crop + column * (width - 2 * crop) // width
            matrix[row * width + column, r * width + (width - 1 - c)] = 1
    return matrix


def soap_by_hand(x, effect, *, steps, radius, step, radii, batch):
    """The chosen path and radii; ``effect`` maps inputs to differences of logits."""
    paths, losses = [], []
    for number in range(radii):
        path = [x]
        for _ in range(steps):
            slope = 2 * (path[-1] @ effect.T) @ effect / len(effect)
            near = np.clip(path[-1] - step * np.sign(slope), x - number * radius, x + number * radius)
            path.append(np.clip(near, 0, 1))
        paths.append(np.stack(path))
        losses.append(((path[-1] @ effect.T) ** 2).mean(1))
    table = np.stack(losses)
    best = np.full(len(x), table.mean(1).argmin()) if batch else table.argmin(0)
    return np.stack([paths[e][:, row] for row, e in enumerate(best)], 1), best * radius


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 3), st.integers(1, 4), st.integers(1, 5), st.booleans())
def test_soap_does_what_a_loop_by_hand_does(seed, steps, rows, radii, batch):
    net = linear(np.random.default_rng(seed).normal(size=(3, 30)))
    x = np.random.default_rng(seed + 1).random((rows, 30))
    # No number of steps ends on a radius, where rounding would choose between two that are alike.
    sizes = {"steps": steps, "radius": 0.03, "radii": radii}
    grouped = {"choice": "batch", "group_size": rows} if batch else {}
    trace = SOAP(net, step_size=0.0225, **sizes, **grouped).trace(torch.from_numpy(x).view(rows, 1, 6, 5))
    weights = net.get_parameter("1.weight").detach().numpy()
    path, radius = soap_by_hand(x, weights - weights @ view_matrix(6, 5, 2), step=0.0225, batch=batch, **sizes)
    np.testing.assert_allclose(trace.state["radius"].numpy(), radius, atol=1e-12)
    np.testing.assert_allclose(torch.stack(trace.iterates).flatten(2).numpy(), path, atol=1e-12)
    torch.testing.assert_close(trace.logits, net(trace.final))


def test_the_view_of_soap_flips_crops_and_stretches_and_its_loss_never_gets_larger():
    x = torch.arange(16.0).view(1, 1, 4, 4)
    wanted = torch.tensor([[6.0, 6, 5, 5], [6, 6, 5, 5], [10, 10, 9, 9], [10, 10, 9, 9]])
    assert torch.equal(flipped_crop(x, crop=1)[0, 0], wanted)
    image = torch.rand(2, 3, 32, 28, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.equal(flipped_crop(image).flatten(2), image.flatten(2) @ torch.from_numpy(view_matrix(32, 28, 2)).T)
    for small in (torch.zeros(1, 1, 4, 9), torch.zeros(2, 6)):
        with pytest.raises(InvalidArgumentError, match="images"):
            flipped_crop(small)
    defense, (x, _) = SOAP(digits_network(), steps=2, radii=4), load_dataset("digits").take(range(10))
    with torch.no_grad():
        before, after = defense.loss(x), defense.loss(defense.trace(x).final)
    assert bool((after <= before).all())
    assert bool((after < 0.9 * before).any())


@pytest.mark.parametrize("layers", [(), ("1", "3", "6")])
def test_a_trained_discriminator_finds_adversarial_inputs_and_the_defense_keeps_clean_ones(layers):
    metrics = pytest.importorskip("sklearn.metrics")
    net, (x, labels) = digits_network(), load_dataset("digits").take(range(60))
    attack, ball = ObjectivePGD(objective="ace", steps=10, step_size=0.03), ThreatModel(norm="linf", epsilon=0.1)
    generator = torch.Generator().manual_seed(5)
    points = run_attack(attack, target_of(net, (1, 8, 8), 10), x, labels, threat_model=ball, generator=generator)
    small = {"epochs": 12, "batch_size": 30, "learning_rate": 0.02, "width": 32, "before": 0, "after": 1}
    training = DiscriminatorTraining(layers=layers, epsilon=0.1, attack_step_size=0.04, attack_steps=5, **small)
    judge = training.fit(net, *load_dataset("digits", split="train").take(range(300)))
    defense = AIDPurifier(net, judge) if layers else IMF(net, judge, radius=8 / 255)
    with torch.no_grad():
        clean, adversarial, defended = (
            defense.loss(one) if layers else judge(net(one)) for one in (x, points, defense.trace(points).final)
        )
        assert metrics.roc_auc_score([1] * 60 + [0] * 60, torch.cat([clean, adversarial])) > 0.7
        assert defended.mean() > adversarial.mean()
        assert (defense(x).argmax(1) == labels).sum() >= (net(x).argmax(1) == labels).sum() - 3


def images(rows, shape=(3, 12, 10)):
    return torch.rand(rows, *shape, generator=torch.Generator().manual_seed(1))


def by_art(name, x, **settings):
    pytest.importorskip("robust_ext.adapters.art.library", reason="ART is not installed")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*mode.*", category=DeprecationWarning)
        return getattr(importlib.import_module("art.defences.preprocessor"), name)(**settings)(x.numpy())[0]


@pytest.mark.parametrize("bounds", [(0.0, 1.0), (0.0, 255.0)])
def test_transformations_are_those_of_art(bounds):
    x = images(4) * bounds[1]
    for bits in (1, 3, 8):
        found = BitDepthReduction(nn.Flatten(), bits=bits, bounds=bounds).trace(x).final
        wanted = by_art("FeatureSqueezing", x, clip_values=bounds, bit_depth=bits)
        np.testing.assert_allclose(found.numpy(), wanted, atol=1e-6 * bounds[1])
    for shape, quality in (((3, 16, 11), 50), ((1, 9, 8), 20), ((2, 8, 8), 20)):
        x = images(3, shape) * bounds[1]
        found = JPEGCompression(nn.Flatten(), quality=quality, truncate=True, bounds=bounds).trace(x).final
        wanted = by_art("JpegCompression", x, clip_values=bounds, quality=quality, channels_first=True)
        np.testing.assert_allclose(found.numpy(), wanted, atol=1e-6 * bounds[1])


def test_medians_are_those_of_scipy_and_jpeg_rounds():
    for size in (2, 5):
        wanted = scipy.ndimage.median_filter(images(3).numpy(), size=(1, 1, size, size), mode="reflect")
        np.testing.assert_array_equal(MedianSmoothing(nn.Flatten(), size=size).trace(images(3)).final, wanted)
    image = pytest.importorskip("PIL.Image")
    x, buffer = images(1), io.BytesIO()
    whole = (x[0] * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    image.fromarray(whole).save(buffer, format="jpeg", quality=80)
    with image.open(buffer) as saved:
        wanted = torch.tensor(np.array(saved)).permute(2, 0, 1)[None] / 255
    model = JPEGCompression(nn.Flatten(), quality=80)
    found = model.trace(x).final
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(model.with_steps(2).trace(x).final, model.trace(found).final)


@pytest.mark.parametrize(("smallest", "largest", "full"), [(1.0, 1.3, (16, 13)), (0.5, 1.0, (12, 10))])
def test_images_are_resized_and_placed(smallest, largest, full):
    x, model = images(5), RandomResizePad(nn.Flatten(), smallest=smallest, largest=largest, seed=0)
    trace = model.trace(x)
    places = np.stack([trace.state[name].numpy() for name in ("height", "width", "top", "left")], 1)
    for row, found, place in zip(x.numpy(), trace.logits, places, strict=True):
        (height, width, top, left), wanted = place.tolist(), np.full((3, *full), 0.5)
        for i, j in itertools.product(range(height), range(width)):
            wanted[:, top + i, left + j] = row[:, i * 12 // height, j * 10 // width]
        np.testing.assert_allclose(found.view(3, *full).numpy(), wanted, atol=1e-7)
    assert torch.equal(trace.final, x)
    many = model.trace(x[:1].expand(400, -1, -1, -1)).state
    low = round(12 * smallest)
    assert set(many["height"].tolist()) == set(range(low, full[0]))
    spare = full[0] - many["height"]
    assert bool(((many["top"] >= 0) & (many["top"] <= spare)).all())
    assert bool((many["top"] == spare).any())
    assert bool((many["left"] + many["width"] <= full[1]).all())


def test_resizing_is_differentiable_and_its_own_approximation():
    x = images(2, (1, 5, 6)).double().requires_grad_()
    with seeded_globals(0):
        net = nn.Sequential(nn.Flatten(), nn.Linear(6 * 7, 2)).double()
    for mode in ("nearest", "bilinear"):
        model = RandomResizePad(net, smallest=0.7, largest=1.2, mode=mode, seed=0, fill=0.2)
        seeds = torch.tensor([1, 2])
        assert torch.autograd.gradcheck(lambda x, model=model, seeds=seeds: model.trace(x, seeds=seeds).logits, x)
        with model.seeded(0, fixed=True):
            (plain,) = torch.autograd.grad(model(x)[:, 0].sum(), x)
            (found,) = torch.autograd.grad(BPDA(model)(x)[:, 0].sum(), x)
        torch.testing.assert_close(found, plain)
    same = RandomResizePad(nn.Flatten(), smallest=1.0, largest=1.0)
    assert torch.equal(same(x), x.flatten(1))


@pytest.mark.parametrize("chunk", [1, 4, 50])
@pytest.mark.parametrize("vote", ["mean", "majority"])
def test_smoothing_counts_votes_over_its_own_noise(chunk, vote):
    with seeded_globals(0):
        net = nn.Sequential(nn.Flatten(), nn.Linear(8, 3)).eval()
    x, seeds = images(3, (2, 4)), torch.tensor([7, 8, 9])
    model = RandomizedSmoothing(net, noise=0.4, samples=11, vote=vote, chunk=chunk, bounds=(0, 2))
    total = torch.zeros(3, 3)
    for number in range(11):
        logits = net(x + 0.8 * RowRNG(seeds).normal(x, "noise", number))
        total += logits.softmax(1) if vote == "mean" else torch.eye(3)[logits.argmax(1)]
    found = model.trace(x, seeds=seeds).logits
    torch.testing.assert_close(found.exp(), total / 11)
    calls = [0]
    net.register_forward_hook(lambda _, args, __: calls.__setitem__(0, calls[0] + len(args[0])))
    with torch.no_grad():
        model(x)
    assert calls == [33]


def test_smoothed_gradients():
    with seeded_globals(0):
        net = nn.Sequential(nn.Flatten(), nn.Linear(8, 3)).double()
    x, seeds = images(2, (2, 4)).double().requires_grad_(), torch.tensor([1, 2])
    mean = RandomizedSmoothing(net, samples=5, vote="mean")
    assert torch.autograd.gradcheck(lambda x: mean.trace(x, seeds=seeds).logits, x)
    votes = RandomizedSmoothing(net, samples=5)
    assert not bool(torch.autograd.grad(votes(x).sum(), x)[0].any())
    (found,) = torch.autograd.grad(BPDA(votes, backward=net)(x)[:, 0].sum(), x)
    torch.testing.assert_close(found, net[1].weight[0].detach().view(2, 4).expand(2, 2, 4))


def test_median_is_that_of_art_inside():
    x = images(3)
    for size in (3, 5):
        found, inner = MedianSmoothing(nn.Flatten(), size=size).trace(x).final.numpy(), slice(size // 2, -(size // 2))
        # ART mirrors at the edges without repeating the outermost pixels.
        wanted = by_art("SpatialSmoothingPyTorch", x, window_size=size, channels_first=True, device_type="cpu")
        np.testing.assert_array_equal(found[..., inner, inner], wanted[..., inner, inner])
