"""Parts of wrapping: modules around the target, the unit space, and points to start at."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from robust_ext.adapters.wrapped import starting_points
from robust_ext.attacks.running import UnitSpace
from robust_ext.core.threat import ThreatModel
from tests.adapters.common import UNIT, Brightness, Recorder, target_of

host = pytest.importorskip("robust_ext.adapters.foolbox.target", reason="Foolbox is not installed")
LOGIT = st.floats(-1e4, 1e4, width=32)


@given(st.lists(st.tuples(LOGIT, LOGIT, LOGIT), min_size=1, max_size=5))
def test_low_logits_are_shifted_only_where_they_must_be(rows):
    logits = torch.tensor(rows)
    low = host.LowLogits(nn.Identity())(logits)
    high = logits.amax(1) > 80
    assert torch.equal(low[~high], logits[~high])
    assert bool((low.amax(1) <= 80.01).all())
    assert bool(torch.isfinite(low.exp().sum(1)).all())
    torch.testing.assert_close(low - low[:, :1], logits - logits[:, :1], rtol=1e-4, atol=1e-2)


@given(st.lists(st.sampled_from([0.0, 1e-30, 1e-15, 1e-8, 1.0, 1e5]), min_size=1, max_size=6), st.sampled_from([2, 4]))
def test_gradients_are_changed_only_where_they_have_vanished(factors, power):
    x = torch.ones(len(factors), 3, requires_grad=True)
    module = nn.Linear(3, 3)
    module.forward = lambda x: x * torch.tensor(factors)[:, None]
    out = host.NeverFlat(module, power=power)(x)
    assert torch.equal(out, module(x))
    (gradient,) = torch.autograd.grad(out.sum(), x)
    (own,) = torch.autograd.grad(module(x).sum(), x)
    size = (gradient.square().sum(1)) ** (power // 2)
    assert bool((size > 0).all())
    vanished = own.square().sum(1) ** (power // 2) == 0
    assert torch.equal(gradient[~vanished], own[~vanished])
    # A hook left on the caller's tensor would change gradients that are none of the wrapper's.
    (again,) = torch.autograd.grad(module(x).sum(), x)
    assert torch.equal(again, own)


@pytest.mark.parametrize("bounds", [UNIT, (-1.0, 1.0), (0.0, 255.0)])
def test_points_are_adversarial_and_close_to_the_boundary(bounds):
    module, width = Recorder(Brightness(0.5, bounds)), bounds[1] - bounds[0]
    x = torch.rand(6, 1, 4, 4, generator=torch.Generator().manual_seed(0)) * 0.6 * width + bounds[0]
    labels = module(x).argmax(1)
    module.queries.clear()
    target = target_of(module, (1, 4, 4), bounds=bounds, classes=2)
    points, found = starting_points(target, x, labels, generator=torch.Generator().manual_seed(1))
    assert set(module.sizes) == {6}
    assert bool(found.all())
    assert bool((module(points).argmax(1) != labels).all())
    assert bounds[0] <= float(points.min()) < float(points.max()) <= bounds[1]
    # Ten halvings lead within a thousandth of the way to where the mean crosses the middle.
    away = (points.flatten(1).mean(1) - sum(bounds) / 2).abs()
    assert float(away.max()) < 2e-3 * width
    again, _ = starting_points(target, x, labels, generator=torch.Generator().manual_seed(1))
    assert torch.equal(points, again)


@settings(max_examples=50, deadline=None)
@given(
    st.tuples(st.floats(-300, 300), st.floats(0.01, 500)), st.sampled_from(["linf", "l2", "l1"]), st.integers(0, 10**6)
)
def test_points_and_distances_are_stretched(ends, norm, seed):
    bounds = (ends[0], ends[0] + ends[1])
    true = ThreatModel(norm=norm, epsilon=0.1, bounds=bounds)
    unit = UnitSpace(target_of(nn.Linear(5, 2).eval(), (5,), bounds=bounds, classes=2), true)
    generator = torch.Generator().manual_seed(seed)
    x = (torch.rand(4, 5, generator=generator) * ends[1] + ends[0]).clamp(*bounds)
    entered = unit.enter(x)
    assert torch.equal(entered, entered.clamp(0, 1))
    assert unit.target.bounds == UNIT
    magnitude = max(map(abs, bounds))
    original = unit.target.module.module
    torch.testing.assert_close(unit.target.module(entered), original(x), rtol=1e-4, atol=1e-5 * (1 + magnitude))
    # What is not moved is exactly the input; what is moved by epsilon there is moved by epsilon here.
    assert torch.equal(unit.leave(entered, x), x)
    moved = entered.clone()
    moved[:, 0] = (moved[:, 0] + unit.threat_model.epsilon).clamp(max=1)
    back = unit.leave(moved, x)
    assert torch.equal(back[:, 1:], x[:, 1:])
    assert torch.equal(back, back.clamp(*bounds))
    assert bool(true.contains(back, x).all())
