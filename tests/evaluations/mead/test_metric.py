"""The multi-armed metric and the published one: brute force, scikit-learn, plain loops, and intervals."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import trapezoid
from sklearn.metrics import roc_auc_score

from robust_ext.evaluations.arms import Arm
from robust_ext.evaluations.mead import MeadSettings
from robust_ext.evaluations.mead.metric import (
    Detection,
    _Curve,
    attribution,
    average,
    curve_at,
    detect,
    multi_armed,
    published_curve,
)
from robust_ext.evaluations.mead.summary import ArmResult, DetectorRows

NAN, INF = float("nan"), float("inf")


def curve(natural, worst):
    """(FPR, TPR) at every threshold that makes a difference, by the definition of true and false positives."""
    levels = [-INF, *np.unique(np.concatenate([natural, worst]))]
    return [(1.0, 1.0)] + [((natural > level).mean(), np.mean(np.array(worst) > level)) for level in levels]


@st.composite
def problems(draw):
    """Few distinct scores, so that ties are common; every size from one sample and one arm on."""
    samples, count = draw(st.integers(1, 24)), draw(st.integers(1, 4))
    values = st.one_of(st.integers(0, 4).map(float), st.floats(-2, 2), st.sampled_from([-INF, INF]))
    natural, *scores = (draw(st.lists(values, min_size=samples, max_size=samples)) for _ in range(1 + count))
    success = [draw(st.lists(st.booleans(), min_size=samples, max_size=samples)) for _ in range(count)]
    return np.array(natural), np.array(scores), np.array(success)


@settings(max_examples=300)
@given(problem=problems())
def test_brute_force_over_thresholds_agrees_and_the_order_of_scores_matters_alone(problem):
    natural, scores, success = problem
    levels = np.unique(np.concatenate([natural, scores.ravel()]))
    places = [np.searchsorted(levels, one).astype(float) ** 3 for one in (natural, scores)]
    assert multi_armed(*places, success, resamples=20) == multi_armed(natural, scores, success, resamples=20)
    found, shares = multi_armed(natural, scores, success), np.zeros(len(scores))
    possible = np.flatnonzero(success.any(0))
    assert (found.positives, found.naturals) == (len(possible), len(natural))
    assert found.coverage == len(possible) / len(natural)
    if not len(possible):
        assert (found.auroc, found.fpr_at_95_tpr, found.tpr_at_5_fpr, attribution(scores, success)) == (None,) * 4
        return
    worst = [scores[success[:, i], i].min() for i in possible]
    points, positives = curve(natural, worst), len(possible)
    # scikit-learn takes no infinite scores.
    both, truth = np.clip([*natural, *worst], -10, 10), np.repeat([0, 1], [len(natural), positives])
    assert found.auroc == pytest.approx(roc_auc_score(truth, both), abs=1e-12)
    assert found.fpr_at_95_tpr == min(fpr for fpr, tpr in points if 100 * round(tpr * positives) >= 95 * positives)
    assert found.tpr_at_5_fpr == max(tpr for fpr, tpr in points if 100 * round(fpr * len(natural)) <= 5 * len(natural))
    for i, lowest in zip(possible, worst, strict=True):
        guilty = success[:, i] & (scores[:, i] == lowest)
        shares += guilty / guilty.sum()
    np.testing.assert_allclose(attribution(scores, success), shares / positives, atol=1e-12)


def numbers(row):
    return {name: row[name] for name in Detection._fields}


@pytest.mark.parametrize("naturals", ["kept", "filtered"])
def test_objectives_take_in_the_arms_that_have_none_and_misclassified_samples_may_be_left_out(naturals):
    labels = [("a", "ace", "pgd"), ("b", "kl", "pgd"), ("c", "kl", "bim"), ("d", None, None)]
    generator, results = np.random.default_rng(0), []
    natural, scores, success = generator.random(40), generator.random((4, 40)), generator.random((4, 40)) < 0.7
    correct = generator.random(40) < 0.8
    for own, hit, (name, objective, algorithm) in zip(scores, success, labels, strict=True):
        arm = Arm(attack="robust_ext:APGD()", epsilon=0.1, label=name, objective=objective, algorithm=algorithm)
        given = {"success": hit, "finite": hit, "lost": np.zeros_like(hit), "scores": {"d": own}, "cost": {}}
        results.append(ArmResult(arm=arm, name=name, adaptive_to=None, **given))
    given = {"natural": natural, "correct": correct, "threshold": None}
    found = DetectorRows(detector="d", settings=MeadSettings(resamples=0, naturals=naturals), **given).of(results)
    kept = correct if naturals == "filtered" else np.ones(40, dtype=bool)

    def of(*chosen):
        return multi_armed(natural[kept], scores[chosen, :][:, kept], success[chosen, :][:, kept])._asdict()

    everything = {None: of(0, 1, 2, 3), "ace": of(0, 3), "kl": of(1, 2, 3), "pgd": of(0, 1), "bim": of(2)}
    assert {row["objective"] or row["algorithm"]: numbers(row) for row in found["results"]} == everything
    assert {row["arm"]: numbers(row) for row in found["arms"]} == {"a": of(0), "b": of(1), "c": of(2), "d": of(3)}
    assert found["results"][0]["successes_per_sample"] == pytest.approx(success.sum() / 40)
    shares = [*found["results"][0]["attribution"].values()]
    np.testing.assert_allclose(shares, attribution(scores[:, kept], success[:, kept]))
    json.dumps(found, allow_nan=False)


def test_scores_that_are_no_numbers_are_left_out_and_counted():
    natural, scores = np.array([0.1, NAN, 0.3]), np.array([[NAN, 0.5, 0.2], [0.4, NAN, NAN]])
    success = np.array([[True, True, True], [True, True, False]])
    found = multi_armed(natural, scores, success)
    # Positives .4, .5 and .2 against .1 and .3.
    assert found[6:] == (3, 2, 1.0, 3)
    assert found.auroc == pytest.approx(5 / 6)
    nothing = multi_armed(np.full(3, NAN), np.full((2, 3), NAN), success)
    assert (nothing.auroc, nothing.coverage, nothing.auroc_interval) == (None, 0.0, None)


def delong(natural, positives):
    """Standard error of the AUROC by DeLong et al. (1988), with the covariance of samples that give both scores."""
    has = ~np.isnan(positives)
    order = np.sign(positives[has][:, None] - natural[None]) / 2 + 0.5
    of_positive = np.zeros(len(natural))
    of_positive[has] = order.mean(1) - order.mean()
    return float(np.linalg.norm((order.mean(0) - order.mean()) / len(natural) + of_positive / has.sum()))


@pytest.mark.parametrize("paired", [0.0, 0.9])
def test_intervals_are_as_wide_as_delongs(paired):
    """Natural and adversarial scores of a sample that move together make the difference less uncertain, or more."""
    generator = np.random.default_rng(3)
    natural = generator.normal(size=600)
    positives = 1 + paired * natural + math.sqrt(1 - paired**2) * generator.normal(size=600)
    positives[generator.random(600) < 0.3] = NAN
    found = detect(natural, positives, resamples=2000, seed=0)
    half = 1.96 * delong(natural, positives)
    np.testing.assert_allclose(found.auroc_interval, [found.auroc - half, found.auroc + half], atol=0.12 * half)


def test_a_resample_has_the_numbers_of_the_samples_it_holds():
    generator = np.random.default_rng(5)
    natural, positives = generator.normal(size=40).round(1), generator.normal(1, size=40).round(1)
    positives[::4] = NAN
    counts = generator.integers(0, 4, size=(40, 8)).astype(np.int32)
    for column, numbers in zip(counts.T, _Curve(natural, positives).numbers(counts), strict=True):
        clean, attacked = np.sort(natural.repeat(column)), np.sort(positives.repeat(column))
        attacked = attacked[~np.isnan(attacked)]
        auroc = roc_auc_score([0] * len(clean) + [1] * len(attacked), [*clean, *attacked])
        fpr = (clean >= attacked[len(attacked) - math.ceil(0.95 * len(attacked))]).mean()
        tpr = (attacked > clean[len(clean) - 1 - len(clean) // 20]).mean()
        assert numbers.tolist() == pytest.approx([auroc, fpr, tpr])


def test_a_perfect_detector_has_an_interval_too():
    found = detect(np.zeros(20), np.array([1.0] * 10 + [NAN] * 10), resamples=100, seed=0)
    assert found.auroc_interval == found.tpr_at_5_fpr_interval == pytest.approx((0.025**0.1, 1.0))
    assert found.fpr_at_95_tpr_interval == pytest.approx((0.0, 1 - 0.025**0.1))
    # One that is not perfect has that of resamples, also where it begins at 0.
    nearly = detect(np.array([2.0] + [0.0] * 19), np.array([1.0] * 10 + [NAN] * 10), resamples=100, seed=0)
    assert nearly.fpr_at_95_tpr_interval[0] == 0
    assert 0.05 <= nearly.fpr_at_95_tpr_interval[1] <= 0.2


def test_averages_weigh_rows_alike():
    scores = ([0.0, 1.0], [2.0, NAN]), ([0.0] * 3, [NAN] * 3), ([0.0] * 8 + [3.0] * 8, [1.0] * 16)
    rows = [detect(np.array(natural), np.array(hit), resamples=0, seed=0)._asdict() for natural, hit in scores]
    found = average(rows)
    assert found == {"auroc": 0.75, "fpr_at_95_tpr": 0.25, "tpr_at_5_fpr": 0.5, "rows": 2, "skipped": 1}
    # Averages of groups: the four of the summary table count alike, however many rows they have.
    perfect = average([rows[0]])
    assert average([found, perfect, perfect, average(rows[1:2])])["auroc"] == pytest.approx(2.75 / 3)
    assert average([])["auroc"] is None


def in_loops(natural, scores, success, thresholds):
    """FPR and TPR at each index of a threshold, one sample and one attack at a time; natural scores ``(L, N)``."""
    arms, samples = map(range, scores.shape)
    levels = [np.linspace(min(*natural[a], *scores[a]), max(*natural[a], *scores[a]), thresholds) for a in arms]
    possible, fpr, tpr = [i for i in samples if success[:, i].any()], [], []
    for at in zip(*levels, strict=True):
        fpr.append(np.mean([any(natural[a, i] > at[a] for a in arms) for i in samples]))
        tpr.append(np.mean([all(scores[a, i] > at[a] for a in arms if success[a, i]) for i in possible]))
    return fpr, tpr


def fpr_in_loops(fpr, tpr):
    x, y = sorted(fpr), sorted(tpr)
    if y[-1] <= 0.95 or y[0] >= 0.95:
        return x[-1] if y[-1] <= 0.95 else x[0]
    after = next(k for k, value in enumerate(y) if value > 0.95)
    share = (0.95 - y[after - 1]) / (y[after] - y[after - 1])
    return x[after - 1] + share * (x[after] - x[after - 1])


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    shape=st.tuples(st.integers(1, 4), st.integers(1, 12)),
    thresholds=st.sampled_from([2, 7, 200]),
    digits=st.sampled_from([0, 1, 8]),
    anew=st.booleans(),
)
def test_plain_loops_agree_with_the_published_curve(seed, shape, thresholds, digits, anew):
    generator = np.random.default_rng(seed)
    natural = generator.normal(size=shape if anew else shape[1]).round(digits)
    scores = (generator.normal(size=shape) * generator.uniform(0.1, 5, (shape[0], 1))).round(digits)
    success = generator.random(shape) < 0.6
    found = published_curve(natural, scores, success, thresholds=thresholds)
    if not success.any():
        assert found is None
        return
    fpr, tpr = in_loops(np.broadcast_to(natural, shape), scores, success, thresholds)
    np.testing.assert_allclose([found.fpr, found.tpr], [fpr, tpr], atol=1e-15)
    assert found.auroc == pytest.approx(trapezoid(sorted(tpr), sorted(fpr)), abs=1e-12)
    assert found.fpr_at_95_tpr == pytest.approx(fpr_in_loops(fpr, tpr), abs=1e-12)


def test_the_published_curve_is_none_where_it_has_no_thresholds():
    natural, scores, success = np.array([0.0, 1.0]), np.array([[2.0, 3.0]]), np.array([[True, True]])
    empty, none = np.zeros((0, 2)), np.zeros((2, 0))
    wrong = [(natural, scores, ~success), (natural, empty, empty > 0), (np.zeros(0), none, none > 0)]
    wrong += [(natural, np.array([[value, 3.0]]), success) for value in (NAN, INF)]
    assert [published_curve(*one) for one in wrong] == [None] * 5


@given(problem=problems(), missing=st.booleans())
def test_the_curve_at_a_rate_is_the_best_threshold_that_keeps_to_it(problem, missing):
    natural, (positives, *_), _ = problem
    rates = np.array([0.0, 0.05, 1 / 3, 0.5, 2 / 3, 1.0])
    given_natural = np.append(natural, NAN) if missing else natural
    for rate, found in zip(rates, curve_at(given_natural, np.append(positives, NAN), rates), strict=True):
        kept = [t for t in (-INF, *natural, *positives, INF) if (natural > t).mean() <= rate + 1e-12]
        best = 1.0 if rate == 1 else max((positives > t).mean() for t in kept)
        assert found == pytest.approx(best, abs=1e-12)
    assert np.isnan(curve_at(natural, np.array([NAN]), rates)).all()
