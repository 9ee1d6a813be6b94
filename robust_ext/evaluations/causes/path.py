"""Faults of the way an attack went: too short, away from its aim, back and forth, or not at its end."""

from __future__ import annotations

from robust_ext.core.statistics import lower_bound
from robust_ext.engine.verify import BROKEN
from robust_ext.evaluations.causes import remedies, step_remedies
from robust_ext.evaluations.causes.evidence import FEWEST, OF_ALL, Case, Sample, number, typical
from robust_ext.evaluations.causes.finding import Finding
from robust_ext.evaluations.causes.gradients import MOSTLY

# In epsilons. Adversarial points lie at the edge of the ball more often than not: a path that ends before is too short.
NEAR_EDGE = 0.9
# Parts of the largest logit that a margin has to gain, or lose, to mean anything, or has to stay below to be flat.
GAIN, LOSS, FLAT = 0.01, 0.05, 1e-3
# Part of its whole gain that the best margin makes in the last tenth of the queries: a tenth where it rises evenly all
# the way; a hundredth where an ascent has converged, and up to .06 of Foolbox's PGD with its own steps.
LATE = 0.08
# Of fewer queries there is no last tenth: what counts is the part of the open samples that the last step alone solves.
# More steps then solve more; ascents that have converged solve a few in a hundred.
SHORT, AT_LAST = 10, 0.1
# Steps of half a ball and more leap over what lies inside it.
LEAP = 0.5
# Share of consecutive gradients that turn against each other: .5 is a coin's, and smooth ascents stay below .1.
TURNS = 0.3
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
        remedies=step_remedies.for_length(
            case.attack, steps=steps, step=step, threat_model=case.threat_model, most=_most_steps(case)
        ),
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
    """The best margin still rose in the last tenth of the queries, or the last of few steps solved many samples."""
    if case.black_box or case.minimum_norm:
        return None
    if _most_steps(case) > 1 and all(one.count("batch_queries") < SHORT for one in case.samples):
        return _solves_at_last(case)
    rows = case.showing(lambda one: one.known("late") is not None and one.count("gradients") > 1 and _rises(one))
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
        remedies=step_remedies.for_more_steps(case.attack, steps=steps, most=_most_steps(case)),
    )


def _solves_at_last(case: Case) -> Finding | None:
    """The finding about an attack of few steps, of which the last solved a large part of what was open."""
    steps, unsolved = _most_steps(case), case.showing(lambda one: not one.count("outside"))

    def shows(one: Sample) -> bool:
        found = one.known("adversarial_at")
        right = one.outcome in BROKEN and one.entry.get("correct") is not False
        late = found >= steps if found is not None else one.count("gradients") == steps
        return right and one.traced and late and not one.count("outside")

    late = [one for one in case.samples if shows(one)]
    considered = len(late) + len(unsolved)
    if len(unsolved) < FEWEST or len(late) < OF_ALL * len(case.samples) or not considered:
        return None
    if lower_bound(len(late), considered) <= AT_LAST:
        return None
    return case.finding(
        "still_improving",
        "It was stopped while it was still improving.",
        unsolved,
        f"The last of {steps} steps alone solved {len(late)} of the {considered} samples that were open before it.",
        remedies=step_remedies.for_more_steps(case.attack, steps=steps, most=steps),
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


def _most_steps(case: Case) -> int:
    """The most steps of any sample: where others took fewer, it ends by itself."""
    return round(max((one.count("gradients") for one in case.samples), default=0.0))


def _rises(one: Sample) -> bool:
    """Return whether the best margin rose in the last tenth of the queries as it did before."""
    late, first, best = one.known("late"), one.known("first"), one.known("best")
    if first is None or best is None:
        return False
    if late is None:
        return one.count("best_at") >= one.count("queries") - 1
    return late > max(GAIN * one.scale, LATE * (best - first))


def goes_on(one: Sample) -> bool:
    """Return whether an averaged-gradient path with many missing steps was still moving."""
    return one.count("late") > LATE / 2 * (one.count("best") - one.count("first"))


def _falls_short(one: Sample) -> bool:
    gradients, travel = one.count("gradients"), one.travel
    if gradients < 1 or one.far == 0 or one.outcome != "not_adversarial":
        return False
    if travel is None:
        # One step, that the bounds may shorten by little; or several gradients at each point.
        return one.far < NEAR_EDGE / 2 if gradients == 1 else one.far < NEAR_EDGE and goes_on(one)
    # From a random start at the edge it takes more than from the input: then the margin still rises at the end, or none
    # of the steps was so long that all of them could cross the ball, as the first of steps that get shorter are.
    longest = one.known("longest")
    tiny = longest is not None and longest * gradients < NEAR_EDGE
    return travel < NEAR_EDGE and (one.far < NEAR_EDGE or tiny or _rises(one))
