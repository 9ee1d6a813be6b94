"""Sentences of a verdict: the counts, their meaning, and advice for an inconclusive test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil, floor
from typing import Any

from robust_ext.core.statistics import proportion_interval
from robust_ext.engine.context import current_context
from robust_ext.evaluations.binarization.rules import Rules, Solved
from robust_ext.evaluations.binarization.settings import BinarizationSettings

# Above it kappa decides nothing, and from that many inner points on, more are too slow to measure to be advised.
_CLOSE, _MANY = 0.99, 10_000
# More candidates than these change little.
_CANDIDATES = 64
# Where nothing else is left to change.
_COMPARE = (
    "no setting of this test makes the planted points harder to find by chance; compare the attack with others on the "
    "same samples instead: robust-ext diagnose"
)


def more_samples(needed: int, *, planted: int, lost: int) -> str:
    """Return a number of planted problems as a setting, where ``lost`` of ``planted + lost`` samples had none."""
    samples = ceil(needed * (planted + lost) / planted) if planted else needed
    return f"{samples} samples (--samples {samples})" if current_context().command else f"{samples} samples"


def easier_to_plant(settings: BinarizationSettings, *, inseparable: int, unplanted: int) -> str:
    """Advise on planting: for missing readouts, or for planted points that did not stay adversarial."""
    ways = []
    if inseparable >= unplanted:
        if settings.inner_points > 1:
            ways.append(_set("inner_points", max(settings.inner_points // 5, 1)))
        if str(settings.readout).startswith("logistic"):
            ways.append(_set("readout", "max-margin"))
    if (unplanted or not ways) and settings.kappa > 0.5:
        ways.append(_set("kappa", 0.9 if settings.kappa > 0.9 else 0.5))
    return " or ".join(ways) or "other inputs"


def others_to_plant(settings: BinarizationSettings, *, references: bool) -> list[dict[str, Any]]:
    """Settings to try where a detector accepts none of the points: points nearer to clean ones, and more of them.

    With ``references`` points to imitate are needed, which it has to let pass too.
    """
    near: dict[str, Any] = {"boundary": "surface", "inner": 0.0} if settings.corners else {}
    alone: dict[str, Any] = {} if references or not settings.reference_points else {"reference_points": 0}
    more = {"planting_tries": 10 * settings.planting_tries}
    ways = [near, alone, {**near, **alone}, {**near, **alone, **more}]
    return [way for number, way in enumerate(ways) if way and way not in ways[:number]]


def settle_planting(
    tried: Sequence[tuple[Mapping[str, object], int]], *, unfound: int, samples: int, tries: int, inverted: bool
) -> str:
    """Describe the planting under a detector, and the tried settings that plant most, with their counts.

    In ``unfound`` of the samples none of ``tries`` points is judged as the test needs.
    """
    verb = "let pass" if inverted else "rejected"
    facts = f"The detector {verb} all points to plant, or all to imitate, in {unfound} of {samples} samples"
    facts += f" ({tries} points each)"
    best, count = max(tried, key=lambda one: one[1], default=({}, 0))
    if count:
        between = " " if current_context().command else ", "
        ways = between.join(_set(*one) for one in best.items())
        return f"{facts}. To settle it: {ways}, which plants {count} of {samples}."
    names = ", ".join(dict.fromkeys(name for way, _ in tried for name in way))
    also = f"; other settings ({names}) plant nothing either" if names else ""
    return (
        f"{facts}{also}. To settle it: test the attack on the classifier alone, and classifier with detector by "
        "MEAD (robust-ext mead)."
    )


def settle(at: Solved, rules: Rules, *, lost: int) -> str:
    """Advise on an inconclusive test, whose counts show neither a high rate nor a low R-ASR."""
    settings, ways = rules.settings, []
    easy = at.random_score > settings.maximum_random_score
    if not rules.proves_hard(at):
        if settings.planted_candidates < _CANDIDATES:
            ways.append(_set("planted_candidates", _CANDIDATES))
        if replace(settings, inner=0.5).inner_corners > settings.inner_corners == 0:
            ways.append(_set("inner", 0.5))
        if settings.boundary_points > 1:
            ways.append(_set("boundary_points", 1))
        if settings.boundary_position < _CLOSE:
            ways.append(_set("kappa", 0.999))
        if len(settings.depths) == 1:
            ways.append("--depths 1,2,4,8" if current_context().command else "depths=(1, 2, 4, 8)")
        if not ways and settings.inner_points < _MANY:
            ways.append(_set("inner_points", min(4 * (settings.inner_points + 1), _MANY)))
    both = " and R-ASR stays" if at.random_found else ""
    needed = rules.needed(replace(at, random_found=0) if easy else at)
    enough = "" if needed is None else more_samples(needed, planted=at.samples, lost=lost)
    if easy:
        # No number of samples settles that; it may take more of them as well.
        more = "" if rules.proves_rate(at.found, at.samples) or not enough else f", with {enough}"
        return ("; or ".join(ways) or _COMPARE) + more
    if enough:
        ways.insert(0, f"{enough}, if it misses no more{both}")
    return "; or ".join(ways) or _COMPARE


def _set(name: str, value: object) -> str:
    """A setting as the caller writes it, in Python or on the command line."""
    return f"--{name.replace('_', '-')} {value}" if current_context().command else f"{name}={value!r}"


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
    """Explain why an attack that finds the planted points in the features fails at the logits."""
    head = "the head, which the test replaces,"
    why = f"But {head} masks gradients ({masking})" if masking else f"But it hardly gets through {head}"
    random = f"random search found {behind.random_score:.2f}"
    found = f"planted at the logits, it found {behind.found} of {behind.samples}; {random}"
    if not behind.samples:
        found = "nothing was planted behind it"
    return f"{why}: {found}. Robustness of the whole model measured with it cannot be trusted."


def _facts(at: Solved, first: Solved) -> str:
    """Describe the counts, without a full stop; names the depth where it is not 1."""
    score, random_score = f"{at.found / at.samples:.2f}", f"{at.random_score:.2f}"
    if at is first:
        found = f"random search found {at.random_found} of {at.searched} ({random_score})"
        return f"It found {at.found} of {at.samples} planted examples ({score}); {found}"
    return (
        f"It found {first.found} of {first.samples} planted examples, and random search "
        f"{first.random_score:.2f} of them; at depth {at.depth:g}, where the verdict is taken, it "
        f"found {at.found} of {at.samples} that others prove ({score}); random search found {random_score}"
    )


def _compared(at: Solved, rules: Rules) -> str:
    """Describe how little a score exceeds that of random search, if it is little."""
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
        rate, most = f"more than {chosen.proven_rate or chosen.threshold:g}", chosen.maximum_random_score
    else:
        rate = f"at least {floor(100 * rules.at_least(at.found, at.samples)) / 100:.2f}"
        most = ceil(100 * rules.at_most(at)) / 100
    enough = f", which {at.searched} of them suffice to show" if at.searched < at.samples else ""
    return (
        f"The attack finds what {found} in this model: {rate} of it{_confidence(rules)}, random search at most "
        f"{most:.2f}{enough}."
    )


def _unsettled(at: Solved, rules: Rules, *, lost: int) -> str:
    """The rest of the sentence where samples do not show enough, and what would settle it."""
    chosen = rules.settings
    parts = []
    if not rules.proves_rate(at.found, at.samples):
        rate = chosen.proven_rate or chosen.threshold
        parts.append(f"the samples do not show that it finds more than {rate:g}{_confidence(rules)}")
    if not rules.proves_hard(at):
        limit = f"{chosen.maximum_random_score:g}"
        if at.random_score > chosen.maximum_random_score:
            parts.append(f"an R-ASR above {limit} means that the planted examples are too easy to find")
        else:
            parts.append(f"R-ASR may be above {limit}, so the planted examples may be too easy to find")
    return f": {', and '.join(parts)}. To settle it: {settle(at, rules, lost=lost)}."


def _confidence(rules: Rules) -> str:
    """The confidence of a claim about a rate, in brackets."""
    among = f", corrected for {rules.attacks} attacks" if rules.attacks > 1 else ""
    return f" ({100 * (1 - rules.settings.error_rate):g}% confidence, one-sided{among})"


def explain_calibration(
    chosen: Mapping[str, Any] | None, rows: Sequence[Mapping[str, Any]], settings: BinarizationSettings
) -> str:
    """Why a calibration chose this setting, of the rows that it left."""
    bar = f"{settings.threshold:g} of the problems"
    if chosen is None:
        words = f"At no setting does an attack solve {bar}; nearest comes {_solves(rows, settings)}."
        return f"{words} The test is run at the setting that was given."
    points = [key for key in chosen if key != "depth"]
    first = next(place for place, row in enumerate(rows) if all(row[key] == chosen[key] for key in points))
    here = [row for row in rows if all(row[key] == chosen[key] for key in chosen)]
    if first:
        words = f"This is the hardest setting at which an attack solves {bar}: {_solves(here, settings)}. "
        words += f"At harder ones the most is {_solves(rows[:first], settings)}."
    elif chosen["depth"] > 1:
        words = (
            f"At the hardest kappa an attack solves {bar}, so the boundary was moved deeper, as far as others prove "
        )
        words += f"half of the problems and an attack still solves that much of them: {_solves(here, settings)}."
    else:
        words = f"At the hardest kappa an attack solves {bar}, and at no depth beyond: {_solves(here, settings)}."
    if max(row["random_score"] for row in here) > settings.maximum_random_score:
        words += f" That R-ASR is above {settings.maximum_random_score:g}: nothing passes there."
    return words


def _solves(rows: Sequence[Mapping[str, Any]], settings: BinarizationSettings) -> str:
    """The highest score of some rows, as text."""
    best = max(rows, key=lambda row: row["score"] or 0.0)
    deep = f", depth {best['depth']:g}" if best["depth"] > 1 else ""
    gap = f", gap {best['gap']:g}" if best["gap"] != settings.gap else ""
    planted = best["boundary_points"]
    more = f", {planted} planted points" if planted != settings.boundary_points else ""
    place = f"kappa {best['kappa']:g}, {best['inner_points']} inner points{gap}{more}{deep}"
    return f"{best['attack']} with {best['score'] or 0.0:.2f} ({place}; R-ASR {best['random_score'] or 0.0:.2f})"
