"""Successive halving of candidate recipes, and a judge with a stated error rate.

Source: Jamieson and Talwalkar, "Non-stochastic Best Arm Identification and Hyperparameter Optimization" (2016). Here a
candidate has no better than solving everything, so that a race ends as soon as one does.

**False passes.** A race picks winners, so their scores in it prove nothing. Each of at most ``JUDGED`` recipes is
judged on problems of its own, which no choice depended on, with the error rate divided by ``JUDGED`` (Bonferroni): the
probability that any recipe passes whose rate is not above what a pass claims (.9) is at most .03, for anything tried
before. A pass takes at most 1 miss of 64 problems, or 5 of 128, which a rate of .9 has with probability .0096 and
.0093: the exact bound for three is .029. The test of the standard attack before the search has an error rate of .02
(:data:`robust_ext.evaluations.evaluate.certificate.ERROR_RATE`): a whole evaluation passes falsely at most once in 20.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isinf
from typing import Any, Protocol

from robust_ext.core.errors import OutOfTimeError
from robust_ext.core.wording import count
from robust_ext.evaluations.evaluate.recipes import Recipe

JUDGED = 3
"""How many recipes the judge sees at most."""
ERROR_RATE = 0.03
"""The probability that the search passes a recipe whose rate is not above what a pass claims."""
# Problems of the rungs, and of the judge.
RUNGS, PROBLEMS = (8, 24), 64
GOOD = 0.85
"""The share of a rung's problems from which on a recipe may go before the judge."""
# The share of deeper problems below which a recipe falls behind, as in the binarization test.
_BEHIND = 0.75
# Candidates of the first rung at most, of the second, and how often the best one is made longer there.
_MOST, _SECOND, _LONGER = 12, 4, 3
AT_MOST = (3 * _MOST, _SECOND + 3 * (_LONGER + JUDGED))
"""How many candidates each rung scores at most: three kinds, then those that are made longer in up to three ways."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """The result of a candidate on the problems of a rung; no problems where it joined later."""

    found: int = 0
    problems: int = 0
    deeper: float = 1.0  # The share that it solves of deeper problems which others prove to have a solution
    error: str | None = None

    @property
    def share(self) -> float:
        """The share of problems that it solved."""
        return self.found / self.problems if self.problems else 0.0


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The verdict of the judge on a recipe: ``content`` is that of its binarization test."""

    passed: bool
    reason: str
    near: bool = False  # Whether it solves most problems, so that a longer one may pass
    content: Mapping[str, Any] = field(default_factory=dict)


class Trial(Protocol):
    """The interface that scores and judges candidates."""

    def score(self, recipes: Sequence[Recipe], rung: int) -> Mapping[str, Score]:
        """Return the scores of recipes by text, on the problems of a rung."""

    def judge(self, recipe: Recipe, attempt: int, *, problems: int) -> Judgement:
        """Judge a recipe on this many problems of this attempt alone."""


@dataclass(frozen=True, kw_only=True)
class Kinds:
    """The candidates of a search, kind after kind.

    Args:
        first: One for each view of the gradients.
        further: Composes more from the best of these.
        last: Those without gradients.
        longer: Makes a recipe longer, in several ways; none where it is as long as it gets.
    """

    first: Sequence[Recipe]
    further: Callable[[Sequence[Recipe]], Sequence[Recipe]]
    last: Sequence[Recipe]
    longer: Callable[[Recipe], Sequence[Recipe]]


@dataclass(kw_only=True)
class Race:
    """Successive halving of candidates, and the judge at its end."""

    trial: Trial
    kinds: Kinds
    affordable: float = inf  # Passes a problem that a recipe may take, backward ones counted twice
    watch: Callable[[str], object] = lambda words: None
    scores: dict[str, list[Score]] = field(default_factory=dict)  # By the text of each recipe, one a rung
    recipes: dict[str, Recipe] = field(default_factory=dict)
    judgements: dict[str, Judgement] = field(default_factory=dict)
    over: bool = False

    def run(self) -> Recipe | None:
        """Return the cheapest recipe that passes the judge, which sees at most ``JUDGED``."""
        preferred = set[str]()
        try:
            self._race()
            for attempt in range(JUDGED):
                recipe = self._next(preferred)
                if recipe is None:
                    break
                self.watch(f"judge: {recipe.words}")
                # What misses something in the race needs more problems to show that it misses little.
                problems = PROBLEMS if self._flawless(recipe) else 2 * PROBLEMS
                found = self.trial.judge(recipe, attempt, problems=problems)
                self.judgements[recipe.text] = found
                if found.passed:
                    return recipe
                if found.near:
                    more = self._lengthen(recipe)
                    preferred |= {one.text for one in more}
        except OutOfTimeError:
            self.over = True
        return None

    def _race(self) -> None:
        """Race candidates, kind after kind until one is good; and make the best longer until one misses nothing."""
        self._score(self.kinds.first, 0)
        if not self._good(0):
            self._score(self.kinds.further(self._best(0, 2)), 0)
        if not self._good(0):
            self._score(self.kinds.last, 0)
        # Of many that are good the cheapest, else the better half, few as these are then.
        half = self._best(0, min(JUDGED, (len(self.recipes) + 1) // 2))
        self._score(self._good(0)[:_SECOND] or half, 1)
        for _ in range(_LONGER):
            if any(self._misses(one) == 0 and not self._behind(one) for one in self._good(1)):
                break
            # The best one that can be made longer.
            next((found for one in self._best(1, JUDGED) if (found := self._lengthen(one))), None)

    def _lengthen(self, recipe: Recipe) -> list[Recipe]:
        """Score longer ones of a recipe on the last rung, and return those that are new."""
        longer = self.kinds.longer(recipe)
        found = [one for one in longer if len(self.scores.get(one.text, ())) < 2 and one.cost <= self.affordable]
        for one in found:
            self.scores.setdefault(one.text, [Score()])
        self._score(found, 1)
        return found

    def _next(self, preferred: set[str]) -> Recipe | None:
        """Return the next recipe for the judge: of those that missed nothing, or else little, the cheapest."""
        left = [one for one in self._good(1) if one.text not in self.judgements]
        chosen = [one for one in left if one.text in preferred] or left
        return min(chosen, key=lambda one: (self._misses(one), self._behind(one), one.cost), default=None)

    def _misses(self, recipe: Recipe) -> int:
        return sum(one.problems - one.found for one in self.scores[recipe.text])

    def _behind(self, recipe: Recipe) -> bool:
        return self.scores[recipe.text][-1].deeper < _BEHIND

    def _flawless(self, recipe: Recipe) -> bool:
        return [one.found for one in self.scores[recipe.text]] == list(RUNGS)

    def _score(self, recipes: Sequence[Recipe], rung: int) -> None:
        """Score the recipes that come to a rung."""
        new = [one for one in recipes if len(self.scores.get(one.text, ())) == rung and one.cost <= self.affordable]
        new = new[:_MOST]
        if not new:
            return
        self.watch(f"race: {count(len(new), 'recipe')} on {RUNGS[rung]} planted problems")
        found = self.trial.score(new, rung)
        for one in new:
            self.recipes[one.text] = one
            self.scores.setdefault(one.text, []).append(found[one.text])

    def _best(self, rung: int, most: int) -> list[Recipe]:
        """Return the recipes of the highest scores on a rung, of those that solve anything; the cheaper first."""
        raced = [text for text, scores in self.scores.items() if len(scores) > rung and scores[rung].found]
        raced.sort(key=lambda text: (-self.scores[text][rung].share, self.recipes[text].cost))
        return [self.recipes[text] for text in raced[:most]]

    def nearest(self) -> Recipe | None:
        """Return the recipe that solved most on the last rung that any came to; None where none solved anything."""
        return next((one for rung in (1, 0) for one in self._best(rung, 1)), None)

    def _good(self, rung: int) -> list[Recipe]:
        """Return the recipes that solve nearly all problems of a rung, the cheapest first."""
        good = [one for one in self._best(rung, len(self.scores)) if self.scores[one.text][rung].share >= GOOD]
        return sorted(good, key=lambda one: one.cost)

    def tried(self) -> tuple[Mapping[str, Any], ...]:
        """Return an entry a candidate, plain values."""
        return tuple(self._entry(text) for text in self.recipes)

    def _entry(self, text: str) -> dict[str, Any]:
        recipe, scores, judged = self.recipes[text], self.scores.get(text, []), self.judgements.get(text)
        last = scores[-1] if scores else Score()
        if judged is not None:
            outcome, reason = ("passed" if judged.passed else "failed the judge"), judged.reason
        elif last.error is not None:
            outcome, reason = "raised", last.error
        else:
            outcome, reason = "dropped", f"it solves {last.found} of {count(last.problems, 'planted problem')}"
        return {
            "name": recipe.attack.name,
            "words": recipe.words,
            "text": text,
            "rungs": len(scores),
            "scores": [{"found": one.found, "problems": one.problems, "deeper": one.deeper} for one in scores],
            "passes": None if isinf(recipe.cost) else recipe.cost,
            "outcome": outcome,
            "reason": reason,
        }
