"""Defenses with learned parts against loops by hand: CLC, SODEF, ADP and Reverse."""

import colorsys
import math

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from robust_ext import BPDA
from robust_ext.core.random import derive_seed, seeded_globals, stream
from robust_ext.datasets.load import load_dataset
from robust_ext.defenses.adp import AdaptiveDenoising, ScoreTraining
from robust_ext.defenses.clc import ClosedLoopControl, Projections, ProjectionsTraining
from robust_ext.defenses.reverse import ContrastiveEncoder, ContrastiveReversal, ContrastiveTraining, contrastive_losses
from robust_ext.defenses.sodef import SODEF, StableField, StableHead, StableHeadTraining, integrate
from robust_ext.defenses.training.views import RandomViews, View
from robust_ext.demo.network import digits_network
from robust_ext.models.features import split
from robust_ext.models.rows import RowRNG
from tests.models.cases import Net, data, network

F64 = torch.float64
NET, X = network(F64), data(4, F64)


def pulled(module, x, of=lambda logits: logits.square().sum()):
    leaf = x.detach().requires_grad_()
    return torch.autograd.grad(of(module(leaf)), leaf)[0]


# CLC.
LAYERS = ("", "1", "3")


def subspaces():
    """Of rank 3, 2 and 4, around points of their own."""
    generator = torch.Generator().manual_seed(3)
    sizes = ((6, 3), (6, 2), (8, 4))
    bases = [torch.linalg.qr(torch.randn(size, rank, generator=generator))[0].double() for size, rank in sizes]
    return Projections(LAYERS, bases, [torch.rand(size, generator=generator).double() for size, _ in sizes])


def clc(**settings):
    return ClosedLoopControl(NET, subspaces(), **{"group_size": 4, **settings})


def clc_by_hand(x, *, steps=5, learning_rate=0.1, centre="batch", reduction="mean"):
    """The offsets of the lowest loss, the offsets of the input over time, and the losses, by torch's Adam."""
    found, blocks, controls, value = subspaces(), [NET[0], NET[1:3], NET[3]], [], x
    for block in blocks:
        controls.append(torch.zeros_like(value).requires_grad_())
        value = block(value).detach()
    optimizer = torch.optim.Adam(controls, lr=learning_rate)
    path, losses, best = [], [], []
    for _ in range(steps):
        value, total = x, torch.zeros((), dtype=x.dtype)
        for number, block in enumerate(blocks):
            value = value + controls[number]
            flat = value.flatten(1)
            middle = flat.mean(0) if centre == "batch" else getattr(found, f"mean_{number}")
            basis = found.basis(number)
            distance = (flat - (flat - middle) @ (basis @ basis.T) - middle) ** 2
            total = total + (distance.mean() if reduction == "mean" else distance.sum())
            value = block(value)
        path.append(controls[0].detach().clone())
        if not losses or total.item() < min(losses):
            best = [control.detach().clone() for control in controls]
        losses.append(total.item())
        optimizer.zero_grad()
        torch.autograd.backward(total, inputs=controls)
        optimizer.step()
    return best, path, losses


def controlled(x, offsets):
    return NET[3](NET[2](NET[1](NET[0](x + offsets[0]) + offsets[1])) + offsets[2])


@pytest.mark.parametrize(("centre", "reduction"), [("batch", "mean"), ("training", "sum")])
@pytest.mark.parametrize(("steps", "rate"), [(5, 5e-3), (6, 0.8)])
def test_offsets_of_clc_are_those_of_adam(centre, reduction, steps, rate):
    ways = {"steps": steps, "learning_rate": rate, "centre": centre, "reduction": reduction}
    best, path, losses = clc_by_hand(X, **ways)
    trace = clc(**ways).trace(X)
    torch.testing.assert_close(trace.final, X + best[0])
    torch.testing.assert_close(trace.state, dict(zip(("1", "3"), best[1:], strict=True)))
    torch.testing.assert_close(list(trace.iterates), [X + offset for offset in path])
    torch.testing.assert_close(trace.logits, controlled(X, best))
    # At the large rate the last offsets are not the best ones.
    assert (losses.index(min(losses)) == steps - 1) == (rate < 0.1)
    assert not trace.final.requires_grad


def test_projections_are_those_of_a_singular_value_decomposition():
    net, x = network(), data(50)
    labels = net(x).argmax(1)
    labels[:10] = (labels[:10] + 1) % 3
    found = ProjectionsTraining(layers=LAYERS, share=0.6).fit(net, x, labels)
    for number, seen in enumerate((nn.Flatten(), nn.Flatten(), net[:3])):
        # What is misclassified has no part.
        centred = seen(x[10:]).detach().double().numpy()
        mean = centred.mean(0)
        _, sizes, axes = np.linalg.svd(centred - mean)
        count = int((np.cumsum(sizes) <= 0.6 * sizes.sum()).sum()) + 1
        projector = axes[:count].T @ axes[:count]
        basis = found.basis(number).double().numpy()
        assert basis.shape[1] == count < centred.shape[1]
        np.testing.assert_allclose(basis @ basis.T, projector, atol=1e-4)
        point = seen(data(3, seed=5)).detach()
        left = point.double().numpy() - mean
        off = found.off_plane(number, point, own_mean=False)
        np.testing.assert_allclose(off.numpy(), left - left @ projector, atol=1e-4)


def test_gradients_of_clc():
    # The paper's attack holds the control.
    offsets = clc_by_hand(X)[0]
    wanted = pulled(lambda x: controlled(x, offsets), X)
    for backward in ("frozen", "identity"):
        torch.testing.assert_close(pulled(BPDA(clc(learning_rate=0.1), backward=backward), X), wanted)
    model = clc(learning_rate=0.05, steps=4)
    assert torch.autograd.gradcheck(model, X.clone().requires_grad_(), atol=1e-4, rtol=1e-3)
    assert all(p.grad is None for p in model.parameters())
    # They are finite where nothing is to do.
    full = Projections(["", "1"], [torch.eye(6), torch.eye(6)], [torch.zeros(6)] * 2)
    idle = ClosedLoopControl(network(), full, group_size=2)
    torch.testing.assert_close(pulled(idle, data(2)), pulled(network(), data(2)))


# SODEF.
MATRIX = np.array([[-0.3, 1.0, 0.0], [-1.0, -0.2, 0.4], [0.1, 0.0, -0.7]])
EXPONENTIAL = torch.tensor(scipy.linalg.expm(5.0 * MATRIX))
DOPRI = {"solver": "dopri5", "tolerance": 1e-9}


def sodef(dtype=F64, **settings):
    net = network(dtype)
    with seeded_globals(1):
        head = StableHead(8, 3, dimension=4, hidden=8).to(dtype)
    return SODEF(net, net[:3], head, **{"solver": "rk4", **settings})


@pytest.mark.parametrize("settings", [{"solver": "rk4", "steps": 200}, DOPRI, {**DOPRI, "adjoint": False}])
def test_a_linear_equation_ends_where_the_exponential_does(settings):
    if settings["solver"] == "dopri5":
        pytest.importorskip("torchdiffeq")
    start = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=F64).requires_grad_()
    field = Net(lambda net, time, state: state @ net.matrix.T, matrix=nn.Parameter(torch.tensor(MATRIX)))
    end = integrate(field, start, time=5.0, **settings)
    torch.testing.assert_close(end, start.detach() @ EXPONENTIAL.T, rtol=1e-6, atol=1e-7)
    cotangent = torch.arange(12.0, dtype=F64).view(4, 3)
    (gradient,) = torch.autograd.grad(end, start, cotangent)
    torch.testing.assert_close(gradient, cotangent @ EXPONENTIAL, rtol=1e-6, atol=1e-6)


def test_the_field_and_its_jacobian():
    field, time = StableField(4, hidden=7).double(), torch.zeros((), dtype=F64)
    states = torch.randn(3, 4, dtype=F64, generator=torch.Generator().manual_seed(0))
    values = states.numpy()
    for layer in field.layers:
        values = np.sin(-(values @ layer.weight.detach().numpy().T + layer.bias.detach().numpy()))
    np.testing.assert_allclose(field(time, states).detach().numpy(), values)
    for state, found in zip(states, field.jacobian(states), strict=True):
        wanted = torch.autograd.functional.jacobian(lambda row: field(time, row[None])[0], state)
        torch.testing.assert_close(found, wanted)


def test_the_parts_of_sodef_follow_one_another_and_pass_gradients():
    model = sodef(steps=7)
    trace, head = model.trace(X), model.head
    start = NET[:3](X) @ head.reduce.weight.T + head.reduce.bias
    torch.testing.assert_close(trace.state["start"], start)
    torch.testing.assert_close(trace.state["end"], integrate(head.field, start, solver="rk4", steps=7))
    torch.testing.assert_close(trace.logits, head.readout(trace.state["end"]))
    assert torch.equal(trace.final, X)
    torch.testing.assert_close(model.with_steps(0)(X), head.readout(start))
    assert torch.autograd.gradcheck(sodef(steps=3), X[:2].clone().requires_grad_())
    for backward in ("identity", "frozen", "trajectory", "unrolled"):
        torch.testing.assert_close(pulled(BPDA(model, backward=backward), X), pulled(model, X))


def test_training_makes_a_stable_classifier():
    net, (x, labels) = digits_network(), load_dataset("digits").take(range(60))
    inputs, known = load_dataset("digits", split="train").take(range(400))
    head = StableHeadTraining(hidden=32, epochs=3, seed=4).fit(net, inputs, known)
    model = SODEF(net, split(net, inputs[:2]).features, head, solver="rk4", steps=8)
    assert float((model(x).argmax(1) == labels).float().mean()) > 0.8
    with seeded_globals(0), torch.no_grad():
        start = model.trace(x[:8]).state["start"]
        # The states are nearer to rest than in an untrained field, and the Jacobian's diagonal is negative there.
        speed = [float(field(torch.zeros(()), start).norm()) for field in (head.field, StableField(64, hidden=32))]
        assert speed[0] < speed[1]
        assert float(head.field.jacobian(start).diagonal(dim1=1, dim2=2).mean()) < 0


# ADP.


def quadratic(scale=1.0):
    """The score ``-rates * (x - 0.5)`` of a normal distribution."""
    rates = nn.Parameter(scale * torch.linspace(4, 30, 6, dtype=F64).view(2, 3))
    return Net(lambda net, x: -net.rates * (x - 0.5), rates=rates)


def adp(score=None, **settings):
    return AdaptiveDenoising(NET, score or quadratic(), **{"steps": 4, "runs": 3, **settings})


@pytest.mark.parametrize(
    "settings",
    [
        *({}, {"share": 1.5}, {"stop": 0.0, "lengths": (0.004, 0.005)}, {"stop": 0.0035}),
        *({"clip": False, "noise": 0.6}, {"noise": 0.0, "runs": 1}),
    ],
)
def test_each_run_of_adp_takes_the_steps_of_the_formula(settings):
    model, seeds = adp(**settings), torch.tensor([3, 4, 5, 6])
    with torch.no_grad():
        trace = model.trace(X, seeds=seeds)
    rates = model.score.rates.detach().numpy()
    low, high = settings.get("lengths", (1e-5, 0.1))
    bounds = (0, 1) if model.clip else (-np.inf, np.inf)
    finals, stopped = [], 0
    for run in range(model.runs):
        path = np.zeros((5, *X.shape))
        own = RowRNG(torch.tensor([derive_seed(seed, "run", run) for seed in seeds.tolist()]))
        path[0] = np.clip(X.numpy() + model.noise * own.normal(X, "noise").numpy(), *bounds)
        for row in range(4):
            going = True
            for step in range(4):
                point = path[step, row]
                score = -rates * (point - 0.5)
                ahead = -rates * (point + 1e-3 * score - 0.5)
                z = np.sum(score * ahead) / np.sum(score * score)
                length = min(max(model.share * 1e-3 / (1 - z), low), high)
                going = going and length > model.stop
                stopped += not going
                path[step + 1, row] = np.clip(point + (length if going else 0) * score, *bounds)
        finals.append(path[-1])
        if run == 0:
            np.testing.assert_allclose(torch.stack(trace.iterates).numpy(), path, atol=1e-12)
    assert (stopped > 0) == (settings.get("stop") == 0.0035)
    mean = np.mean([NET(torch.tensor(final)).softmax(1).detach().numpy() for final in finals], 0)
    np.testing.assert_allclose(trace.logits.exp().numpy(), mean, atol=1e-12)
    if model.runs > 1:
        offsets = trace.state["offsets"].numpy()
        np.testing.assert_allclose(trace.final.numpy()[:, None] + offsets, np.stack(finals[1:], 1), atol=1e-12)


def test_gradients_of_adp():
    x, seeds = X[:2].clone().requires_grad_(), torch.tensor([1, 2])
    free = {"clip": False, "stop": 0.0}
    through = adp(differentiable_lengths=True, **free)
    assert torch.autograd.gradcheck(lambda leaf: through.trace(leaf, seeds=seeds).logits, x)
    # With lengths held, each step multiplies by 1 - length * rates.
    held, factor = adp(runs=1, **free), torch.ones_like(x)
    trace = held.trace(x, seeds=seeds)
    for point in trace.iterates[:-1]:
        factor = factor * (1 - held.step_lengths(point, held.score(point)).view(2, 1, 1) * held.score.rates)
    (found,) = torch.autograd.grad(trace.logits[:, 0].sum(), x)
    inner = pulled(lambda final: held.logits(final, {}), trace.final, lambda logits: logits[:, 0].sum())
    torch.testing.assert_close(found, inner * factor.detach())
    # The identity takes the mean of all runs.
    model = adp(seed=2)
    trace = model.trace(x.detach(), seeds=seeds)
    finals = [trace.final, *(trace.final + offset for offset in trace.state["offsets"].unbind(1))]
    leaves = [final.detach().requires_grad_() for final in finals]
    total = sum(NET(leaf).softmax(1) / 3 for leaf in leaves)
    gradients = torch.autograd.grad(total.log()[:, 1].sum(), leaves)
    model.next_seeds = lambda rows: seeds
    found = pulled(BPDA(model), x, lambda logits: logits[:, 1].sum())
    torch.testing.assert_close(found, torch.stack(gradients).sum(0))


def test_where_there_is_no_score_nothing_moves():
    still = adp(quadratic(scale=0.0), steps=2, runs=2, noise=0.0)
    torch.testing.assert_close(still(X), NET(X).log_softmax(1))
    assert bool(torch.isfinite(pulled(still, X)).all())

    # A score that does not change has the greatest length.
    settings = {"steps": 1, "runs": 1, "noise": 0.0, "clip": False, "differentiable_lengths": True}
    even = adp(Net(lambda net, x: torch.ones_like(x)), **settings)
    torch.testing.assert_close(even.trace(X).final, X + 0.1)
    assert bool(torch.isfinite(pulled(even, X)).all())


def test_a_score_network_learns_where_images_are():
    # All images are one: the noise is the difference from it.
    image = torch.rand(1, 1, 5, 5, generator=torch.Generator().manual_seed(0))
    settings = {"width": 16, "depth": 2, "epochs": 40, "batch_size": 32, "learning_rate": 1e-2}
    score = ScoreTraining(**settings).fit(nn.Identity(), image.expand(64, -1, -1, -1))
    noise = 0.2 * torch.randn(20, 1, 5, 5, generator=torch.Generator().manual_seed(1))
    found = score(image + noise)
    assert float(nn.functional.cosine_similarity(found.flatten(1), -noise.flatten(1)).mean()) > 0.8
    assert not found.requires_grad
    assert not score.training


# Reverse.


def images(rows, shape=(3, 5, 4)):
    return torch.rand(rows, *shape, generator=torch.Generator().manual_seed(1)).double()


def reverse(**keywords):
    with seeded_globals(0):
        classifier, encoder = (nn.Sequential(nn.Flatten(), nn.Linear(60, size)).eval().double() for size in (3, 4))
    return ContrastiveReversal(classifier, encoder, **{"group_size": 3, "steps": 3, **keywords})


def loss_by_loop(embeddings, temperature, positives):
    views, rows, _ = embeddings.shape
    unit = embeddings / np.linalg.norm(embeddings, axis=2, keepdims=True)
    losses = np.zeros(rows)
    places = [(row, view) for row in range(rows) for view in range(views)]
    for row, view in places:
        terms = {
            (other, seen): math.exp(unit[view, row] @ unit[seen, other] / temperature)
            for other, seen in places
            if (other, seen) != (row, view)
        }
        same = [terms[row, seen] for seen in range(views) if seen != view]
        same = same[:1] if positives == "first" else same
        losses[row] += np.mean([-math.log(term / sum(terms.values())) for term in same]) / views
    return losses


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 4), st.integers(1, 4), st.integers(1, 5), st.floats(0.1, 2), st.sampled_from(["first", "all"]))
def test_the_loss_of_reverse_is_that_of_a_loop(views, rows, size, temperature, positives):
    embeddings = torch.randn(views, rows, size, dtype=F64, generator=stream(views * 10 + rows, "z"))
    found = contrastive_losses(embeddings, temperature=temperature, positives=positives)
    np.testing.assert_allclose(found, loss_by_loop(embeddings.numpy(), temperature, positives), rtol=1e-6, atol=1e-12)


def test_steps_of_reverse_go_down_the_loss_of_their_own_views():
    model, x, seeds = reverse(), images(3), torch.tensor([5, 6, 7])
    trace, rng = model.trace(x, seeds=seeds), RowRNG(seeds)
    point = (x + rng.uniform(x, "start", low=-16 / 255, high=16 / 255)).clamp(0, 1)
    assert len(trace.iterates) == 4
    for number in range(3):
        torch.testing.assert_close(trace.iterates[number], point)
        views = [model.augment.draw((5, 4), rng.generator(0, "view", number, view)) for view in range(4)]

        def loss(leaf, views=views):
            seen = torch.stack([model.encoder(view.apply(leaf)) for view in views])
            return contrastive_losses(seen, temperature=0.2, positives="first").sum()

        point = point - 2 / 255 * pulled(loss, point, lambda loss: loss).sign()
        point = torch.minimum(torch.maximum(point, x - 16 / 255), x + 16 / 255).clamp(0, 1)
    torch.testing.assert_close(trace.final, point)
    torch.testing.assert_close(trace.logits, model.classifier(point))


def test_views_are_crops_flips_and_colours():
    x = images(2).float()

    def view(of=x, crop=(0, 0, 5, 4), **parts):
        return View(crop=crop, **parts).apply(of)

    assert torch.equal(view(), x)
    assert torch.equal(view(flip=True), x.flip(3))
    # Twice as large: each new pixel lies a quarter of a pixel from an old one.
    row = torch.tensor([[[[1.0, 3.0, 5.0, 0.0]]]]).repeat(1, 1, 4, 1) / 5
    torch.testing.assert_close(view(row, (0, 0, 4, 2))[0, 0, 0], torch.tensor([1.0, 1.5, 2.5, 3.0]) / 5)
    values = x.numpy()
    grey = np.einsum("c,nchw->nhw", [0.2989, 0.587, 0.114], values)[:, None]
    for kind, amount, wanted in (
        ("brightness", 1.5, np.clip(1.5 * values, 0, 1)),
        ("contrast", 0.4, 0.4 * values + 0.6 * grey.mean((1, 2, 3), keepdims=True)),
        ("saturation", 1.8, np.clip(1.8 * values - 0.8 * grey, 0, 1)),
    ):
        np.testing.assert_allclose(view(colours=((kind, amount),)), wanted, atol=1e-6)
    np.testing.assert_allclose(view(grey=True), np.repeat(grey, 3, 1), atol=1e-6)
    single = images(2, (1, 5, 4))
    assert torch.equal(view(single, colours=(("hue", 0.1), ("saturation", 0.3)), grey=True), single)


@settings(max_examples=40, deadline=None)
@given(st.tuples(*[st.integers(0, 8)] * 3), st.floats(-0.5, 0.5))
def test_hues_turn_as_in_the_standard_library(colour, turn):
    values = [part / 8 for part in colour]
    hue, saturation, value = colorsys.rgb_to_hsv(*values)
    pixel = torch.tensor(values, dtype=F64).view(1, 3, 1, 1)
    turned = View(crop=(0, 0, 1, 1), colours=(("hue", turn),)).apply
    wanted = colorsys.hsv_to_rgb((hue + turn) % 1, saturation, value)
    np.testing.assert_allclose(turned(pixel).flatten(), wanted, atol=1e-9)
    assert bool(torch.isfinite(pulled(turned, pixel)).all())


def test_training_of_reverse_learns():
    net, (x, _) = digits_network(), load_dataset("digits").take(range(40))
    inputs, _ = load_dataset("digits", split="train").take(range(200))
    views, rows = RandomViews(area=0.8, flip=0, jitter=0.2), torch.arange(40)
    trained = ContrastiveTraining(seed=0, views=views, width=32, epochs=10, batch_size=50).fit(net, inputs)
    seen = [torch.cat([views(x, RowRNG(rows + 100 * pair), number) for number in range(2)]) for pair in range(5)]
    features = split(net, inputs[:2]).features

    def loss(of):
        return float(torch.cat([contrastive_losses(of(pair).view(2, 40, -1)) for pair in seen]).mean())

    with seeded_globals(3):
        fresh = nn.Sequential(nn.Linear(128, 32), nn.ReLU(), nn.Linear(32, 16))
    with torch.no_grad():
        assert loss(ContrastiveEncoder(features, trained)) < loss(nn.Sequential(features, fresh)) - 0.2
