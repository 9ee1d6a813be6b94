"""Passes are counted, forward and backward, and what is not in eval mode is named."""

import pytest
import torch
from torch import nn

from robust_ext.core.classifier import check_classifier
from robust_ext.core.errors import ModelError
from robust_ext.core.target import Counted, PassCounter, count_all_calls


@pytest.fixture
def network():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3)).eval()


def counts(counter):
    return counter.forward, counter.backward


def test_rows_are_counted_forward_and_backward(network):
    counter = PassCounter()
    counted = Counted(network, counter)
    # It is in the mode of the module.
    assert not counted.training
    assert Counted(nn.Flatten().train(), counter).training
    x = torch.rand(5, 4)
    assert torch.equal(counted(x), network(x))
    assert counts(counter) == (5, 0)
    with torch.no_grad():
        counted(torch.rand(3, 4))
    assert counts(counter) == (8, 0)
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(counted(leaf).sum(), leaf)
    assert counts(counter) == (13, 5)
    torch.testing.assert_close(gradient, torch.autograd.grad(network(leaf).sum(), leaf)[0])
    # Two passes back through one pass forward.
    out = counted(leaf)
    out[:, 0].sum().backward(retain_graph=True)
    out[:, 1].sum().backward()
    assert counts(counter) == (18, 15)
    # A pass forward whose gradient is never taken.
    counted(leaf)
    assert counts(counter) == (23, 15)
    counted(torch.rand(0, 4))
    assert counts(counter) == (23, 15)


def test_calls_within_one_graph_count_each(network):
    counter = PassCounter()
    counted = Counted(network, counter)
    leaf = torch.rand(2, 4, requires_grad=True)
    sum(counted(leaf + i).sum() for i in range(4)).backward()
    assert counts(counter) == (8, 8)
    before = counter.snapshot()
    counted(leaf)
    assert counts(counter.since(before)) == (2, 0)
    assert counts(before) == (8, 8)


@pytest.mark.parametrize("module", [nn.Identity(), nn.Dropout(0.5).eval(), nn.Flatten()])
def test_a_module_that_returns_its_input_leaves_no_hook_on_it(module):
    """Some modules return the very tensor they got; that one belongs to the attack, which goes on using it."""
    counter = PassCounter()
    counted = Counted(module, counter)
    leaf = torch.rand(3, 2, requires_grad=True)
    for step in range(1, 5):
        (gradient,) = torch.autograd.grad(counted(leaf).sum(), leaf)
        assert torch.equal(gradient, torch.ones(3, 2))
        assert counts(counter) == (3 * step, 3 * step)
    torch.autograd.grad((leaf * 2).sum(), leaf)
    assert counts(counter) == (12, 12)


@pytest.mark.parametrize(
    "part", [nn.BatchNorm1d(4), nn.Dropout(0.1), nn.AlphaDropout(), nn.InstanceNorm1d(4, track_running_stats=True)]
)
def test_parts_in_train_mode_are_named(part):
    model = nn.Sequential(nn.Identity(), part, nn.Flatten()).eval()
    assert check_classifier(nn.Sequential(nn.Flatten()).eval(), torch.rand(2, 4)).shape == (2, 4)
    part.train()
    with pytest.raises(ModelError, match=r"^model: 1 is in train mode.*call model.eval\(\) first"):
        check_classifier(model, torch.rand(2, 4))


def test_parts_of_several_networks_are_counted_as_their_share():
    """Half a network four times is two of it; what is less than a row is not lost."""
    halves, other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 2)
    counter, x = PassCounter(), torch.rand(3, 4, requires_grad=True)
    with count_all_calls({"halves": halves, "other": other}, counter):
        for part in (*halves, *halves):
            part(x).sum().backward()
        other(halves(x.detach()))
    assert (counter.forward, counter.backward) == (4 * 3 // 2 + 3 + 3, 4 * 3 // 2)
    other(x)
    assert counter.forward == 12
