import pytest
import torch
from torch import nn

from robust_ext.adapters.starting_points import starting_points
from robust_ext.core.target import Target


class Brightness(nn.Module):
    """Class 1 where the mean is above a half of the bounds."""

    def __init__(self, bounds):
        super().__init__()
        self.middle = sum(bounds) / 2
        self.sizes = []

    def forward(self, x):
        self.sizes.append(len(x))
        above = x.flatten(1).mean(1) - self.middle
        return torch.stack([-above, above], 1)


def target(module, bounds):
    return Target(module=module, bounds=bounds, classes=2, input_shape=(1, 4, 4), device=torch.device("cpu"))


@pytest.mark.parametrize("bounds", [(0.0, 1.0), (-1.0, 1.0), (0.0, 255.0)])
def test_points_are_adversarial_and_close_to_the_boundary(bounds):
    module, width = Brightness(bounds), bounds[1] - bounds[0]
    x = torch.rand(6, 1, 4, 4, generator=torch.Generator().manual_seed(0)) * 0.6 * width + bounds[0]
    labels = module(x).argmax(1)
    module.sizes.clear()
    points, found = starting_points(target(module, bounds), x, labels, generator=torch.Generator().manual_seed(1))
    assert set(module.sizes) == {6}
    assert bool(found.all())
    assert bool((module(points).argmax(1) != labels).all())
    assert bounds[0] <= float(points.min())
    assert float(points.max()) <= bounds[1]
    # Ten halvings lead within a thousandth of the way to where the mean crosses the middle.
    away = (points.flatten(1).mean(1) - module.middle).abs()
    assert float(away.max()) < 2e-3 * width
    again, _ = starting_points(target(module, bounds), x, labels, generator=torch.Generator().manual_seed(1))
    assert torch.equal(points, again)


def test_rows_without_such_points_keep_their_input():
    class Constant(nn.Module):
        def forward(self, x):
            return torch.tensor([1.0, 0.0]).expand(len(x), 2)

    x = torch.rand(3, 1, 4, 4)
    labels = torch.tensor([0, 1, 0])
    met = target(Constant(), (0.0, 1.0))
    points, found = starting_points(met, x, labels, generator=torch.Generator(), tries=3)
    assert found.tolist() == [False, True, False]
    assert torch.equal(points[::2], x[::2])
