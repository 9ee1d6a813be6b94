"""Faults of where points lie: out of bounds or ball, or within those of another threat model."""

from __future__ import annotations

from robust_ext.evaluations.causes import remedies
from robust_ext.evaluations.causes.evidence import Case, Sample, number, typical
from robust_ext.evaluations.causes.finding import Finding
from robust_ext.evaluations.causes.gradients import MOSTLY
from robust_ext.evaluations.causes.path import goes_on
from robust_ext.evaluations.causes.updates import of_draws
from robust_ext.reports.wording import typed

# A ball that is smaller than the threat model's by less than this is no other scale, but a margin of safety.
OTHER_BALL = 0.8
# What all steps together may differ by from where they end, where they go straight there.
STRAIGHT = 1.2
# How far the samples' farthest points may differ, as a part of them, where all were held back at one distance.
PINNED = 0.02
# Rounding apart, in epsilons.
BEYOND = 1.001
# A candidate so far out was given another epsilon; one nearer was not projected.
OTHER_SCALE = 3.0
# Nearly all queries; attacks that look at scaled copies look at the point itself too.
ALWAYS = 0.99
# Values that are no further apart, as a part of the bounds, are the same; fewer samples may share some by chance.
SAME = 0.002
SHARED = 5


def wrong_bounds(case: Case) -> Finding | None:
    """Candidates or queries lie within epsilon and out of the bounds."""
    low, high = case.threat_model.bounds
    returned = [one for one in case.unsolved if one.outcome == "out_of_bounds"]
    queried = case.showing(
        lambda one: (
            one.count("outside") >= MOSTLY * one.count("queries") > 0
            and one.count("reach") <= BEYOND
            and not (case.attack.traits.leaves_ball or of_draws(one))
        )
    )
    rows = returned if case.enough(returned) else queried
    if not case.enough(rows):
        return _narrow_bounds(case)
    what = "candidates" if rows is returned else "queries, within epsilon,"
    return case.finding(
        "wrong_bounds",
        f"It works in other bounds than the valid inputs' [{low:g}, {high:g}].",
        rows,
        f"For {case.part(rows)} {what} lie out of [{low:g}, {high:g}].",
        remedies=remedies.for_bounds(case.attack, case.threat_model.bounds),
    )


def _narrow_bounds(case: Case) -> Finding | None:
    """The last queries all end at the same smallest or largest value, inside the bounds, and none lies beyond it."""
    (low, high), width, epsilon = case.threat_model.bounds, case.threat_model.width, case.threat_model.epsilon

    def ended(one: Sample) -> bool:
        # An image of one value, as black ones that some libraries return, ends nowhere.
        return one.count("end") > 0 and one.known("low") != one.known("high")

    def natural(one: Sample, margin: float) -> bool:
        # Inputs that touch the bound may all be moved away from it by as much as they are moved.
        return case.threat_model.norm == "linf" and abs(margin - one.count("end") * epsilon / width) < SAME

    rows = case.showing(ended)
    if not case.enough(rows) or len(rows) < MOSTLY * len(case.unsolved):
        return None
    everyone = [one for one in case.samples if one.traced and ended(one)]
    ends = []
    for name, bound, way in (("low", low, 1), ("high", high, -1)):

        def inside(one: Sample, name: str = name, bound: float = bound, way: int = way) -> float:
            return way * (one.count(name) - bound) / width

        least = min(map(inside, everyone))
        same = least + SAME
        if least > SAME and sum(inside(one) < same for one in everyone) >= SHARED and max(map(inside, rows)) < same:
            ends.append((bound + way * least * width, all(natural(one, least) for one in rows)))
    # In other norms than linf many values stay as they are, and inputs may well share their smallest or largest.
    if len(ends) < (1 if case.threat_model.norm == "linf" else 2) or all(moved for _, moved in ends):
        return None
    shown = " and ".join(number(value) for value, _ in ends)
    return case.finding(
        "wrong_bounds",
        f"It works in other bounds than the valid inputs' [{low:g}, {high:g}].",
        rows,
        f"The last queries of {case.part(rows)} all end at {shown}, and those of no sample lie beyond.",
        remedies=remedies.for_bounds(case.attack, case.threat_model.bounds),
    )


def other_points(case: Case) -> Finding | None:
    """Find gradients that are taken at the inputs on another scale than the returned points."""
    if case.minimum_norm or case.black_box:
        return None

    def shows(one: Sample) -> bool:
        return one.count("elsewhere") >= ALWAYS and (one.distance or 0.0) <= BEYOND

    rows = case.showing(shows)
    if not case.enough(rows) or len(rows) < MOSTLY * len(case.unsolved):
        return None
    slope = typical(rows, lambda one: one.known("slope")) or 1.0
    shift = typical(rows, lambda one: one.known("shift")) or 0.0
    reach = typical(rows, lambda one: one.known("reach")) or 0.0
    return case.finding(
        "other_points",
        "It takes gradients at other points than those it returns: inputs are scaled or normalised in the attack, "
        "before they go to a model that takes them as they are.",
        rows,
        f"In {case.part(rows)} all queries with gradients are about {number(slope)} times the input "
        f"{'+' if shift >= 0 else '-'} {number(abs(shift))}, up to {number(reach)} epsilon away from it, as by a mean "
        f"of {number(-shift / slope)} and a deviation of {number(1 / slope)}; what it returned lies within epsilon.",
        remedies=remedies.for_points(case.attack),
    )


def epsilon_scale(case: Case) -> Finding | None:
    """All samples were held back at one distance well inside the ball, that steps would have gone beyond."""
    if case.minimum_norm:
        return None
    rows = case.showing(lambda one: one.far > 0 and (one.outcome == "not_adversarial"))
    far = sorted(one.far for one in rows)
    if not case.enough(rows) or far[-1] > OTHER_BALL or far[-1] - far[0] > PINNED * far[-1]:
        return None
    if sum(map(_held_back, rows)) < MOSTLY * len(rows):
        return None
    return _scaled(case, rows, far[len(far) // 2])


def left_ball(case: Case) -> Finding | None:
    """Candidates lie beyond epsilon, of an attack that is given epsilon."""
    if case.minimum_norm:
        return None
    rows = [one for one in case.unsolved if one.outcome == "beyond_epsilon"]
    if not case.enough(rows):
        return None
    ratio = typical(rows, lambda one: one.distance) or 1.0
    farthest = max(one.distance or 0.0 for one in rows)
    straight = sum(map(_walked, rows)) >= MOSTLY * len(rows)
    alike = all(abs((one.distance or 0.0) / ratio - 1) < PINNED for one in rows)
    level = case.threat_model.width / 255 / case.threat_model.epsilon
    if (
        case.threat_model.norm == "linf"
        and farthest <= 1 + 1.01 * level
        and all(one.known("grid") == 1 for one in rows)
    ):
        return case.finding(
            "left_ball",
            "It rounds its points to 8 bits, which takes them out of the ball: nothing takes them back within epsilon.",
            rows,
            f"{case.part(rows)} came back at up to {number(farthest)} epsilon, all values on the grid of 8 bits, a "
            f"level of which is {number(level)} epsilon.",
            remedies=remedies.for_rounding(case.attack, case.threat_model),
        )
    if not straight and (alike or ratio > OTHER_SCALE):
        return _scaled(case, rows, ratio)
    return case.finding(
        "left_ball",
        "It leaves the ball: nothing takes its points back within epsilon, in the threat model's norm.",
        rows,
        f"{case.part(rows)} came back beyond epsilon, at {number(ratio)} times it on "
        f"the median and {number(farthest)} at most.",
        remedies=remedies.for_ball(case.attack, case.threat_model),
    )


def _scaled(case: Case, rows: list[Sample], ratio: float) -> Finding:
    """The finding for an attack whose ball is ``ratio`` times the threat model's."""
    epsilon = case.threat_model.epsilon
    known = next((text for value, text in _SCALES if abs(ratio / value - 1) < 0.05), "")
    where = "stay within" if ratio < 1 else "end at"
    return case.finding(
        "epsilon_scale",
        f"It was given an epsilon of another scale: {number(ratio)} times that of the threat model{known}.",
        rows,
        f"{case.part(rows)} {where} {number(ratio)} epsilon, that is "
        f"{number(ratio * epsilon)} where the threat model has {typed(epsilon)}, however many steps they took.",
        remedies=remedies.for_epsilon(case.attack, case.threat_model),
    )


_SCALES = (
    (255.0, ", as where inputs are in [0, 255] for it"),
    (1 / 255, ", as where it is divided by 255 twice"),
    (2.0, ", as where inputs are in [-1, 1] for it"),
    (0.5, ", as where inputs are in [-1, 1] here and in [0, 1] for it"),
)


def _held_back(one: Sample) -> bool:
    """Return whether its steps would have gone farther than it came: something took it back."""
    step, travel = one.known("step"), one.travel
    # Where most steps are none it may take several gradients at each point, and go on to the end.
    return one.count("gradients") > 2 and (not goes_on(one) if step == 0 else (travel or 0.0) > STRAIGHT * one.far)


def _walked(one: Sample) -> bool:
    """Return whether its steps, one after another, lead just where it came."""
    travel = one.travel
    return travel is not None and one.far / STRAIGHT < travel < STRAIGHT * one.far
