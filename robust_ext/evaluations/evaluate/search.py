"""A search for an attack that passes the binarization test, where the standard one fails it.

Candidates race on planted problems by successive halving (Jamieson and Talwalkar, "Non-stochastic Best Arm
Identification and Hyperparameter Optimization", 2016): all of them on a few problems, the better half on more. Those
that solve nearly all go before a judge, the cheapest first: problems of other draws, on other samples where there are
enough, with depth. Automated discovery of adaptive attacks (Yao et al. 2021) searches the same factors by what breaks
samples; planted problems have known solutions instead, so that a recipe can be judged, and not only compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.attacks.base import Attack
from robust_ext.attacks.random_search import RandomSearch
from robust_ext.core.errors import AttackError, InvalidArgumentError, ModelError, OutOfTimeError, collecting
from robust_ext.core.random import derive_seed
from robust_ext.core.threat import ThreatModel
from robust_ext.core.wording import count
from robust_ext.engine.context import current_context, is_over
from robust_ext.engine.estimate import Estimate, EstimatedError, estimate
from robust_ext.evaluations.binarization import BinarizationResult, binarization_test
from robust_ext.evaluations.binarization.readout_settings import DEPTHS
from robust_ext.evaluations.causes.finding import Finding
from robust_ext.evaluations.caveats import Part, parts_of
from robust_ext.evaluations.evaluate.certificate import weakness
from robust_ext.evaluations.evaluate.race import (
    AT_MOST,
    ERROR_RATE,
    GOOD,
    JUDGED,
    PROBLEMS,
    RUNGS,
    Judgement,
    Kinds,
    Race,
    Score,
)
from robust_ext.evaluations.evaluate.recipes import Recipe as Recipe
from robust_ext.evaluations.evaluate.recipes import first_recipes, further_recipes, gradient_free, longer

AFFORDABLE = 12_500.0
"""Passes a problem that a recipe may take by default: 20 runs of Square of 500 queries are below it."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """The recipes of a search, and the one that passed.

    Args:
        winner: The cheapest recipe that passed; None without one.
        nearest: Without a winner, the recipe that solved most; it may break samples all the same.
        tried: One entry a candidate, plain values.
        judged: Content of the judge's binarization test of the winner, or of the best recipe that failed it.
        reason: What was found, in a sentence.
        parts: The costs of all tests.
    """

    winner: Recipe | None
    tried: tuple[Mapping[str, Any], ...]
    judged: Mapping[str, Any] | None
    reason: str
    parts: tuple[Part, ...] = ()
    nearest: Recipe | None = None


@dataclass(kw_only=True)
class Planted:
    """Planted problems of a model, as what scores and judges candidates."""

    module: nn.Module
    inputs: Tensor
    ids: Sequence[int]
    threat_model: ThreatModel
    seed: int
    judge_seed: int
    out: Path | None
    options: Mapping[str, Any] = field(default_factory=dict)  # Further settings of the tests
    parts: list[Part] = field(default_factory=list)
    tests: int = 0

    def score(self, recipes: Sequence[Recipe], rung: int) -> Mapping[str, Score]:
        """Return the scores of recipes by text; all of them meet the same problems, which are planted once."""
        found, left = dict[str, Score](), list(recipes)
        while left:
            try:
                with collecting():
                    result = self._race(left, rung)
            except OutOfTimeError:
                raise
            except (AttackError, InvalidArgumentError, ModelError) as error:
                # The others continue without the one that raised, if the error names it.
                guilty = [one for one in left if one.attack.name in str(error)] or (left if len(left) == 1 else [])
                if guilty:
                    found |= {one.text: Score(error=str(error)) for one in guilty}
                    left = [one for one in left if one.text not in found]
                    continue
                for one in left:
                    found |= self.score([one], rung)
                return found
            self.parts += parts_of(result.content)
            return found | {one.text: _score(result.attacks[one.attack.name]) for one in left}
        return found

    def judge(self, recipe: Recipe, attempt: int, *, problems: int) -> Judgement:
        """Judge a recipe by the binarization test with depth, at its share of the error rate."""
        inputs, ids = self._rows(problems, sum(RUNGS))
        seed = derive_seed(self.judge_seed, "judge of the search", attempt)
        try:
            result = self._test([recipe], inputs, ids, seed=seed, error_rate=ERROR_RATE / JUDGED)
        except OutOfTimeError:
            raise
        except (AttackError, InvalidArgumentError, ModelError) as error:
            return Judgement(passed=False, reason=str(error))
        self.parts += parts_of(result.content)
        return judged(recipe.attack, result.content)

    def _race(self, recipes: Sequence[Recipe], rung: int) -> BinarizationResult:
        inputs, ids = self._rows(RUNGS[rung], sum(RUNGS[:rung]))
        seed = derive_seed(self.judge_seed, "race of the search", rung)
        # What decides verdicts is left out: random search and canaries.
        light: dict[str, Any] = {"random_inner": 0, "random_corners": 1, "canaries": 0}
        # Recipes that find every planted example differ in depth.
        light["depths"] = DEPTHS[:-1] if rung else (1,)
        return self._test(recipes, inputs, ids, seed=seed, **light)

    def _test(
        self, recipes: Sequence[Recipe], inputs: Tensor, ids: Sequence[int], *, seed: int, **settings: Any
    ) -> BinarizationResult:
        self.tests += 1
        if is_over():
            raise OutOfTimeError("the time that was given was over")
        return binarization_test(
            self.module,
            [one.attack for one in recipes],
            inputs,
            self.threat_model,
            sample_ids=ids,
            out=None if self.out is None else self.out / f"search-{self.tests:02d}",
            seed=self.seed,
            judge_seed=seed,
            **{**self.options, **settings},
        )

    def _rows(self, problems: int, start: int) -> tuple[Tensor, list[int]]:
        """Return that many samples from ``start`` on with their ids.

        Where there are fewer they begin again, under ids of their own, by which other points are planted.
        """
        total = len(self.ids)
        start = start if start + problems <= total else 0
        rows = [(start + row) % total for row in range(problems)]
        turn = max(self.ids) + 1
        ids = [self.ids[row] + turn * ((start + number) // total) for number, row in enumerate(rows)]
        return self.inputs[torch.tensor(rows, device=self.inputs.device)], ids


def _score(entry: Mapping[str, Any]) -> Score:
    """The score of a rung, by the numbers of a test: at the logits too, where problems were planted there."""
    problems, found = int(entry["samples"]), int(entry["outcomes"]["found"])
    behind = entry.get("at_logits")
    if behind is not None and 2 * behind["found"] <= behind["samples"]:
        found = min(found, round(problems * behind["found"] / behind["samples"]))
    deeper = entry["depths"][1:]
    proved = sum(row["problems_by_others"] for row in deeper)
    solved = sum(row["found_by_others"] for row in deeper)
    return Score(found=found, problems=problems, deeper=solved / proved if proved else 1.0)


def judged(attack: Attack, content: Mapping[str, Any]) -> Judgement:
    """Return the judgement by the content of a binarization test of this attack alone."""
    entry = content["attacks"][0]
    weaker = weakness(attack, content) if entry["verdict"] == "passed" else ""
    return Judgement(
        passed=entry["verdict"] == "passed" and not weaker,
        reason=weaker[:1].upper() + weaker[1:] or entry["reason"],
        near=(entry["score"] or 0.0) >= GOOD,
        content=content,
    )


def search_recipe(
    *,
    module: nn.Module,
    inputs: Tensor,
    ids: Sequence[int],
    threat_model: ThreatModel,
    findings: Sequence[Finding],
    seed: int,
    judge_seed: int,
    out: Path | None = None,
    random: bool = False,
    affordable: float = AFFORDABLE,
    watch: Callable[[str], object] = lambda words: None,
    **options: Any,
) -> Search:
    """Search for the cheapest attack that finds the examples planted in a model.

    Args:
        module: From inputs ``(N, ...)`` in bounds to logits, in eval mode, on the device of ``inputs``.
        inputs: Clean samples ``(N, ...)``, at least one.
        ids: Their ids, which with the seeds decide the planted examples.
        threat_model: The norm, epsilon and bounds.
        findings: What is known of model and attack; those of weight propose views of the gradients.
        seed: Of what attacks draw.
        judge_seed: Of the draws of the judge's problems.
        out: Run folder of the tests, if any.
        random: Whether predictions are random; all recipes are then averaged over draws.
        affordable: Passes a problem that a recipe may take, backward ones counted twice.
        watch: Called with words for each step.
        **options: Further settings of the binarization tests, such as ``layer``.

    Example:
        >>> network = nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).eval()
        >>> linf = ThreatModel(norm="linf", epsilon=0.1)
        >>> given = {"module": network, "inputs": torch.rand(8, 1, 4, 4), "ids": range(8), "threat_model": linf}
        >>> search_recipe(**given, findings=(), seed=0, judge_seed=0).winner.loss
        'margin'
    """
    trial = Planted(
        module=module,
        inputs=inputs,
        ids=list(ids),
        threat_model=threat_model,
        seed=seed,
        judge_seed=judge_seed,
        out=out,
        options=options,
    )
    if current_context().dry_run:
        raise EstimatedError(_at_most(trial, affordable))
    kinds = Kinds(
        first=first_recipes(findings, random=random),
        further=further_recipes,
        last=gradient_free(findings, threat_model, images=inputs.dim() == 4),
        longer=longer,
    )
    race = Race(trial=trial, kinds=kinds, affordable=affordable, watch=watch)
    winner = race.run()
    return _result(race, winner, trial.parts)


def _at_most(trial: Planted, affordable: float) -> Estimate:
    """Estimate the tests of a search at most: as many recipes as a race takes, each as dear as it may be."""
    dear = Recipe(attack=RandomSearch(points=int(affordable)), text="", words="the dearest recipe")
    races = [estimate(partial(trial.score, [dear], rung)) for rung in range(len(RUNGS))]
    judge = estimate(partial(trial.judge, dear, 0, problems=2 * PROBLEMS))
    parts = [
        one.as_phase("search", times=times) for one, times in zip([*races, judge], [*AT_MOST, JUDGED], strict=True)
    ]
    return sum(parts, Estimate(title="search"))


def _result(race: Race, winner: Recipe | None, parts: Sequence[Part]) -> Search:
    seen = race.judgements
    best = seen[winner.text] if winner else max(seen.values(), key=_found, default=None)
    return Search(
        winner=winner,
        tried=race.tried(),
        judged=None if best is None else best.content or None,
        reason=_reason(race, winner, best),
        parts=tuple(parts),
        nearest=None if winner else race.nearest(),
    )


def _found(one: Judgement) -> float:
    return float(one.content["attacks"][0]["score"] or 0.0) if one.content else -1.0


def _reason(race: Race, winner: Recipe | None, best: Judgement | None) -> str:
    tried = count(len(race.recipes), "recipe")
    if winner is not None and best is not None:
        entry = best.content["attacks"][0]
        return (
            f"Of {tried} the cheapest that passes on held-out problems is {winner.words}: it finds "
            f"{entry['outcomes']['found']} of {entry['samples']}."
        )
    over = "The time was over before a recipe passed" if race.over else "No recipe passes"
    if best is not None:
        return f"{over}: {len(race.judgements)} of {tried} went before the judge. The best of these: {best.reason}"
    scores = [(scores[-1].share, text) for text, scores in race.scores.items()]
    if not scores:
        return f"{over}; none was run."
    errors = [found[-1].error for found in race.scores.values() if found[-1].error is not None]
    if len(errors) == len(scores):
        return f"{over}: all {tried} raised, the first: {errors[0]}"
    share, text = max(scores)
    return f"{over}: of {tried} the best solves {share:.0%} of the planted problems of its last rung ({text})."
