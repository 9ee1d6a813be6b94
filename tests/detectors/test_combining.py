"""Several detectors as one: ranks against scipy, the mixture against minimisation and quadrature, the detector."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from scipy.special import rel_entr
from scipy.stats import percentileofscore

from robust_ext.core.errors import ModelError
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.detectors import Detector, FeatureSqueezingDetector, MagNetDetector, ScoreDetector
from robust_ext.detectors.combined import CombinedDetector
from robust_ext.detectors.combining import METHODS, combine, combine_ranks, ranks_among
from robust_ext.evaluations.detectors import detector_digest
from tests.detectors import cases
from tests.detectors.cases import flat as network

SCORES = st.one_of(st.integers(-5, 5).map(float), st.floats(-1e6, 1e6, width=32))
PROBABILITIES = st.one_of(st.floats(0, 1), st.sampled_from([0.0, 1.0, 0.5, 1e-12, 1 - 1e-12, 1e-300]))
EACH_METHOD = pytest.mark.parametrize("method", METHODS)


def ranks(scores, clean):
    """With one detector, all ways to combine keep its ranks."""
    return combine(np.asarray(scores, dtype=np.float64)[None], [clean], method="max")


def mixture(*numbers):
    return float(combine_ranks(torch.tensor(numbers, dtype=torch.float64), method="mixture"))


def divergence(p, q):
    """KL of two Bernoulli distributions, in nats."""
    p, q = np.asarray(p, dtype=np.float64), np.asarray(q, dtype=np.float64)
    return rel_entr(p, q) + rel_entr(1 - p, 1 - q)


@settings(max_examples=200)
@given(st.lists(SCORES, min_size=1, max_size=12), st.lists(SCORES, max_size=12))
def test_ranks_are_mid_ranks_and_interpolated_between_clean_scores_and_fall_off_beyond(clean, scores):
    knots = np.unique(clean)
    shares = percentileofscore(clean, knots, kind="mean") / 100
    scores = np.array([*knots, *scores])
    found = ranks(scores, clean)
    assert found.dtype == np.float64
    # Beyond the ends np.interp is flat.
    away = (scores - np.clip(scores, knots[0], knots[-1])) / (np.ptp(knots) or 1)
    tails = np.where(away < 0, -shares[0], 1 - shares[-1]) * (1 - 1 / (1 + abs(away)))
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


@settings(max_examples=300)
@given(st.lists(PROBABILITIES, min_size=1, max_size=5))
@example([0.0, 1.0])
@example([0.0, 0.0])
@example([1.0, 1.0])
@example([0.3, 0.3 + 1e-15])
@example([0.0, 5e-324])
def test_the_mixture_minimises_the_largest_divergence(numbers):
    found, low, high = mixture(*numbers), min(numbers), max(numbers)
    assert low - 1e-14 <= found <= high + 1e-14
    if high - low < 1e-6:
        return
    limits = {"bounds": (low, high), "method": "bounded", "options": {"xatol": 1e-13}}
    other = minimize_scalar(lambda q: divergence(numbers, q).max(), **limits)
    # Golden sections stop at the square root of the precision; what they find cannot be lower.
    grid = divergence(np.array(numbers)[:, None], np.linspace(low, high, 2001)[None, 1:-1]).max(0)
    assert divergence(numbers, found).max() <= min(other.fun, grid.min()) * (1 + 1e-9) + 1e-12
    assert other.x == pytest.approx(found, abs=2e-6)
    assert divergence(low, found) == pytest.approx(divergence(high, found), rel=1e-6, abs=1e-11)


def test_the_mixture_of_nearly_equal_numbers_is_the_middle():
    # Also where rounding would swallow the formula.
    for gap in (1e-15, 1e-12, 1e-9, 1e-6, 3e-5, 1e-4):
        assert mixture(0.25, 0.25 + gap) - 0.25 == pytest.approx(gap / 2, rel=2e-4, abs=1e-16)


@EACH_METHOD
def test_combining_row_by_row(method):
    rng = np.random.default_rng(3)
    scores, clean = rng.normal(size=(3, 4, 5)) * 2, [rng.normal(size=count) for count in (20, 7, 1)]
    found = combine(scores, clean, method=method)
    own = np.stack([ranks(row, one) for row, one in zip(scores, clean, strict=True)])
    by_hand = {
        "mean": np.mean,
        "max": np.max,
        "mixture": lambda q, axis: combine_ranks(torch.tensor(q), method="mixture"),
    }
    np.testing.assert_allclose(found, by_hand[method](own, axis=0), atol=1e-14)
    np.testing.assert_allclose(combine(scores[::-1], clean[::-1], method=method), found, rtol=0, atol=1e-15)
    scores[1, 2, 3] = np.nan
    assert np.argwhere(np.isnan(combine(scores, clean, method=method))).tolist() == [[2, 3]]
    assert combine(np.empty((2, 0)), clean[:2], method=method).shape == (0,)
    assert np.isfinite(combine([[np.inf], [-np.inf]], clean[:2], method=method)).all()


@pytest.mark.parametrize("numbers", [(0.0, 1.0), (0.0, 0.0), (1.0, 1.0), (0.0, 0.5), (0.3, 0.3), (0.4, 1.0)])
def test_gradients_at_the_ends_are_finite(numbers):
    values = torch.tensor(numbers, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(combine_ranks(values, method="mixture"), values)
    assert bool(torch.isfinite(gradient).all() & (gradient >= 0).all())
    assert numbers[0] != numbers[1] or gradient.tolist() == pytest.approx([0.5, 0.5], abs=1e-12)


def test_gradients_of_ranks_at_and_beyond_the_ends():
    # At the ends they are those of the line between, and one unit beyond a quarter of 1 / 2n.
    scores = torch.tensor([1.0, 1.5, 2.0, 3.0], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(ranks_among(scores, torch.tensor([1.0, 2.0]).double()).sum(), scores)
    assert gradient.tolist() == [0.5, 0.5, 0.5, 0.0625]
    scores = torch.tensor([-math.inf, 1.0, 2.0, 5.0, math.inf], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(ranks_among(scores, torch.tensor([1.0, 1.0, 2.0]).double()).sum(), scores)
    assert bool(torch.isfinite(gradient).all())


class Unit(Detector):
    """The distance of one layer's mean to a number that is fitted."""

    def __init__(self, classifier, *, layer="1", power=1.0):
        super().__init__(classifier)
        self.layers, self.power = (layer,), power
        self.register_buffer("middle", torch.zeros(()))

    @property
    def settings(self):
        return {"layer": self.layers[0], "power": self.power}

    def score_of(self, observed):
        (found,) = observed.layers.values()
        return (found.mean(1) - self.middle).abs() ** self.power


class Noisy(Unit):
    """A score with noise, that hands no gradients on."""

    differentiable, random = False, True

    def score_of(self, observed):
        return (super().score_of(observed) + torch.rand(len(observed.inputs))).detach()


def data(count, seed=0):
    return cases.data(count, seed, (2, 3)) * 4 - 1


def ready(classifier, members, clean, method="mean", **chosen):
    detector = CombinedDetector(classifier, members, method=method)
    detector.fit_clean(clean, **chosen)
    return detector


def three(classifier):
    members = [Unit(classifier, layer="1"), Unit(classifier, layer="2", power=3), Unit(classifier, layer="1", power=2)]
    members[2].middle = data(10).mean()
    return members


@EACH_METHOD
def test_scores_are_those_of_numpy(method):
    classifier, x = network(), data(30, 1) * 3
    members = three(classifier)
    detector = ready(classifier, members, data(50), method, batch_size=7)
    own, clean = (np.stack([one.score(y).detach().double().numpy() for one in members]) for y in (x, data(50)))
    found = detector.score(x)
    np.testing.assert_allclose(found.detach().numpy(), combine(own, [*clean], method=method), atol=2e-6)
    torch.testing.assert_close(ready(classifier, members[::-1], data(50), method).score(x), found, rtol=0, atol=2e-6)
    for rows in (slice(0), slice(3, 4)):
        torch.testing.assert_close(detector.score(x[rows]), found[rows], rtol=0, atol=2e-6)
    if torch.cuda.is_available():
        torch.testing.assert_close(detector.to("cuda").score(x.cuda()).cpu(), found)
        detector.cpu()
    # New clean scores forget the threshold.
    detector.calibrate(data(100, 2))
    detector.fit_clean(data(30, 2))
    with pytest.raises(ModelError, match="has no threshold"):
        detector.decide(x)


@EACH_METHOD
def test_gradients_are_those_of_finite_differences(method):
    classifier = network().double()
    detector = ready(classifier, three(classifier), data(25).double(), method)
    x = data(6, 3).double().requires_grad_()
    assert torch.autograd.gradcheck(detector, x)
    assert float(torch.autograd.grad(detector.score(x).sum(), x)[0].abs().sum()) > 0


def test_members_decide_what_the_whole_is():
    classifier = network()
    plain, noisy = CombinedDetector(classifier, three(classifier)), CombinedDetector(classifier, [Noisy(classifier)])
    assert (plain.differentiable, plain.random) == (True, False)
    assert (noisy.differentiable, noisy.random) == (False, True)
    before, drawn = torch.random.get_rng_state(), []
    for seed in (4, 4, 5):
        noisy.fit_clean(data(30), seed=seed)
        drawn.append(noisy.clean)
    assert [torch.equal(drawn[0], one) for one in drawn] == [True, True, False]
    assert torch.equal(torch.random.get_rng_state(), before)
    members = [Noisy(classifier), ScoreDetector(classifier, lambda x: x.flatten(1).sum(1))]
    mixed, x = ready(classifier, members, data(30)), data(5).requires_grad_()
    assert (mixed.differentiable, mixed.random) == (False, True)
    assert bool((torch.autograd.grad(mixed.score(x).sum(), x)[0] != 0).any())


def test_nan_of_a_member_lets_nothing_pass():
    classifier = network()
    root = ScoreDetector(classifier, lambda x: x.flatten(1)[:, 0].sqrt(), name="root")
    detector = CombinedDetector(classifier, [root, *three(classifier)], method="max")
    with pytest.raises(ModelError, match=r"member 0 \(root\) scored \d+ of 50 clean inputs NaN .* leave it out"):
        detector.fit_clean(data(50))
    assert not detector.clean.numel()
    detector.fit_clean(data(50).abs())
    infinite = CombinedDetector(classifier, [ScoreDetector(classifier, lambda x: x.flatten(1)[:, 0] / 0)])
    with pytest.raises(ModelError, match=r"member 0 .*0 finite, expected none and at least one"):
        infinite.fit_clean(data(5).abs())
    x = data(4).abs()
    x[2] = -x[2]
    assert detector.score(x).isnan().tolist() == [False, False, True, False]
    detector.calibrate(data(60, 1).abs())
    margins = detector.score_margin(x)
    assert detector.decide(x).tolist() == [bool(margin > 0) or place == 2 for place, margin in enumerate(margins)]


def test_saving_and_loading(tmp_path):
    classifier, inputs = digits_network(), load_dataset("digits", split="train").take(range(120))[0]
    magnet, path = MagNetDetector(classifier), tmp_path / "combined.safetensors"
    magnet.fit(inputs, epochs=1)
    squeezing = FeatureSqueezingDetector(classifier, squeezers=[("median", {"size": 2})])
    inner = ready(classifier, [squeezing, Unit(classifier, layer="5", power=2)], inputs, "mixture")
    detector = ready(classifier, [magnet, inner], inputs[:60], "max")
    detector.calibrate(inputs[60:])
    detector.save(path)
    again = CombinedDetector.load(path, classifier, kinds=[Unit])
    assert torch.equal(again.score(inputs), detector.score(inputs))
    assert torch.equal(again.threshold, detector.threshold)
    assert [type(member) for member in again.members] == [MagNetDetector, CombinedDetector]
    assert all(member.classifier is classifier for member in again.members)
    # The classifier is in no file.
    assert path.stat().st_size < 40_000
    assert detector_digest(detector) == detector_digest(again) != detector_digest(inner)
