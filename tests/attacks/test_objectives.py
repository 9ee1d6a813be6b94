"""Losses against numpy, loops, finite differences and the libraries that have them too."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import logsumexp
from torch import Tensor

from robust_ext.attacks._common.objectives import OBJECTIVES, aimed_dlr, cross_entropy, dlr, margin


def problem(seed: int, rows: int = 6, classes: int = 5, scale: float = 3.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(rows, classes, generator=generator, dtype=torch.float64)
    return logits, torch.randint(classes, (rows,), generator=generator)


def by_loop(name: str, z: np.ndarray, y: int, t: int = -1) -> float:
    others = np.delete(z, y)
    top = np.sort(z)[::-1]
    if name == "ce":
        return float(logsumexp(z) - z[y])
    if name == "margin":
        return float(others.max() - z[y])
    if name == "dlr":
        return float((others.max() - z[y]) / (top[0] - top[2]))
    aim = others.max() if t < 0 else z[t]
    return float((aim - z[y]) / (top[0] - 0.5 * (top[2] + top[3])))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31), classes=st.integers(4, 12), scale=st.sampled_from([1e-3, 1.0, 50.0]))
@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_values_are_those_of_the_formulas(name: str, seed: int, classes: int, scale: float) -> None:
    logits, labels = problem(seed, classes=classes, scale=scale)
    expected = [by_loop(name, z, int(y)) for z, y in zip(logits.numpy(), labels, strict=True)]
    objective = OBJECTIVES[name]
    np.testing.assert_allclose(objective.untargeted(logits, labels).numpy(), expected, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(objective.targeted(logits, labels).numpy(), -np.array(expected), rtol=1e-9, atol=1e-12)


def test_numbers_by_hand() -> None:
    logits = torch.tensor([[4.0, 3.0, 1.0, 0.0]])
    first, second = torch.tensor([0]), torch.tensor([1])
    assert float(margin(logits, first)) == -1
    assert float(margin(logits, second)) == 1
    assert float(dlr(logits, first)) == pytest.approx(-1 / 3)
    assert float(dlr(logits, second)) == pytest.approx(1 / 3)
    assert float(aimed_dlr(logits, first, torch.tensor([3]))) == pytest.approx(-4 / 3.5)
    assert float(cross_entropy(torch.zeros(1, 4), first)) == pytest.approx(np.log(4))


@pytest.mark.parametrize("name", ["margin", "dlr", "targeted-dlr"])
def test_signs_are_decisions(name: str) -> None:
    logits, labels = problem(3, rows=500)
    wrong = logits.argmax(1) != labels
    assert 0 < int(wrong.sum()) < 500
    assert torch.equal(OBJECTIVES[name].untargeted(logits, labels) > 0, wrong)
    assert torch.equal(OBJECTIVES[name].targeted(logits, labels) > 0, ~wrong)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**31), shift=st.floats(-100, 100), scale=st.floats(0.01, 1000))
def test_dlr_is_invariant_to_shift_and_scale(seed: int, shift: float, scale: float) -> None:
    logits, labels = problem(seed)
    classes = (labels + 1) % 5
    torch.testing.assert_close(dlr(logits * scale + shift, labels), dlr(logits, labels), rtol=1e-6, atol=1e-6)
    moved = aimed_dlr(logits * scale + shift, labels, classes)
    torch.testing.assert_close(moved, aimed_dlr(logits, labels, classes), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", list(OBJECTIVES))
@pytest.mark.parametrize("targeted", [False, True])
def test_gradients_are_those_of_finite_differences(name: str, targeted: bool) -> None:
    logits, labels = problem(5)
    loss = OBJECTIVES[name].of_kind(targeted=targeted)
    assert torch.autograd.gradcheck(lambda z: loss(z, labels), logits.requires_grad_(True))


@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_equal_logits_give_finite_values_and_gradients(name: str) -> None:
    logits = torch.zeros(2, 5, requires_grad=True)
    value = OBJECTIVES[name].untargeted(logits, torch.tensor([0, 1]))
    (gradient,) = torch.autograd.grad(value.sum(), logits)
    assert bool(torch.isfinite(value).all())
    assert bool(torch.isfinite(gradient).all())


def test_dlr_is_that_of_torchattacks() -> None:
    torchattacks = pytest.importorskip("torchattacks")
    logits, labels = problem(7, rows=200)
    model = torch.nn.Linear(1, 1)
    torch.testing.assert_close(torchattacks.APGD(model).dlr_loss(logits, labels), dlr(logits, labels))
    classes = (labels + 2) % 5
    theirs = torchattacks.APGDT(model, n_classes=5).dlr_loss_targeted(logits, labels, classes)
    torch.testing.assert_close(theirs, aimed_dlr(logits, labels, classes))


def test_minimum_classes_are_the_fewest_that_work() -> None:
    for name, objective in OBJECTIVES.items():
        labels = torch.tensor([0])
        assert objective.untargeted(torch.randn(1, objective.minimum_classes), labels).shape == (1,)
        if objective.minimum_classes > 2:
            with pytest.raises(RuntimeError):
                objective.untargeted(torch.randn(1, objective.minimum_classes - 1), labels)
        assert objective.minimum_classes == {"ce": 2, "margin": 2, "dlr": 3, "targeted-dlr": 4}[name]
