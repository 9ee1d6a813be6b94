"""The search for an attack that passes: what it finds on masked models, and how often it passes what it must not."""

import math
from dataclasses import replace

import numpy as np
import pytest

from robust_ext import ThreatModel, as_attack, binarization_test
from robust_ext.evaluations.binarization.rules import Rules, Solved
from robust_ext.evaluations.binarization.settings import BinarizationSettings
from robust_ext.evaluations.causes.probes import probe_model
from robust_ext.evaluations.evaluate import certificate
from robust_ext.evaluations.evaluate.race import ERROR_RATE, JUDGED, PROBLEMS, RUNGS, Judgement, Kinds, Race, Score
from robust_ext.evaluations.evaluate.recipes import compose, gradient_free, longer
from robust_ext.evaluations.evaluate.search import search_recipe
from tests.evaluations.diagnosis.zoo.layers import Rounding, Winners
from tests.evaluations.diagnosis.zoo.networks import convolutional, digits, trained

LINF = ThreatModel(norm="linf", epsilon=0.1)


def searched(network, **settings):
    inputs, labels = digits(12)
    findings = probe_model(network, inputs, labels, threat_model=LINF).findings
    given = {"module": network, "inputs": inputs, "ids": range(len(inputs)), "threat_model": LINF, "seed": 0}
    return search_recipe(**given, judge_seed=1, findings=findings, **settings)


def test_the_winner_names_the_layer_and_its_text_finds_other_planted_points():
    network = convolutional(mask=Rounding())
    found = searched(network)
    assert found.winner.view == {"bpda": "net.mask"}
    assert next(one for one in found.tried if one["words"] == "margin, 20 steps")["outcome"] == "dropped"
    again = binarization_test(network, found.winner.text, digits(24)[0], LINF, judge_seed=77, depths=(1,))
    assert again.score >= 0.95
    assert found.judged["settings"]["error_rate"] == ERROR_RATE / JUDGED


def test_without_a_recipe_that_passes_nothing_is_claimed():
    # Gradients of k winners lead nowhere, and queries that would find something are more than may be spent.
    found = searched(trained("winners", Winners, faulty=True), affordable=500)
    assert found.winner is None
    assert {one["outcome"] for one in found.tried} <= {"dropped", "raised", "failed the judge"}


class Binomial:
    """Candidates that solve each problem with a rate of their own, and the judge's rules on what they solve.

    One by the name of shallow finds little that lies deeper.
    """

    def __init__(self, rates, seed):
        self.rates, self.rng, self.attempts = rates, np.random.default_rng(seed), []

    def score(self, recipes, rung):
        problems, texts = RUNGS[rung], [one.text for one in recipes]
        counts = self.rng.binomial(problems, [self.rates[text] for text in texts]).tolist()
        deeper = [0.3 if text == "shallow" else 1.0 for text in texts]
        scores = zip(texts, counts, deeper, strict=True)
        return {text: Score(found=count, problems=problems, deeper=deep) for text, count, deep in scores}

    def judge(self, recipe, attempt, *, problems):
        self.attempts.append(attempt)
        found = int(self.rng.binomial(problems, self.rates[recipe.text]))
        verdict = decided(found, problems, ERROR_RATE / JUDGED)
        return Judgement(passed=verdict == "passed", reason=verdict, near=found >= 0.85 * problems)


def decided(found, problems, error_rate):
    rules = Rules(BinarizationSettings(threat_model=LINF, error_rate=error_rate))
    return rules.decide([Solved(found=int(found), random_found=0, samples=problems)])[0]


def passes(rates, *, searches):
    """Count the searches that pass a recipe, of candidates with these rates; those composed later have the best one."""
    made = [replace(compose(), text=f"recipe {number}") for number in range(len(rates) + 60)]
    known = {one.text: rate for one, rate in zip(made, [*rates, *[max(rates)] * 60], strict=True)}
    count = 0
    for seed in range(searches):
        fresh, trial = iter(made[len(rates) :]), Binomial(known, seed)
        kinds = Kinds(
            first=made[: len(rates)],
            further=lambda best, fresh=fresh: [next(fresh) for _ in range(4)],
            last=[],
            longer=lambda one, fresh=fresh: [next(fresh), next(fresh)],
        )
        count += Race(trial=trial, kinds=kinds).run() is not None
        assert len(set(trial.attempts)) == len(trial.attempts) <= JUDGED
    return count


def accepted(problems, error_rate=ERROR_RATE / JUDGED):
    """The exact probability that a rate of .9 passes: of at most as many misses as are too few for it."""

    def at_most(misses):
        return sum(math.comb(problems, k) * 0.1**k * 0.9 ** (problems - k) for k in range(misses + 1))

    allowed = [misses for misses in range(problems // 20 + 1) if at_most(misses) < error_rate]
    return at_most(max(allowed)) if allowed else 0.0


SEARCH = JUDGED * max(accepted(PROBLEMS), accepted(2 * PROBLEMS))


@pytest.mark.parametrize("rates", [[0.9] * 12, [0.3, 0.6, 0.8, 0.85, 0.88, 0.9]], ids=["alike", "mixed"])
def test_a_search_among_recipes_that_must_not_pass_passes_one_in_at_most_a_twentieth(rates):
    assert SEARCH <= ERROR_RATE
    assert passes(rates, searches=200) <= 200 * SEARCH + 3 * math.sqrt(200 * SEARCH)


@pytest.mark.parametrize("planted", [38, 64, 200])
def test_an_evaluation_certifies_an_attack_that_must_not_be_in_at_most_a_twentieth(planted):
    """The standard attack, which has the rate of a pass to miss, and then the search, whatever was planted."""
    alone = accepted(planted, certificate.ERROR_RATE)
    most = alone + SEARCH
    assert most <= 0.05
    found = np.random.default_rng(planted).binomial(planted, 0.9, size=1000)
    first = sum(decided(n, planted, certificate.ERROR_RATE) == "passed" for n in found)
    assert first <= 1000 * alone + 3 * math.sqrt(1000 * 0.02)
    assert first + passes([0.9] * 6, searches=100) * 10 <= 1000 * most + 3 * math.sqrt(1000 * most) + 20


def test_the_fewest_problems_that_certify_an_attack():
    rules = Rules(BinarizationSettings(threat_model=LINF, error_rate=certificate.ERROR_RATE))
    assert min(n for n in range(1, 100) if rules.proves_rate(n, n)) == certificate.ENOUGH


def test_a_search_passes_a_sound_recipe_among_weak_ones_and_prefers_those_that_reach_deeper():
    assert passes([0.5] * 5 + [0.999], searches=60) >= 57
    cheap, dear = replace(compose(), text="shallow"), replace(compose(steps=50), text="deep")
    kinds = Kinds(first=[cheap, dear], further=list, last=[], longer=lambda one: [])
    race = Race(trial=Binomial({"shallow": 1.0, "deep": 1.0}, 0), kinds=kinds)
    assert race.run() is dear
    assert list(race.judgements) == ["deep"]


def test_longer_recipes_cost_more_and_end():
    left, seen = [compose({"bpda": "net.mask"}), *gradient_free([], LINF, images=True)], set()
    while left:
        one, *left = left
        more = longer(one)
        assert all(further.cost > one.cost for further in more)
        assert all(as_attack(further.text) is not None for further in more)
        left += [further for further in more if further.text not in seen]
        seen |= {further.text for further in more}
        assert len(seen) < 50
