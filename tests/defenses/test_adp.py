import functools

import numpy as np
import pytest
import torch
from torch import nn

from robust_ext import BPDA
from robust_ext.core.random import derive_seed
from robust_ext.defenses.adp import AdaptiveDenoising, ScoreTraining
from robust_ext.models.rows import RowRNG
from tests.models.cases import data as some
from tests.models.cases import network


class Quadratic(nn.Module):
    """The score ``-rates * (x - 0.5)`` of a normal distribution."""

    def __init__(self, scale=1.0):
        super().__init__()
        self.rates = nn.Parameter(scale * torch.linspace(4, 30, 6, dtype=torch.float64).view(2, 3))

    def forward(self, x):
        return -self.rates * (x - 0.5)


data = functools.partial(some, dtype=torch.float64)


def defense(**settings):
    return AdaptiveDenoising(network(torch.float64), Quadratic(), **{"steps": 4, "runs": 3, **settings})


def noise_of(seeds, run, like):
    own = torch.tensor([derive_seed(seed, "run", run) for seed in seeds.tolist()])
    return RowRNG(own).normal(like, "noise").numpy()


@pytest.mark.parametrize(
    "settings",
    [
        *({}, {"share": 1.5}, {"stop": 0.0, "lengths": (0.004, 0.005)}, {"stop": 0.0035}),
        *({"clip": False, "noise": 0.6}, {"noise": 0.0, "runs": 1}),
    ],
)
def test_each_run_takes_the_steps_of_the_formula(settings):
    model, x = defense(**settings), data(4)
    seeds = torch.tensor([3, 4, 5, 6])
    with torch.no_grad():
        trace = model.trace(x, seeds=seeds)
    rates = model.score.rates.detach().numpy()
    low, high = settings.get("lengths", (1e-5, 0.1))
    finals, stopped = [], 0
    for run in range(model.runs):
        points = x.numpy() + model.noise * noise_of(seeds, run, x)
        path = []
        for row in range(4):
            point = np.clip(points[row], 0, 1) if model.clip else points[row]
            places, going = [point], True
            for _ in range(4):
                score = -rates * (point - 0.5)
                ahead = -rates * (point + 1e-3 * score - 0.5)
                z = np.sum(score * ahead) / np.sum(score * score)
                length = min(max(model.share * 1e-3 / (1 - z), low), high)
                going = going and length > model.stop
                stopped += not going
                point = point + (length if going else 0) * score
                point = np.clip(point, 0, 1) if model.clip else point
                places.append(point)
            path.append(places)
        finals.append(np.stack([places[-1] for places in path]))
        if run == 0:
            for number, iterate in enumerate(trace.iterates):
                np.testing.assert_allclose(iterate.numpy(), np.stack([p[number] for p in path]), atol=1e-12)
    assert (stopped > 0) == (settings.get("stop") == 0.0035)
    np.testing.assert_allclose(trace.final.numpy(), finals[0], atol=1e-12)
    mean = np.mean([network(torch.float64)(torch.tensor(final)).softmax(1).detach().numpy() for final in finals], 0)
    np.testing.assert_allclose(trace.logits.exp().numpy(), mean, atol=1e-12)
    if model.runs > 1:
        offsets = trace.state["offsets"].numpy()
        np.testing.assert_allclose(trace.final.numpy()[:, None] + offsets, np.stack(finals[1:], 1), atol=1e-12)


def test_passes_are_those_of_the_paper():
    model = AdaptiveDenoising(network(torch.float64), Quadratic(), seed=0)
    calls = {"score": 0, "classifier": 0}
    model.score.register_forward_hook(lambda *_: calls.update(score=calls["score"] + 1))
    model.classifier.register_forward_hook(lambda *_: calls.update(classifier=calls["classifier"] + 1))
    with torch.no_grad():
        model(data(3))
    assert calls == {"score": 2 * 10 * 10, "classifier": 10}
    assert defense(runs=1).with_steps(0).trace(data(2)).state == {}


def test_unrolled_gradients():
    x, seeds = data(2).requires_grad_(), torch.tensor([1, 2])
    settings = {"clip": False, "stop": 0.0}
    through = defense(differentiable_lengths=True, **settings)
    assert torch.autograd.gradcheck(lambda leaf: through.trace(leaf, seeds=seeds).logits, x)
    # With lengths held, each step multiplies by 1 - length * rates.
    held = defense(runs=1, **settings)
    trace = held.trace(x, seeds=seeds)
    factor = torch.ones_like(x)
    for point in trace.iterates[:-1]:
        score = held.score(point)
        factor = factor * (1 - held.step_lengths(point, score).view(2, 1, 1) * held.score.rates)
    final = trace.final.detach().requires_grad_()
    (inner,) = torch.autograd.grad(held.logits(final, {})[:, 0].sum(), final)
    (found,) = torch.autograd.grad(trace.logits[:, 0].sum(), x)
    torch.testing.assert_close(found, inner * factor.detach())


def test_the_identity_takes_the_mean_of_all_runs():
    model, x = defense(seed=2), data(3).requires_grad_()
    trace = model.trace(x.detach(), seeds=(seeds := torch.tensor([1, 2, 3])))
    finals = [trace.final, *(trace.final + offset for offset in trace.state["offsets"].unbind(1))]
    total = torch.zeros(3, 3, dtype=torch.float64)
    leaves = [final.detach().requires_grad_() for final in finals]
    for leaf in leaves:
        total = total + network(torch.float64)(leaf).softmax(1) / 3
    gradients = torch.autograd.grad(total.log()[:, 1].sum(), leaves)
    module = BPDA(model)
    model.next_seeds = lambda rows: seeds
    (found,) = torch.autograd.grad(module(x)[:, 1].sum(), x)
    torch.testing.assert_close(found, torch.stack(gradients).sum(0))


def test_where_there_is_no_score_nothing_moves():
    model = AdaptiveDenoising(network(torch.float64), Quadratic(scale=0.0), steps=2, runs=2, noise=0.0)
    x = data(3).requires_grad_()
    torch.testing.assert_close(model(x), network(torch.float64)(x).log_softmax(1))
    assert bool(torch.isfinite(torch.autograd.grad(model(x).sum(), x)[0]).all())

    class Constant(nn.Module):
        def forward(self, x):
            return torch.ones_like(x)

    # A score that does not change has the greatest length.
    even = AdaptiveDenoising(
        network(torch.float64), Constant(), steps=1, runs=1, noise=0.0, clip=False, differentiable_lengths=True
    )
    torch.testing.assert_close(even.trace(x).final, x + 0.1)
    assert bool(torch.isfinite(torch.autograd.grad(even(x).sum(), x)[0]).all())


def test_a_score_network_learns_where_images_are():
    # All images are one: the noise is the difference from it.
    image = torch.rand(1, 1, 5, 5, generator=torch.Generator().manual_seed(0))
    inputs = image.expand(64, -1, -1, -1)
    score = ScoreTraining(width=16, depth=2, epochs=40, batch_size=32, learning_rate=1e-2).fit(nn.Identity(), inputs)
    noise = 0.2 * torch.randn(20, 1, 5, 5, generator=torch.Generator().manual_seed(1))
    found = score(image + noise)
    assert float(nn.functional.cosine_similarity(found.flatten(1), -noise.flatten(1)).mean()) > 0.8
    assert not found.requires_grad
    assert not score.training


def test_noise_has_its_width():
    model = defense(steps=0, runs=1, clip=False, seed=4, bounds=(-1, 1))
    x = torch.zeros(500, 2, 3, dtype=torch.float64)
    noise = model.trace(x).final
    assert abs(float(noise.std()) - 0.5) < 0.03
    assert abs(float(noise.mean())) < 0.03
