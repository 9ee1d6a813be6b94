"""Faults of the way an attack went: too short, away from its aim, back and forth, or not at its end."""

from __future__ import annotations

from robust_ext.core.statistics import lower_bound
from robust_ext.engine.verify import BROKEN
from robust_ext.evaluations.causes import remedies
from robust_ext.evaluations.causes.evidence import FEWEST, MOSTLY, OF_ALL, Case, Sample, number, typical
from robust_ext.evaluations.causes.finding import Finding, Remedy
from robust_ext.evaluations.causes.rewriting import call_of

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
# As a verdict counts them: two canaries that are moved into the class of their label are no chance.
REPAIRED = 2
# Share of gradients for another label: an attack that aims has more, and others have none.
OTHER_LABEL = 0.1


def toward_label(case: Case) -> Finding | None:
    """The margin falls along the path: the loss has the wrong sign, or the label is the target."""

    def shows(one: Sample) -> bool:
        first, best, last = one.known("first"), one.known("best"), one.known("last")
        if first is None or best is None or last is None or one.count("gradients") < 1:
            return False
        return first - last > LOSS * one.scale and best - first < GAIN * one.scale

    if not (rows := case.stepping(shows)):
        return None
    fall = number(typical(rows, lambda one: one.count("first") - one.count("last")))
    elsewhere = [one for one in rows if one.count("other_label") > MOSTLY * one.count("gradients")]
    if case.enough(elsewhere):
        return case.finding(
            "predicted_labels",
            "It attacks other labels than the given ones: its loss is that of other classes.",
            elsewhere,
            f"In {case.part(elsewhere)} most gradients are those of cross-entropy for another label, and the margin "
            f"(highest other logit less the label's) fell by {fall}.",
            remedies=remedies.for_labels(case.attack),
        )
    targeted, call = remedies.flag_of(case.attack, "targeted"), call_of(case.attack)
    aims = " Its setting targeted is on: the label that it is given is then the class it aims at." if targeted else ""
    untargeted = [] if call is None else [Remedy(words="Attack untargeted.", attack=call.changed(targeted=False))]
    return case.finding(
        "toward_label",
        f"It moves in the wrong direction: the label's logit gains on the others along the path.{aims}",
        rows,
        f"In {case.part(rows)} the margin (highest other logit less the label's) fell by {fall} from the first to the "
        "last query, and was never above the first.",
        remedies=(
            *(untargeted if targeted else ()),
            Remedy(
                words="Ascend the loss of the given label instead of descending it.",
                code="x = x + step_size * gradient.sign()  # up the loss of the true label; a targeted attack goes "
                "down",
            ),
            remedies.viewed(
                "Give it the second most likely class, if it is meant to be targeted.", case.attack, aimed=True
            ),
        ),
    )


def short_path(case: Case) -> Finding | None:
    """Steps times step size end inside the ball."""
    if not (rows := case.stepping(_falls_short)):
        return None
    gradients, far = typical(rows, "gradients") or 1.0, typical(rows, lambda one: one.far)
    step, steps = typical(rows, "step") or far / gradients, round(gradients)
    takes = f"{steps} step{'s' if steps > 1 else ''} x {number(step)} epsilon"
    ends = f"end at {number(far)} epsilon" if far < NEAR_EDGE else f"go {number(step * steps)} epsilon in all"
    return case.finding(
        "short_path",
        f"The path is too short to reach adversarial examples: {takes} {ends}.",
        rows,
        f"{case.part(rows)} were moved by {takes}; they {ends}. To cross the ball and come back takes 2.5 epsilon.",
        remedies=remedies.for_length(
            case.attack, steps=steps, step=step, threat_model=case.threat_model, most=case.most_steps
        ),
    )


def step_too_large(case: Case) -> Finding | None:
    """Steps leap over the ball, back and forth, and the best point came early."""

    def shows(one: Sample) -> bool:
        best, last = one.known("best"), one.known("last")
        if one.count("gradients") < 3 or one.count("step") < LEAP or best is None or last is None:
            return False
        # Some attacks end by a query of the input itself.
        worse = one.count("end") > 0 and best - last > LOSS * one.scale
        return one.count("turns") > TURNS or (worse and one.count("best_at") < EARLY * one.count("queries"))

    if not (rows := case.stepping(shows)):
        return None
    steps = round(typical(rows, "gradients") or 1.0)
    drop = typical(rows, lambda one: one.count("best") - one.count("last"))
    return case.finding(
        "step_too_large",
        f"The step is too large: each moves {number(typical(rows, 'step'))} epsilon, from side to side of the "
        "ball, so that it never looks inside.",
        rows,
        f"In {case.part(rows)} gradients turned against the one before {typical(rows, 'turns'):.0%} of the time, and "
        f"the last margin lay {number(drop)} below the best.",
        remedies=remedies.for_step(case.attack, steps=steps, threat_model=case.threat_model),
    )


def still_improving(case: Case) -> Finding | None:
    """The best margin still rose in the last tenth of the queries, or the last of few steps solved many samples."""
    if case.black_box or case.minimum_norm:
        return None
    most, cause = case.most_steps, "It was stopped while it was still improving."
    if most > 1 and all(one.count("batch_queries") < SHORT for one in case.samples):
        # Of few steps, whether the last one alone solved a large part of what was open.
        rows = [one for one in case.unsolved if one.trace and not one.count("outside")]
        late = [one for one in case.samples if _solved_at(one, most)]
        if (
            len(rows) < FEWEST
            or len(late) < OF_ALL * len(case.samples)
            or lower_bound(len(late), len(late) + len(rows)) <= AT_LAST
        ):
            return None
        seen = f"The last of {most} steps alone solved {len(late)} of the {len(late) + len(rows)} samples that were "
        found = remedies.for_more_steps(case.attack, steps=most, most=most)
        return case.finding("still_improving", cause, rows, f"{seen}open before it.", remedies=found)
    rows = case.stepping(lambda one: one.known("late") is not None and one.count("gradients") > 1 and _rises(one))
    if not rows:
        return None
    return case.finding(
        "still_improving",
        cause,
        rows,
        f"In {case.part(rows)} the best margin gained {number(typical(rows, 'late'))} in the last tenth of the "
        f"queries, where the largest logit is {number(typical(rows, lambda one: one.scale))}.",
        remedies=remedies.for_more_steps(case.attack, steps=round(typical(rows, "gradients") or 1.0), most=most),
    )


def _solved_at(one: Sample, steps: int) -> bool:
    """Return whether the last of that many steps solved it."""
    found = one.known("adversarial_at")
    late = found >= steps if found is not None else one.count("gradients") == steps
    return one.outcome in BROKEN and one.right and bool(one.trace) and late and not one.count("outside")


def flat_loss(case: Case) -> Finding | None:
    """Gradients came, the samples moved, and the margin stayed where it was."""

    def shows(one: Sample) -> bool:
        first, best = one.known("first"), one.known("best")
        if first is None or best is None or one.count("gradients") < 3 or one.count("reach") < LEAP:
            # The margin at a returned point without a query is unknown.
            return False
        # Of points out of the ball, the best margin counts none.
        return one.count("outside") < MOSTLY * one.count("queries") and best - first < FLAT * one.scale

    if not (rows := case.stepping(shows)):
        return None
    return case.finding(
        "flat_loss",
        "Its steps achieve nothing: the samples moved, but the margin is no higher than at the start.",
        rows,
        f"In {case.part(rows)} the best margin is that of the first query, after "
        f"{number(typical(rows, 'gradients'))} gradients and a way of {number(typical(rows, lambda one: one.far))} "
        "epsilon.",
        remedies=remedies.for_flat(case.attack),
    )


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


def predicted_labels(case: Case) -> Finding | None:
    """Misclassified inputs were moved into their label's class, or given back: it attacks what the model predicts."""
    repaired = sum(entry.get("canary") == "repaired" for entry in case.entries)
    posed = sum(entry.get("canary") is not None for entry in case.entries)
    wrong = [one for one in case.samples if not one.right]
    fixed = [one for one in wrong if one.outcome == "not_adversarial"]
    turned = _turned_back(case)
    if repaired < REPAIRED and (len(fixed) < REPAIRED or len(fixed) < MOSTLY * len(wrong)) and not turned:
        return None
    # How many show each, of how many, and as a sentence.
    seen = [
        (repaired, posed, f"It moved {repaired} of {posed} misclassified canaries into the class of their label."),
        (
            len(fixed),
            len(wrong),
            f"{len(fixed)} of {len(wrong)} samples that the model gets wrong as they are came back classified "
            "correctly, though the input itself would have done.",
        ),
        (
            len(turned),
            len(case.unsolved),
            f"{case.part(turned)} came to an adversarial point, from where the loss of another label than theirs took "
            "them back.",
        ),
    ]
    samples, of, _ = max(seen, key=lambda one: one[:2])
    return Finding(
        code="predicted_labels",
        cause="It attacks the model's predicted labels instead of the given ones, which repairs misclassified inputs "
        "and overstates robust accuracy.",
        evidence=tuple(words for count, _, words in seen if count),
        attack=case.name,
        samples=samples,
        of=of,
        remedies=remedies.for_labels(case.attack),
    )


def _turned_back(case: Case) -> list[Sample]:
    """Samples whose gradients turned to and fro once they were adversarial, where that is for another label's loss.

    Of two classes it cannot be seen whose loss it is: then other samples have to show it.
    """

    def for_another_label(one: Sample) -> bool:
        other = one.count("other_label") / max(one.count("gradients"), 1)
        return one.known("adversarial_at") is not None and OTHER_LABEL < other < 1 - OTHER_LABEL

    lost = case.showing(lambda one: one.known("adversarial_at") is not None)
    turned = [one for one in lost if one.count("turns") > TURNS]
    if not case.enough(turned) or len(turned) < MOSTLY * len(lost):
        return []
    return turned if sum(map(for_another_label, case.samples)) >= REPAIRED else []
