import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from robust_ext.adapters.unit_space import UnitSpace
from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel


def space(bounds, norm="linf"):
    module = nn.Linear(5, 2).eval()
    target = Target(module=module, bounds=bounds, classes=2, input_shape=(5,), device=torch.device("cpu"))
    return UnitSpace(target, ThreatModel(norm=norm, epsilon=0.1, bounds=bounds))


def test_unit_bounds_are_left_alone():
    unit = space((0.0, 1.0))
    x, candidates = torch.rand(3, 5), torch.rand(3, 5)
    assert isinstance(unit.target.module, nn.Linear)
    assert unit.enter(x) is x
    assert unit.leave(candidates, x) is candidates
    assert unit.threat_model.epsilon == 0.1


@settings(max_examples=50, deadline=None)
@given(
    st.tuples(st.floats(-300, 300), st.floats(0.01, 500)), st.sampled_from(["linf", "l2", "l1"]), st.integers(0, 10**6)
)
def test_points_and_distances_are_stretched(ends, norm, seed):
    bounds = (ends[0], ends[0] + ends[1])
    unit = space(bounds, norm)
    generator = torch.Generator().manual_seed(seed)
    x = (torch.rand(4, 5, generator=generator) * ends[1] + ends[0]).clamp(*bounds)
    entered = unit.enter(x)
    assert float(entered.min()) >= 0
    assert float(entered.max()) <= 1
    assert unit.target.bounds == (0.0, 1.0)
    magnitude = max(map(abs, bounds))
    original = unit.target.module.module
    torch.testing.assert_close(unit.target.module(entered), original(x), rtol=1e-4, atol=1e-5 * (1 + magnitude))
    # What is not moved is exactly the input; what is moved by epsilon there is moved by epsilon here.
    assert torch.equal(unit.leave(entered, x), x)
    moved = entered.clone()
    moved[:, 0] = (moved[:, 0] + unit.threat_model.epsilon).clamp(max=1)
    back = unit.leave(moved, x)
    assert torch.equal(back[:, 1:], x[:, 1:])
    assert bool((back >= bounds[0]).all())
    assert bool((back <= bounds[1]).all())
    true = ThreatModel(norm=norm, epsilon=0.1, bounds=bounds)
    assert bool(true.contains(back, x).all())
