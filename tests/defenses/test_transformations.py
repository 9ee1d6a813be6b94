import importlib
import io
import itertools
import warnings

import numpy as np
import pytest
import torch
from scipy import ndimage
from torch import nn

from robust_ext import BPDA
from robust_ext.core.random import seeded_globals
from robust_ext.defenses import (
    BitDepthReduction,
    JPEGCompression,
    MedianSmoothing,
    RandomizedSmoothing,
    RandomResizePad,
)
from robust_ext.models.rows import RowRNG


def images(rows, shape=(3, 12, 10)):
    return torch.rand(rows, *shape, generator=torch.Generator().manual_seed(1))


class Linear(nn.Module):
    """Two logits: the sum of the pixels and a constant."""

    def __init__(self):
        super().__init__()
        self.level = nn.Parameter(torch.tensor(0.3))

    def forward(self, x):
        return torch.stack([x.flatten(1).sum(1), self.level.expand(len(x))], 1)


def by_art(name, x, **settings):
    pytest.importorskip("robust_ext.adapters.art.library", reason="ART is not installed")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*mode.*", category=DeprecationWarning)
        return getattr(importlib.import_module("art.defences.preprocessor"), name)(**settings)(x.numpy())[0]


@pytest.mark.parametrize("bounds", [(0.0, 1.0), (0.0, 255.0)])
def test_transformations_are_those_of_art(bounds):
    x = images(4) * bounds[1]
    for bits in (1, 3, 8):
        found = BitDepthReduction(Linear(), bits=bits, bounds=bounds).trace(x).final
        wanted = by_art("FeatureSqueezing", x, clip_values=bounds, bit_depth=bits)
        np.testing.assert_allclose(found.numpy(), wanted, atol=1e-6 * bounds[1])
        assert len(found.unique()) <= 2**bits
    for shape, quality in (((3, 16, 11), 50), ((1, 9, 8), 20), ((2, 8, 8), 20)):
        x = images(3, shape) * bounds[1]
        found = JPEGCompression(Linear(), quality=quality, truncate=True, bounds=bounds).trace(x).final
        wanted = by_art("JpegCompression", x, clip_values=bounds, quality=quality, channels_first=True)
        np.testing.assert_allclose(found.numpy(), wanted, atol=1e-6 * bounds[1])


@pytest.mark.parametrize("size", [2, 3, 5])
def test_median_is_that_of_art_inside_and_of_scipy_everywhere(size):
    x = images(3)
    found = MedianSmoothing(Linear(), size=size).trace(x).final.numpy()
    np.testing.assert_array_equal(found, ndimage.median_filter(x.numpy(), (1, 1, size, size), mode="reflect"))
    if size % 2:
        # ART mirrors at the edges without repeating the outermost pixels.
        settings = {"window_size": size, "channels_first": True, "device_type": "cpu"}
        wanted, inner = by_art("SpatialSmoothingPyTorch", x, **settings), slice(size // 2, -(size // 2))
        np.testing.assert_array_equal(found[..., inner, inner], wanted[..., inner, inner])


def test_jpeg_rounds():
    image = pytest.importorskip("PIL.Image")
    x, buffer = images(1), io.BytesIO()
    whole = (x[0] * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    image.fromarray(whole).save(buffer, format="jpeg", quality=80)
    with image.open(buffer) as saved:
        wanted = torch.tensor(np.array(saved)).permute(2, 0, 1)[None] / 255
    model = JPEGCompression(Linear(), quality=80)
    found = model.trace(x).final
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(model.with_steps(2).trace(x).final, model.trace(found).final)


@pytest.mark.parametrize("kind", [BitDepthReduction, JPEGCompression])
def test_gradients_of_what_rounds_are_zero_and_bpda_gives_them_back(kind):
    x, model = images(2).requires_grad_(), kind(Linear())
    for module, wanted in ((model, torch.zeros_like(x)), (BPDA(model), torch.ones_like(x))):
        assert torch.equal(torch.autograd.grad(module(x)[:, 0].sum(), x)[0], wanted)
    assert model.classifier.level.grad is None


def placed_by_hand(row, height, width, top, left, full):
    out = np.full((len(row), *full), 0.5)
    for i, j in itertools.product(range(height), range(width)):
        out[:, top + i, left + j] = row[:, i * row.shape[1] // height, j * row.shape[2] // width]
    return out


@pytest.mark.parametrize(("smallest", "largest", "full"), [(1.0, 1.3, (16, 13)), (0.5, 1.0, (12, 10))])
def test_images_are_resized_and_placed(smallest, largest, full):
    x, model = images(5), RandomResizePad(nn.Flatten(), smallest=smallest, largest=largest, seed=0)
    trace = model.trace(x)
    places = np.stack([trace.state[name].numpy() for name in ("height", "width", "top", "left")], 1)
    for row, found, place in zip(x.numpy(), trace.logits, places, strict=True):
        np.testing.assert_allclose(found.view(3, *full).numpy(), placed_by_hand(row, *place.tolist(), full), atol=1e-7)
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
