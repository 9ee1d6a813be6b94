"""Faults of the way an attack went: too short, away from its aim, back and forth, or not at its end."""

from __future__ import annotations

from robust_ext.evaluations.causes import remedies, step_remedies
from robust_ext.evaluations.causes.evidence import Case, Sample, number, typical
from robust_ext.evaluations.causes.finding import Finding
from robust_ext.evaluations.causes.gradients import MOSTLY

# In epsilons. Adversarial points lie at the edge of the ball more often than not: a path that ends before is too short.
NEAR_EDGE = 0.9
# Parts of the largest logit that a margin has to gain, or lose, to mean anything, or has to stay below to be flat.
GAIN, LOSS, FLAT = 0.01, 0.05, 1e-3
# Part of its whole gain that the best margin makes in the last tenth of the queries: a tenth where it rises evenly all
# the way; a hundredth where an ascent has converged, and up to .06 of Foolbox's PGD with its own steps.
LATE = 0.08
# Steps of half a ball and more leap over what lies inside it.
LEAP = 0.5
# Share of consecutive gradients that turn against each other: .5 is a coin's, and smooth ascents stay below .1.
TURNS = 0.3
# Of all its movement, the part that goes along the gradients: 1 for signs and smaller steps alike, .5 and more with
# momentum and at the edge of the ball, below .4 by chance. Of what noise does, below .25, and nearly all goes back.
AGAINST, NOISE, BY_CHANCE, IN_PART, BACK = -0.15, 0.25, 0.4, 0.8, 0.6
# Gain of a path that goes elsewhere, of the largest logit; sound attacks reach .3 and more.
LITTLE = 0.2
# Share of values that stay where they were: a quarter on the grid of 8 bits, elsewhere nearly all.
HELD_ON_GRID, HELD = 0.25, 0.9
# Shares of a path: a best point before the first means that what follows led nowhere.
EARLY = 0.5


def toward_label(case: Case) -> Finding | None:
    """The margin falls along the path: the loss has the wrong sign, or the label is what is aimed at."""
    if case.minimum_norm or case.black_box:
        return None

    def shows(one: Sample) -> bool:
        first, best, last = one.known("first"), one.known("best"), one.known("last")
        if first is None or best is None or last is None or one.count("gradients") < 1:
            return False
        return first - last > LOSS * one.scale and best - first < GAIN * one.scale

    rows = case.showing(shows)
    if not case.enough(rows) or len(rows) < MOSTLY * len(case.unsolved):
        return None
    fall = typical(rows, lambda one: one.count("first") - one.count("last")) or 0.0
    elsewhere = [one for one in rows if one.count("other_label") > MOSTLY * one.count("gradients")]
    if case.enough(elsewhere):
        return case.finding(
            "predicted_labels",
            "It attacks other labels than those it is given: the loss on its way is that of other classes.",
            elsewhere,
            f"In {case.part(elsewhere)} most gradients are those of cross-entropy for another label, and the margin "
            f"(highest other logit less the label's) fell by {number(fall)}.",
            remedies=remedies.for_labels(case.attack),
        )
    targeted = remedies.flag_of(case.attack, "targeted")
    aims = " Its setting targeted is on: the label that it is given is then the class it aims at." if targeted else ""
    return case.finding(
        "toward_label",
        f"It goes the wrong way: the label's logit gains on the others along the path.{aims}",
        rows,
        f"In {case.part(rows)} the margin (highest other logit less the label's) fell "
        f"by {number(fall)} from the first to the last query, and was never above the first.",
        remedies=remedies.for_direction(case.attack),
    )


def off_gradient(case: Case) -> Finding | None:
    """Steps that go against the gradients that came back, by chance, or back and forth where gradients do not turn."""
    if case.minimum_norm or case.black_box:
        return None
    for shows, cause in (
        (_against, "Its steps go against the gradients that it received, and the label's logit gains on the others"),
        (_elsewhere, "Its steps have nothing to do with the gradients that it received"),
        (_back_and_forth, "Its steps undo one another, though the gradients that it received keep their direction"),
    ):
        rows = case.showing(lambda one, shows=shows: _steady(one) and shows(one))  # type: ignore[misc]
        if case.enough(rows) and len(rows) >= MOSTLY * len(case.unsolved):
            break
    else:
        return None
    follows, uses, back = (typical(rows, lambda one, key=key: one.known(key)) or 0.0 for key in _WAYS)  # type: ignore[misc]
    gain = typical(rows, lambda one: one.count("last") - one.count("first")) or 0.0
    return case.finding(
        "off_gradient",
        f"{cause}: a momentum, a sign or an index in its update is wrong.",
        rows,
        f"In {case.part(rows)} {uses:.0%} of the movement lies along the gradients that came before it, or against "
        f"them ({follows:+.0%} away from the label, on balance), and {back:.0%} goes back on the step before; sound "
        f"attacks: over 80%. The margin moved by {number(gain)}, where the largest logit is "
        f"{number(typical(rows, lambda one: one.scale) or 0)}.",
        remedies=remedies.for_update(case.attack),
    )


_WAYS = ("follows", "uses", "back")


def _steady(one: Sample) -> bool:
    """Whether it goes step by step: draws of noise and changed images leap, and say nothing of steps."""
    return one.count("gradients") >= 5 and one.count("longest") < LEAP and one.known("uses") is not None


def _against(one: Sample) -> bool:
    return one.count("follows") < AGAINST and one.count("first") - one.count("last") > LOSS * one.scale


def _elsewhere(one: Sample) -> bool:
    little = one.count("best") - one.count("first") < LITTLE * one.scale
    return one.count("uses") < BY_CHANCE and one.count("back") < MOSTLY and little


def _back_and_forth(one: Sample) -> bool:
    return one.count("back") > BACK and NOISE < one.count("uses") < IN_PART and one.count("turns") < 1 - IN_PART


def vanishing_steps(case: Case) -> Finding | None:
    """Values that a step should have moved stay where they were: rounding takes it back, or it is lost."""
    if case.minimum_norm or case.black_box:
        return None

    def on_grid(one: Sample) -> bool:
        most = HELD_ON_GRID if case.threat_model.norm == "linf" else HELD
        return one.known("grid") == 1 and one.count("held") > most

    def stuck(one: Sample) -> bool:
        # Draws at the same point move on; a single step is no query.
        moved, far = one.count("longest"), one.distance or 0.0
        there = abs(far - one.count("end")) < BESIDE and far > 0
        return one.count("held") > HELD and there and (far < STRAIGHT * moved if moved else one.count("unmoved") == 0)

    for shows in (on_grid, stuck):
        rows = case.showing(lambda one, shows=shows: one.count("gradients") >= 3 and shows(one))  # type: ignore[misc]
        if case.enough(rows) and len(rows) >= MOSTLY * len(case.unsolved):
            break
    else:
        return None
    held = typical(rows, lambda one: one.known("held")) or 0.0
    grid = shows is on_grid
    why = "rounding to 8 bits takes them back" if grid else "they are rounded away, or never kept"
    lies = " All values of the points lie on the grid of 8 bits." if grid else ""
    return case.finding(
        "vanishing_steps",
        f"Its steps vanish: {why}.",
        rows,
        f"In {case.part(rows)} {held:.0%} of the values that a step should have moved, as their gradient is not 0 and "
        f"neither ball nor bounds hold them, stayed where they were.{lies}",
        remedies=remedies.for_rounding(case.attack, case.threat_model),
    )


def short_path(case: Case) -> Finding | None:
    """Steps times step size end inside the ball."""
    if case.minimum_norm or case.black_box:
        return None
    rows = case.showing(_falls_short)
    if not case.enough(rows) or len(rows) < MOSTLY * len(case.unsolved):
        return None
    gradients = typical(rows, lambda one: one.known("gradients")) or 1.0
    far = typical(rows, lambda one: one.far) or 0.0
    step = typical(rows, lambda one: one.known("step")) or far / gradients
    steps = round(gradients)
    takes = f"{steps} step{'s' if steps > 1 else ''} x {number(step)} epsilon"
    ends = f"end at {number(far)} epsilon" if far < NEAR_EDGE else f"go {number(step * steps)} epsilon in all"
    return case.finding(
        "short_path",
        f"The path is too short to reach where adversarial examples are: {takes} {ends}.",
        rows,
        f"{case.part(rows)} were moved by {takes}; they {ends}. To cross the ball and come back takes 2.5 epsilon.",
        remedies=step_remedies.for_length(case.attack, steps=steps, step=step, threat_model=case.threat_model),
    )


def step_too_large(case: Case) -> Finding | None:
    """Steps leap over the ball, back and forth, and the best point came early."""
    if case.minimum_norm or case.black_box:
        return None

    def shows(one: Sample) -> bool:
        best, last = one.known("best"), one.known("last")
        if one.count("gradients") < 3 or one.count("step") < LEAP or best is None or last is None:
            return False
        turned = one.count("turns") > TURNS
        # Some attacks end by a query of the input itself.
        worse = one.count("end") > 0 and best - last > LOSS * one.scale
        return turned or (worse and one.count("best_at") < EARLY * one.count("queries"))

    rows = case.showing(shows)
    if not case.enough(rows) or len(rows) < MOSTLY * len(case.unsolved):
        return None
    step = typical(rows, lambda one: one.known("step")) or 0.0
    steps = round(typical(rows, lambda one: one.known("gradients")) or 1.0)
    turns = typical(rows, lambda one: one.known("turns")) or 0.0
    drop = typical(rows, lambda one: one.count("best") - one.count("last")) or 0.0
    return case.finding(
        "step_too_large",
        f"The step is too large: each moves {number(step)} epsilon, across the ball and back, so that nothing inside "
        "it is looked at.",
        rows,
        f"In {case.part(rows)} gradients turned against the one before {turns:.0%} of "
        f"the time, and the last margin lay {number(drop)} below the best.",
        remedies=step_remedies.for_step(case.attack, steps=steps, threat_model=case.threat_model),
    )


def still_improving(case: Case) -> Finding | None:
    """The best margin still rose in the last tenth of the queries."""
    if case.black_box or case.minimum_norm:
        return None
    rows = case.showing(lambda one: one.known("late") is not None and one.count("gradients") > 1 and rises(one))
    if not case.enough(rows) or len(rows) < MOSTLY * len(case.unsolved):
        return None
    late = typical(rows, lambda one: one.known("late")) or 0.0
    steps = round(typical(rows, lambda one: one.known("gradients")) or 1.0)
    return case.finding(
        "still_improving",
        "It was stopped while it was still improving.",
        rows,
        f"In {case.part(rows)} the best margin gained {number(late)} in the last tenth "
        f"of the queries, where the largest logit is {number(typical(rows, lambda one: one.scale) or 0)}.",
        remedies=step_remedies.for_more_steps(case.attack, steps=steps),
    )


def flat_loss(case: Case) -> Finding | None:
    """Gradients came, the samples moved, and the margin stayed where it was."""
    if case.black_box or case.minimum_norm:
        return None

    def shows(one: Sample) -> bool:
        first, best = one.known("first"), one.known("best")
        if first is None or best is None or one.count("gradients") < 3 or one.count("reach") < LEAP:
            # A point that it returns without a query says nothing of the margin there.
            return False
        if one.count("outside") >= MOSTLY * one.count("queries"):
            # Of points out of the ball, the best margin counts none.
            return False
        return best - first < FLAT * one.scale

    rows = case.showing(shows)
    if not case.enough(rows) or len(rows) < MOSTLY * len(case.unsolved):
        return None
    return case.finding(
        "flat_loss",
        "Its steps change nothing: the margin is no higher than where it began, though the samples moved.",
        rows,
        f"In {case.part(rows)} the best margin is that of the first query, after "
        f"{number(typical(rows, lambda one: one.known('gradients')) or 0)} gradients and a way of "
        f"{number(typical(rows, lambda one: one.far) or 0)} epsilon.",
        remedies=remedies.for_flat(case.attack),
    )


# What distances may differ by, in epsilons, and all steps together from where they end.
BESIDE, STRAIGHT = 1e-3, 1.2


def rises(one: Sample) -> bool:
    """Whether the best margin rose in the last tenth of the queries as it did before."""
    late, first, best = one.known("late"), one.known("first"), one.known("best")
    if first is None or best is None:
        return False
    if late is None:
        return one.count("best_at") >= one.count("queries") - 1
    return late > max(GAIN * one.scale, LATE * (best - first))


def _falls_short(one: Sample) -> bool:
    gradients, travel = one.count("gradients"), one.travel
    if gradients < 1 or one.far == 0 or one.outcome != "not_adversarial":
        return False
    if travel is None:
        # One step, that the bounds may shorten by little; or several gradients at each point.
        return one.far < NEAR_EDGE / 2 if gradients == 1 else one.far < NEAR_EDGE and rises(one)
    # From a random start at the edge it takes more than from the input: then the margin still rises at the end, or none
    # of the steps was so long that all of them could cross the ball, as the first of steps that get shorter are.
    longest = one.known("longest")
    tiny = longest is not None and longest * gradients < NEAR_EDGE
    return travel < NEAR_EDGE and (one.far < NEAR_EDGE or tiny or rises(one))
