"""The rules of the verdict, one by one and at their edges."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from robust_ext.core.threat import ThreatModel
from robust_ext.evaluations.binarization.settings import BinarizationSettings
from robust_ext.evaluations.binarization.verdict import VERDICTS, judge, overall, overall_reason, pair_verdict

LINF = ThreatModel(norm="linf", epsilon=0.1)


def judged(found, random_found, samples, *, planted=8, repaired=0, **options):
    rules = BinarizationSettings(threat_model=LINF, **options)
    return judge(found, random_found, samples, planted=planted, repaired=repaired, settings=rules)


@pytest.mark.parametrize(
    ("found", "random_found", "samples", "options", "verdict", "reason"),
    [
        # Rule 1: canaries come before everything else.
        (512, 0, 512, {"repaired": 2}, "failed", "predicted labels instead of the given ones"),
        (512, 0, 512, {"repaired": 8}, "failed", "moved 8 of 8 misclassified canaries"),
        (512, 0, 512, {"repaired": 1}, "passed", "finds what was planted"),
        (0, 0, 0, {"repaired": 2}, "failed", "predicted labels"),
        (3, 0, 3, {"repaired": 2}, "failed", "predicted labels"),
        # Rule 2.
        (0, 0, 0, {}, "inconclusive", "No example could be planted"),
        (0, 0, 0, {"minimum_samples": 0}, "inconclusive", "No example could be planted"),
        # Rule 3: the upper bounds of 0 of 1 and 1 of 2 are .95 and .9747, that of 0 of 2 is .776.
        (9, 0, 9, {}, "inconclusive", "too few samples for a verdict; use at least 10"),
        (8, 0, 9, {}, "inconclusive", "too few samples"),
        (0, 0, 1, {"threshold": 0.96}, "failed", "Even on so few samples a score of 0.96 can be ruled out"),
        (0, 0, 1, {"threshold": 0.94}, "inconclusive", "too few samples"),
        (0, 0, 2, {}, "failed", "can be ruled out"),
        (1, 0, 2, {}, "inconclusive", "too few samples"),
        (3, 0, 9, {}, "failed", "can be ruled out"),
        (10, 0, 10, {"minimum_samples": 11}, "inconclusive", "use at least 11"),
        # Rule 4: exactly at the threshold is not below it.
        (18, 0, 20, {}, "failed", "A score below 0.95 means that the attack misses adversarial examples"),
        (19, 0, 20, {}, "passed", "finds what was planted"),
        (95, 0, 100, {}, "passed", "finds what was planted"),
        (94, 0, 100, {}, "failed", "A score below 0.95 means"),
        (30, 40, 100, {}, "failed", "no better than that of random search"),
        (40, 40, 100, {}, "failed", "no better than that of random search"),
        (45, 40, 100, {}, "failed", "hardly better than that of random search"),
        (90, 95, 100, {}, "failed", "no better than"),
        (90, 0, 100, {"threshold": 0.9}, "passed", "finds what was planted"),
        # Rule 5: exactly at the maximum is not above it.
        (100, 50, 100, {}, "passed", "finds what was planted"),
        (100, 51, 100, {}, "inconclusive", "an R-ASR above 0.5 means that the planted examples are too easy"),
        (100, 11, 100, {"maximum_random_score": 0.1}, "inconclusive", "an R-ASR above 0.1"),
        (10, 5, 10, {}, "inconclusive", "an R-ASR whose interval overlaps that of the score"),
        (100, 95, 100, {"maximum_random_score": 1.0}, "inconclusive", "an R-ASR whose interval overlaps"),
        (100, 90, 100, {"maximum_random_score": 1.0}, "passed", "finds what was planted"),
        # Rule 6, with the doubt that few samples leave.
        (10, 0, 10, {}, "passed", "so few samples leave room for a true score below 0.95"),
        (61, 0, 61, {}, "passed", "so few samples leave room"),
    ],
)
def test_the_rules(found, random_found, samples, options, verdict, reason):
    judgement = judged(found, random_found, samples, **options)
    assert judgement["verdict"] == verdict
    assert reason in judgement["reason"]
    assert judgement["reason"].endswith(".")


@pytest.mark.parametrize(
    ("counts", "options", "advice"),
    [
        # 10 problems are needed, and 8 of 10 samples could be planted.
        ((8, 0, 8), {"inseparable": 1, "unplanted": 1}, "To settle it: 13 samples (--samples 13)."),
        ((8, 4, 8), {}, "To settle it: 16 samples (--samples 16)."),
        ((10, 5, 10), {}, "16 samples (--samples 16), if the scores stay as they are; or inner_points=4000 (--inner"),
        ((10, 5, 10), {"inner_points": 5000}, "as they are; or inner_points=10000 (--inner-points 10000)."),
        ((10, 5, 10), {"inner_points": 10_000}, "To settle it: 16 samples (--samples 16), if the scores stay as they"),
        # Above the maximum no number of samples settles it, and a kappa of .999 is as good as one nearer to 1.
        ((100, 51, 100), {}, "To settle it: inner_points=4000 (--inner-points 4000)."),
        ((100, 51, 100), {"kappa": 0.9}, "To settle it: kappa=0.999 (--kappa 0.999)."),
        ((100, 51, 100), {"boundary_points": 5}, "To settle it: boundary_points=1 (--boundary-points 1)."),
        ((100, 51, 100), {"inner_points": 10_000}, "To settle it: no setting of this test makes"),
        ((0, 0, 0), {}, "To settle it: inner_points=199 (--inner-points 199) or readout='max-margin' (--readout max-"),
        ((0, 0, 0), {"unplanted": 3}, "To settle it: kappa=0.9 (--kappa 0.9)."),
        ((18, 0, 20), {"non_finite": 1}, "To settle it: mend the network, and run this again."),
    ],
)
def test_inconclusive_names_what_would_settle_it(counts, options, advice):
    of_run = {key: options[key] for key in ("inseparable", "unplanted", "non_finite") if key in options}
    rules = BinarizationSettings(threat_model=LINF, **{key: options[key] for key in options.keys() - of_run})
    judgement = judge(*counts, planted=8, repaired=0, settings=rules, **of_run)
    assert judgement["verdict"] == "inconclusive"
    assert advice in judgement["reason"]


@pytest.mark.parametrize("random_found", range(10))
def test_as_many_samples_as_advised_settle_it(random_found):
    """With these scores on so many samples, the verdict is no longer inconclusive."""
    advised = judged(10, random_found, 10)["reason"].partition("--samples ")[2].partition(")")[0]
    if random_found > 5:
        assert not advised
    elif advised:
        number = int(advised)
        assert judged(number, int(random_found * number / 10), number)["verdict"] == "passed"
    else:
        assert judged(10, random_found, 10)["verdict"] == "passed"


@pytest.mark.parametrize(("samples", "sure"), [(61, False), (62, True), (512, True)])
def test_doubt_ends_where_the_sequential_test_decides(samples, sure):
    assert ("so few samples" not in judged(samples, 0, samples)["reason"]) == sure


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


@settings(deadline=None, max_examples=300)
@given(
    st.integers(0, 120).flatmap(lambda n: st.tuples(st.integers(0, n), st.integers(0, n), st.just(n))),
    st.integers(0, 3),
)
def test_what_passes_has_earned_it(counts, repaired):
    found, random_found, samples = counts
    judgement = judged(found, random_found, samples, repaired=repaired)
    assert judgement["verdict"] in VERDICTS
    if judgement["verdict"] == "passed":
        assert samples >= 10
        assert repaired < 2
        assert found / samples >= 0.95
        assert random_found / samples <= 0.5
        assert stats.beta.ppf(0.025, found, samples - found + 1) > stats.beta.ppf(
            0.975, random_found + 1, samples - random_found
        )
    if repaired >= 2 or (samples >= 10 and found / samples < 0.95):
        assert judgement["verdict"] == "failed"
    # A stronger attack is never judged worse, an easier test never better.
    rank = {"failed": 0, "inconclusive": 1, "passed": 2}
    if found < samples:
        better = judged(found + 1, random_found, samples, repaired=repaired)
        assert rank[better["verdict"]] >= rank[judgement["verdict"]]
    if random_found < samples:
        easier = judged(found, random_found + 1, samples, repaired=repaired)
        assert rank[easier["verdict"]] <= rank[judgement["verdict"]]


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
        (("passed", 1.0), ("failed", 0.1), "failed", "inverted test (0.10) and not the regular one (1.00): it"),
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
