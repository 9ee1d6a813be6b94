"""What to do about a model that attacks cannot get through: remedies of what its probes find."""

from __future__ import annotations

from collections.abc import Sequence

from robust_ext.evaluations.causes.calls import Call
from robust_ext.evaluations.causes.finding import Remedy
from robust_ext.evaluations.causes.remedies import BLUR, DRAWS

EVAL = Remedy(words="Put the model into eval mode before it is attacked.", code="model.eval()", evaluate=True)
EOT = Remedy(
    words=f"Average gradients over draws (EoT), here {DRAWS}; take more until the result no longer changes. "
    "Evaluate the model as a random defense (evaluate_defense).",
    options=("--eot", str(DRAWS)),
    code=f"model = robust_ext.EoT(model, draws={DRAWS})",
    view={"eot": DRAWS},
)
CLONE = Remedy(
    words="Begin the model's forward with a copy, or use functions that return a new tensor.", code="x = x.clone()"
)
ROW_WISE = Remedy(words="Take statistics and scales that do not come from the batch.")
SMOOTHED = Remedy(
    words="Average gradients over noisy inputs, which sees across jumps.",
    code=f"robust_ext.AdaptedAttack(attack=attack, eot={DRAWS}, noise={BLUR:g})",
    view={"eot": DRAWS, "noise": BLUR},
)


def around(call: Call | None, others: Sequence[Call] = ()) -> tuple[Remedy, ...]:
    """Other gradients for a module: the identity's where it keeps the shape, else those its operations would have.

    ``others`` are at fault too, and keep theirs from coming back.
    """
    if call is not None and call.name and call.same_shape:
        named = [call.name, *(one.name for one in others if one.name and one.same_shape and one.name != call.name)]
        layers = ",".join(named)
        identity = Remedy(
            words=f"Give {layers} the gradient of the identity (BPDA), or that of a smooth function like it.",
            options=("--bpda", layers),
            code=f'model = robust_ext.BPDA(model, layer="{layers}")',
            view={"bpda": layers},
        )
        return identity, SMOOTHED
    layer = "" if call is None or not call.name else f'layer="{call.name}", '
    view = {} if call is None or not call.name else {"bpda": call.name}
    straight = Remedy(
        words="Give operations like rounding or detach inside it the gradient of the identity (straight-through).",
        code=f'model = robust_ext.BPDA(model, {layer}backward="straight_through")',
        view={**view, "gradient_mode": "straight_through"},
    )
    module = Remedy(
        words="Make a module of the operation, and give it the gradient of a smooth function like it (BPDA).",
        code="self.step = robust_ext.BPDA(step, backward=smooth_step)",
    )
    return straight, SMOOTHED, module


def cooled(temperature: float) -> Remedy:
    """Logits divided by a number."""
    return Remedy(
        words=f"Divide the logits by {temperature:g} for the attack; predictions stay the same.",
        code=f"attacked = lambda x: model(x) / {temperature:g}",
        view={"temperature": temperature},
    )


MARGIN = Remedy(
    words="Climb on a difference of logits (margin, CW or DLR loss) instead of cross-entropy.",
    code="# ART\nAutoProjectedGradientDescent(classifier, loss_type='difference_logits_ratio')\n"
    "# Foolbox\nattack.get_loss_fn = lambda model, labels: lambda x: (lambda z: (z.scatter(1, labels.raw[:, None],\n"
    "    -1e9).amax(1) - z.gather(1, labels.raw[:, None])[:, 0]).sum())(model(x).raw)",
)


def logits_of(call: Call | None, *, logarithms: bool) -> tuple[Remedy, ...]:
    """Logits in place of probabilities; evaluations take their logarithms, so these can be attacked otherwise."""
    words = "Let the model return its logits: leave out the softmax at its end."
    if call is None or not call.name or not call.same_shape or not call.leaf:
        return (Remedy(words=words),)
    *parents, last = call.name.split(".")
    owner = ".".join(["model", *parents])
    code = f'setattr({owner}, "{last}", torch.nn.Identity())'
    returned = Remedy(words=words, code=code)
    return (returned, around(call)[0]) if logarithms else (returned,)


def finite(call: Call | None) -> tuple[Remedy, ...]:
    """Gradients that are finite."""
    words = "Keep arguments of square roots, norms and logarithms away from 0, or leave the logarithm's softmax out."
    return *around(call), Remedy(words=words, code="x = (x + 1e-12).sqrt()")
