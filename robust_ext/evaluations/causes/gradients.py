"""Faults of the gradients that reached an attack: none, zero, not finite, or none of the loss."""

from __future__ import annotations

from robust_ext.attacks.adapted import AdaptedAttack
from robust_ext.evaluations.causes import remedies
from robust_ext.evaluations.causes.evidence import Case, Sample, number, share, typical
from robust_ext.evaluations.causes.finding import Finding, ranked

# Half: an attack whose gradients are zero at fewer points gets away from them.
MOSTLY = 0.5
# Faults of a model by which no gradient comes back; all by which gradients mislead, for any attack.
NO_GRADIENT = ("cut_gradient", "zero_gradient")
MISLEADING = (
    *NO_GRADIENT,
    "non_finite_gradient",
    "wrong_gradient",
    "saturated_layer",
    "saturated_loss",
)
# Faults of a model that hinder attacks without gradients too.
UNRELIABLE = ("train_mode", "changes_input", "random_output", "batch_dependent")


def model_at_fault(case: Case) -> Finding | None:
    """Find the model's fault, as a cause of the samples that this attack did not solve.

    What the attack has other gradients for is none of its causes, and a flat loss is none where its loss has gradients.
    """
    if case.probe is None or not case.enough(case.unsolved):
        return None
    codes = UNRELIABLE if case.black_box else (*UNRELIABLE, *MISLEADING)
    flat = saturated_loss(case)
    explains = flat is not None or not any(one.traced for one in case.unsolved)
    faults = (
        one
        for one in ranked(case.probe.findings)
        if one.code in codes and not _adapted_to(case, one) and (explains or one.code != "saturated_loss")
    )
    fault = next(faults, None)
    if fault is None:
        return None
    seen = [one for one in (zero_gradient(case), flat, cut_gradient(case)) if one is not None]
    evidence = (*fault.evidence, *(line for one in seen for line in one.evidence))
    scale = typical(case.unsolved, lambda one: one.known("scale")) or 0.0
    found = remedies.of_model(fault, case.attack, scale=scale)
    return case.finding(fault.code, fault.cause, case.unsolved, *evidence, remedies=found, layer=fault.layer)


def cut_gradient(case: Case) -> Finding | None:
    """Gradients were wanted, and none arrived at the input; a probe of the model, where there is one, knows better."""
    if not case.attack.traits.gradients or case.probe is not None:
        return None
    rows = case.showing(lambda one: one.count("cut") > 0 and one.count("gradients") == 0)
    if not case.enough(rows):
        return None
    return case.finding(
        "cut_gradient",
        "The graph is cut between the input and the logits: gradients were wanted and none arrived.",
        rows,
        f"{case.part(rows)} were sent forward with a graph "
        f"({number(typical(rows, lambda one: one.known('graphs')) or 0)} times each), and the logits came without one.",
        remedies=remedies.for_flat(case.attack),
    )


def zero_gradient(case: Case) -> Finding | None:
    """The network turned gradients of the loss into exact zeros."""

    def shows(one: Sample) -> bool:
        gradients = one.count("gradients")
        stopped = gradients > 0 and one.count("zero") - one.count("zero_loss") >= MOSTLY * gradients
        return stopped and not _saturated(one)

    rows = case.showing(shows)
    if not case.enough(rows):
        return None
    part = typical(rows, lambda one: share(one.count("zero"), one.count("gradients"))) or 0.0
    return case.finding(
        "zero_gradient",
        "The gradient at the input is exactly zero, though that of the loss by the logits is not: a layer stops it.",
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

    rows = case.showing(shows)
    if not case.enough(rows):
        return None
    scale = typical(rows, lambda one: one.known("scale")) or 0.0
    margin = typical(rows, lambda one: one.known("first")) or 0.0
    saturated = sum(map(_saturated, rows))
    why = (
        f"The largest logit is {number(scale)}, and the label's lies {number(-margin)} above all others: beyond 16.6 "
        "the gradient of cross-entropy is exactly 0 in float32."
        if saturated >= MOSTLY * len(rows)
        else f"The largest logit is {number(scale)}: the loss itself is constant there."
    )
    return case.finding(
        "saturated_loss",
        "The loss is flat: its gradient by the logits is exactly zero, before it reaches the network.",
        rows,
        f"In {case.part(rows)} at least half of the gradients were exactly zero.",
        why,
        remedies=remedies.for_loss(case.attack, scale=max(scale, -margin)),
    )


def non_finite_gradient(case: Case) -> Finding | None:
    """Gradients held NaN or infinity."""
    rows = case.showing(lambda one: one.count("non_finite") > 0)
    if not case.enough(rows):
        return None
    part = typical(rows, lambda one: share(one.count("non_finite"), one.count("gradients"))) or 0.0
    return case.finding(
        "non_finite_gradient",
        "Gradients at the input hold NaN or infinity, of which a step is made that leads nowhere.",
        rows,
        f"In {case.part(rows)} {part:.0%} of the gradients were not finite.",
        remedies=remedies.for_flat(case.attack),
    )


def no_gradient(case: Case) -> Finding | None:
    """No gradient was wanted: worth knowing, and no fault."""
    rows = [one for one in case.samples if one.traced]
    if not rows or not case.black_box or not case.enough(case.unsolved):
        return None
    return case.finding(
        "no_gradient",
        "The attack uses outputs only: it took no gradient, and finds less than one that does where gradients are of "
        "use.",
        case.unsolved,
        f"{number(typical(rows, lambda one: one.known('queries')) or 0)} queries a sample, none with a gradient.",
    )


def _saturated(one: Sample) -> bool:
    """Return whether cross-entropy, of logits or of their logarithms, was flat at most of its points."""
    return one.count("saturated") >= MOSTLY * one.count("queries") > 0


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
        return attack.gradient_mode == "straight_through"
    layer = f".{fault.layer}"
    return any(layer.endswith(f".{name.strip()}") for name in attack.bpda.split(","))
