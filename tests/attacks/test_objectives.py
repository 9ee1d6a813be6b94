"""Losses against the formulas in numpy, loops and finite differences."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import logsumexp

from robust_ext.attacks._common.objectives import DIVERGENCES, OBJECTIVES, cross_entropy, fisher_rao, gini
from robust_ext.core.criteria import AIMED, MISCLASSIFICATION


def problem(seed, rows=6, classes=5, scale=3.0):
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(rows, classes, generator=generator, dtype=torch.float64)
    return logits, torch.randint(classes, (rows,), generator=generator)


def by_loop(name, z, y, t=-1):
    others = np.delete(z, y)
    top = np.sort(z)[::-1]
    if name == "ce":
        return float(logsumexp(z) - z[y])
    if name == "dlr":
        return float((others.max() - z[y]) / (top[0] - top[2]))
    aim = others.max() if t < 0 else z[t]
    if name.endswith("margin"):
        return float(aim - z[y])
    return float((aim - z[y]) / (top[0] - 0.5 * (top[2] + top[3])))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31), classes=st.integers(4, 12), scale=st.sampled_from([1e-3, 1.0, 50.0]))
@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_values_are_those_of_the_formulas(name, seed, classes, scale):
    logits, labels = problem(seed, classes=classes, scale=scale)
    expected = [by_loop(name, z, int(y)) for z, y in zip(logits.numpy(), labels, strict=True)]
    objective = OBJECTIVES[name]
    np.testing.assert_allclose(objective.loss(logits, labels).numpy(), expected, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(
        objective.of_kind(AIMED)(logits, labels).numpy(), -np.array(expected), rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize("name", [*OBJECTIVES, *DIVERGENCES])
@pytest.mark.parametrize("targeted", [False, True])
def test_gradients_are_those_of_finite_differences(name, targeted):
    logits, labels = problem(5, rows=12)
    natural, _ = problem(6, rows=12)

    def loss(z):
        if name in DIVERGENCES:
            return DIVERGENCES[name].value(z, natural, labels)
        return OBJECTIVES[name].of_kind(AIMED if targeted else MISCLASSIFICATION)(z, labels)

    assert torch.autograd.gradcheck(loss, logits.requires_grad_(True))


@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_equal_logits_give_finite_values_and_gradients(name):
    logits = torch.zeros(2, 5, requires_grad=True)
    value = OBJECTIVES[name].loss(logits, torch.tensor([0, 1]))
    (gradient,) = torch.autograd.grad(value.sum(), logits)
    assert bool(torch.isfinite(value).all())
    assert bool(torch.isfinite(gradient).all())


def test_minimum_classes_are_the_fewest_that_work():
    for name, objective in OBJECTIVES.items():
        labels = torch.tensor([0])
        assert objective.loss(torch.randn(1, objective.minimum_classes), labels).shape == (1,)
        if objective.minimum_classes > 2:
            with pytest.raises(RuntimeError):
                objective.loss(torch.randn(1, objective.minimum_classes - 1), labels)
        assert objective.minimum_classes == {"dlr": 3, "targeted-dlr": 4}.get(name, 2)


# ---- Those of MEAD.


def logits_of(*rows):
    """Any logits with these probabilities; what is added to a row changes nothing."""
    return torch.tensor(rows, dtype=torch.float64).log() + 3.0


@given(p=st.lists(st.floats(1e-3, 1), min_size=2, max_size=6), q=st.lists(st.floats(1e-3, 1), min_size=6, max_size=6))
def test_values_are_those_of_the_paper(p, q):
    of_p, of_q = (np.array(one[: len(p)]) / sum(one[: len(p)]) for one in (p, q))
    natural, adversarial = logits_of(list(of_p)), logits_of(list(of_q))
    names, labels = ("kl", "gini", "fisher-rao"), torch.zeros(1, dtype=torch.int64)
    found = [float(DIVERGENCES[name].value(adversarial, natural, labels)) for name in names]
    assert torch.equal(DIVERGENCES["ace"].value(adversarial, natural, labels), cross_entropy(adversarial, labels))
    # The cosine loses half of the digits near 1: an error of 1e-15 is one of 4e-8 in the angle.
    cosine = min(float(np.sqrt(of_p * of_q).sum()), 1.0)
    paper = [float((of_p * np.log(of_p / of_q)).sum()), 1 - float(np.linalg.norm(of_q)), 2 * math.acos(cosine)]
    np.testing.assert_allclose(found, paper, rtol=1e-9, atol=2e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e3, 1e6])
@pytest.mark.parametrize("name", list(DIVERGENCES))
def test_nothing_is_no_number(name, scale, dtype):
    """10,000 rows far apart, equal and nearly equal, whose probabilities underflow at the larger scales."""
    natural, labels = problem(1, rows=10_000, scale=scale)
    natural, apart = natural.to(dtype), problem(2, rows=10_000, scale=scale)[0].to(dtype)
    for points in (apart, natural, natural * (1 + 2e-7), natural + 1e-6):
        logits = points.clone().requires_grad_(True)
        value = DIVERGENCES[name].value(logits, natural, labels)
        (gradient,) = torch.autograd.grad(value.sum(), logits)
        assert bool(value.isfinite().all())
        assert bool(gradient.isfinite().all())
        assert float(value.detach().min()) > -1e-5
        if name == "fisher-rao":
            assert float(value.detach().max()) <= math.pi + 1e-5


@pytest.mark.parametrize("distance", [1e-3, 1e-6, 1e-9])
def test_fisher_rao_is_exact_for_near_distributions(distance):
    """Nearby it is the length in Fisher's metric, ``(sum dp^2 / p)^.5``, of which the cosine keeps no digit."""
    p = torch.tensor([[0.1, 0.2, 0.7]], dtype=torch.float64)
    # For logits z + d: dp = p (d - p.d), so the length is the standard deviation of d under p.
    step = torch.tensor([[1.0, -2.0, 0.5]], dtype=torch.float64) * distance
    length = float(((p * step.square()).sum() - (p * step).sum().square()).sqrt())
    found = float(fisher_rao(p.log() + step, p.log()))
    assert found == pytest.approx(length, rel=max(distance, 1e-6))


@given(scale=st.floats(1e-3, 30), seed=st.integers(0, 1000), distance=st.floats(1e-5, 10))
def test_fisher_rao_has_a_gradient_of_bounded_length(scale, seed, distance):
    """The distance of two distributions cannot grow faster than the logits move."""
    natural, _ = problem(seed, 1, 4, scale)
    logits = (natural + problem(seed + 1, 1, 4, distance)[0]).requires_grad_(True)
    (gradient,) = torch.autograd.grad(fisher_rao(logits, natural).sum(), logits)
    assert float(gradient.norm()) <= 1 + 1e-6


def test_comparisons_have_no_gradient_at_the_input_and_the_others_do():
    natural, _ = problem(2, rows=50, scale=1)
    for objective in DIVERGENCES.values():
        logits = natural.clone().requires_grad_(True)
        (gradient,) = torch.autograd.grad(objective.value(logits, natural, torch.zeros(50).long()).sum(), logits)
        length = gradient.norm(dim=1)
        assert float(length.max()) < 1e-12 if objective.compares else float(length.min()) > 1e-3


@pytest.mark.parametrize("gap", [1.0, 20.0, 60.0])
def test_gini_keeps_its_gradient_where_the_largest_probability_rounds_to_one(gap):
    values, gradients = [], []
    for dtype in (torch.float32, torch.float64):
        logits = torch.tensor([[gap, 0.0, -1.0]], dtype=dtype, requires_grad=True)
        value = gini(logits)
        values.append(float(value.detach()))
        gradients.append(torch.autograd.grad(value.sum(), logits)[0].double().numpy())
    # In float64, to first order where the norm itself is lost: 1 - ||q|| = sum of the other probabilities.
    assert values[0] == pytest.approx(values[1], rel=1e-4)
    if gap >= 20:
        assert values[1] == pytest.approx(math.exp(-gap) + math.exp(-gap - 1), rel=1e-4)
    np.testing.assert_allclose(gradients[0], gradients[1], rtol=1e-4)
    assert abs(gradients[0][0, 0]) > 0
