"""Remedies for each fault, by library: an attack ready to run, another view of the model, or code."""

from __future__ import annotations

from typing import Any

from robust_ext.attacks.base import Attack
from robust_ext.core.threat import ThreatModel
from robust_ext.evaluations.causes.finding import Finding, Remedy
from robust_ext.evaluations.causes.rewriting import (
    ABSOLUTE,
    EPSILONS,
    MARGIN_LOSSES,
    UNIT_SPACE,
    AttackCall,
    call_of,
)
from robust_ext.reports.wording import typed

# Draws that are averaged over: where gradients are noise, fewer leave them so.
DRAWS = 16
# Largest logit at which cross-entropy and its gradient are well apart from 0.
SMALL_LOGIT = 10.0
# Standard deviation of input noise, in epsilons: it blurs kinks and lets most draws stay near the point.
BLUR = 0.5
BLACK_BOX = Remedy(
    words="Attack without gradients: what it finds was there all the time.", attack="robust_ext:Square(queries=2000)"
)

_FOLLOWED = Remedy(
    words="Run an attack whose steps are known to be right beside it.", attack="robust_ext:APGD(steps=50)"
)


def of_model(fault: Finding, attack: Attack, *, scale: float) -> tuple[Remedy, ...]:
    """Return remedies for a fault of the model for this attack; ``scale`` is the largest logit."""
    if fault.code == "saturated_loss":
        return for_loss(attack, scale=scale)
    # With the attack at hand, what needs its text can be a command.
    found = tuple(_blurred(attack) if "noise" in one.view else one for one in fault.remedies)
    return found or for_flat(attack)


def for_loss(attack: Attack, *, scale: float) -> tuple[Remedy, ...]:
    """The loss is flat: one that is not, or smaller logits."""
    found = []
    call = call_of(attack)
    if call is not None:
        for name, value in MARGIN_LOSSES.get(call.scope, ()):
            if call.first((name,)) is not None and call.value(name) != value:
                words = "Raise the difference of logits, which does not saturate."
                found.append(Remedy(words=words, attack=call.changed(**{name: value})))
                break
    temperature = max(2.0, _rounded(scale / SMALL_LOGIT))
    words = f"Divide the logits by {temperature:g}, which changes no prediction, so that the loss has a gradient."
    cooled = _viewed(words, attack, temperature=temperature)
    margin = Remedy(
        words="Raise the difference of logits instead of cross-entropy.",
        attack=None if call is not None and call.scope == "robust_ext" else "robust_ext:APGD(loss='margin')",
        code="label = logits.gather(1, y[:, None]).squeeze(1)\n"
        "other = logits.scatter(1, y[:, None], -torch.inf).amax(1)\n"
        "loss = (other - label).sum()",
    )
    return *found, cooled, margin


def for_flat(attack: Attack) -> tuple[Remedy, ...]:
    """Gradients came and were of no use."""
    if attack.traits.gradients:
        return _blurred(attack), BLACK_BOX
    call = call_of(attack)
    return () if call is not None and call.name == "Square" else (BLACK_BOX,)


def for_direction(attack: Attack) -> tuple[Remedy, ...]:
    """It goes towards the label."""
    call = call_of(attack)
    found = []
    if call is not None and flag_of(attack, "targeted"):
        found.append(Remedy(words="Attack untargeted.", attack=call.changed(targeted=False)))
    code = "x = x + step_size * gradient.sign()  # up the loss of the true label; a targeted attack goes down"
    fixed = Remedy(words="Go up the loss of the label that is given, not down.", code=code)
    aimed = _viewed("Give it the class that comes second, where aiming is what it does.", attack, aimed=True)
    return *found, fixed, aimed


def for_update(attack: Attack) -> tuple[Remedy, ...]:
    """Its steps do not follow the gradients that came back."""
    code = "velocity = decay * velocity + gradient / gradient.abs().flatten(1).sum(1).view(-1, 1, 1, 1)\n"
    code += "x_adv = x_adv + step_size * velocity.sign()  # each row by its own gradient, up the loss of its label"
    words = "Add each gradient to the momentum, and the momentum to the points; or leave the momentum out."
    return Remedy(words=words, code=code), _FOLLOWED


def for_points(attack: Attack) -> tuple[Remedy, ...]:
    """It takes gradients at other points than it returns."""
    code = "loss = cross_entropy(model(x_adv), y)  # model takes inputs in the bounds of the threat model"
    words = "Give the model the points themselves: it is evaluated on inputs as they are, and normalises them itself."
    return Remedy(words=words, code=code), _FOLLOWED


def for_rounding(attack: Attack, threat_model: ThreatModel) -> tuple[Remedy, ...]:
    """Rounding takes its steps back, or its points out of the ball."""
    low, width = threat_model.bounds[0], threat_model.width
    x_adv = "x_adv" if low == 0 else f"(x_adv - {low:g})"
    code = f"grey = 255 / {width:g}  # levels in a unit\n"
    code += f"levels = torch.where(x_adv > x, ({x_adv} * grey).floor(), ({x_adv} * grey).ceil())  # towards x\n"
    code += f"x_adv = levels / grey{'' if low == 0 else f' + {low:g}'}  # once, after the last step"
    words = "Keep the points as they are while the attack runs; round once at its end, towards the input, if at all."
    return Remedy(words=words, code=code), _FOLLOWED


def for_mask() -> tuple[Remedy, ...]:
    """It moves some of the values only."""
    words = "Test the attack without its mask; a threat model that allows some of the values only cannot be stated."
    return (Remedy(words=words, code="x_adv = x_adv + step_size * gradient.sign()  # not times the mask"),)


def for_epsilon(attack: Attack, threat_model: ThreatModel) -> tuple[Remedy, ...]:
    """It has an epsilon of its own."""
    call, epsilon = call_of(attack), threat_model.epsilon
    name = None if call is None else next((name for name in EPSILONS if name in call.settings), None)
    if call is not None and name is not None:
        # Adapted libraries are given the threat model's; a function in a file is not.
        text = call.changed(
            **{name: None if call.defaults is not None else epsilon, **_step_along(call, name, threat_model)}
        )
        return (Remedy(words=f"Leave {name} to the threat model.", attack=text),)
    code = f"def attack(model, x, y, epsilon): ...  # is given {typed(epsilon)}, in the units of the inputs"
    words = "Take epsilon from the threat model, in the units of the inputs."
    return Remedy(words=words, code=code), _projected(attack)


def _step_along(call: AttackCall, name: str, threat_model: ThreatModel) -> dict[str, float]:
    """A step within the epsilon that it was given was of that scale too: it stays the same part of epsilon."""
    setting = call.first(ABSOLUTE)
    given, step = call.settings[name], None if setting is None else call.settings.get(setting)
    if setting is None or not isinstance(step, (int, float)) or not isinstance(given, (int, float)):
        return {}
    width = threat_model.width if call.scope in UNIT_SPACE else 1.0
    return {setting: float(f"{step / given * threat_model.epsilon / width:.4g}")} if 0 < step <= given else {}


def for_ball(attack: Attack, threat_model: ThreatModel) -> tuple[Remedy, ...]:
    """It leaves the ball."""
    low, high = threat_model.bounds
    project = {
        "linf": "x_adv = x + (x_adv - x).clamp(-epsilon, epsilon)",
        "l2": "d = (x_adv - x).flatten(1)\n"
        "d = d * (epsilon / d.norm(dim=1, keepdim=True).clamp_min(1e-12)).clamp_max(1)\n"
        "x_adv = x + d.view_as(x)",
        "l1": "# project x_adv - x onto the l1 ball of epsilon (Duchi et al. 2008), row by row",
    }[threat_model.norm]
    words = f"Project onto the {threat_model.norm} ball after each step, and clip to the bounds last."
    projected = Remedy(words=words, code=f"{project}\nx_adv = x_adv.clamp({low:g}, {high:g})")
    given = EPSILONS if (call := call_of(attack)) is not None and call.first(EPSILONS) in call.settings else ()
    own = for_epsilon(attack, threat_model)[:1] if given else ()
    return *own, projected, _projected(attack)


def for_bounds(attack: Attack, bounds: tuple[float, float]) -> tuple[Remedy, ...]:
    """It works in other bounds."""
    low, high = bounds
    code = f"x_adv = x_adv.clamp({low:g}, {high:g})"
    return Remedy(words=f"Clip to the bounds of the inputs, [{low:g}, {high:g}].", code=code), _projected(attack)


def for_labels(attack: Attack) -> tuple[Remedy, ...]:
    """It attacks predicted labels."""
    code = "loss = cross_entropy(model(x), y)  # y as given, not model(x).argmax(1)"
    kept = _viewed("Keep the best point that it queries, the input included.", attack, keep_best=True)
    return Remedy(words="Use the labels that are given.", code=code), kept


def for_best(attack: Attack) -> tuple[Remedy, ...]:
    """It met adversarial points and returned others."""
    code = (
        "fooled = model(x_adv).argmax(1) != y\n"
        "best[fooled] = x_adv[fooled]  # after each step; return best, which begins as x.clone()"
    )
    return (_viewed("Return the best point of the path instead of the last.", attack, code=code, keep_best=True),)


def for_batch(attack: Attack) -> tuple[Remedy, ...]:
    """It stops for the whole batch."""
    code = "if fooled.all(): break  # not fooled.any(); or go on, and keep the best point of each row"
    words = "Attack samples one at a time, or stop only where all of the batch is solved."
    return (_viewed(words, attack, code=code, one_by_one=True),)


def for_crash(error: str) -> tuple[Remedy, ...]:
    """It raised, or returned NaN."""
    words = "Run it on a few samples in your own process, and fix what is raised there."
    return (Remedy(words=words, code="" if error else "assert torch.isfinite(x_adv).all()  # after each step"),)


def for_classes() -> tuple[Remedy, ...]:
    """It raised on problems of two classes."""
    words = "Take the number of classes from the logits, and targets from among them and the labels that are given."
    code = "classes = logits.shape[1]\ntarget = (y + 1) % classes  # not classes or targets of its own"
    return (Remedy(words=words, code=code),)


def for_unmoved(attack: Attack) -> tuple[Remedy, ...]:
    """It returns the inputs."""
    words = "Begin at a random point of the ball, and look at the size of the first step."
    return (Remedy(words=words, code="x_adv = x + epsilon * (2 * torch.rand_like(x) - 1)"),)


def flag_of(attack: Attack, name: str) -> bool:
    """Return whether a setting of the attack is on, wherever it is kept."""
    call = call_of(attack)
    places = [
        {} if call is None else call.settings,
        getattr(getattr(attack, "function", None), "keywords", {}),
        {name: getattr(getattr(attack, "attack", None), name, None)},
    ]
    return any(place.get(name) is True for place in places)


def _viewed(words: str, attack: Attack, *, code: str = "", **view: Any) -> Remedy:
    """The attack on another view of the model: as a text where the attack has one."""
    call = call_of(attack)
    if call is None:
        return Remedy(words=words, code=code, view=view)
    return Remedy(words=words, code=code, attack=call.viewed(view))


def _projected(attack: Attack) -> Remedy:
    return _viewed("Move what it returns to the nearest point in ball and bounds.", attack, projected=True)


def _blurred(attack: Attack) -> Remedy:
    words = f"Average the gradient over {DRAWS} points nearby (noise of {BLUR:g} epsilon)."
    return _viewed(words, attack, noise=BLUR, eot=DRAWS)


def _rounded(value: float) -> float:
    return float(f"{value:.1g}")
