"""Batch-level defenses among held images do what the defense does with batches put together by hand."""

import pytest
import torch

from robust_ext import BPDA
from robust_ext.core.random import seeded_globals
from robust_ext.core.target import Counted, PassCounter
from robust_ext.core.threat import ThreatModel
from robust_ext.evaluations.binarization.forward import choose_forward
from robust_ext.models.adaptive_features import binarized_defense, split_defense
from robust_ext.models.company import in_company, one_image
from tests.models.cases import Descent, data, network, planted

LINF = ThreatModel(norm="linf", epsilon=0.05)


class Centred(Descent):
    """Steps away from the mean of the group."""

    random = False
    batch_level = True
    noise = 0.0

    def start(self, x, rng):
        return x, {"scale": 0.2 * x.flatten(1).mean(1)}

    def step(self, point, *, x, number, state, rng):
        return point + state["scale"][:, None, None] * (point - point.mean(0)).tanh()


class Shifted(Centred):
    """The same from points that are drawn."""

    random = True

    def start(self, x, rng):
        return x + 0.3 * rng.uniform(x, "start"), {"scale": 0.2 * x.flatten(1).mean(1)}


def near(x, seed):
    return x + 0.05 * torch.rand(x.shape, generator=torch.Generator().manual_seed(seed))


def test_rows_meet_those_of_the_other_samples_and_clean_ones_where_these_are_missing():
    x, defense = data(5), Centred(network(), steps=2, group_size=2)
    # Groups: samples 0 and 1, 2 and 3, 4 and a copy of the first.
    one, two = near(x, 3), near(x, 4)
    rows = torch.stack([one[3], one[0], two[0], one[1], one[4], one[2], two[3]])
    batches = torch.stack([one[0], one[1], one[2], one[3], one[4], x[0], two[0], x[1], x[2], two[3]])
    expected = defense(batches)[[3, 0, 6, 1, 4, 2, 9]]
    module = in_company(defense, x, LINF)
    torch.testing.assert_close(module(rows), expected)
    torch.testing.assert_close(module(near(x, 3)[[2]]), defense(torch.stack([one[2], x[3]]))[:1])
    assert len(module(rows[:0])) == 0


def test_points_are_measured_beside_those_of_the_other_samples():
    """The first points of all samples are one batch of the defense, the second ones the next, however many fit."""
    x, defense = data(4), Centred(network(), steps=2, group_size=2)
    points = torch.stack([near(x, seed) for seed in range(3)], 1)
    features = Counted(split_defense(in_company(defense, x, LINF), x).features, PassCounter())
    for rows in (1, 9):
        found = choose_forward(features, x, rows=rows, fold=True).of_points(points)
        assert found.shape == (4, 3, 8)
        for number in range(3):
            final = defense.solution(points[:, number], seeds=defense.next_seeds(4)).final
            torch.testing.assert_close(found[:, number], network()[:-1](final))


def test_gradients_are_those_of_the_whole_batch():
    x, defense = data(4), Centred(network(), steps=2, group_size=2)
    order = [2, 0, 3, 1]
    weights = torch.rand(4, 3, generator=torch.Generator().manual_seed(6))

    def gradient(module, rows, weights):
        leaf = rows.clone().requires_grad_()
        return torch.autograd.grad((weights * module(leaf)).sum(), leaf)[0]

    wanted = gradient(defense, near(x, 3), weights)
    module = in_company(defense, x, LINF)
    for crossed in (module, BPDA(module, backward="unrolled")):
        torch.testing.assert_close(gradient(crossed, near(x, 3)[order], weights[order]), wanted[order])


@pytest.mark.parametrize("backward", ["identity", "frozen", "trajectory"])
def test_the_binarized_defense_is_the_classifier(backward):
    x = data(4)
    module = planted(split_defense(in_company(Centred(network(), steps=2, group_size=2), x, LINF), x).features, x)
    defense = binarized_defense(module)
    points = near(x, 3)[[3, 0, 1]]
    torch.testing.assert_close(BPDA(defense, backward=backward)(points.requires_grad_()), module(points))


def test_held_draws_stay_and_fresh_ones_do_not():
    x = data(4)
    defense = in_company(Shifted(network(), steps=2, group_size=2), x, LINF)
    held, fresh = (split_defense(defense, x, held=one).features for one in (True, False))
    assert torch.equal(held(x), held(x))
    torch.testing.assert_close(held(x)[[2]], held(x[[2]]))
    with seeded_globals(3):
        assert not torch.equal(fresh(x), fresh(x))


def test_one_image_is_alone_among_its_negatives():
    x, defense = data(3), Centred(network(), steps=2, group_size=4)
    held = near(x, 5)
    module = one_image(defense, held)
    assert not module.batch_level
    torch.testing.assert_close(module(x), torch.cat([defense(torch.cat([row[None], held]))[:1] for row in x]))
    torch.testing.assert_close(module(x)[[1]], module(x[[1]]))
