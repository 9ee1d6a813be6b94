"""The metric as published, against the public code's description in plain loops, and what its differences do."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from robust_ext.evaluations.mead.metric import multi_armed, published_curve


def in_loops(natural, scores, success, thresholds):
    """FPR and TPR at each index of a threshold, one sample and one attack at a time; natural scores ``(L, N)``."""
    arms, samples = scores.shape
    levels = []
    for arm in range(arms):
        pooled = [*natural[arm], *scores[arm]]
        levels.append(np.linspace(min(pooled), max(pooled), thresholds))
    fpr, tpr = [], []
    for index in range(thresholds):
        flagged, caught, possible = 0, 0, 0
        for i in range(samples):
            flagged += any(natural[arm, i] > levels[arm][index] for arm in range(arms))
            hits = [arm for arm in range(arms) if success[arm, i]]
            possible += len(hits) > 0
            caught += len(hits) > 0 and all(scores[arm, i] > levels[arm][index] for arm in hits)
        fpr.append(flagged / samples)
        tpr.append(caught / possible)
    return fpr, tpr


def fpr_in_loops(fpr, tpr):
    x, y = sorted(fpr), sorted(tpr)
    if y[-1] <= 0.95:
        return x[-1]
    if y[0] >= 0.95:
        return x[0]
    after = next(k for k, value in enumerate(y) if value > 0.95)
    share = (0.95 - y[after - 1]) / (y[after] - y[after - 1])
    return x[after - 1] + share * (x[after] - x[after - 1])


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    samples=st.integers(1, 12),
    arms=st.integers(1, 4),
    thresholds=st.sampled_from([2, 7, 200]),
    digits=st.sampled_from([0, 1, 8]),
    anew=st.booleans(),
)
def test_plain_loops_agree(seed, samples, arms, thresholds, digits, anew):
    generator = np.random.default_rng(seed)
    natural = generator.normal(size=(arms, samples) if anew else samples).round(digits)
    scores = (generator.normal(size=(arms, samples)) * generator.uniform(0.1, 5, (arms, 1))).round(digits)
    success = generator.random((arms, samples)) < 0.6
    found = published_curve(natural, scores, success, thresholds=thresholds)
    if not success.any():
        assert found is None
        return
    everywhere = np.broadcast_to(natural, scores.shape)
    fpr, tpr = in_loops(everywhere, scores, success, thresholds)
    np.testing.assert_allclose(found.fpr, fpr, atol=1e-15)
    np.testing.assert_allclose(found.tpr, tpr, atol=1e-15)
    steps = itertools.pairwise(zip(sorted(fpr), sorted(tpr), strict=True))
    area = sum((right - left) * (low + high) / 2 for (left, low), (right, high) in steps)
    assert found.auroc == pytest.approx(area, abs=1e-12)
    assert found.fpr_at_95_tpr == pytest.approx(fpr_in_loops(fpr, tpr), abs=1e-12)


def exact(natural, scores, success):
    found = multi_armed(natural, scores, success)
    return found.auroc, found.fpr_at_95_tpr


def test_one_arm_without_ties_is_near_the_exact_curve():
    """Where all scores differ and one arm sets the thresholds, only the steps between 200 thresholds are left."""
    generator = np.random.default_rng(0)
    natural, scores = generator.random(4000), generator.random((1, 4000)) ** 0.5
    success = np.ones((1, 4000), dtype=bool)
    found = published_curve(natural, scores, success)
    np.testing.assert_allclose((found.auroc, found.fpr_at_95_tpr), exact(natural, scores, success), atol=0.01)


def test_thresholds_of_their_own_make_the_detector_look_worse():
    """Differences 1 and 2: an outlier of one arm, even of a failed attack, moves its thresholds against the others'."""
    generator = np.random.default_rng(1)
    natural, success = generator.normal(size=1000), np.ones((2, 1000), dtype=bool)
    scores = generator.normal(size=(2, 1000)) + 1
    auroc, fpr = exact(natural, scores, success)
    before = published_curve(natural, scores, success)
    assert before.auroc == pytest.approx(auroc, abs=0.05)
    # Now natural samples are flagged by the low thresholds of one arm where the high ones of the other flag nothing.
    scores[0, 0], success[0, 0], scores[1, 1] = -100, False, 100
    found = published_curve(natural, scores, success)
    after, _ = exact(natural, scores, success)
    assert after == pytest.approx(auroc, abs=0.01)
    assert auroc > 0.6
    assert found.auroc < 0.1
    assert found.fpr_at_95_tpr > fpr


def test_ties_at_the_lowest_score_cut_the_curve_off():
    """Difference 3: what has the lowest score is never flagged, and the area beyond the last point is lost."""
    generator = np.random.default_rng(2)
    natural, success = generator.integers(0, 2, 1000).astype(float), np.ones((1, 1000), dtype=bool)
    scores = (generator.random((1, 1000)) < 0.2).astype(float)
    found = published_curve(natural, scores, success)
    auroc, fpr = exact(natural, scores, success)
    # Half flag, and .2 of the positives: from (0, 0) to (.5, .2), and nothing beyond.
    assert found.auroc == pytest.approx(0.5 * 0.2 / 2, abs=0.01)
    assert auroc == pytest.approx(0.5 * 0.2 / 2 + 0.5 * (0.2 + 1) / 2, abs=0.02)
    # The interpolation ends at the curve's last point instead of at 1.
    assert found.fpr_at_95_tpr == np.mean(natural > 0)
    assert fpr == 1.0


def test_it_is_none_where_it_has_no_thresholds():
    natural, scores, success = np.array([0.0, 1.0]), np.array([[2.0, 3.0]]), np.array([[True, True]])
    assert published_curve(natural, scores, ~success) is None
    for value in (np.nan, np.inf):
        assert published_curve(natural, np.array([[value, 3.0]]), success) is None
    empty = np.zeros((0, 2))
    assert published_curve(natural, empty, empty > 0) is None
    assert published_curve(np.zeros(0), np.zeros((2, 0)), np.zeros((2, 0), dtype=bool)) is None
