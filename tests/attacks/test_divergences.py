"""What MEAD's attacks maximise: closed forms, gradients, and nothing that is no number."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from robust_ext.attacks._common.objectives import DIVERGENCES, find_divergence, fisher_rao, gini, kl
from robust_ext.core.errors import InvalidArgumentError

NAMES = list(DIVERGENCES)


def logits_of(*rows: list[float]) -> Tensor:
    """Any logits with these probabilities; what is added to a row changes nothing."""
    return torch.tensor(rows, dtype=torch.float64).log() + 3.0


def test_values_where_they_are_known() -> None:
    natural, adversarial = logits_of([0.5, 0.5], [0.2, 0.8]), logits_of([0.25, 0.75], [0.2, 0.8])
    labels = torch.tensor([0, 1])
    expected = {
        "ace": [math.log(4), -math.log(0.8)],
        "kl": [0.5 * math.log(2) + 0.5 * math.log(2 / 3), 0],
        "gini": [1 - math.sqrt(0.625), 1 - math.sqrt(0.68)],
        "fisher-rao": [2 * math.acos(math.sqrt(0.125) + math.sqrt(0.375)), 0],
    }
    assert set(expected) == set(DIVERGENCES)
    for name, values in expected.items():
        np.testing.assert_allclose(DIVERGENCES[name].value(adversarial, natural, labels), values, atol=1e-12)


@given(
    p=st.lists(st.floats(1e-3, 1), min_size=2, max_size=6),
    q=st.lists(st.floats(1e-3, 1), min_size=6, max_size=6),
)
def test_values_are_those_of_the_paper(p: list[float], q: list[float]) -> None:
    of_p, of_q = (np.array(one[: len(p)]) / sum(one[: len(p)]) for one in (p, q))
    natural, adversarial = logits_of(list(of_p)), logits_of(list(of_q))
    found = [float(kl(adversarial, natural)), float(gini(adversarial)), float(fisher_rao(adversarial, natural))]
    # The cosine loses half of the digits near 1: an error of 1e-15 is one of 4e-8 in the angle.
    cosine = min(float(np.sqrt(of_p * of_q).sum()), 1.0)
    paper = [float((of_p * np.log(of_p / of_q)).sum()), 1 - float(np.linalg.norm(of_q)), 2 * math.acos(cosine)]
    np.testing.assert_allclose(found, paper, rtol=1e-9, atol=2e-7)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(20, 4, generator=generator, dtype=torch.float64) * 3
    natural = torch.randn(20, 4, generator=generator, dtype=torch.float64) * 3
    labels = torch.arange(20) % 4
    assert torch.autograd.gradcheck(  # type: ignore[no-untyped-call]
        lambda z: DIVERGENCES[name].value(z, natural, labels), logits.requires_grad_(True)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e3, 1e6])
@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_no_number(name: str, scale: float, dtype: torch.dtype) -> None:
    """10,000 rows far apart, equal and nearly equal, whose probabilities underflow at the larger scales."""
    generator = torch.Generator().manual_seed(1)
    natural = (torch.randn(10_000, 5, generator=generator) * scale).to(dtype)
    labels = torch.randint(0, 5, (10_000,), generator=generator)
    apart = (torch.randn(10_000, 5, generator=generator) * scale).to(dtype)
    for points in (apart, natural, natural * (1 + 2e-7), natural + 1e-6):
        logits = points.clone().requires_grad_(True)
        value = DIVERGENCES[name].value(logits, natural, labels)
        (gradient,) = torch.autograd.grad(value.sum(), logits)
        assert bool(value.isfinite().all())
        assert bool(gradient.isfinite().all())
        assert float(value.detach().min()) > -1e-5
        if name == "fisher-rao":
            assert float(value.detach().max()) <= math.pi + 1e-5


def test_the_arccos_and_the_root_would_not_do() -> None:
    """What the chord is for: the formula as it is written fails on the same rows."""
    natural = torch.randn(1000, 5, generator=torch.Generator().manual_seed(1)) * 1000
    logits = (natural * (1 + 2e-7)).requires_grad_(True)
    written = 2 * (logits.softmax(1) * natural.softmax(1)).sqrt().sum(1).arccos()
    (gradient,) = torch.autograd.grad(written.sum(), logits)
    assert bool(gradient.isnan().any(1).float().mean() > 0.3)


@pytest.mark.parametrize("distance", [1e-3, 1e-6, 1e-9])
def test_fisher_rao_is_exact_for_near_distributions(distance: float) -> None:
    """Nearby it is the length in Fisher's metric, ``(sum dp^2 / p)^.5``, of which the cosine keeps no digit."""
    p = torch.tensor([[0.1, 0.2, 0.7]], dtype=torch.float64)
    # For logits z + d: dp = p (d - p.d), so the length is the standard deviation of d under p.
    step = torch.tensor([[1.0, -2.0, 0.5]], dtype=torch.float64) * distance
    length = float(((p * step.square()).sum() - (p * step).sum().square()).sqrt())
    found = float(fisher_rao(p.log() + step, p.log()))
    assert found == pytest.approx(length, rel=max(distance, 1e-6))


@settings(deadline=None)
@given(scale=st.floats(1e-3, 30), seed=st.integers(0, 1000), distance=st.floats(1e-5, 10))
def test_fisher_rao_has_a_gradient_of_bounded_length(scale: float, seed: int, distance: float) -> None:
    """The distance of two distributions cannot grow faster than the logits move."""
    generator = torch.Generator().manual_seed(seed)
    natural = torch.randn(1, 4, generator=generator, dtype=torch.float64) * scale
    moved = natural + torch.randn(1, 4, generator=generator, dtype=torch.float64) * distance
    logits = moved.requires_grad_(True)
    (gradient,) = torch.autograd.grad(fisher_rao(logits, natural).sum(), logits)
    assert float(gradient.norm()) <= 1 + 1e-6


def test_comparisons_have_no_gradient_at_the_input_and_the_others_do() -> None:
    natural = torch.randn(50, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for objective in DIVERGENCES.values():
        logits = natural.clone().requires_grad_(True)
        (gradient,) = torch.autograd.grad(objective.value(logits, natural, torch.zeros(50).long()).sum(), logits)
        length = gradient.norm(dim=1)
        assert float(length.max()) < 1e-12 if objective.compares else float(length.min()) > 1e-3


@pytest.mark.parametrize("gap", [1.0, 20.0, 60.0])
def test_gini_keeps_its_gradient_where_the_largest_probability_rounds_to_one(gap: float) -> None:
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


@pytest.mark.parametrize("loss", [kl, fisher_rao])
def test_comparisons_grow_with_the_distance(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    natural = torch.tensor([[2.0, 0.0]])
    moved = natural + torch.tensor([[0.0, 1.0]]) * torch.linspace(0, 8, 9)[:, None]
    assert bool((loss(moved, natural.expand(9, 2)).diff() > 0).all())


def test_unknown_names_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="objective: got 'ce'"):
        find_divergence("ce")
