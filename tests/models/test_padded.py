import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.models.normalized import PaddedClasses

SCALES = st.sampled_from([1e-6, 1e-3, 1.0, 30.0, 1e3, 1e6, 1e9])


def logits(seed, scale, shift=0.0):
    return torch.randn(5, 2, generator=torch.Generator().manual_seed(seed)) * scale + shift


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), SCALES, st.sampled_from([0.0, -1e3, 1e5]), st.integers(2, 12))
def test_added_classes_never_win(seed, scale, shift, classes):
    z = logits(seed, scale, shift)
    padded = PaddedClasses(nn.Identity(), classes=classes)(z)
    assert padded.shape == (5, classes)
    assert torch.equal(padded[:, :2], z)
    assert torch.equal(padded.argmax(1), z.argmax(1))
    if classes > 2:
        assert bool((padded[:, 2:].amax(1) <= z.amin(1) - 100).all())


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), SCALES, st.integers(3, 12))
def test_cross_entropy_and_its_gradient_are_the_same_to_the_last_bit(seed, scale, classes):
    z = logits(seed, scale)
    y = torch.tensor([0, 1, 0, 1, 0])

    def value_and_gradient(module):
        x = z.clone().requires_grad_()
        loss = nn.functional.cross_entropy(module(x), y, reduction="none")
        return loss.detach(), torch.autograd.grad(loss.sum(), x)[0]

    plain, padded = value_and_gradient(nn.Identity()), value_and_gradient(PaddedClasses(nn.Identity(), classes=classes))
    assert torch.equal(plain[0], padded[0])
    assert torch.equal(plain[1], padded[1])


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1e-2, 1.0, 30.0]))
def test_the_dlr_of_two_classes_rises_with_the_margin(seed, scale):
    z = logits(seed, scale).double().requires_grad_()
    padded = PaddedClasses(nn.Identity(), classes=3)(z)
    ordered = padded.sort(1, descending=True).values
    dlr = -(padded[:, 0] - padded[:, 1]) / (ordered[:, 0] - ordered[:, 2])
    margin = z[:, 1] - z[:, 0]
    below = 110 + z.detach().abs().amax(1) / 1000
    torch.testing.assert_close(dlr, margin / (margin.abs() + below))
    (gradient,) = torch.autograd.grad(dlr.sum(), z)
    # Up for the other class, down for the true one, by the same amount: the direction of the margin's gradient.
    assert bool((gradient[:, 1] > 0).all())
    torch.testing.assert_close(gradient[:, 0], -gradient[:, 1])


def test_enough_classes_are_left_alone():
    z = torch.randn(3, 4)
    assert PaddedClasses(nn.Identity(), classes=3)(z) is z
    assert PaddedClasses(nn.Identity(), classes=4)(torch.empty(0, 2)).shape == (0, 4)
    with pytest.raises(InvalidArgumentError, match="classes: got 1"):
        PaddedClasses(nn.Identity(), classes=1)
