"""Faults of the gradients that reached an attack, and of steps that do not follow them or vanish."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from robust_ext.attacks.adapted import FITTED, AdaptedAttack
from robust_ext.evaluations.causes import remedies
from robust_ext.evaluations.causes.evidence import MOSTLY, Case, Sample, number, typical
from robust_ext.evaluations.causes.finding import Finding, Remedy, ranked
from robust_ext.evaluations.causes.path import LEAP, LOSS

# Faults of a model by which no gradient comes back; all by which gradients mislead, for any attack.
NO_GRADIENT = ("cut_gradient", "zero_gradient")
MISLEADING = (*NO_GRADIENT, "non_finite_gradient", "wrong_gradient", "saturated_layer", "saturated_loss")
# Faults of a model that hinder attacks without gradients too.
UNRELIABLE = ("train_mode", "changes_input", "random_output", "batch_dependent")
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


def model_at_fault(case: Case) -> Finding | None:
    """Find the model's fault, as a cause of the samples that this attack did not solve.

    What the attack has other gradients for is none of its causes, and a flat loss is none where its loss has gradients.
    """
    if case.probe is None or not case.enough(case.unsolved):
        return None
    codes = UNRELIABLE if case.black_box else (*UNRELIABLE, *MISLEADING)
    flat = saturated_loss(case)
    explains = flat is not None or not any(one.trace for one in case.unsolved)
    for fault in ranked(case.probe.findings):
        if fault.code in codes and not _adapted_to(case, fault) and (explains or fault.code != "saturated_loss"):
            seen = [one for one in (zero_gradient(case), flat, cut_gradient(case)) if one is not None]
            evidence = (*fault.evidence, *(line for one in seen for line in one.evidence))
            found = remedies.of_model(fault, case.attack, scale=typical(case.unsolved, "scale"))
            return case.finding(fault.code, fault.cause, case.unsolved, *evidence, remedies=found, layer=fault.layer)
    return None


def _adapted_to(case: Case, fault: Finding) -> bool:
    """Return whether the attack gets past a fault of the gradients.

    It does where it replaces the backward pass of the layer at fault, cools the logits that saturate a loss, or
    averages gradients over noise and succeeds.
    """
    attack = case.attack
    if not isinstance(attack, AdaptedAttack) or fault.code not in MISLEADING:
        return False
    if fault.code == "saturated_loss":
        return attack.temperature > 1
    if attack.noise and case.succeeds:
        return True
    if attack.bpda is None:
        return attack.gradient_mode in ("straight_through", FITTED)
    return any(f".{fault.layer}".endswith(f".{name.strip()}") for name in attack.bpda.split(","))


def cut_gradient(case: Case) -> Finding | None:
    """Gradients were wanted, and none arrived at the input; a probe of the model, if any, is more precise."""
    rows = case.showing(lambda one: one.count("cut") > 0 and one.count("gradients") == 0)
    if not rows or not case.attack.traits.gradients or case.probe is not None:
        return None
    return case.finding(
        "cut_gradient",
        "The graph is cut between the input and the logits: the attack asked for gradients and received none.",
        rows,
        f"{case.part(rows)} were sent forward with a graph ({number(typical(rows, 'graphs'))} times each), and the "
        "logits came without one.",
        remedies=remedies.for_flat(case.attack),
    )


def zero_gradient(case: Case) -> Finding | None:
    """The network turned gradients of the loss into exact zeros."""

    def shows(one: Sample) -> bool:
        gradients = one.count("gradients")
        stopped = gradients > 0 and one.count("zero") - one.count("zero_loss") >= MOSTLY * gradients
        return stopped and not _saturated(one)

    if not (rows := case.showing(shows)):
        return None
    part = typical(rows, lambda one: one.count("zero") / one.count("gradients"))
    return case.finding(
        "zero_gradient",
        "The gradient at the input is exactly zero, although that of the loss with respect to the logits is not: a "
        "layer stops it.",
        rows,
        f"In {case.part(rows)} {part:.0%} of the gradients were exactly zero.",
        remedies=remedies.for_flat(case.attack),
    )


def saturated_loss(case: Case) -> Finding | None:
    """The loss had no gradient by the logits, so that the network was not to blame.

    An attack that comes from outside may switch its loss off at adversarial points: there cross-entropy has to be what
    is flat.
    """

    def shows(one: Sample) -> bool:
        gradients = one.count("gradients")
        if gradients == 0 or one.count("zero") < MOSTLY * gradients:
            return False
        leaves = case.minimum_norm or one.count("outside") >= MOSTLY * one.count("queries")
        return _saturated(one) or (not leaves and one.count("zero_loss") >= MOSTLY * gradients)

    if not (rows := case.showing(shows)):
        return None
    scale, margin = typical(rows, "scale"), typical(rows, "first")
    why = (
        f"The largest logit is {number(scale)}, and the label's lies {number(-margin)} above all others: beyond 16.6 "
        "the gradient of cross-entropy is exactly 0 in float32."
        if sum(map(_saturated, rows)) >= MOSTLY * len(rows)
        else f"The largest logit is {number(scale)}: the loss itself is constant there."
    )
    return case.finding(
        "saturated_loss",
        "The loss is flat: its gradient with respect to the logits is exactly zero.",
        rows,
        f"In {case.part(rows)} at least half of the gradients were exactly zero.",
        why,
        remedies=remedies.for_loss(case.attack, scale=max(scale, -margin)),
    )


def _saturated(one: Sample) -> bool:
    """Return whether cross-entropy, of logits or of their logarithms, was flat at most of its points."""
    return one.count("saturated") >= MOSTLY * one.count("queries") > 0


def non_finite_gradient(case: Case) -> Finding | None:
    """Gradients held NaN or infinity."""
    if not (rows := case.showing(lambda one: one.count("non_finite") > 0)):
        return None
    part = typical(rows, lambda one: one.count("non_finite") / max(one.count("gradients"), 1))
    return case.finding(
        "non_finite_gradient",
        "Gradients at the input hold NaN or infinity, and a step along them leads nowhere.",
        rows,
        f"In {case.part(rows)} {part:.0%} of the gradients were not finite.",
        remedies=remedies.for_flat(case.attack),
    )


def no_gradient(case: Case) -> Finding | None:
    """No gradient was wanted: worth knowing, and no fault."""
    rows = [one for one in case.samples if one.trace]
    if not rows or not case.black_box or not case.enough(case.unsolved):
        return None
    return case.finding(
        "no_gradient",
        "The attack uses outputs only, and finds less than an attack with gradients where gradients are useful.",
        case.unsolved,
        f"{number(typical(rows, 'queries'))} queries a sample, none with a gradient.",
    )


def off_gradient(case: Case) -> Finding | None:
    """Steps that go against the gradients that came back, by chance, or back and forth where gradients do not turn."""
    shown = ((words, case.stepping(partial(_steadily, shows))) for words, shows in _UPDATES.items())
    words, rows = next((one for one in shown if one[1]), ("", []))
    if not rows:
        return None
    gain = typical(rows, lambda one: one.count("last") - one.count("first"))
    return case.finding(
        "off_gradient",
        f"Its steps {words}: a momentum, a sign or an index in its update is wrong.",
        rows,
        f"In {case.part(rows)} {typical(rows, 'uses'):.0%} of the movement lies along the gradients that came before "
        f"it, or against them ({typical(rows, 'follows'):+.0%} away from the label, on balance), and "
        f"{typical(rows, 'back'):.0%} goes back on the step before; sound attacks: over 80%, and under 50%. The margin "
        f"changed by {number(gain)}, where the largest logit is {number(typical(rows, lambda one: one.scale))}.",
        remedies=(
            Remedy(
                words="Add each gradient to the momentum, and the momentum to the points; or leave the momentum out.",
                code="velocity = decay * velocity + gradient / gradient.abs().flatten(1).sum(1).view(-1, 1, 1, 1)\n"
                "x_adv = x_adv + step_size * velocity.sign()  # each row by its own gradient, up the loss of its label",
            ),
            remedies.FOLLOWED,
        ),
    )


def _steadily(shows: Callable[[Sample], bool], one: Sample) -> bool:
    """Return whether it shows that while it moves step by step.

    Changed images leap, and draws of noise leave ball or bounds.
    """
    if one.count("gradients") < PATH or one.known("uses") is None:
        return False
    return one.count("longest") < LEAP and one.count("outside") < EDGES * one.count("queries") and shows(one)


def _against(one: Sample) -> bool:
    return one.count("follows") < AGAINST and one.count("first") - one.count("last") > LOSS * one.scale


def _elsewhere(one: Sample) -> bool:
    little = one.count("best") - one.count("first") < LITTLE * one.scale
    return one.count("uses") < BY_CHANCE and one.count("back") < MOSTLY and little


def _back_and_forth(one: Sample) -> bool:
    return one.count("back") > BACK and NOISE < one.count("uses") < IN_PART and one.count("turns") < 1 - IN_PART


_UPDATES: dict[str, Callable[[Sample], bool]] = {
    "go against its gradients, and the label's logit gains on the others": _against,
    "are unrelated to its gradients": _elsewhere,
    "undo one another, although its gradients keep their direction": _back_and_forth,
}


def of_draws(one: Sample) -> bool:
    """Return whether queries go to and fro by noise, of which gradients are averaged."""
    return one.count("back") > BACK and one.known("uses") is not None and one.count("uses") < NOISE


def restricted(case: Case) -> Finding | None:
    """The same values stay as they are in every row, though their gradient is not 0, and all others move."""

    def shows(one: Sample) -> bool:
        fixed, held = one.count("fixed"), one.count("held")
        return FIXED < fixed < 1 and held - fixed < STRAY * (1 - fixed) and max(one.count("longest"), one.far) > 0

    rows = case.stepping(shows)
    if not rows or case.threat_model.norm == "l1":
        return None
    return case.finding(
        "restricted",
        "It changes only some of the values, the same ones in every sample, as if through a mask; the threat model "
        "allows all.",
        rows,
        f"{typical(rows, 'fixed'):.0%} of the values never moved in any sample, though their gradient is not 0 and "
        "neither ball nor bounds hold them; the others did. Planted examples differ from the input everywhere: the "
        "restriction is not part of the test, which says nothing about the attack within it.",
        remedies=[
            Remedy(
                words="Test the attack without its mask; a threat model that allows some of the values only cannot be "
                "stated.",
                code="x_adv = x_adv + step_size * gradient.sign()  # not times the mask",
            )
        ],
    )


def vanishing_steps(case: Case) -> Finding | None:
    """Values that a step should have moved stay where they were: rounding takes it back, or it is not kept."""

    def stuck(one: Sample) -> bool:
        """Return whether it moved once; gradients that are averaged over draws at one point move on to the next."""
        moved, far = one.count("longest"), one.distance or 0.0
        there = abs(far - one.count("end")) < BESIDE and 0 < far < STRAIGHT * moved
        # From a random start, it is the margin that shows where it stopped.
        early = one.count("best_at") <= max(2, EARLY * one.count("queries")) and one.count("fixed") < FIXED
        stopped = moved > 0 and one.known("step") == 0 and one.known("best") == one.known("last") and early
        held = HELD_FROM_START if stopped else HELD
        return (there or stopped) and one.count("held") > held and one.count("gradients") > 2 and not one.count("zero")

    most = HELD_ON_GRID if case.threat_model.norm == "linf" else HELD
    grid = case.stepping(lambda one: one.known("grid") == 1 and one.count("held") > most and one.count("gradients") > 2)
    if not (rows := grid or case.stepping(stuck)):
        return None
    why = "rounding to 8 bits undoes them" if grid else "after the first one they are rounded away, or not kept"
    return case.finding(
        "vanishing_steps",
        f"Its steps vanish: {why}.",
        rows,
        f"In {case.part(rows)} {typical(rows, 'held'):.0%} of the values that a step should have moved, as their "
        "gradient is not 0 and neither ball nor bounds hold them, stayed where they were."
        + (" All values of the points lie on the grid of 8 bits." if grid else ""),
        remedies=remedies.for_rounding(case.threat_model),
    )
