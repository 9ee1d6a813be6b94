"""APGD: what it promises of its results, its queries and its rows."""

from dataclasses import replace

import pytest
import torch

from robust_ext.attacks._common.objectives import OBJECTIVES
from robust_ext.attacks.apgd import APGD
from robust_ext.core.errors import InvalidArgumentError, RobustExtWarning
from robust_ext.core.random import stream
from robust_ext.core.target import Counted, PassCounter
from robust_ext.core.threat import NORMS, ThreatModel
from tests.attacks.problems import Lambda, predicted, rowwise_problem, target_of


def attack(parts, threat_model, watch=None, **chosen):
    return APGD(**chosen).run(*parts, threat_model=threat_model, generator=stream(0), watch=watch)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("loss", ["ce", "margin", "dlr"])
@pytest.mark.parametrize("epsilon", [1e-3, 0.3])
def test_losses_are_those_of_the_best_points(norm, loss, epsilon):
    parts = rowwise_problem()
    result = attack(parts, ThreatModel(norm=norm, epsilon=epsilon), loss=loss, steps=20)
    # On failure the best point comes back.
    assert epsilon > 0.1 or not bool(result.found.any())
    assert torch.equal(result.candidates[~result.found], result.best_points[~result.found])
    losses, clean = (
        OBJECTIVES[loss].loss(parts[0].module(points), parts[2]) for points in (result.best_points, parts[1])
    )
    torch.testing.assert_close(result.losses, losses)
    assert bool((losses > clean).all())


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("loss", list(OBJECTIVES))
@pytest.mark.parametrize("start", ["random", "input"])
def test_passes_are_counted_and_every_query_is_the_batch_in_order(norm, loss, start):
    target, inputs, labels = rowwise_problem()
    counter = PassCounter()
    queried = []
    counted = Counted(target.module, counter)
    counted.register_forward_pre_hook(lambda _, given: queried.append(given[0].detach().clone()))
    threat_model = ThreatModel(norm=norm, epsilon=0.02)
    parts = (replace(target, module=counted), inputs, labels)
    result = attack(parts, threat_model, loss=loss, steps=7, restarts=3, start=start, target_classes=2)
    runs, extra = (6, 1) if loss.startswith("targeted") else (3, 0)
    assert (counter.forward, counter.backward) == ((8 * runs + extra) * 6, 7 * runs * 6)
    assert result.passes == PassCounter(counter.forward, counter.backward)
    assert len(queried) == 8 * runs + extra
    for points in queried:
        assert points.shape == inputs.shape
        nearest = torch.cdist(points.flatten(1), inputs.flatten(1)).argmin(1)
        assert nearest.tolist() == list(range(6))
        assert bool(threat_model.contains(points, inputs).all())


@pytest.mark.parametrize("norm", NORMS)
def test_stopping_early_solves_the_same_rows_with_fewer_passes(norm):
    parts = rowwise_problem(rows=40)
    threat_model = ThreatModel(norm=norm, epsilon={"linf": 0.1, "l2": 0.4, "l1": 1.0}[norm])
    full = attack(parts, threat_model, steps=20, restarts=2)
    early = attack(parts, threat_model, steps=20, restarts=2, stop_early=True)
    assert 0 < int(full.found.sum()) < 40
    assert torch.equal(full.found, early.found)
    assert early.passes.backward < full.passes.backward
    unsolved = ~full.found
    assert torch.equal(full.candidates[unsolved], early.candidates[unsolved])
    assert torch.equal(predicted(parts[0].module, early.candidates) != parts[2], early.found)
    everywhere = attack(parts, ThreatModel(norm="linf", epsilon=1.0), steps=50, stop_early=True)
    assert bool(everywhere.found.all())
    assert everywhere.passes.backward < 40 * 50


def test_an_adversarial_point_counts_even_where_another_has_a_higher_loss():
    def trap(x):
        left = x < 0.5
        second = torch.where(left, 0.2 + 0.001 * x, -0.01 + 0.001 * x)
        return torch.cat([torch.zeros_like(x), second, torch.where(left, -3.0, -0.01)], 1)

    target = target_of(Lambda(trap), (1,), 3)
    inputs, labels = torch.tensor([[0.3]]), torch.tensor([0])
    result = attack((target, inputs, labels), ThreatModel(norm="linf", epsilon=0.4), start="input", steps=10)
    assert float(result.best_points) > 0.5
    assert float(result.candidates) < 0.5
    assert bool(result.found)


@pytest.mark.parametrize("norm", NORMS)
def test_rows_that_are_no_numbers_stay_and_harm_no_others(norm):
    target, inputs, labels = rowwise_problem(rows=4)

    def broken(x):
        out = target.module(x).clone()
        out[1] = out[1] + torch.nan
        # The root has an infinite gradient at 0, and infinity times 0 is no number.
        out[2] = out[2] + (x[2].flatten()[:1] * 0).sqrt()
        return out

    threat_model = ThreatModel(norm=norm, epsilon=0.3)
    with pytest.warns(RobustExtWarning, match="the gradient of some rows was zero"):
        result = attack((replace(target, module=Lambda(broken)), inputs, labels), threat_model, start="input", steps=10)
    assert bool(torch.isfinite(result.candidates).all())
    # The input itself is a point at which nothing is robust.
    assert torch.equal(result.candidates[1], inputs[1])
    assert bool(result.found[1])
    assert not torch.equal(result.candidates[2], inputs[2])
    assert result.no_gradient.tolist() == [False, True, False, False]
    plain = attack((target, inputs, labels), threat_model, start="input", steps=10)
    torch.testing.assert_close(plain.candidates[[0, 3]], result.candidates[[0, 3]])


@pytest.mark.parametrize("norm", NORMS)
def test_warm_runs_begin_at_the_given_points_within_the_ball(norm):
    target, inputs, labels = rowwise_problem(rows=4)
    threat_model, shown = ThreatModel(norm=norm, epsilon=0.05), []
    given = 1 - inputs.round()
    parts = (replace(target, starting_points=torch.stack([given, inputs], 1)), inputs, labels)
    attack(parts, threat_model, steps=2, restarts=2, warm=True, watch=shown.append)
    first = shown[0].points
    assert bool(threat_model.contains(first, inputs).all())
    # As far towards the given points as the ball allows.
    edge = torch.full((4,), 0.05, dtype=torch.float64)
    torch.testing.assert_close(threat_model.distance(first, inputs), edge, rtol=1e-5, atol=0)
    assert bool((((first - inputs) * (given - inputs)) >= 0).all())
    again = []
    attack((target, inputs, labels), threat_model, steps=2, restarts=2, watch=again.append)
    # The restart draws what the first run of another attack draws.
    assert torch.equal(shown[3].points, again[0].points)
    with pytest.raises(InvalidArgumentError, match="starting_points"):
        attack((replace(target, starting_points=given), inputs, labels), threat_model, warm=True)


def test_warm_runs_aim_at_the_likeliest_classes_where_they_begin():
    # The second class is the likeliest at the input, the third where the run begins.
    target = target_of(Lambda(lambda x: torch.cat([0.6 - 0.1 * x, 0.4 - x, x - 0.2], 1)), (1,), 3)
    inputs, labels = torch.tensor([[0.2]]), torch.tensor([0])
    threat_model = ThreatModel(norm="linf", epsilon=0.6)
    chosen = {"loss": "targeted-margin", "target_classes": 1, "steps": 10}
    cold = attack((target, inputs, labels), threat_model, **chosen)
    given = replace(target, starting_points=torch.tensor([[[0.7]]]))
    warm = attack((given, inputs, labels), threat_model, warm=True, **chosen)
    assert (bool(cold.found), bool(warm.found)) == (False, True)


@pytest.mark.parametrize("stop_early", [False, True])
def test_watching_shows_every_evaluation(stop_early):
    target, inputs, labels = rowwise_problem()
    shown = []
    threat_model = ThreatModel(norm="linf", epsilon=0.001)
    attack((target, inputs, labels), threat_model, steps=4, restarts=2, watch=shown.append, stop_early=stop_early)
    assert [step.number for step in shown] == list(range(10))
    assert {step.total for step in shown} == {10}
    for step in shown:
        points = step.points.clone().requires_grad_(True)
        losses = OBJECTIVES["ce"].loss(target.module(points), labels)
        (gradient,) = torch.autograd.grad(losses.sum(), points)
        torch.testing.assert_close(step.loss, losses.detach())
        assert (step.gradient is None) == (step.number % 5 == 4)
        if step.gradient is not None:
            torch.testing.assert_close(step.gradient, gradient)
