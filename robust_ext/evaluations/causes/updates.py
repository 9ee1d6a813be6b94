"""Faults of an update: steps that do not follow the gradients that came before them, or that vanish."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from robust_ext.evaluations.causes import remedies
from robust_ext.evaluations.causes.evidence import Case, Sample, number, typical
from robust_ext.evaluations.causes.finding import Finding
from robust_ext.evaluations.causes.gradients import MOSTLY
from robust_ext.evaluations.causes.path import LEAP, LOSS

# Of all its movement, the part that goes along the gradients: 1 for signs and smaller steps alike, .5 and more with
# momentum and at the edge of the ball, below .4 by chance. Of what noise does, below .25, and nearly all goes back.
AGAINST, NOISE, BY_CHANCE, IN_PART, BACK = -0.15, 0.25, 0.4, 0.8, 0.6
# Share of queries out of ball or bounds that projections may leave; fewest gradients of a path.
EDGES, PATH = 0.1, 5
# Gain of a path that goes elsewhere, of the largest logit; sound attacks reach .3 and more.
LITTLE = 0.2
# Share of values that stay where they were: a quarter on the grid of 8 bits, elsewhere nearly all.
HELD_ON_GRID, HELD, HELD_FROM_START, EARLY = 0.25, 0.9, 0.75, 0.1
# Share of values that never move in any row, for a mask, and of the others that may stay in some step.
FIXED, STRAY = 0.1, 0.4
# What distances may differ by, in epsilons, and all steps together from where they end.
BESIDE, STRAIGHT = 1e-3, 1.2
Shows = Callable[[Sample], bool]


def off_gradient(case: Case) -> Finding | None:
    """Steps that go against the gradients that came back, by chance, or back and forth where gradients do not turn."""
    if case.minimum_norm or case.black_box:
        return None
    for shows, words in _UPDATES.items():
        if rows := _most(case, lambda one: _steady(one) and shows(one)):  # noqa: B023 - called at once
            return _off_gradient(case, rows, words)
    return None


def _off_gradient(case: Case, rows: list[Sample], words: str) -> Finding:
    follows, uses, back = (typical(rows, partial(Sample.known, key=key)) or 0.0 for key in ("follows", "uses", "back"))
    gain = typical(rows, lambda one: one.count("last") - one.count("first")) or 0.0
    scale = typical(rows, lambda one: one.scale) or 0.0
    return case.finding(
        "off_gradient",
        f"Its steps {words}: a momentum, a sign or an index in its update is wrong.",
        rows,
        f"In {case.part(rows)} {uses:.0%} of the movement lies along the gradients that came before it, or against "
        f"them ({follows:+.0%} away from the label, on balance), and {back:.0%} goes back on the step before; sound "
        f"attacks: over 80%, and under 50%. The margin changed by {number(gain)}, where the largest logit is "
        f"{number(scale)}.",
        remedies=remedies.for_update(case.attack),
    )


def restricted(case: Case) -> Finding | None:
    """The same values stay as they are in every row, though their gradient is not 0, and all others move."""
    if case.minimum_norm or case.black_box or case.threat_model.norm == "l1":
        return None
    rows = _most(case, _masked)
    if not rows:
        return None
    fixed = typical(rows, lambda one: one.known("fixed")) or 0.0
    return case.finding(
        "restricted",
        "It moves only some of the values, the same in every sample, as with a mask; the threat model allows all.",
        rows,
        f"{fixed:.0%} of the values never moved in any sample, though their gradient is not 0 and neither ball nor "
        "bounds hold them; the others did. Planted examples differ from the input everywhere: the restriction is not "
        "part of the test, which says nothing about the attack within it.",
        remedies=remedies.for_mask(),
    )


def vanishing_steps(case: Case) -> Finding | None:
    """Values that a step should have moved stay where they were: rounding takes it back, or it is not kept."""
    if case.minimum_norm or case.black_box:
        return None
    most = HELD_ON_GRID if case.threat_model.norm == "linf" else HELD
    grid = _most(case, lambda one: one.known("grid") == 1 and one.count("held") > most and one.count("gradients") > 2)
    rows = grid or _most(case, _stuck)
    if not rows:
        return None
    held = typical(rows, lambda one: one.known("held")) or 0.0
    why = "rounding to 8 bits takes them back" if grid else "after the first one they are rounded away, or not kept"
    lies = " All values of the points lie on the grid of 8 bits." if grid else ""
    return case.finding(
        "vanishing_steps",
        f"Its steps vanish: {why}.",
        rows,
        f"In {case.part(rows)} {held:.0%} of the values that a step should have moved, as their gradient is not 0 and "
        f"neither ball nor bounds hold them, stayed where they were.{lies}",
        remedies=remedies.for_rounding(case.attack, case.threat_model),
    )


def of_draws(one: Sample) -> bool:
    """Return whether queries go to and fro by noise, of which gradients are averaged."""
    return one.count("back") > BACK and one.known("uses") is not None and one.count("uses") < NOISE


def _most(case: Case, shows: Shows) -> list[Sample]:
    """The samples that show something; none where fewer than half of those not solved do."""
    rows = case.showing(shows)
    return rows if case.enough(rows) and len(rows) >= MOSTLY * len(case.unsolved) else []


def _steady(one: Sample) -> bool:
    """Return whether it moves step by step: changed images leap, and draws of noise leave ball or bounds."""
    if one.count("gradients") < PATH or one.known("uses") is None:
        return False
    return one.count("longest") < LEAP and one.count("outside") < EDGES * one.count("queries")


def _against(one: Sample) -> bool:
    return one.count("follows") < AGAINST and one.count("first") - one.count("last") > LOSS * one.scale


def _elsewhere(one: Sample) -> bool:
    little = one.count("best") - one.count("first") < LITTLE * one.scale
    return one.count("uses") < BY_CHANCE and one.count("back") < MOSTLY and little


def _back_and_forth(one: Sample) -> bool:
    return one.count("back") > BACK and NOISE < one.count("uses") < IN_PART and one.count("turns") < 1 - IN_PART


_UPDATES: dict[Shows, str] = {
    _against: "go against the gradients that it received, and the label's logit gains on the others",
    _elsewhere: "have nothing to do with the gradients that it received",
    _back_and_forth: "undo one another, though the gradients that it received keep their direction",
}


def _masked(one: Sample) -> bool:
    fixed, held = one.count("fixed"), one.count("held")
    return FIXED < fixed < 1 and held - fixed < STRAY * (1 - fixed) and max(one.count("longest"), one.far) > 0


def _stuck(one: Sample) -> bool:
    """Return whether it moved once; gradients that are averaged over draws at one point move on to the next."""
    moved, far = one.count("longest"), one.distance or 0.0
    there = abs(far - one.count("end")) < BESIDE and 0 < far < STRAIGHT * moved
    # From a random start, it is the margin that shows where it stopped.
    early = one.count("best_at") <= max(2, EARLY * one.count("queries")) and one.count("fixed") < FIXED
    stopped = moved > 0 and one.known("step") == 0 and one.known("best") == one.known("last") and early
    held = HELD_FROM_START if stopped else HELD
    return (there or stopped) and one.count("held") > held and one.count("gradients") > 2 and not one.count("zero")
