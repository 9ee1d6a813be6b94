"""Remedies for models that block attacks, by their probes' findings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from robust_ext.evaluations.causes.calls import Call
from robust_ext.evaluations.causes.finding import Remedy
from robust_ext.evaluations.causes.remedies import BLACK_BOX as BLACK_BOX
from robust_ext.evaluations.causes.remedies import BLUR, DRAWS

EVAL = Remedy(words="Put the model into eval mode before it is attacked.", evaluate=True)
_STATED = """defense = {module}
defense.random = True"""
_JUDGED = """result = robust_ext.evaluate_defense(
    defense, attack, inputs, labels, threat_model, classifier=static_model  # the model without its randomness
)"""
RANDOM = (
    Remedy(
        words=f"Evaluate the model as a random defense of the model without its randomness, with gradients that are "
        f"averaged over draws (EoT), here {DRAWS}; take more until the result no longer changes.",
        view={"eot": DRAWS},
        paste=f"import robust_ext\n{_STATED}\n"
        f"attack = robust_ext.AdaptedAttack(attack=robust_ext.as_attack(attack), eot={DRAWS})\n{_JUDGED}",
    ),
    Remedy(
        words="Evaluate the model as a random defense of the model without its randomness: candidates are then judged "
        "by repeated draws.",
        paste=f"import robust_ext\n{_STATED}\n{_JUDGED}",
    ),
)
_TEST_TIME = """result = robust_ext.evaluate_defense(
    {module}, None, inputs, labels, threat_model, classifier=static_model  # the model without its optimisation
)"""
TEST_TIME = Remedy(
    words="Evaluate it as a test-time defense, next to the model without its optimisation: robust-ext test-time runs "
    "BPDA, EoT, transfer and black-box attacks.",
    paste=f"import robust_ext\n{_TEST_TIME}",
)
GRADIENTS_ON = Remedy(
    words="Or switch gradients on inside its forward, which is called without them.",
    code="with torch.inference_mode(False), torch.enable_grad():\n    x = purify(x.clone())",
)
TRANSFER = Remedy(
    words="Craft examples on the float model that this one was quantised from, and transfer them.", transfer=True
)
FLOAT_TWIN = Remedy(
    words="Take the gradients of the same network in float32, with the rounded weights; values stay the model's.",
    view={"gradient_mode": "float_twin"},
)
CLONE = Remedy(
    words="Begin the model's forward with a copy, or use functions that return a new tensor.", code="x = x.clone()"
)
ROW_WISE = Remedy(words="Take statistics and scales that do not come from the batch.")
SMOOTHED = Remedy(words="Average gradients over noisy inputs, which smooths jumps.", view={"eot": DRAWS, "noise": BLUR})

# Of k winners, Square finds more than smoothed gradients do, and the gradient of the identity finds next to nothing.
ACROSS_JUMPS = (
    replace(
        BLACK_BOX,
        words="Attack without gradients: where values jump, smoothed or replaced gradients find only some examples.",
    ),
    SMOOTHED,
)


def around(call: Call | None, others: Sequence[Call] = (), *, near: bool = True) -> tuple[Remedy, ...]:
    """Other gradients for a module: the identity's where it keeps the shape, else those its operations would have.

    ``others`` are at fault too, and keep theirs from coming back. Where the module is not ``near`` the identity, that
    one comes last.
    """
    identity: tuple[Remedy, ...] = ()
    if call is not None and call.name and call.same_shape:
        named = [call.name, *(one.name for one in others if one.name and one.same_shape and one.name != call.name)]
        layers = ",".join(named)
        words = f"Give {layers} the gradient of the identity (BPDA), or that of a smooth function like it."
        identity = (Remedy(words=words, view={"bpda": layers}),)
        if near:
            return identity
    straight = Remedy(
        words="Give operations like rounding or detach inside it the gradient of the identity (straight-through).",
        view={**({"bpda": call.name} if call is not None and call.name else {}), "gradient_mode": "straight_through"},
    )
    module = Remedy(
        words="Make a module of the operation, and give it the gradient of a smooth function like it (BPDA).",
        code="self.step = robust_ext.BPDA(step, backward=smooth_step)",
    )
    return straight, module, *identity


def cooled(temperature: float) -> Remedy:
    """Logits divided by a number."""
    words = f"Divide the logits by {temperature:g} for the attack; predictions stay the same."
    return Remedy(words=words, view={"temperature": temperature})


MARGIN = Remedy(
    words="Maximise the difference of logits (margin) instead of cross-entropy.",
    attack="robust_ext:APGD(loss='margin')",
)


def logits_of(call: Call | None, *, logarithms: bool) -> tuple[Remedy, ...]:
    """Logits in place of probabilities; evaluations take their logarithms, so these can be attacked otherwise."""
    words = "Let the model return its logits: leave out the softmax at its end."
    if call is None or not call.name or not call.same_shape or not call.leaf:
        return (Remedy(words=words),)
    owner, _, last = call.name.rpartition(".")
    owner = f'{{module}}.get_submodule("{owner}")' if owner else "{module}"
    returned = Remedy(words=words, paste=f'import torch\nsetattr({owner}, "{last}", torch.nn.Identity())')
    return (returned, *around(call)) if logarithms else (returned,)


def finite(call: Call | None) -> tuple[Remedy, ...]:
    """Gradients that are finite."""
    words = "Keep arguments of square roots, norms and logarithms away from 0, or leave the logarithm's softmax out."
    return *around(call), Remedy(words=words, code="x = (x + 1e-12).sqrt()")
