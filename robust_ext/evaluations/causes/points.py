"""Faults of the points: out of bounds or ball, of another threat model, not the best, early, or the input itself."""

from __future__ import annotations

from robust_ext.core.wording import typed
from robust_ext.engine.verify import LOST
from robust_ext.evaluations.causes import remedies
from robust_ext.evaluations.causes.evidence import MOSTLY, Case, Sample, number, typical
from robust_ext.evaluations.causes.finding import Finding, Remedy
from robust_ext.evaluations.causes.gradients import STRAIGHT, of_draws
from robust_ext.evaluations.causes.path import FLAT, NEAR_EDGE, REPAIRED, goes_on

# A ball that is smaller than the threat model's by less than this is no other scale, but a margin of safety.
OTHER_BALL = 0.8
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
# Fewest queries of a search that can have stopped early.
SEARCH = 5


def wrong_bounds(case: Case) -> Finding | None:
    """Candidates or queries lie within epsilon and out of the bounds, or end at the same values inside them."""
    low, high = case.threat_model.bounds

    def queried(one: Sample) -> bool:
        outside = one.count("outside") >= MOSTLY * one.count("queries") > 0 and one.count("reach") <= BEYOND
        return outside and not (case.attack.traits.leaves_ball or of_draws(one))

    returned = [one for one in case.unsolved if one.outcome == "out_of_bounds"]
    if case.enough(returned):
        rows, seen = returned, f"For {case.part(returned)} candidates lie out of [{low:g}, {high:g}]."
    elif rows := case.showing(queried):
        seen = f"For {case.part(rows)} queries, within epsilon, lie out of [{low:g}, {high:g}]."
    else:
        rows, ends = _narrow_bounds(case)
        seen = f"The last queries of {case.part(rows)} all end at {ends}, and those of no sample lie beyond."
    if not rows:
        return None
    return case.finding(
        "wrong_bounds",
        f"It uses other bounds than those of valid inputs, [{low:g}, {high:g}].",
        rows,
        seen,
        remedies=(
            Remedy(
                words=f"Clip to the bounds of the inputs, [{low:g}, {high:g}].",
                code=f"x_adv = x_adv.clamp({low:g}, {high:g})",
            ),
            remedies.projected(case.attack),
        ),
    )


def _narrow_bounds(case: Case) -> tuple[list[Sample], str]:
    """The last queries all end at the same smallest or largest value, inside the bounds, and none lies beyond it."""
    (low, high), width, epsilon = case.threat_model.bounds, case.threat_model.width, case.threat_model.epsilon
    linf = case.threat_model.norm == "linf"

    def ended(one: Sample) -> bool:
        # An image of one value, as black ones that some libraries return, ends nowhere.
        return one.count("end") > 0 and one.known("low") != one.known("high")

    rows = case.showing(ended)
    if not rows or len(rows) < MOSTLY * len(case.unsolved):
        return [], ""
    everyone = [one for one in case.samples if one.trace and ended(one)]
    ends = []
    for name, bound, way in (("low", low, 1), ("high", high, -1)):
        inside = {id(one): way * (one.count(name) - bound) / width for one in everyone}
        least = min(inside.values())
        same = sum(value < least + SAME for value in inside.values()) >= SHARED
        if least > SAME and same and all(inside[id(one)] < least + SAME for one in rows):
            # Inputs that touch the bound may all be moved away from it by as much as they are moved.
            moved = linf and all(abs(least - one.count("end") * epsilon / width) < SAME for one in rows)
            ends.append((bound + way * least * width, moved))
    # In other norms than linf many values stay as they are, and inputs may well share their smallest or largest.
    if len(ends) < (1 if linf else 2) or all(moved for _, moved in ends):
        return [], ""
    return rows, " and ".join(number(value) for value, _ in ends)


def other_points(case: Case) -> Finding | None:
    """Find gradients that are taken at the inputs on another scale than the returned points."""
    rows = case.stepping(lambda one: one.count("elsewhere") >= ALWAYS and (one.distance or 0.0) <= BEYOND)
    if not rows:
        return None
    slope, shift, reach = typical(rows, "slope") or 1.0, typical(rows, "shift"), typical(rows, "reach")
    return case.finding(
        "other_points",
        "It takes gradients at other points than those it returns: the attack scales or normalises inputs for a model "
        "that expects them unscaled.",
        rows,
        f"In {case.part(rows)} all queries with gradients are about {number(slope)} times the input "
        f"{'+' if shift >= 0 else '-'} {number(abs(shift))}, up to {number(reach)} epsilon away from it, as by a mean "
        f"of {number(-shift / slope)} and a deviation of {number(1 / slope)}; what it returned lies within epsilon.",
        remedies=(
            Remedy(
                words="Give the model the points themselves: it expects unscaled inputs, and normalises them itself.",
                code="loss = cross_entropy(model(x_adv), y)  # model takes inputs in the bounds of the threat model",
            ),
            remedies.FOLLOWED,
        ),
    )


def epsilon_scale(case: Case) -> Finding | None:
    """All samples were held back at one distance well inside the ball, that steps would have gone beyond."""

    def held_back(one: Sample) -> bool:
        # Where most steps are none it may take several gradients at each point, and go on to the end.
        beyond = not goes_on(one) if one.known("step") == 0 else (one.travel or 0.0) > STRAIGHT * one.far
        return one.count("gradients") > 2 and beyond

    rows = case.showing(lambda one: one.far > 0 and one.outcome == "not_adversarial")
    far = sorted(one.far for one in rows)
    if case.minimum_norm or not rows or far[-1] > OTHER_BALL or far[-1] - far[0] > PINNED * far[-1]:
        return None
    return _scaled(case, rows, far[len(far) // 2]) if sum(map(held_back, rows)) >= MOSTLY * len(rows) else None


def left_ball(case: Case) -> Finding | None:
    """Candidates lie beyond epsilon, of an attack that is given epsilon."""

    def walked(one: Sample) -> bool:
        """Return whether its steps, one after another, lead just where it came."""
        return one.travel is not None and one.far / STRAIGHT < one.travel < STRAIGHT * one.far

    rows, model = [one for one in case.unsolved if one.outcome == "beyond_epsilon"], case.threat_model
    if case.minimum_norm or not case.enough(rows):
        return None
    ratio = typical(rows, lambda one: one.distance) or 1.0
    farthest = max(one.distance or 0.0 for one in rows)
    level = model.width / 255 / model.epsilon
    if model.norm == "linf" and farthest <= 1 + 1.01 * level and all(one.known("grid") == 1 for one in rows):
        return case.finding(
            "left_ball",
            "It rounds its points to 8 bits, which moves them out of the ball, and does not project them back.",
            rows,
            f"{case.part(rows)} came back at up to {number(farthest)} epsilon, all values on the grid of 8 bits, a "
            f"level of which is {number(level)} epsilon.",
            remedies=remedies.for_rounding(model),
        )
    alike = all(abs((one.distance or 0.0) / ratio - 1) < PINNED for one in rows)
    if sum(map(walked, rows)) < MOSTLY * len(rows) and (alike or ratio > OTHER_SCALE):
        return _scaled(case, rows, ratio)
    return case.finding(
        "left_ball",
        "It leaves the ball: its points are not projected back to within epsilon in the threat model's norm.",
        rows,
        f"{case.part(rows)} came back beyond epsilon, at {number(ratio)} times it on the median and {number(farthest)} "
        "at most.",
        remedies=remedies.for_ball(case.attack, model),
    )


_SCALES = (
    (255.0, ", as if it expected inputs in [0, 255]"),
    (1 / 255, ", as if it had been divided by 255 twice"),
    (2.0, ", as if it expected inputs in [-1, 1]"),
    (0.5, ", as if it expected inputs in [0, 1] instead of [-1, 1]"),
)


def _scaled(case: Case, rows: list[Sample], ratio: float) -> Finding:
    """The finding for an attack whose ball is ``ratio`` times the threat model's."""
    epsilon = case.threat_model.epsilon
    known = next((text for value, text in _SCALES if abs(ratio / value - 1) < 0.05), "")
    where = "stay within" if ratio < 1 else "end at"
    return case.finding(
        "epsilon_scale",
        f"Its epsilon has another scale: {number(ratio)} times that of the threat model{known}.",
        rows,
        f"{case.part(rows)} {where} {number(ratio)} epsilon, that is {number(ratio * epsilon)} where the threat model "
        f"has {typed(epsilon)}, however many steps they took.",
        remedies=remedies.for_epsilon(case.attack, case.threat_model),
    )


def best_not_returned(case: Case) -> Finding | None:
    """An adversarial point in ball and bounds was queried, and another one returned."""

    def shows(one: Sample) -> bool:
        met = one.known("adversarial_at") is not None and one.count("best") > FLAT * one.scale
        return met and one.outcome != "rejected"

    rows = case.showing(shows)
    if not rows or case.minimum_norm or (case.probe is not None and case.probe.random):
        # One may have been farther away than what came back; at another draw of the model it may be none any more.
        return None
    return case.finding(
        "best_not_returned",
        "It found adversarial points within epsilon, but returned other points.",
        rows,
        f"In {case.part(rows)} it met an adversarial point, at query {number(typical(rows, 'adversarial_at') + 1)} of "
        f"{number(typical(rows, 'queries'))} on the median, and came back with one that is none.",
        remedies=[
            remedies.viewed(
                "Return the best point of the path instead of the last.",
                case.attack,
                code="fooled = model(x_adv).argmax(1) != y\n"
                "best[fooled] = x_adv[fooled]  # after each step; return best, which begins as x.clone()",
                keep_best=True,
            )
        ],
    )


def stopped_early(case: Case) -> Finding | None:
    """Nothing became adversarial before the very end of a call, and others of the same call ended there with it.

    One call alone may end so by chance; that is ruled out where calls differ in length, where the attack is set to take
    far more steps, or where several samples were solved at once, at the end of a path that had not come to its own.
    """
    solved = [one for one in case.samples if one.known("adversarial_at") is not None]
    if not solved or any(one.count("adversarial_at") < one.count("batch_queries") - 2 for one in solved):
        return None
    lengths = sorted({one.count("batch_queries") for one in solved})
    others = [one for one in case.unsolved if one.known("adversarial_at") is None]
    together = [one for one in others if one.known("batch_queries") in lengths]
    planned = remedies.steps_of(case.attack)
    if not case.enough(together) or len(solved) > len(together) or (planned is not None and lengths[0] >= planned):
        # Where it was solved by chance, or took all its steps.
        return None
    short = planned is not None and all(2 * length < planned for length in lengths)
    under_way = sum(one.far < NEAR_EDGE for one in together) >= MOSTLY * len(together)
    at_once = under_way and len(solved) >= REPAIRED and lengths[0] >= SEARCH
    if not short and len(lengths) == 1 and not at_once:
        return None
    shown = " to ".join(number(one) for one in dict.fromkeys((lengths[0], lengths[-1])))
    return case.finding(
        "stopped_early",
        "It stops the whole batch as soon as some of its samples are solved.",
        together,
        f"In no call was a sample adversarial before its last two queries ({shown} in all), and {len(together)} "
        "others of the same calls, not yet solved, ended with it.",
        remedies=[
            remedies.viewed(
                "Attack samples one at a time, or stop only where all of the batch is solved.",
                case.attack,
                code="if fooled.all(): break  # not fooled.any(); or go on, and keep the best point of each row",
                one_by_one=True,
            )
        ],
    )


def crashed(case: Case) -> Finding | None:
    """Nothing came back, or NaN did."""
    lost = [entry for entry in case.entries if entry["outcome"] in LOST]
    broken = [one.entry for one in case.unsolved if one.outcome == "not_finite"]
    if not (lost or broken) or not case.enough([*lost, *broken]):
        return None
    said = next((str(entry["error"]) for entry in lost if entry.get("error")), "")
    evidence = [f"{len(lost)} of {len(case.entries)} samples were not attacked. {said}".strip()] if lost else []
    if broken:
        evidence.append(f"{len(broken)} candidates hold NaN or infinity.")
    cause = "It broke down: nothing came back." if lost else "It broke down numerically: what came back is NaN."
    return case.finding("crashed", cause, [*lost, *broken], *evidence, remedies=[remedies.for_crash(said)])


def unmoved(case: Case) -> Finding | None:
    """Candidates equal the inputs, and nothing else was tried."""
    rows = [one for one in case.unsolved if one.distance == 0 and one.count("unmoved") >= one.count("queries")]
    if not case.enough(rows):
        return None
    queries = typical(rows, lambda one: one.count("queries"))
    tried = f"queried nothing else in {number(queries)} queries" if queries else "sent nothing to the model"
    return case.finding(
        "unmoved",
        "It returns the inputs unchanged, and tries nothing else.",
        rows,
        f"{case.part(rows)} came back unchanged; it {tried}.",
        remedies=[
            Remedy(
                words="Start at a random point of the ball, and check the size of the first step.",
                code="x_adv = x + epsilon * (2 * torch.rand_like(x) - 1)",
            )
        ],
    )
