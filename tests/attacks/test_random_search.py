import math

import pytest
import torch
from scipy.stats import beta, binom, binomtest

from robust_ext.attacks.native import Step
from robust_ext.attacks.random_search import RandomSearch
from robust_ext.attacks.spatial import SpatialTransformation
from robust_ext.attacks.square import Square
from robust_ext.core.threat import NORMS, ThreatModel
from robust_ext.testing.networks import margins
from tests.attacks.problems import Linear, Recorder, Rowwise, images, labels_of, predicted, search

X = images(3, (1, 3, 4))


def run(attack, module, x, threat_model, seed=0, **extras):
    """Candidates for rows of class 0."""
    return search(attack, x, torch.zeros(len(x)).long(), threat_model, module=module, seed=seed, **extras)[0]


def recorder(weight, threshold):
    return Recorder(Linear(weight, threshold))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("targeted", [False, True])
@pytest.mark.parametrize(
    "attack", [RandomSearch(points=30), Square(queries=20), Square(queries=20, restarts=3)], ids=repr
)
def test_keeps_what_a_loop_over_the_points_it_queried_would_keep(attack, norm, targeted):
    epsilon = {"linf": 0.1, "l2": 0.6, "l1": 2.5}[norm] * (2 if isinstance(attack, RandomSearch) else 1)
    threat_model = ThreatModel(norm=norm, epsilon=epsilon, bounds=(-1.0, 1.0))
    x = images(12, (2, 5, 6), (-1.0, 1.0))
    y = Rowwise(60)(x).argsort(1)[:, 2 if targeted else 3]
    out, passes, seen = search(attack, x, y, threat_model, targeted=targeted)
    assert passes.forward == 12 * len(seen)
    assert [(step.number, step.total) for step in seen] == [(number, len(seen)) for number in range(len(seen))]
    sign = -1 if targeted else 1
    values = [(-sign * margins(Rowwise(60)(step.points), y)).tolist() for step in seen]
    solved = 0
    for row in range(12):
        kept, highest = x[row], -math.inf
        for step, value in zip(seen, values, strict=True):
            assert float(step.loss[row]) == pytest.approx(value[row], abs=1e-5)
            if highest > 0:
                assert torch.equal(step.points[row], kept)
            if value[row] > highest:
                kept, highest = step.points[row], value[row]
        assert torch.equal(out[row], kept)
        solved += highest > 0
    assert 0 < solved < 12


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("outer", ["corners", "surface"])
def test_inner_and_outer_points_take_turns(norm, outer):
    threat_model = ThreatModel(norm=norm, epsilon=0.25, bounds=(-5.0, 5.0))
    module = recorder(torch.zeros(1), 1.0)
    run(RandomSearch(points=25, outer=outer), module, X, threat_model)
    far = torch.stack([threat_model.distance(points, X) for points in module.batches])
    on_surface = (far - 0.25).abs() < 1e-6
    assert far.shape == (25, 3)
    assert on_surface.all(1).tolist() == [False, True] * 12 + [False]
    assert on_surface.any(1).tolist() == [False, True] * 12 + [False]
    corner = (module.batches[1] - X).abs().flatten(1)
    assert bool((corner.amax(1) - corner.amin(1) < 1e-6).all()) == (outer == "corners" and norm != "l1")


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0), (0.25, 5), (1 / 3, 6), (0.9, 18), (1.0, 20)])
def test_the_share_of_outer_points(share, expected):
    threat_model = ThreatModel(norm="linf", epsilon=0.25)
    module, x = recorder(torch.zeros(1), 1.0), torch.full((1, 1, 3, 4), 0.5)
    run(RandomSearch(points=20, outer_share=share), module, x, threat_model)
    corners = [bool(((points - x).abs() == 0.25).all()) for points in module.batches]
    assert sum(corners) == expected


@pytest.mark.parametrize(
    ("chosen", "norm", "weight", "threshold", "probability"),
    [
        # Corners: of 9 coordinates of +-1 the sum is above 4.5 where at least 7 are up.
        ({"points": 1, "outer_share": 1.0}, "linf", [1.0] * 9, 4.5, float(binom.sf(6, 9, 0.5))),
        ({"points": 4, "outer_share": 1.0}, "linf", [1.0] * 9, 4.5, 1 - (1 - float(binom.sf(6, 9, 0.5))) ** 4),
        # Points in the cube.
        ({"points": 3, "outer_share": 0.0}, "linf", [1.0, 0.0, 0.0], 0.6, 1 - 0.8**3),
        # (1 + u) / 2 of a coordinate u of a point on the sphere in D dimensions is Beta((D - 1) / 2, (D - 1) / 2).
        (
            {"points": 2, "outer": "surface", "outer_share": 1.0},
            *("l2", [0.0, 1.0, 0.0, 0.0, 0.0], 0.4, 1 - float(beta.cdf(0.7, 2, 2)) ** 2),
        ),
        # Both in turn: in one dimension inner points are uniform in [-1, 1] and corners its ends.
        ({"points": 2}, "linf", [1.0], 0.8, 1 - 0.9 * 0.5),
    ],
)
def test_success_rates(chosen, norm, weight, threshold, probability):
    """Of many equal rows at zero, each of which draws points of its own."""
    module, threat_model = Linear(torch.tensor(weight), threshold), ThreatModel(norm=norm, epsilon=1, bounds=(-2, 2))
    out = run(RandomSearch(**chosen), module, torch.zeros(3000, len(weight)), threat_model, seed=11)
    assert 0.05 < probability < 0.95
    # A wrong rate fails here; a right one does once in a million seeds, and the seed is fixed.
    assert binomtest(int(predicted(module, out).sum()), 3000, probability).pvalue > 1e-6


@pytest.mark.parametrize(
    ("attack", "norm"),
    [
        (RandomSearch(points=3), "l2"),
        (Square(queries=1, stop_early=False), "linf"),
        (SpatialTransformation(translation=2, mode="random", samples=1), "linf"),
    ],
)
def test_equal_rows_and_other_seeds_get_points_of_their_own(attack, norm):
    x = images(1, (1, 4, 30)).expand(5, -1, -1, -1)
    threat_model = ThreatModel(norm=norm, epsilon=0.01)
    out = torch.cat([search(attack, x, labels_of(x), threat_model, seed=seed)[0] for seed in (0, 1)])
    assert len(out.unique(dim=0)) == 10


def test_ends_when_all_rows_are_solved():
    module, seen = recorder(torch.ones(1), -5.0), list[Step]()
    threat_model = ThreatModel(norm="linf", epsilon=1.0, bounds=(-2.0, 2.0))
    run(RandomSearch(), module, torch.zeros(4, 1), threat_model, watch=seen.append)
    assert len(module.batches) == 1
    assert [(step.number, step.total) for step in seen] == [(0, 400)]
    assert torch.equal(seen[0].points, module.batches[0])
    torch.testing.assert_close(seen[0].loss, module.batches[0].squeeze(1) + 5)
    assert seen[0].gradient is None
