"""The rules of the verdict, one by one and at their edges."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from robust_ext.core.statistics import proportion_interval
from robust_ext.core.threat import ThreatModel
from robust_ext.evaluations.binarization.content import blind_words
from robust_ext.evaluations.binarization.defense import TESTS
from robust_ext.evaluations.binarization.rules import Rules, Solved
from robust_ext.evaluations.binarization.settings import BinarizationSettings
from robust_ext.evaluations.binarization.verdict import VERDICTS, Counts, judge, overall, overall_reason, pair_verdict
from robust_ext.registry.attack import as_attack

LINF = ThreatModel(norm="linf", epsilon=0.1)


def judged(found, random_found, samples, *, attacks=1, deeper=(), non_finite=0, **options):
    counted = {key: options.pop(key) for key in ("repaired", "inseparable", "unplanted", "unfound") if key in options}
    first = Solved(found=found, random_found=random_found, samples=samples, non_finite=non_finite)
    rules = Rules(BinarizationSettings(threat_model=LINF, **{"depths": (1,), **options}), attacks)
    return judge(Counts(problems=[first, *deeper], canaries=8, **counted), rules)


@pytest.mark.parametrize(
    ("found", "random_found", "samples", "options", "verdict", "reason"),
    [
        # Rule 1: canaries come before everything else.
        (512, 0, 512, {"repaired": 2}, "failed", "predicted labels instead of the given ones"),
        (512, 0, 512, {"repaired": 8}, "failed", "moved 8 of 8 misclassified canaries"),
        (512, 0, 512, {"repaired": 1}, "passed", "finds what was planted"),
        (0, 0, 0, {"repaired": 2}, "failed", "predicted labels"),
        # Rule 2.
        (0, 0, 0, {}, "inconclusive", "No example could be planted"),
        # Rule 3: two misses, and exactly at the threshold is not below it.
        (0, 0, 1, {}, "inconclusive", "leave room for a rate of 0.9 or less"),
        (0, 0, 2, {}, "failed", "A score below 0.95"),
        (1, 0, 2, {}, "inconclusive", "leave room"),
        (18, 0, 19, {}, "inconclusive", "leave room"),
        (38, 0, 40, {}, "inconclusive", "leave room"),
        (37, 0, 39, {}, "failed", "A score below 0.95 means that the attack misses adversarial examples"),
        (96, 0, 100, {}, "passed", "finds what was planted"),
        (94, 0, 100, {}, "failed", "A score below 0.95 means"),
        (30, 40, 100, {}, "failed", "no better than that of random search"),
        (40, 40, 100, {}, "failed", "no better than that of random search"),
        (45, 40, 100, {}, "failed", "hardly better than that of random search"),
        (90, 0, 100, {"threshold": 0.9, "proven_rate": 0.8}, "passed", "finds what was planted"),
        # Rule 4: .9^28 = .052 and .9^29 = .047; with two attacks .9^35 = .0250 and .9^36 = .0225.
        (28, 0, 28, {}, "inconclusive", "leave room for a rate of 0.9 or less (at error 0.05)"),
        (29, 0, 29, {}, "passed", "its rate is at least 0.90 (at error 0.05), that of random search at most 0.12"),
        (35, 0, 35, {"attacks": 2}, "inconclusive", "0.9 or less (at error 0.05 shared by 2 attacks)"),
        (36, 0, 36, {"attacks": 2}, "passed", "its rate is at least 0.90 (at error 0.05 shared by 2 attacks)"),
        (62, 0, 64, {}, "passed", "its rate is at least 0.90"),
        (61, 0, 64, {}, "inconclusive", "leave room"),
        (10, 0, 10, {"proven_rate": 0.0}, "passed", "its rate is at least 0.74"),
        (9, 0, 10, {"proven_rate": 0.0}, "inconclusive", "leave room for a rate of 0.95 or less"),
        # Rule 5: of 100, 41 show at most .497, 42 at most .507; at two thirds of the error, 40 and 41.
        (100, 41, 100, {"random_stops": False}, "passed", "that of random search at most 0.50"),
        (100, 42, 100, {"random_stops": False}, "inconclusive", "R-ASR that the samples do not show"),
        (100, 40, 100, {}, "passed", "that of random search at most 0.50"),
        (100, 41, 100, {}, "inconclusive", "R-ASR that the samples do not show"),
        (100, 41, 100, {"depths": (1, 2, 4, 8)}, "inconclusive", "R-ASR that the samples do not show"),
        (100, 38, 100, {"depths": (1, 2, 4, 8)}, "passed", "that of random search at most 0.50"),
        (100, 42, 100, {}, "inconclusive", "an R-ASR that the samples do not show to be at most 0.5"),
        (100, 51, 100, {}, "inconclusive", "an R-ASR above 0.5 means that the planted examples are too easy"),
        (28, 20, 28, {}, "inconclusive", "or less (at error 0.05), and an R-ASR above 0.5 means"),
        (100, 100, 100, {"maximum_random_score": 1.0}, "passed", "that of random search at most 1.00"),
        # Sequential: a perfect attack needs 31 samples, among ten 54.
        (30, 0, 30, {"sequential": True}, "inconclusive", "leave room for a rate of 0.9 or less"),
        (31, 0, 31, {"sequential": True}, "passed", "its rate is above 0.9 (at error 0.05), that of random search"),
        (53, 0, 53, {"sequential": True, "attacks": 10}, "inconclusive", "leave room"),
        (54, 0, 54, {"sequential": True, "attacks": 10}, "passed", "its rate is above 0.9"),
        (62, 0, 62, {"sequential": True, "proven_rate": 0.0}, "inconclusive", "leave room for a rate of 0.95"),
        (63, 0, 63, {"sequential": True, "proven_rate": 0.0}, "passed", "its rate is above 0.95"),
    ],
)
def test_the_rules(found, random_found, samples, options, verdict, reason):
    judgement = judged(found, random_found, samples, **options)
    assert judgement["verdict"] == verdict
    assert reason in judgement["reason"]
    assert judgement["reason"].endswith(".")


@pytest.mark.parametrize(
    ("found", "random_found", "samples", "better"),
    [
        (45, 40, 100, "hardly"),
        (6, 5, 12, "hardly"),
        (40, 40, 100, "no"),
        (1, 3, 16, "no"),
        # However few problems they rest on, these are no little.
        (2, 0, 4, None),
        (6, 0, 12, None),
        (8, 4, 16, None),
        (3, 1, 8, None),
        (50, 0, 100, None),
    ],
)
def test_hardly_better_than_random_search_is_what_is_hardly_better(found, random_found, samples, better):
    reason = judged(found, random_found, samples)["reason"]
    words = [word for word in ("hardly", "no") if f"{word} better than" in reason]
    assert words == ([better] if better else [])


def row(found, random_found, samples, depth):
    return Solved(found=found, random_found=random_found, samples=samples, depth=depth)


@pytest.mark.parametrize(
    ("deeper", "verdict", "depth", "reason"),
    [
        # Random search finds 40 of the 64 planted examples: deeper problems decide.
        ([], "inconclusive", 1, "an R-ASR above 0.5 means"),
        ([row(0, 0, 0, 2.0)], "inconclusive", 1, "an R-ASR above 0.5 means"),
        (
            [row(60, 5, 60, 2.0)],
            "passed",
            2,
            "0.62 of them; at depth 2, where the verdict is taken, it found 60 of 60 that",
        ),
        ([row(60, 30, 60, 2.0), row(40, 2, 40, 4.0)], "passed", 4, "finds what others find in this model"),
        # At each depth up to that one its rate must be shown.
        ([row(58, 30, 64, 2.0), row(50, 2, 50, 4.0)], "inconclusive", 2, "leave room for a rate of 0.9 or less"),
        ([row(60, 30, 60, 2.0), row(20, 2, 20, 4.0)], "inconclusive", 4, "93 samples, if it misses no"),
        # Missing some of what the best of all witnesses found is no failure; missing most of it is.
        ([row(50, 5, 60, 2.0)], "inconclusive", 2, "leave room"),
        ([row(20, 0, 60, 2.0)], "failed", 2, "It misses more than half of the adversarial examples that are known"),
        ([row(60, 30, 60, 2.0), row(60, 25, 60, 4.0)], "inconclusive", 4, "do not show to be at most 0.5"),
    ],
)
def test_deeper_problems_decide_where_those_planted_are_too_easy(deeper, verdict, depth, reason):
    judgement = judged(64, 40, 64, deeper=deeper, depths=(1, 2, 4))
    assert (judgement["verdict"], judgement["verdict_depth"]) == (verdict, depth)
    assert reason in judgement["reason"]
    # What the planted problems decide stays decided.
    assert judged(64, 0, 64, deeper=deeper, depths=(1, 2, 4))["verdict"] == "passed"
    assert judged(40, 40, 64, deeper=deeper, depths=(1, 2, 4))["verdict"] == "failed"
    assert judged(20, 20, 20, deeper=deeper, depths=(1, 2, 4))["verdict"] == "inconclusive"


@pytest.mark.parametrize(
    ("deeper", "verdict", "depth", "reason"),
    [
        ([], "inconclusive", 1, "others prove too little at depth 4. To settle it: least_depth=1."),
        ([row(60, 5, 60, 2.0)], "inconclusive", 2, "others prove too little at depth 4"),
        ([row(60, 5, 60, 2.0), row(40, 2, 40, 4.0)], "passed", 4, "finds what others find"),
        # What the planted problems would pass is not failed by deeper ones.
        ([row(20, 0, 60, 2.0)], "inconclusive", 2, "leave room"),
    ],
)
def test_it_passes_no_earlier_than_asked_for(deeper, verdict, depth, reason):
    judgement = judged(64, 4, 64, deeper=deeper, depths=(1, 2, 4), least_depth=4.0)
    assert (judgement["verdict"], judgement["verdict_depth"]) == (verdict, depth)
    assert reason in judgement["reason"]


@pytest.mark.parametrize(
    ("counts", "options", "advice"),
    [
        # 29 problems are needed, and 8 of 10 samples could be planted.
        (
            (8, 0, 8),
            {"inseparable": 1, "unplanted": 1},
            "To settle it: 37 samples, if it misses no more.",
        ),
        ((8, 4, 8), {}, "To settle it: inner_points=1600."),
        ((8, 1, 8), {}, "To settle it: 29 samples, if it misses no more and R-ASR stays"),
        ((18, 0, 19), {}, "To settle it: 46 samples, if it misses no more."),
        ((38, 0, 40), {}, "To settle it: 61 samples, if it misses no more."),
        # As many samples again as the share of planted ones asks for, whatever the others were lost by.
        (
            (24, 1, 24),
            {"unplanted": 26, "unfound": 14},
            "To settle it: 78 samples, if it misses no more",
        ),
        ((50, 0, 50), {"attacks": 10}, "To settle it: 51 samples, if it misses no more."),
        # Above the maximum no number of samples settles it, and a kappa of .999 is as good as one nearer to 1.
        ((10, 6, 10), {}, "To settle it: inner_points=1600, with 29 samples."),
        ((100, 51, 100), {}, "To settle it: inner_points=1600."),
        ((100, 51, 100), {"kappa": 0.9}, "To settle it: kappa=0.999."),
        (
            (100, 51, 100),
            {"inner": "uniform", "depths": (1,)},
            "inner=0.5; or depths=(1, 2, 4, 8)",
        ),
        ((100, 51, 100), {"boundary_points": 5}, "To settle it: boundary_points=1."),
        (
            (100, 51, 100),
            {"planted_candidates": 1, "inner": "uniform"},
            "To settle it: planted_candidates=32; or inner=0.5.",
        ),
        ((100, 51, 100), {"inner_points": 10_000}, "To settle it: no setting of this test makes"),
        ((0, 0, 0), {}, "To settle it: inner_points=79 or readout='max-margin'"),
        ((0, 0, 0), {"unplanted": 3}, "To settle it: kappa=0.9."),
        ((18, 0, 20), {"non_finite": 1}, "To settle it: fix the network, and run this again."),
    ],
)
def test_inconclusive_names_what_would_settle_it(counts, options, advice):
    judgement = judged(*counts, **{"depths": (1, 2, 4, 8), **options})
    assert judgement["verdict"] == "inconclusive"
    assert advice in judgement["reason"]


@pytest.mark.parametrize("sequential", [False, True])
@pytest.mark.parametrize("random_found", range(6))
def test_as_many_samples_as_advised_settle_it(random_found, sequential):
    """With no more misses and this R-ASR on so many samples the attack passes, and on one sample less it does not."""
    judgement = judged(11, random_found, 12, sequential=sequential)
    number = int(re.findall(r"(\d+) samples", judgement["reason"])[-1])
    for samples, verdict in ((number, "passed"), (number - 1, "inconclusive")):
        random = -(-random_found * samples // 12)
        assert judged(samples - 1, random, samples, sequential=sequential)["verdict"] == verdict


def test_numbers_of_a_judgement():
    judgement = judged(19, 4, 20, confidence=0.9)
    assert (judgement["score"], judgement["random_score"]) == (0.95, 0.2)
    assert judgement["score_interval"] == pytest.approx((stats.beta.ppf(0.05, 19, 2), stats.beta.ppf(0.95, 20, 1)))
    assert judgement["random_score_interval"] == pytest.approx(
        (stats.beta.ppf(0.05, 4, 17), stats.beta.ppf(0.95, 5, 16))
    )
    assert "It found 19 of 20 planted examples (0.95); random search found 0.20" in judgement["reason"]
    nothing = judged(0, 0, 0)
    parts = ("score", "score_interval", "random_score", "random_score_interval")
    assert all(nothing[part] is None for part in parts)


@settings(deadline=None, max_examples=100)
@given(
    st.integers(0, 120).flatmap(lambda n: st.tuples(st.integers(0, n), st.integers(0, n), st.just(n))),
    st.integers(0, 3),
    st.integers(1, 12),
    st.booleans(),
)
def test_what_passes_has_earned_it(counts, repaired, attacks, sequential):
    found, random_found, samples = counts
    given_rules = {"repaired": repaired, "attacks": attacks, "sequential": sequential}
    judgement = judged(found, random_found, samples, **given_rules)
    assert judgement["verdict"] in VERDICTS
    if judgement["verdict"] == "passed":
        assert repaired < 2
        assert found / samples >= 0.95
        # At a rate of .9, and at an R-ASR of .5, counts like these are rare: those of the sequential rule rarer.
        assert stats.binom.sf(found - 1, samples, 0.9) <= 0.05 / attacks
        assert stats.binom.cdf(random_found, samples, 0.5) <= 0.05
    if repaired >= 2 or (samples - found >= 2 and found / samples < 0.95):
        assert judgement["verdict"] == "failed"
    # A stronger attack is never judged worse, an easier test or more attacks never better.
    rank = {"failed": 0, "inconclusive": 1, "passed": 2}
    if found < samples:
        better = judged(found + 1, random_found, samples, **given_rules)
        assert rank[better["verdict"]] >= rank[judgement["verdict"]]
    if random_found < samples:
        easier = judged(found, random_found + 1, samples, **given_rules)
        assert rank[easier["verdict"]] <= rank[judgement["verdict"]]
    more = judged(found, random_found, samples, **{**given_rules, "attacks": attacks + 1})
    assert rank[more["verdict"]] <= rank[judgement["verdict"]]


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        ([], "inconclusive"),
        (["failed"], "failed"),
        (["failed", "failed"], "failed"),
        (["failed", "inconclusive"], "inconclusive"),
        (["inconclusive", "passed", "failed"], "passed"),
        (["passed"], "passed"),
    ],
)
def test_the_best_attack_decides(verdicts, expected):
    assert overall(verdicts) == expected
    assert overall(verdicts[::-1]) == expected


def entry(name, verdict, score):
    return {"name": name, "verdict": verdict, "score": score, "reason": f"Reason of {name}."}


def test_the_reason_is_that_of_the_deciding_attack():
    assert overall_reason([]) == "No attack was run."
    assert overall_reason([entry("pgd", "failed", 0.1)]) == "Reason of pgd."
    attacks = [entry("fgsm", "passed", 0.96), entry("easy", "inconclusive", 1.0), entry("pgd", "passed", 0.99)]
    assert overall_reason(attacks) == "Best of 3 attacks, pgd: Reason of pgd."
    nothing = [entry("a", "inconclusive", None), entry("b", "failed", 0.5)]
    assert overall_reason(nothing) == "Best of 2 attacks, a: Reason of a."


@pytest.mark.parametrize(
    ("regular", "inverted", "verdict", "words"),
    [
        (("passed", 1.0), ("passed", 0.97), "passed", "In the regular test: Reason of one."),
        (("passed", 1.0), ("failed", 0.1), "failed", "inverted test (0.10) and not the regular one (1.00), as"),
        (("failed", 0.2), ("passed", 1.0), "failed", "ignores the detector"),
        (("failed", 0.2), ("inconclusive", None), "failed", "not the inverted one (nothing planted)"),
        (("failed", 0.2), ("failed", 0.3), "failed", "fails both tests"),
        (("passed", 1.0), ("inconclusive", 1.0), "inconclusive", "In the inverted test: Reason of other."),
    ],
)
def test_the_verdict_on_both(regular, inverted, verdict, words):
    found, reason = pair_verdict({"regular": entry("one", *regular), "inverted": entry("other", *inverted)})
    assert found == verdict
    assert words in reason


@pytest.mark.parametrize(
    ("found", "samples", "ignores"),
    [
        (38, 42, False),
        (61, 64, False),
        (64, 64, False),  # As one that fails by canaries or at the head.
        (20, 40, False),
        (0, 3, False),
        (0, 0, False),  # By canaries, where nothing was planted.
        (9, 40, True),
        (2, 30, True),
    ],
)
def test_only_an_attack_that_misses_more_than_half_ignores_the_detector(found, samples, ignores):
    interval = proportion_interval(found, samples, confidence=0.95)
    missing = entry("one", "failed", found / samples if samples else None)
    missing["score_interval"] = interval and list(interval)
    for tests in ({"regular": entry("other", "passed", 1.0), "inverted": missing}, dict.fromkeys(TESTS, missing)):
        verdict, reason = pair_verdict(tests)
        assert verdict == "failed"
        assert ("ignores the detector" in reason or "finds neither" in reason) == ignores
    for exposure, rejected in (("classifier", 0), ("classifier", samples - found), ("reject", 0)):
        test = {**missing, "samples": samples, "outcomes": {"found": found, "rejected": rejected}}
        words = blind_words(as_attack("robust_ext:APGD()"), exposure, test)
        assert ("cause" in words) == ignores
        # What is no cause is told as a fact, where there is one.
        assert ("Remedy" in words) == (ignores or bool(samples - found and (rejected or exposure == "reject")))
        assert not blind_words(as_attack("robust_ext:OrthogonalPGD()"), exposure, test)


@pytest.mark.parametrize(
    ("found", "samples", "most"), [(38, 42, True), (60, 64, True), (30, 40, True), (20, 40, False), (3, 5, False)]
)
def test_a_failure_by_the_rule_says_that_the_attack_finds_most(found, samples, most):
    result = judged(found, 0, samples)
    assert result["verdict"] == "failed"
    assert ("finds most" in result["reason"]) == most
