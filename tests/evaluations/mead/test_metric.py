"""The multi-armed metric and the published one: brute force, scikit-learn, plain loops, and intervals."""

import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from robust_ext.evaluations.arms import Arm
from robust_ext.evaluations.mead import MeadSettings
from robust_ext.evaluations.mead.metric import (
    attribution,
    average,
    curve_at,
    detect,
    multi_armed,
    published_curve,
    worst_scores,
)
from robust_ext.evaluations.mead.summary import ArmResult, DetectorRows

NAN, INF = float("nan"), float("inf")


def curve(natural, scores, success):
    """(FPR, TPR) at every threshold that makes a difference, by the definition of true and false positives."""
    samples = range(len(natural))
    possible = [i for i in samples if success[:, i].any()]
    levels = np.concatenate([[-INF], np.unique(np.concatenate([natural, scores.ravel()]))])
    points = [(1.0, 1.0)]
    for level in levels:
        caught = sum(all(scores[a, i] > level for a in range(len(scores)) if success[a, i]) for i in possible)
        points.append((sum(natural > level) / len(natural), caught / len(possible)))
    return points


@st.composite
def problems(draw):
    """Few distinct scores, so that ties are common; every size from one sample and one arm on."""
    samples, count = draw(st.integers(1, 24)), draw(st.integers(1, 4))
    values = st.one_of(st.integers(0, 4).map(float), st.floats(-2, 2), st.sampled_from([-INF, INF]))
    natural = draw(st.lists(values, min_size=samples, max_size=samples))
    scores = draw(st.lists(values, min_size=samples * count, max_size=samples * count))
    success = draw(st.lists(st.booleans(), min_size=samples * count, max_size=samples * count))
    shape = (count, samples)
    return np.array(natural), np.array(scores).reshape(shape), np.array(success).reshape(shape)


@settings(max_examples=300, deadline=None)
@given(problem=problems())
def test_brute_force_over_thresholds_agrees(problem):
    natural, scores, success = problem
    found = multi_armed(natural, scores, success)
    positives = int(success.any(0).sum())
    assert (found.positives, found.naturals) == (positives, len(natural))
    assert found.coverage == positives / len(natural)
    if positives == 0:
        assert (found.auroc, found.fpr_at_95_tpr, found.tpr_at_5_fpr) == (None, None, None)
        return
    points = curve(natural, scores, success)
    area = sum((x - u) * (y + v) / 2 for (x, y), (u, v) in itertools.pairwise(points))
    assert found.auroc == pytest.approx(area, abs=1e-12)
    assert found.fpr_at_95_tpr == min(fpr for fpr, tpr in points if 100 * round(tpr * positives) >= 95 * positives)
    # The threshold is the (M - ceil(.95 M) + 1)-th smallest positive.
    worst = worst_scores(scores, success)
    threshold = np.sort(worst[~np.isnan(worst)])[positives - math.ceil(95 * positives / 100)]
    assert found.fpr_at_95_tpr == np.mean(natural >= threshold)
    assert found.tpr_at_5_fpr == max(tpr for fpr, tpr in points if 100 * round(fpr * len(natural)) <= 5 * len(natural))


@settings(max_examples=100, deadline=None)
@given(problem=problems())
def test_only_the_order_of_scores_matters(problem):
    natural, scores, success = problem
    levels = np.unique(np.concatenate([natural, scores.ravel()]))
    places = [np.searchsorted(levels, one).astype(float) ** 3 for one in (natural, scores)]
    assert multi_armed(*places, success, resamples=20) == multi_armed(natural, scores, success, resamples=20)


@settings(max_examples=100, deadline=None)
@given(problem=problems())
def test_one_arm_is_an_ordinary_roc_curve(problem):
    natural, scores, success = problem
    for own, succeeded in zip(scores, success, strict=True):
        found, hit = multi_armed(natural, own[None], succeeded[None]), own[succeeded]
        if len(hit):
            # scikit-learn takes no infinite scores; only the order matters.
            both = np.clip(np.concatenate([natural, hit]), -10, 10)
            truth = [0] * len(natural) + [1] * len(hit)
            assert found.auroc == pytest.approx(roc_auc_score(truth, both), abs=1e-12)
        else:
            assert found.auroc is None


@settings(max_examples=100, deadline=None)
@given(problem=problems())
def test_more_arms_on_the_same_samples_never_help_the_detector(problem):
    natural, scores, success = problem
    success = np.broadcast_to(success.any(0), success.shape)
    together = multi_armed(natural, scores, success).auroc
    if together is not None:
        for own, succeeded in zip(scores, success, strict=True):
            assert together <= multi_armed(natural, own[None], succeeded[None]).auroc + 1e-12


def test_a_single_arm_can_score_below_all_of_them():
    """The remark of section 5.2.1: an arm that fails where others are caught has fewer positives."""
    natural, scores = np.array([0.5, 0.5]), np.array([[0.1, 0.0], [0.9, 0.9]])
    success = np.array([[True, False], [False, True]])
    first = multi_armed(natural, scores[:1], success[:1])
    assert (multi_armed(natural, scores, success).auroc, first.auroc, first.coverage) == (0.5, 0.0, 0.5)


@given(problem=problems())
def test_attribution_is_shared_and_complete(problem):
    _, scores, success = problem
    found, worst = attribution(scores, success), worst_scores(scores, success)
    shares, possible = np.zeros(len(scores)), success.any(0)
    assert (np.isnan(worst) == ~possible).all()
    for i in np.flatnonzero(possible):
        hits = np.flatnonzero(success[:, i])
        assert worst[i] == min(scores[hits, i])
        guilty = [a for a in hits if scores[a, i] == worst[i]]
        shares[guilty] += 1 / len(guilty)
    if not possible.any():
        assert found is None
    else:
        np.testing.assert_allclose(found, shares / possible.sum(), atol=1e-12)
        assert sum(found) == pytest.approx(1)


def rows_of(natural, scores, success, labels, *, correct=None, **chosen):
    """The rows of a detector in ``result.json``, of arms with these names, objectives and algorithms."""
    results = [
        ArmResult(
            arm=Arm(attack="robust_ext:APGD()", epsilon=0.1, label=name, objective=objective, algorithm=algorithm),
            name=name,
            adaptive_to=None,
            success=success[place],
            finite=success[place],
            lost=np.zeros_like(success[place]),
            scores={"d": scores[place]},
            cost={},
        )
        for place, (name, objective, algorithm) in enumerate(labels)
    ]
    correct = np.ones(len(natural), dtype=bool) if correct is None else correct
    settings = MeadSettings(**{"resamples": 0, **chosen})
    return DetectorRows(detector="d", natural=natural, correct=correct, settings=settings, threshold=None).of(results)


def numbers(row):
    return {name: row[name] for name in multi_armed(np.zeros(1), np.zeros((1, 1)), np.ones((1, 1), bool))._fields}


def test_objectives_take_in_the_arms_that_have_none():
    labels = [("a", "ace", "pgd"), ("b", "kl", "pgd"), ("c", "kl", "bim"), ("d", None, None)]
    generator = np.random.default_rng(0)
    natural, scores = generator.random(40), generator.random((4, 40))
    success = generator.random((4, 40)) < 0.7
    found = rows_of(natural, scores, success, labels)

    def of(*chosen):
        return multi_armed(natural, scores[list(chosen)], success[list(chosen)])._asdict()

    by_label = {row["objective"] or row["algorithm"]: numbers(row) for row in found["results"]}
    everything = {None: of(0, 1, 2, 3), "ace": of(0, 3), "kl": of(1, 2, 3), "pgd": of(0, 1), "bim": of(2)}
    assert by_label == everything
    assert {row["arm"]: numbers(row) for row in found["arms"]} == {"a": of(0), "b": of(1), "c": of(2), "d": of(3)}
    assert found["results"][0]["successes_per_sample"] == pytest.approx(success.sum() / 40)
    json.dumps(found, allow_nan=False)


def test_misclassified_samples_are_kept_or_left_out():
    generator = np.random.default_rng(1)
    natural, scores, success = generator.random(30), generator.random((2, 30)), generator.random((2, 30)) < 0.6
    correct = generator.random(30) < 0.8
    labels = [("a", None, None), ("b", None, None)]
    (kept,) = rows_of(natural, scores, success, labels, correct=correct)["results"]
    assert numbers(kept) == multi_armed(natural, scores, success)._asdict()
    (filtered,) = rows_of(natural, scores, success, labels, correct=correct, naturals="filtered")["results"]
    alone = natural[correct], scores[:, correct], success[:, correct]
    assert numbers(filtered) == multi_armed(*alone)._asdict()
    assert sum(filtered["attribution"].values()) == pytest.approx(1)
    np.testing.assert_allclose([*filtered["attribution"].values()], attribution(*alone[1:]))


def test_scores_that_are_no_numbers_are_left_out_and_counted():
    natural = np.array([0.1, NAN, 0.3])
    scores = np.array([[NAN, 0.5, 0.2], [0.4, NAN, NAN]])
    success = np.array([[True, True, True], [True, True, False]])
    found = multi_armed(natural, scores, success)
    assert (found.unscored, found.naturals, found.positives) == (3, 2, 3)
    # Positives .4, .5 and .2 against .1 and .3.
    assert found.auroc == pytest.approx(5 / 6)
    nothing = multi_armed(np.full(3, NAN), np.full((2, 3), NAN), success)
    assert (nothing.auroc, nothing.coverage, nothing.auroc_interval) == (None, 0.0, None)
    assert attribution(np.full((2, 3), NAN), success) is None


def delong(natural, positives):
    """Standard error of the AUROC by DeLong et al. (1988), with the covariance of samples that give both scores."""
    has = ~np.isnan(positives)
    order = np.sign(positives[has][:, None] - natural[None]) / 2 + 0.5
    of_natural = order.mean(0) - order.mean()
    of_positive = np.zeros(len(natural))
    of_positive[has] = order.mean(1) - order.mean()
    parts = of_natural / len(natural) + of_positive / has.sum()
    return float(np.sqrt((parts**2).sum()))


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


def test_intervals_cover_what_they_should():
    """Normal scores a distance of 1 apart have an AUROC of .7602; of 100 intervals about 95 hold it."""
    generator = np.random.default_rng(5)
    hits = 0
    for _ in range(100):
        natural, positives = generator.normal(size=80), 1 + generator.normal(size=80)
        interval = detect(natural, positives, resamples=200, seed=0).auroc_interval
        hits += interval[0] <= 0.7602 <= interval[1]
    assert 88 <= hits <= 99


def test_a_perfect_detector_has_an_interval_too():
    found = detect(np.zeros(20), np.array([1.0] * 10 + [NAN] * 10), resamples=100, seed=0)
    assert found.auroc_interval == pytest.approx((0.025**0.1, 1.0))
    assert found.tpr_at_5_fpr_interval == found.auroc_interval
    assert found.fpr_at_95_tpr_interval == pytest.approx((0.0, 1 - 0.025**0.1))
    # One that is not perfect has that of resamples, also where it begins at 0: of 20, 1 is flagged, rarely over 4.
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


@given(problem=problems(), missing=st.booleans())
def test_the_curve_at_a_rate_is_the_best_threshold_that_keeps_to_it(problem, missing):
    natural, (positives, *_), _ = problem
    natural, positives = np.append(natural, np.nan) if missing else natural, np.append(positives, np.nan)
    given_natural, given_positives = natural[~np.isnan(natural)], positives[:-1]
    rates = np.array([0.0, 0.05, 1 / 3, 0.5, 2 / 3, 1.0])
    thresholds = [-INF, *given_natural, *given_positives, INF]
    for rate, found in zip(rates, curve_at(natural, positives, rates), strict=True):
        kept = [t for t in thresholds if (given_natural > t).mean() <= rate + 1e-12]
        everything = rate >= 1 - 1e-12
        best = 1.0 if everything else max((given_positives > t).mean() for t in kept)
        assert found == pytest.approx(best, abs=1e-12)
    assert np.isnan(curve_at(natural, np.array([np.nan]), rates)).all()
