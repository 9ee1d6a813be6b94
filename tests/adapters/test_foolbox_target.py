import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

pytest.importorskip("eagerpy", reason="Foolbox is not installed")
from robust_ext.adapters.foolbox.target import LowLogits, NeverFlat

LOGIT = st.floats(-1e4, 1e4, width=32)


@settings(deadline=None)
@given(st.lists(st.tuples(LOGIT, LOGIT, LOGIT), min_size=1, max_size=5))
def test_low_logits_are_shifted_only_where_they_must_be(rows):
    logits = torch.tensor(rows)
    low = LowLogits(nn.Identity())(logits)
    high = logits.amax(1) > 80
    assert torch.equal(low[~high], logits[~high])
    assert bool((low.amax(1) <= 80.01).all())
    assert bool(torch.isfinite(low.exp().sum(1)).all())
    torch.testing.assert_close(low - low[:, :1], logits - logits[:, :1], rtol=1e-4, atol=1e-2)


class Scaled(nn.Module):
    def __init__(self, factors):
        super().__init__()
        self.factors = torch.tensor(factors)

    def forward(self, x):
        return x * self.factors[:, None]


@settings(deadline=None)
@given(st.lists(st.sampled_from([0.0, 1e-30, 1e-15, 1e-8, 1.0, 1e5]), min_size=1, max_size=6), st.sampled_from([2, 4]))
def test_gradients_are_changed_only_where_they_have_vanished(factors, power):
    x = torch.ones(len(factors), 3, requires_grad=True)
    module = Scaled(factors)
    out = NeverFlat(module, power=power)(x)
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
