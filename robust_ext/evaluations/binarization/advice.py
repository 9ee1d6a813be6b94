"""What would settle an inconclusive test: the settings to change, with values computed from the run.

What is advised is what was measured to change the R-ASR (benchmarks/inner_points.py), the most effective first: planted
points chosen among candidates, inner points as long as these, fewer planted points, a kappa below .99, more inner
points. Kappa above .99 changes next to nothing, and points on the surface in linf are found by the smallest steps, so
that a test with them shows little: neither is advised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import Any

from robust_ext.engine.context import current_context
from robust_ext.evaluations.binarization.rules import Rules, Solved
from robust_ext.evaluations.binarization.settings import BinarizationSettings

# Above it kappa decides nothing, and from so many inner points on, more are too slow to measure to be advised.
_CLOSE, _MANY = 0.99, 10_000
# More candidates than these change little.
_CANDIDATES = 32
# Where nothing else is left to change.
_COMPARE = (
    "no setting of this test makes the planted points harder to find by chance; compare the attack with others on the "
    "same samples instead: robust-ext diagnose"
)


def more_samples(needed: int, *, planted: int, lost: int) -> str:
    """So many planted problems as a setting, where ``lost`` of the ``planted + lost`` samples could not be planted."""
    samples = ceil(needed * (planted + lost) / planted) if planted else needed
    return f"{samples} samples (--samples {samples})" if current_context().command else f"{samples} samples"


def easier_to_plant(settings: BinarizationSettings, *, inseparable: int, unplanted: int) -> str:
    """What to change where nothing could be planted, by whether no readout was found or no point stayed adversarial."""
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
    """Settings to try where a detector lets none of the points pass: points nearer to clean ones, and more of them.

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
    """What a detector left to be planted, and the settings that plant most of those tried, with how many each plants.

    In ``unfound`` of the samples none of ``tries`` points is judged as the test wants it.
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
    """What to change where so many of the problems solved show neither a high enough rate nor a low enough R-ASR."""
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
