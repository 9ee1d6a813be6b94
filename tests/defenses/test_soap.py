import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import nn

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.datasets import load_dataset
from robust_ext.defenses.soap import SOAP, flipped_crop
from robust_ext.demo.network import digits_network
from tests.defenses.cases import linear

Array = NDArray[np.float64]


def view_matrix(height, width, crop):
    """The view as a matrix on flattened images of one channel."""
    matrix = np.zeros((height * width, height * width))
    for row in range(height):
        for column in range(width):
            r = crop + row * (height - 2 * crop) // height
            c = crop + column * (width - 2 * crop) // width
            matrix[row * width + column, r * width + (width - 1 - c)] = 1
    return matrix


def by_hand(x, effect, *, steps, radius, step, radii, batch):
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
    chosen = [np.stack([paths[e][moment, row] for row, e in enumerate(best)]) for moment in range(steps + 1)]
    return chosen, best * radius


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 3), st.integers(1, 4), st.integers(1, 5), st.booleans())
def test_what_it_does_is_what_a_loop_by_hand_does(seed, steps, rows, radii, batch):
    net = linear(np.random.default_rng(seed).normal(size=(3, 30)))
    x = np.random.default_rng(seed + 1).random((rows, 30))
    # No number of steps ends on a radius, where rounding would choose between two that are alike.
    sizes = {"steps": steps, "radius": 0.03, "step_size": 0.0225, "radii": radii}
    defense = SOAP(net, **sizes, choice="batch" if batch else "row", group_size=rows if batch else None)
    trace = defense.trace(torch.from_numpy(x).view(rows, 1, 6, 5))
    weights = net.get_parameter("1.weight").detach().numpy()
    path, radius = by_hand(
        x, weights - weights @ view_matrix(6, 5, 2), steps=steps, radius=0.03, step=0.0225, radii=radii, batch=batch
    )
    np.testing.assert_allclose(trace.state["radius"].numpy(), radius, atol=1e-12)
    assert len(trace.iterates) == steps + 1
    for found, wanted in zip(trace.iterates, path, strict=True):
        np.testing.assert_allclose(found.flatten(1).numpy(), wanted, atol=1e-12)
    torch.testing.assert_close(trace.logits, net(trace.final))


def test_rows_and_batches_choose_differently():
    net = linear(np.random.default_rng(3).normal(size=(3, 30)))
    x = torch.rand(8, 1, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows = SOAP(net, steps=2, step_size=0.1).trace(x).state["radius"]
    batch = SOAP(net, steps=2, step_size=0.1, choice="batch", group_size=4).trace(x).state["radius"]
    assert len(set(rows.tolist())) > 1
    assert len(set(batch[:4].tolist())) == len(set(batch[4:].tolist())) == 1
    padded = SOAP(net, choice="batch", group_size=4, pad=True)(x[:3])
    torch.testing.assert_close(padded, SOAP(net, choice="batch", group_size=4)(torch.cat([x[:3], x[:1]]))[:3])


def test_the_view_flips_crops_and_stretches():
    x = torch.arange(16.0).view(1, 1, 4, 4)
    wanted = torch.tensor([[6.0, 6, 5, 5], [6, 6, 5, 5], [10, 10, 9, 9], [10, 10, 9, 9]])
    assert torch.equal(flipped_crop(x, crop=1)[0, 0], wanted)
    assert torch.equal(flipped_crop(x, crop=0), x.flip(3))
    image = torch.rand(2, 3, 32, 28, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = image.flatten(2) @ torch.from_numpy(view_matrix(32, 28, 2)).T
    assert torch.equal(flipped_crop(image).flatten(2), found)
    for small in (torch.zeros(1, 1, 4, 9), torch.zeros(2, 6)):
        with pytest.raises(InvalidArgumentError, match="images"):
            flipped_crop(small)


def test_other_views_and_settings():
    net = nn.Linear(6, 3).eval()
    x = torch.rand(4, 6)
    same = SOAP(net, view=lambda x: x).trace(x)
    assert torch.equal(same.final, x)
    assert torch.equal(same.state["radius"], torch.zeros(4))
    with pytest.raises(InvalidArgumentError, match="group_size: got None"):
        SOAP(net, choice="batch")


def test_the_loss_never_gets_larger():
    defense = SOAP(digits_network(), steps=2, radii=4)
    x, _ = load_dataset("digits").take(range(10))
    with torch.no_grad():
        trace = defense.trace(x)
        assert bool((defense.loss(trace.final) <= defense.loss(x)).all())
        assert bool((defense.loss(trace.final) < 0.9 * defense.loss(x)).any())
