import numpy as np
import pytest
import torch

from robust_ext import BPDA
from robust_ext.defenses.clc import ClosedLoopControl, Projections, ProjectionsTraining
from tests.models.cases import data, network

LAYERS = ("", "1", "3")


def subspaces(dtype=torch.float64):
    """Of rank 3, 2 and 4, around points of their own."""
    generator = torch.Generator().manual_seed(3)
    bases = [
        torch.linalg.qr(torch.randn(size, rank, generator=generator))[0] for size, rank in ((6, 3), (6, 2), (8, 4))
    ]
    means = [torch.rand(size, generator=generator) for size in (6, 6, 8)]
    return Projections(LAYERS, [basis.to(dtype) for basis in bases], [mean.to(dtype) for mean in means])


def defense(**settings):
    return ClosedLoopControl(network(torch.float64), subspaces(), **{"group_size": 4, **settings})


def by_hand(net, found, x, *, steps, rate, centre, reduction):
    """The offsets of the lowest loss, the offsets of the input over time, and the losses, by torch's Adam."""
    blocks = [net[0], net[1:3], net[3]]
    controls = []
    value = x
    for block in blocks:
        controls.append(torch.zeros_like(value).requires_grad_())
        value = block(value).detach()
    optimizer = torch.optim.Adam(controls, lr=rate)
    path, losses, best = [], [], []
    for _ in range(steps):
        value, total = x, torch.zeros((), dtype=x.dtype)
        for number, block in enumerate(blocks):
            value = value + controls[number]
            flat = value.flatten(1)
            middle = flat.mean(0) if centre == "batch" else getattr(found, f"mean_{number}")
            basis = found.basis(number)
            rebuilt = (flat - middle) @ (basis @ basis.T) + middle
            distance = (flat - rebuilt) ** 2
            total = total + (distance.mean() if reduction == "mean" else distance.sum())
            value = block(value)
        path.append(controls[0].detach().clone())
        if not losses or total.item() < min(losses):
            best = [control.detach().clone() for control in controls]
        losses.append(total.item())
        optimizer.zero_grad()
        torch.autograd.backward(total)
        optimizer.step()
    return best, path, losses


@pytest.mark.parametrize(("centre", "reduction"), [("batch", "mean"), ("training", "sum")])
@pytest.mark.parametrize(("steps", "rate"), [(5, 5e-3), (6, 0.8)])
def test_offsets_are_those_of_adam(centre, reduction, steps, rate):
    x = data(4, torch.float64)
    model = defense(steps=steps, learning_rate=rate, centre=centre, reduction=reduction)
    best, path, losses = by_hand(
        network(torch.float64), subspaces(), x, steps=steps, rate=rate, centre=centre, reduction=reduction
    )
    trace = model.trace(x)
    torch.testing.assert_close(trace.final, x + best[0])
    assert list(trace.state) == ["1", "3"]
    torch.testing.assert_close(list(trace.state.values()), best[1:])
    torch.testing.assert_close(list(trace.iterates), [x + offset for offset in path])
    net = model.classifier
    hidden = net[2](net[1](net[0](x + best[0]) + best[1])) + best[2]
    torch.testing.assert_close(trace.logits, net[3](hidden))
    # At the large rate the last offsets are not the best ones.
    assert (losses.index(min(losses)) == steps - 1) == (rate < 0.1)
    assert not trace.final.requires_grad


def test_projections_are_those_of_a_singular_value_decomposition():
    net, x = network(), data(50)
    labels = net(x).argmax(1)
    labels[:10] = (labels[:10] + 1) % 3
    found = ProjectionsTraining(layers=LAYERS, share=0.6).fit(net, x, labels)
    used = x[10:]
    values = [used.flatten(1), used.flatten(1), net[:3](used)]
    for number, rows in enumerate(values):
        centred = rows.detach().double().numpy()
        mean = centred.mean(0)
        _, sizes, axes = np.linalg.svd(centred - mean)
        count, total = 0, 0.0
        while total <= 0.6 * sizes.sum():
            total += sizes[count]
            count += 1
        projector = axes[:count].T @ axes[:count]
        basis = found.basis(number).double().numpy()
        assert basis.shape[1] == count < centred.shape[1]
        np.testing.assert_allclose(basis @ basis.T, projector, atol=1e-4)
        point = data(3, seed=5).flatten(1) if number < 2 else net[:3](data(3, seed=5)).detach()
        left = point.double().numpy() - mean
        off = found.off_plane(number, point, own_mean=False)
        np.testing.assert_allclose(off.numpy(), left - left @ projector, atol=1e-4)


def test_groups_stay_together_and_one_row_has_no_defense():
    x = data(8, torch.float64)
    model = defense(learning_rate=0.1)
    whole = model(x)
    order = torch.tensor([2, 0, 3, 1])
    torch.testing.assert_close(model(x[order]), whole[order])
    alone = defense(group_size=1, learning_rate=0.1)
    torch.testing.assert_close(alone(x), model.classifier(x))
    by_training = defense(group_size=1, learning_rate=0.1, centre="training")
    assert not torch.allclose(by_training(x), model.classifier(x), atol=1e-4)


def test_steps_cost_what_is_documented(monkeypatch):
    model = defense()
    forward, backward = [0], [0]
    model.classifier.register_forward_hook(lambda *_: forward.__setitem__(0, forward[0] + 1))
    grad = torch.autograd.grad

    def counted(*args, **keywords):
        backward[0] += 1
        return grad(*args, **keywords)

    monkeypatch.setattr(torch.autograd, "grad", counted)
    with torch.no_grad():
        model(data(4))
    assert (forward, backward) == ([6], [4])
    with torch.no_grad():
        torch.testing.assert_close(model.with_steps(0)(data(4)), model.classifier(data(4).double()))


def test_a_held_control_is_the_paper_s_attack():
    x = data(4, torch.float64).requires_grad_()
    model = defense(learning_rate=0.1)
    best = by_hand(network(torch.float64), subspaces(), x.detach(), steps=5, rate=0.1, centre="batch", reduction="mean")
    net, offsets = model.classifier, best[0]
    logits = net[3](net[2](net[1](net[0](x + offsets[0]) + offsets[1])) + offsets[2])
    (wanted,) = torch.autograd.grad(logits.square().sum(), x)
    for backward in ("frozen", "identity"):
        (found,) = torch.autograd.grad(BPDA(model, backward=backward)(x).square().sum(), x)
        torch.testing.assert_close(found, wanted)


def test_unrolled_gradients_are_those_of_finite_differences():
    model = defense(learning_rate=0.05, steps=4)
    x = data(4, torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(model, x, atol=1e-4, rtol=1e-3)
    assert all(p.grad is None for p in model.parameters())


def test_where_nothing_is_to_do_unrolled_gradients_are_finite():
    full = Projections(["", "1"], [torch.eye(6), torch.eye(6)], [torch.zeros(6)] * 2)
    model = ClosedLoopControl(network(), full, group_size=2)
    x = data(2).requires_grad_()
    (found,) = torch.autograd.grad(model(x).sum(), x)
    (wanted,) = torch.autograd.grad(model.classifier(x).sum(), x)
    torch.testing.assert_close(found, wanted)


def test_regularization_holds_offsets_back():
    x = data(4, torch.float64)
    free, held = defense(steps=20, learning_rate=0.1), defense(steps=20, learning_rate=0.1, regularization=100.0)
    assert float((held.trace(x).final - x).norm()) < 0.1 * float((free.trace(x).final - x).norm())
    controls = [torch.full_like(x, 0.5), torch.zeros(4, 6).double(), torch.zeros(4, 8).double()]
    difference = held.loss(x, controls)[0] - free.loss(x, controls)[0]
    torch.testing.assert_close(difference, torch.tensor(100 * 6 * 0.25).double())
