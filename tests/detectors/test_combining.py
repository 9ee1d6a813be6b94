"""Ranks against scipy and exact fractions, the mixture against Blahut-Arimoto, brute force and quadrature."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.optimize import minimize_scalar
from scipy.special import expit, logit, rel_entr
from scipy.stats import percentileofscore
from sklearn.metrics import roc_auc_score

from robust_ext.detectors.combining import METHODS, combine, combine_ranks, ranks_among

SCORES = st.one_of(st.integers(-5, 5).map(float), st.floats(-1e6, 1e6, width=32))
PROBABILITIES = st.one_of(st.floats(0, 1), st.sampled_from([0.0, 1.0, 0.5, 1e-12, 1 - 1e-12, 1e-300]))


def ranks(scores, clean):
    """With one detector, all ways to combine keep its ranks."""
    return combine(np.asarray(scores, dtype=np.float64)[None], [clean], method="max")


def mixture(*numbers):
    return float(combine_ranks(torch.tensor(numbers, dtype=torch.float64), method="mixture"))


def divergence(p, q):
    """KL of two Bernoulli distributions, in nats."""
    p, q = np.asarray(p, dtype=np.float64), np.asarray(q, dtype=np.float64)
    return rel_entr(p, q) + rel_entr(1 - p, 1 - q)


def blahut_arimoto(numbers, steps):
    """The output probability, and a lower and an upper bound of the capacity."""
    weights = np.full(len(numbers), 1 / len(numbers))
    for _ in range(steps):
        apart = divergence(numbers, weights @ numbers)
        weights = weights * np.exp(apart - apart.max())
        weights /= weights.sum()
    apart = divergence(numbers, weights @ numbers)
    return float(weights @ numbers), float(weights @ apart), float(apart.max())


@settings(max_examples=150, deadline=None)
@given(st.lists(SCORES, min_size=1, max_size=12))
def test_ranks_of_clean_scores_are_their_mid_ranks(clean):
    expected = [percentileofscore(clean, one, kind="mean") / 100 for one in clean]
    np.testing.assert_allclose(ranks(clean, clean), expected, atol=1e-12)


@settings(max_examples=150, deadline=None)
@given(st.lists(SCORES, min_size=2, max_size=12, unique=True), st.lists(SCORES, max_size=8))
def test_ranks_between_clean_scores_are_interpolated(clean, scores):
    knots = np.sort(clean)
    shares = (np.arange(len(clean)) + 0.5) / len(clean)
    found = ranks(scores, clean)
    assert found.dtype == np.float64
    # Beyond the ends np.interp is flat.
    away = np.array(scores) - np.clip(scores, knots[0], knots[-1])
    tails = np.sign(away) * shares[0] * (1 - 1 / (1 + abs(away) / (knots[-1] - knots[0])))
    np.testing.assert_allclose(found, np.interp(scores, knots, shares) + tails, rtol=0, atol=1e-12)


def test_infinite_scores_have_places():
    inf = math.inf
    assert ranks([-inf, inf, math.nan], [3.0, 4.0])[:2].tolist() == [0, 1]
    assert np.isnan(ranks([math.nan], [3.0])).all()
    # Half of the shares of equal ones, as for any tie; one clean score alone has the unit 1.
    clean = [-inf, -inf, 2.0, inf]
    np.testing.assert_allclose(ranks([-inf, 2.0, inf], clean), [1 / 4, 5 / 8, 7 / 8])
    np.testing.assert_allclose(ranks([3.0, 1.0], clean), [5 / 8 + 1 / 16, 5 / 8 - 1 / 16])
    assert ranks([[]], [1.0]).shape == (1, 0)
    assert float(ranks(1.0, [1, 1, 1])) == 0.5


@settings(max_examples=200, deadline=None)
@given(st.lists(SCORES, min_size=1, max_size=10), st.lists(st.integers(-3000, 3000), min_size=2, max_size=30))
def test_ranks_grow_strictly(clean, steps):
    clean = [float(round(one)) % 50 for one in clean]
    scores = np.unique(np.array(steps) / 16)
    found = ranks(scores, clean)
    assert (np.diff(found) > 0).all()
    assert ((found > 0) & (found < 1)).all()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.booleans(), st.sampled_from(METHODS))
def test_one_detector_keeps_its_auroc(seed, ties, method):
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=80) * 10 + np.repeat([0, 8], 40)
    scores = scores.round() if ties else scores
    labels = np.repeat([0, 1], 40)
    found = combine(scores[None], [rng.normal(size=30) * 10], method=method)
    assert roc_auc_score(labels, found) == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)


@settings(max_examples=300, deadline=None)
@given(st.lists(PROBABILITIES, min_size=1, max_size=5))
@example([0.0, 1.0])
@example([0.0, 0.0])
@example([1.0, 1.0])
@example([0.3, 0.3 + 1e-15])
@example([0.0, 5e-324])
def test_the_mixture_minimises_the_largest_divergence(numbers):
    found = mixture(*numbers)
    low, high = min(numbers), max(numbers)
    assert low - 1e-14 <= found <= high + 1e-14
    if high - low < 1e-6:
        return
    regret = divergence(numbers, found).max()
    other = minimize_scalar(
        lambda q: divergence(numbers, q).max(), bounds=(low, high), method="bounded", options={"xatol": 1e-13}
    )
    # Golden sections stop at the square root of the precision; what they find cannot be lower.
    grid = divergence(np.array(numbers)[:, None], np.linspace(low, high, 2001)[None, 1:-1]).max(0)
    assert regret <= min(other.fun, grid.min()) * (1 + 1e-9) + 1e-12
    assert other.x == pytest.approx(found, abs=2e-6)
    assert divergence(low, found) == pytest.approx(divergence(high, found), rel=1e-6, abs=1e-11)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0.001, 0.999), min_size=2, max_size=5))
def test_the_mixture_is_that_of_blahut_and_arimoto(numbers):
    assume(max(numbers) - min(numbers) > 0.05)
    output, least, most = blahut_arimoto(np.array(numbers), 2000)
    regret = divergence(numbers, mixture(*numbers)).max()
    assert least - 1e-12 <= regret <= most + 1e-12
    # Pinsker's inequality, and that an output q falls short of the best one, p, by KL(p || q) at least.
    assert abs(mixture(*numbers) - output) <= math.sqrt(max(most - least, 0) / 2) + 1e-7
    if max(numbers) - min(numbers) > 0.4 and len(numbers) == 2:
        assert mixture(*numbers) == pytest.approx(output, abs=1e-9)


@pytest.mark.parametrize(
    ("low", "high"), [(0.1, 0.9), (0.2, 0.20001), (0.05, 0.051), (1e-6, 0.3), (0.7, 0.999999), (0.4, 0.4001)]
)
def test_the_mixture_is_the_mean_of_the_logit(low, high):
    mean = quad(logit, low, high, epsabs=1e-11 * (high - low), epsrel=1e-11)[0] / (high - low)
    assert mixture(low, high) == pytest.approx(float(expit(mean)), rel=1e-10)


def test_mixtures_of_known_channels():
    # Noiseless, symmetric, and the Z-channel of crossover 1/2, whose best input is 1 in two cases of five.
    assert [mixture(*ends) for ends in ((0, 1), (0, 0), (1, 1))] == [0.5, 0, 1]
    assert [mixture(0, 0.5), mixture(0.5, 1)] == pytest.approx([0.2, 0.8], abs=1e-14)
    assert [mixture(0.2, 0.8), mixture(0.3), mixture(0.3, 0.3)] == pytest.approx([0.5, 0.3, 0.3], abs=1e-15)
    assert mixture(0.3) == mixture(0.3, 0.3)
    # Near a common value it is the middle, also where rounding would swallow the formula.
    for gap in (1e-15, 1e-12, 1e-9, 1e-6, 3e-5, 1e-4):
        assert mixture(0.25, 0.25 + gap) - 0.25 == pytest.approx(gap / 2, rel=2e-4, abs=1e-16)


@pytest.mark.parametrize("method", METHODS)
def test_combining_row_by_row(method):
    rng = np.random.default_rng(3)
    scores = rng.normal(size=(3, 4, 5)) * 2
    clean = [rng.normal(size=20), rng.normal(size=7), rng.normal(size=1)]
    found = combine(scores, clean, method=method)
    assert found.shape == (4, 5)
    assert found.dtype == np.float64
    own = np.stack([ranks(row, one) for row, one in zip(scores, clean, strict=True)])
    by_hand = {"mean": np.mean, "max": np.max, "mixture": lambda q, axis: np.apply_along_axis(_best, axis, q)}
    np.testing.assert_allclose(found, by_hand[method](own, axis=0), atol=6e-6)
    turned = combine(scores[::-1], clean[::-1], method=method)
    np.testing.assert_allclose(turned, found, rtol=0, atol=1e-15)
    holed = scores.copy()
    holed[1, 2, 3] = np.nan
    assert np.argwhere(np.isnan(combine(holed, clean, method=method))).tolist() == [[2, 3]]
    assert combine(np.empty((2, 0)), clean[:2], method=method).shape == (0,)
    assert np.isfinite(combine([[np.inf], [-np.inf]], clean[:2], method=method)).all()


def _best(numbers):
    grid = np.linspace(numbers.min(), numbers.max(), 200001)
    low, high = divergence(numbers.min(), grid), divergence(numbers.max(), grid)
    return float(grid[np.maximum(low, high).argmin()])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=2, max_size=5), st.integers(0, 4), st.floats(0, 1), st.sampled_from(METHODS))
def test_a_higher_number_never_lowers_the_result(numbers, place, by, method):
    place %= len(numbers)
    both = torch.tensor([numbers, numbers], dtype=torch.float64).T
    both[place, 1] += by * (1 - both[place, 1])
    before, after = combine_ranks(both, method=method).tolist()
    assert after >= before - 1e-15


def test_gradients_are_those_of_finite_differences():
    generator = torch.Generator().manual_seed(0)
    numbers = torch.rand(3, 6, dtype=torch.float64, generator=generator, requires_grad=True)
    for method in METHODS:
        assert torch.autograd.gradcheck(lambda x, method=method: combine_ranks(x, method=method), numbers)
    clean = torch.randn(15, dtype=torch.float64, generator=generator).sort().values
    scores = (torch.randn(40, dtype=torch.float64, generator=generator) * 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: ranks_among(x, clean), scores)


@pytest.mark.parametrize("numbers", [(0.0, 1.0), (0.0, 0.0), (1.0, 1.0), (0.0, 0.5), (0.3, 0.3), (0.4, 1.0)])
def test_gradients_at_the_ends_are_finite(numbers):
    values = torch.tensor(numbers, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(combine_ranks(values, method="mixture"), values)
    assert bool(torch.isfinite(gradient).all())
    assert bool((gradient >= 0).all())
    if numbers[0] == numbers[1]:
        assert gradient.tolist() == pytest.approx([0.5, 0.5], abs=1e-12)
    # At the ends it is that of the line between, and one unit beyond a quarter of 1 / 2n.
    scores = torch.tensor([1.0, 1.5, 2.0, 3.0], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(ranks_among(scores, torch.tensor([1.0, 2.0]).double()).sum(), scores)
    assert gradient.tolist() == [0.5, 0.5, 0.5, 0.0625]
    scores = torch.tensor([-math.inf, 1.0, 2.0, 5.0, math.inf], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(ranks_among(scores, torch.tensor([1.0, 1.0, 2.0]).double()).sum(), scores)
    assert bool(torch.isfinite(gradient).all())
