"""The rules of the verdict, one by one and at their edges."""

import re

import numpy as np
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
from robust_ext.evaluations.binarization.verdict import Counts, judge, overall, overall_reason, pair_verdict
from robust_ext.registry.attack import as_attack

LINF = ThreatModel(norm="linf", epsilon=0.1)
DEEP = (1, 2, 4, 8)


def judged(found, random_found, samples, *, attacks=1, deeper=(), non_finite=0, **options):
    counted = {key: options.pop(key) for key in ("repaired", "inseparable", "unplanted", "unfound") if key in options}
    first = Solved(found=found, random_found=random_found, samples=samples, non_finite=non_finite)
    rules = Rules(BinarizationSettings(threat_model=LINF, **{"depths": (1,), **options}), attacks)
    return judge(Counts(problems=[first, *deeper], canaries=8, **counted), rules)


# Found, found by random search, problems, options. At the edges of the rules:
# canaries come before everything else; below the threshold by two misses at least;
# .9^28 = .052 and .9^29 = .047, with two attacks .9^35 = .0250 and .9^36 = .0225;
# of 100, R-ASR 41 shows at most .497, 42 at most .507, at two thirds of the error 40 and 41;
# in sequence a perfect attack needs 31 samples, among ten 54.
RULES = {
    "failed": [
        (512, 0, 512, {"repaired": 2}), (0, 0, 0, {"repaired": 2}), (0, 0, 2, {}), (37, 0, 39, {}), (94, 0, 100, {}),
        (30, 40, 100, {}), (40, 40, 100, {}), (45, 40, 100, {}),
    ],
    "inconclusive": [
        (0, 0, 0, {}), (0, 0, 1, {}), (1, 0, 2, {}), (18, 0, 19, {}), (38, 0, 40, {}), (28, 0, 28, {}),
        (35, 0, 35, {"attacks": 2}), (61, 0, 64, {}), (9, 0, 10, {"proven_rate": 0.0}),
        (100, 42, 100, {"random_stops": False}), (100, 41, 100, {}), (100, 41, 100, {"depths": DEEP}),
        (100, 51, 100, {}), (28, 20, 28, {}), (30, 0, 30, {"sequential": True}),
        (53, 0, 53, {"sequential": True, "attacks": 10}), (62, 0, 62, {"sequential": True, "proven_rate": 0.0}),
    ],
    "passed": [
        (512, 0, 512, {"repaired": 1}), (96, 0, 100, {}), (90, 0, 100, {"threshold": 0.9, "proven_rate": 0.8}),
        (29, 0, 29, {}), (36, 0, 36, {"attacks": 2}), (62, 0, 64, {}), (10, 0, 10, {"proven_rate": 0.0}),
        (100, 41, 100, {"random_stops": False}), (100, 40, 100, {}), (100, 38, 100, {"depths": DEEP}),
        (100, 100, 100, {"maximum_random_score": 1.0}), (31, 0, 31, {"sequential": True}),
        (54, 0, 54, {"sequential": True, "attacks": 10}), (63, 0, 63, {"sequential": True, "proven_rate": 0.0}),
    ],
}  # fmt: skip


@pytest.mark.parametrize("verdict", RULES)
def test_the_rules(verdict):
    for *counts, options in RULES[verdict]:
        assert judged(*counts, **options)["verdict"] == verdict, (counts, options)


def row(found, random_found, samples, depth):
    return Solved(found=found, random_found=random_found, samples=samples, depth=depth)


EASY, HARD = row(60, 30, 60, 2.0), row(40, 2, 40, 4.0)
# Found by random search of 64 planted examples, the least depth, deeper problems, and the verdict with its depth.
DEEPER = [
    # Random search finds 40 of them: deeper problems decide.
    (40, 1.0, [], "inconclusive", 1),
    (40, 1.0, [row(0, 0, 0, 2.0)], "inconclusive", 1),
    (40, 1.0, [row(60, 5, 60, 2.0)], "passed", 2),
    (40, 1.0, [EASY, HARD], "passed", 4),
    # At each depth up to that one its rate must be shown.
    (40, 1.0, [row(58, 30, 64, 2.0), row(50, 2, 50, 4.0)], "inconclusive", 2),
    (40, 1.0, [EASY, row(20, 2, 20, 4.0)], "inconclusive", 4),
    # Missing some of what the best of all witnesses found is no failure; missing most of it is.
    (40, 1.0, [row(50, 5, 60, 2.0)], "inconclusive", 2),
    (40, 1.0, [row(20, 0, 60, 2.0)], "failed", 2),
    (40, 1.0, [EASY, row(60, 25, 60, 4.0)], "inconclusive", 4),
    # It passes no earlier than asked for, and what the planted problems would pass is not failed by deeper ones.
    (4, 4.0, [], "inconclusive", 1),
    (4, 4.0, [row(60, 5, 60, 2.0)], "inconclusive", 2),
    (4, 4.0, [row(60, 5, 60, 2.0), HARD], "passed", 4),
    (4, 4.0, [row(20, 0, 60, 2.0)], "inconclusive", 2),
]


def test_deeper_problems_decide_where_those_planted_are_too_easy():
    for random_found, least, deeper, *expected in DEEPER:
        judgement = judged(64, random_found, 64, deeper=deeper, depths=(1, 2, 4), least_depth=least)
        assert [judgement["verdict"], judgement["verdict_depth"]] == expected
        # What the planted problems decide stays decided.
        for counts, verdict in (((64, 0, 64), "passed"), ((40, 40, 64), "failed"), ((20, 20, 20), "inconclusive")):
            assert judged(*counts, deeper=deeper, depths=(1, 2, 4))["verdict"] == verdict


SETTLED_BY = [
    # 29 problems are needed, and 8 of 10 samples could be planted.
    ((8, 0, 8), {"inseparable": 1, "unplanted": 1}, "37 samples"),
    ((8, 4, 8), {}, "inner_points=600."),
    ((24, 1, 24), {"unplanted": 26, "unfound": 14}, "78 samples"),
    ((50, 0, 50), {"attacks": 10}, "51 samples"),
    # Above the maximum no number of samples settles it, and a kappa of .999 is as good as one nearer to 1.
    ((10, 6, 10), {}, "inner_points=600, with 29 samples."),
    ((100, 51, 100), {"kappa": 0.9}, "kappa=0.999."),
    ((100, 51, 100), {"inner": "uniform", "depths": (1,)}, "inner=0.5; or depths=(1, 2, 4, 8)"),
    ((100, 51, 100), {"boundary_points": 5}, "boundary_points=1."),
    ((100, 51, 100), {"planted_candidates": 1, "inner": "uniform"}, "planted_candidates=64; or inner=0.5."),
    ((100, 51, 100), {"inner_points": 10_000}, "no setting of this test"),
    ((0, 0, 0), {}, "inner_points=29 or readout='max-margin'"),
    ((0, 0, 0), {"unplanted": 3}, "kappa=0.9."),
    ((18, 0, 20), {"non_finite": 1}, "fix the network"),
]


def test_inconclusive_names_what_would_settle_it():
    for counts, options, advice in SETTLED_BY:
        judgement = judged(*counts, **{"depths": DEEP, **options})
        assert judgement["verdict"] == "inconclusive"
        assert f"To settle it: {advice}" in judgement["reason"]


@pytest.mark.parametrize("sequential", [False, True])
def test_as_many_samples_as_advised_settle_it(sequential):
    """With no more misses and this R-ASR on so many samples the attack passes, and on one sample less it does not."""
    for random_found in range(6):
        judgement = judged(11, random_found, 12, sequential=sequential)
        number = int(re.findall(r"(\d+) samples", judgement["reason"])[-1])
        for samples, verdict in ((number, "passed"), (number - 1, "inconclusive")):
            random = -(-random_found * samples // 12)
            assert judged(samples - 1, random, samples, sequential=sequential)["verdict"] == verdict


def test_numbers_of_a_judgement():
    judgement, beta, nothing = judged(19, 4, 20, confidence=0.9), stats.beta.ppf, judged(0, 0, 0)
    assert (judgement["score"], judgement["random_score"]) == (0.95, 0.2)
    assert judgement["score_interval"] == pytest.approx((beta(0.05, 19, 2), beta(0.95, 20, 1)))
    assert judgement["random_score_interval"] == pytest.approx((beta(0.05, 4, 17), beta(0.95, 5, 16)))
    assert [nothing[part] for part in judgement if part.endswith(("score", "score_interval"))] == [None] * 4


COUNTS = st.integers(0, 120).flatmap(lambda n: st.tuples(st.integers(0, n), st.integers(0, n), st.just(n)))


@settings(max_examples=100)
@given(COUNTS, st.integers(0, 3), st.integers(1, 12), st.booleans())
def test_what_passes_has_earned_it(counts, repaired, attacks, sequential):
    (found, random_found, samples), given_rules = counts, {"repaired": repaired, "sequential": sequential}
    rank = ["failed", "inconclusive", "passed"].index

    def verdict(found, random_found, attacks):
        return judged(found, random_found, samples, attacks=attacks, **given_rules)["verdict"]

    own = verdict(found, random_found, attacks)
    if own == "passed":
        assert repaired < 2
        assert found / samples >= 0.95
        # At a rate of .9, and at an R-ASR of .5, counts like these are rare: those of the sequential rule rarer.
        assert stats.binom.sf(found - 1, samples, 0.9) <= 0.05 / attacks
        assert stats.binom.cdf(random_found, samples, 0.5) <= 0.05
    if repaired >= 2 or (samples - found >= 2 and found / samples < 0.95):
        assert own == "failed"
    # A stronger attack is never judged worse, an easier test or more attacks never better.
    if found < samples:
        assert rank(verdict(found + 1, random_found, attacks)) >= rank(own)
    if random_found < samples:
        assert rank(verdict(found, random_found + 1, attacks)) <= rank(own)
    assert rank(verdict(found, random_found, attacks + 1)) <= rank(own)


def entry(name, verdict, score):
    return {"name": name, "verdict": verdict, "score": score, "reason": f"Reason of {name}."}


def test_the_best_attack_decides_and_its_reason_is_given():
    for verdicts, expected in (
        ([], "inconclusive"),
        (["failed", "failed"], "failed"),
        (["failed", "inconclusive"], "inconclusive"),
        (["inconclusive", "passed", "failed"], "passed"),
    ):
        assert overall(verdicts) == overall(verdicts[::-1]) == expected
    attacks = [entry("fgsm", "passed", 0.96), entry("easy", "inconclusive", 1.0), entry("pgd", "passed", 0.99)]
    assert overall_reason(attacks).endswith("Reason of pgd.")
    assert overall_reason([entry("a", "inconclusive", None), entry("b", "failed", 0.5)]).endswith("Reason of a.")


PAIRS = [
    (("passed", 1.0), ("passed", 0.97), "passed", "Reason of one."),
    (("passed", 1.0), ("failed", 0.1), "failed", "inverted test (0.10)"),
    (("failed", 0.2), ("passed", 1.0), "failed", "ignores the detector"),
    (("failed", 0.2), ("inconclusive", None), "failed", "regular"),
    (("failed", 0.2), ("failed", 0.3), "failed", "both tests"),
    (("passed", 1.0), ("inconclusive", 1.0), "inconclusive", "Reason of other."),
]


def test_the_verdict_on_both():
    for regular, inverted, verdict, words in PAIRS:
        found, reason = pair_verdict({"regular": entry("one", *regular), "inverted": entry("other", *inverted)})
        assert found == verdict
        assert words in reason
        # Nothing planted in one test shows nothing of the detector.
        assert inverted[1] is not None or "ignores the detector" not in reason


@pytest.mark.parametrize(
    ("found", "samples", "ignores"),
    # Of the second it fails by canaries or at the head; by canaries where nothing was planted.
    [(38, 42, False), (64, 64, False), (20, 40, False), (0, 3, False), (0, 0, False), (9, 40, True), (2, 30, True)],
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


def p_value(found, samples, rate, side):
    """Of the exact binomial test, whose inverse the bounds of Clopper and Pearson are."""
    return stats.binomtest(found, samples, rate, alternative=side).pvalue


@given(st.integers(1, 80), st.data(), st.sampled_from([1, 2, 5]), st.sampled_from([(1,), DEEP]))
def test_rates_are_shown_where_an_exact_binomial_test_shows_them(samples, data, attacks, depths):
    found, random_found = (data.draw(st.integers(0, samples)) for _ in range(2))
    chosen = BinarizationSettings(threat_model=LINF, depths=depths, random_stops=False)
    rules, error = Rules(chosen, attacks), 0.05 / attacks
    proved = found / samples >= 0.95 and p_value(found, samples, 0.9, "greater") < error
    assert rules.proves_rate(found, samples) == proved
    assert rules.falls_behind(found, samples) == (p_value(found, samples, 0.5, "less") < error / len(depths))
    assert rules.trails(found, samples) == (p_value(found, samples, 0.75, "less") < error / len(depths))
    assert rules.outdone(found, samples - found) == (p_value(found, samples, 0.5, "greater") <= error)
    for depth, share in ((1.0, 1 if depths == (1,) else 2), (2.0, 1 if depths == (1,) else 6)):
        at = row(found, random_found, samples, depth)
        assert rules.proves_hard(at) == (p_value(random_found, samples, 0.5, "less") < 0.05 / share)
    behind = row(found, random_found, samples, 1.0)
    blocked = random_found > samples / 2 or p_value(found, samples, 0.5, "greater") >= error
    assert rules.stops_at_head(behind, masked=True) == (blocked or (samples - found >= 2 and found < 0.95 * samples))
    assert rules.stops_at_head(behind, masked=False) == rules.falls_behind(found, samples)
    assert rules.graded(samples) is False


@given(st.integers(1, 80), st.data())
def test_sequential_rules_are_wagers_that_pay_enough(samples, data):
    """Each claim holds from the wealth of its bets on, by numerical integration over the rates that it argues for."""
    found = data.draw(st.integers(0, samples))
    rules = Rules(BinarizationSettings(threat_model=LINF, sequential=True, depths=DEEP), 2)

    def wealth(low, high, against):
        rates = np.linspace(low, high, 4001)[1:-1]
        return stats.binom.pmf(found, samples, rates).mean() / stats.binom.pmf(found, samples, against)

    above = 0.6 * (found == samples) / 0.5**samples + 0.4 * wealth(0.75, 1, 0.5)
    for shown, paid in (
        (rules.falls_behind(found, samples), wealth(0, 0.5, 0.5) * 0.05 / 8),
        (rules.trails(found, samples), wealth(0, 0.75, 0.75) * 0.05 / 8),
        (rules.outdone(found, samples - found), above * 0.05 / 2),
    ):
        # Where its numbers are near the bar they show nothing.
        assert shown == (paid > 1) or 0.97 < paid < 1.03
    assert rules.graded(samples) == (samples >= 16)


def test_random_search_that_solves_half_of_all_is_rarely_settled():
    """At any look of the sequential rule, in simulated tests: half of the error is that of R-ASR."""
    rules = Rules(BinarizationSettings(threat_model=LINF, sequential=True, depths=DEEP))
    hits = (np.random.default_rng(0).random((2000, 200)) < 0.5).cumsum(1)[:, 7::8]
    low = [sum(rules.proves_hard(row(0, hit, look, 1.0)) for hit in range(look + 1)) for look in range(8, 201, 8)]
    assert low == sorted(low)
    assert (hits < low).any(1).mean() <= 0.05 / 2 + 4 * np.sqrt(0.025 / 2000)
    assert rules.random_error_rate() + 3 * rules.random_error_rate(8.0) == pytest.approx(0.05)


# Options, the problems that random search found and all, and whether R-ASR is settled.
SETTLED = [
    ({}, 0, 7, False), ({}, 0, 8, True), ({}, 1, 11, False), ({}, 1, 12, True),
    # Deeper problems need it where planted ones are too easy.
    ({}, 30, 30, False), ({"depths": (1,)}, 30, 30, True), ({"depths": (1,)}, 0, 7, True),
    ({"least_depth": 2.0}, 0, 30, False), ({"maximum_random_score": 1.0}, 0, 30, False),
    ({"random_stops": False}, 0, 30, False), ({"sequential": False, "random_stops": False}, 0, 30, False),
    ({"sequential": False}, 0, 7, False), ({"sequential": False}, 0, 8, True), ({"sequential": False}, 1, 16, True),
    ({"sequential": False}, 2, 16, True), ({"sequential": False}, 3, 16, False),
]  # fmt: skip


def test_where_random_search_is_settled():
    for options, found, samples, settled in SETTLED:
        rules = Rules(BinarizationSettings(threat_model=LINF, **{"sequential": True, **options}))
        assert rules.random_settled(row(0, found, samples, 1.0)) == settled, options


@pytest.mark.parametrize(("options", "attacks", "fewest"), [({}, 1, 29), ({}, 2, 36), ({"proven_rate": 0.0}, 1, 5)])
def test_too_few_samples_are_warned_of_and_how_many_it_takes_is_stated(options, attacks, fewest, recwarn):
    """.9^29 is below the error rate; without a proven rate R-ASR alone has to show that it is at most a half."""
    rules = Rules(BinarizationSettings(threat_model=LINF, depths=(1,), **options), attacks)
    assert rules.needed(Solved(found=0, random_found=0, samples=0)) == fewest
    with pytest.warns(UserWarning, match=f"misses none needs {fewest}"):
        rules.warn_if_few(fewest - 1)
    rules.warn_if_few(fewest)
    assert not recwarn.list
    missed = Solved(found=61, random_found=0, samples=63)
    assert attacks > 1 or rules.needed(missed) == next(
        n for n in range(63, 999) if judged(n - 2, 0, n, attacks=attacks, **options)["verdict"] == "passed"
    )
