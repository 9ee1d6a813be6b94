"""Sentences of a verdict: what was found, what it shows, and what would settle an inconclusive test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, floor
from typing import Any

from robust_ext.core.statistics import proportion_interval
from robust_ext.evaluations.binarization.advice import settle
from robust_ext.evaluations.binarization.rules import Rules, Solved
from robust_ext.evaluations.binarization.settings import BinarizationSettings

# How far above that of random search a score is hardly better.
_LITTLE = 0.1


def explain(verdict: str, at: Solved, first: Solved, rules: Rules, *, without: int) -> str:
    """Why :meth:`Rules.decide` comes to this verdict at a depth, where ``first`` has the planted problems.

    In ``without`` further samples nothing was planted.
    """
    begin = _facts(at, first)
    if verdict == "passed":
        return f"{begin}. {_shown(at, rules)}"
    if verdict == "failed" and at is not first:
        missed = "It misses more than half of the adversarial examples that are known to exist there"
        return f"{begin}. {missed}, so robustness measured with it cannot be trusted."
    if verdict == "failed":
        low, _ = proportion_interval(at.found, at.samples, confidence=rules.settings.confidence) or (0.0, 1.0)
        most = ", though it finds most of those planted" if low > 0.5 else ""
        return (
            f"{begin}. A score below {rules.settings.threshold:g}{_compared(at, rules)} means that the attack misses "
            f"adversarial examples that exist{most}, so robustness measured with it cannot be trusted."
        )
    if at is first and rules.fails(at.found, at.samples):
        return (
            f"{begin}. Whether it misses more is hidden by a network that breaks down. To settle it: fix the network, "
            "and run this again."
        )
    least = rules.settings.least_depth
    if at.depth < least and rules.proves_rate(at.found, at.samples):
        return f"{begin}; others prove too little at depth {least:g}. To settle it: least_depth=1."
    return f"{begin}{_unsettled(at, rules, lost=first.samples + without - at.samples)}"


def explain_head(behind: Solved, masking: str) -> str:
    """Why an attack that finds what is planted in the features does not pass, by what it solves at the logits."""
    head = "the head, which the test replaces,"
    why = f"But {head} masks gradients ({masking})" if masking else f"But it hardly gets through {head}"
    random = f"random search found {behind.random_score:.2f}"
    found = f"planted at the logits, it found {behind.found} of {behind.samples}; {random}"
    if not behind.samples:
        found = "nothing was planted behind it"
    return f"{why}: {found}. Robustness of the whole model measured with it cannot be trusted."


def _facts(at: Solved, first: Solved) -> str:
    """What was found, without a full stop, beginning with why there where that is not at the planted points."""
    score, random_score = f"{at.found / at.samples:.2f}", f"{at.random_score:.2f}"
    if at is first:
        few = "" if at.searched == at.samples else f" of {at.searched}"
        found = f"random search found {random_score}{few}"
        return f"It found {at.found} of {at.samples} planted examples ({score}); {found}"
    return (
        f"It found {first.found} of {first.samples} planted examples, and random search "
        f"{first.random_score:.2f} of them; at depth {at.depth:g}, where the verdict is taken, it "
        f"found {at.found} of {at.samples} that others prove ({score}); random search found {random_score}"
    )


def _compared(at: Solved, rules: Rules) -> str:
    """How little better a score is than that of random search, where it is little."""
    level = rules.settings.confidence
    low, _ = proportion_interval(at.found, at.samples, confidence=level) or (0.0, 1.0)
    _, high = proportion_interval(at.random_found, at.searched, confidence=level) or (0.0, 1.0)
    gap = at.found / at.samples - at.random_score
    # Of few problems intervals overlap however far apart the scores are.
    better = "no" if gap <= 0 else "hardly" if gap <= _LITTLE and low <= high else ""
    return f" and {better} better than that of random search" if better else ""


def _shown(at: Solved, rules: Rules) -> str:
    """The sentence of what a pass shows, rounded so that it claims no more."""
    chosen, found = rules.settings, "was planted" if at.depth == 1 else "others find"
    if chosen.sequential:
        rate, most = f"above {chosen.proven_rate or chosen.threshold:g}", chosen.maximum_random_score
    else:
        rate = f"at least {floor(100 * rules.at_least(at.found, at.samples)) / 100:.2f}"
        most = ceil(100 * rules.at_most(at)) / 100
    return (
        f"The attack finds what {found} in this model: its rate is {rate}{_error(rules)}, that of random search at "
        f"most {most:.2f}."
    )


def _unsettled(at: Solved, rules: Rules, *, lost: int) -> str:
    """The rest of the sentence where samples do not show enough, and what would settle it."""
    chosen = rules.settings
    parts = []
    if not rules.proves_rate(at.found, at.samples):
        rate = chosen.proven_rate or chosen.threshold
        parts.append(f"the samples leave room for a rate of {rate:g} or less{_error(rules)}")
    if not rules.proves_hard(at):
        limit = f"{chosen.maximum_random_score:g}"
        above = at.random_score > chosen.maximum_random_score
        why = f"above {limit}" if above else f"that the samples do not show to be at most {limit}"
        parts.append(f"an R-ASR {why} means that the planted examples are too easy to find")
    return f": {', and '.join(parts)}. To settle it: {settle(at, rules, lost=lost)}."


def _error(rules: Rules) -> str:
    """At which error, in brackets."""
    among = f" shared by {rules.attacks} attacks" if rules.attacks > 1 else ""
    return f" (at error {rules.settings.error_rate:g}{among})"


def explain_calibration(
    chosen: Mapping[str, Any] | None, rows: Sequence[Mapping[str, Any]], settings: BinarizationSettings
) -> str:
    """Why a calibration chose this setting, of the rows that it left."""
    bar = f"{settings.threshold:g} of the problems"
    if chosen is None:
        words = f"At no setting does an attack solve {bar}; nearest comes {_solves(rows)}."
        return f"{words} The test is run at the setting that was given."
    keys = ("kappa", "inner_points", "depth")
    first = next(place for place, row in enumerate(rows) if all(row[key] == chosen[key] for key in keys[:2]))
    here = [row for row in rows if all(row[key] == chosen[key] for key in keys)]
    if first:
        words = f"This is the hardest setting at which an attack solves {bar}: {_solves(here)}. "
        words += f"At harder ones the most is {_solves(rows[:first])}."
    elif chosen["depth"] > 1:
        words = (
            f"At the hardest kappa an attack solves {bar}, so the boundary was moved deeper, as far as others prove "
        )
        words += f"half of the problems and an attack still solves that much of them: {_solves(here)}."
    else:
        words = f"At the hardest kappa an attack solves {bar}, and at no depth beyond: {_solves(here)}."
    if max(row["random_score"] for row in here) > settings.maximum_random_score:
        words += f" That R-ASR is above {settings.maximum_random_score:g}: nothing passes there."
    return words


def _solves(rows: Sequence[Mapping[str, Any]]) -> str:
    """The highest score of some rows, in words."""
    best = max(rows, key=lambda row: row["score"] or 0.0)
    deep = f", depth {best['depth']:g}" if best["depth"] > 1 else ""
    place = f"kappa {best['kappa']:g}, {best['inner_points']} inner points{deep}"
    return f"{best['attack']} with {best['score'] or 0.0:.2f} ({place}; R-ASR {best['random_score'] or 0.0:.2f})"
