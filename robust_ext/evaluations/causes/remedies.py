"""Remedies for faults of attacks, by library: an attack ready to run, another view of the model, or code."""

from __future__ import annotations

import inspect
import math
from typing import Any

from robust_ext.attacks.base import Attack, CallableAttack
from robust_ext.core.threat import ThreatModel
from robust_ext.core.wording import typed
from robust_ext.evaluations.causes.finding import Finding, Remedy
from robust_ext.evaluations.causes.rewriting import AttackCall, call_of

# What the libraries call the same setting: Foolbox, ART, torchattacks, adv-lib, this project, and common names.
STEPS = ("steps", "max_iter", "n_iter", "num_steps", "nb_iter", "iterations", "max_iterations")
RELATIVE = ("rel_stepsize", "relative_step_size", "rel_step_size")
ABSOLUTE = ("abs_stepsize", "eps_step", "alpha", "absolute_step_size", "step_size", "step", "stepsize")
EPSILONS = ("eps", "epsilon", "ε")
# Inputs, and thus steps, of these libraries lie in [0, 1], regardless of the bounds.
UNIT_SPACE = ("torchattacks",)
# Losses that stay of use where cross-entropy is 0: setting and value, by library.
MARGIN_LOSSES = {
    "art": (("loss_type", "difference_logits_ratio"),),
    "torchattacks": (("loss", "dlr"), ("loss", "margin")),
    "adv_lib": (("loss_function", "dlr"),),
    "robust_ext": (("loss", "margin"),),
}
# Draws that are averaged over: where gradients are noise, fewer leave them so.
DRAWS = 16
# Largest logit at which cross-entropy and its gradient are well apart from 0.
SMALL_LOGIT = 10.0
# Standard deviation of input noise, in epsilons: it blurs kinks and keeps most draws near the point.
BLUR = 0.5
# All steps together, in epsilons: across the ball, and half a radius more, as Madry et al. (2018) take.
TRAVEL = 2.5
# Part of its steps that an attack takes at least, where it takes them all: a query may be left out.
TAKEN = 0.9
# What a step that was seen may differ from the one that was set, as a part of it.
ALIKE = 0.1
BLACK_BOX = Remedy(
    words="Attack without gradients: what it finds was within reach all along.",
    attack="robust_ext:Square(queries=2000)",
)
FOLLOWED = Remedy(words="Run an attack whose steps are known to be right as well.", attack="robust_ext:APGD(steps=50)")


def viewed(words: str, attack: Attack, *, code: str = "", **view: Any) -> Remedy:
    """Show an attack another view of the model: as a text where the attack has one."""
    call = call_of(attack)
    if call is None:
        return Remedy(words=words, code=code, view=view)
    return Remedy(words=words, code=code, attack=call.viewed(view))


def projected(attack: Attack) -> Remedy:
    """Project what an attack returns."""
    return viewed("Project what it returns onto the ball and the bounds.", attack, projected=True)


def _blurred(attack: Attack) -> Remedy:
    return viewed(
        f"Average the gradient over {DRAWS} points nearby (noise of {BLUR:g} epsilon).", attack, noise=BLUR, eot=DRAWS
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
    call, found = call_of(attack), list[Remedy]()
    for name, value in () if call is None else MARGIN_LOSSES.get(call.scope, ()):
        if call is not None and call.first((name,)) is not None and call.value(name) != value:
            words = "Maximise the difference of logits, which does not saturate."
            found = [Remedy(words=words, attack=call.changed(**{name: value}))]
            break
    temperature = max(2.0, float(f"{scale / SMALL_LOGIT:.1g}"))
    words = f"Divide the logits by {temperature:g}, which changes no prediction, so that the loss has a gradient."
    margin = Remedy(
        words="Maximise the difference of logits instead of cross-entropy.",
        attack=None if call is not None and call.scope == "robust_ext" else "robust_ext:APGD(loss='margin')",
        code="label = logits.gather(1, y[:, None]).squeeze(1)\n"
        "other = logits.scatter(1, y[:, None], -torch.inf).amax(1)\n"
        "loss = (other - label).sum()",
    )
    return *found, viewed(words, attack, temperature=temperature), margin


def for_flat(attack: Attack) -> tuple[Remedy, ...]:
    """Gradients came and were of no use."""
    if attack.traits.gradients:
        return _blurred(attack), BLACK_BOX
    call = call_of(attack)
    return () if call is not None and call.name == "Square" else (BLACK_BOX,)


def for_labels(attack: Attack) -> tuple[Remedy, ...]:
    """It attacks predicted labels."""
    code = "loss = cross_entropy(model(x), y)  # y as given, not model(x).argmax(1)"
    kept = viewed("Keep the best point that it queries, the input included.", attack, keep_best=True)
    return Remedy(words="Use the labels that the attack was given.", code=code), kept


def for_crash(error: str) -> Remedy:
    """It raised, or returned NaN."""
    words = "Run it on a few samples in your own process, and fix the error."
    return Remedy(words=words, code="" if error else "assert torch.isfinite(x_adv).all()  # after each step")


def for_rounding(threat_model: ThreatModel) -> tuple[Remedy, ...]:
    """Rounding takes its steps back, or its points out of the ball."""
    low, width = threat_model.bounds[0], threat_model.width
    x_adv = "x_adv" if low == 0 else f"(x_adv - {low:g})"
    code = f"grey = 255 / {width:g}  # levels in a unit\n"
    code += f"levels = torch.where(x_adv > x, ({x_adv} * grey).floor(), ({x_adv} * grey).ceil())  # towards x\n"
    code += f"x_adv = levels / grey{'' if low == 0 else f' + {low:g}'}  # once, after the last step"
    words = "Keep the points as they are while the attack runs; round once at its end, towards the input, if at all."
    return Remedy(words=words, code=code), FOLLOWED


def for_epsilon(attack: Attack, threat_model: ThreatModel) -> tuple[Remedy, ...]:
    """It has an epsilon of its own."""
    call, epsilon = call_of(attack), threat_model.epsilon
    name = None if call is None else next((name for name in EPSILONS if name in call.settings), None)
    if call is None or name is None:
        code = f"def attack(model, x, y, epsilon): ...  # is given {typed(epsilon)}, in the units of the inputs"
        words = "Take epsilon from the threat model, in the units of the inputs."
        return Remedy(words=words, code=code), projected(attack)
    # Adapted libraries are given the threat model's; a function in a file is not.
    changes: dict[str, Any] = {name: None if call.defaults is not None else epsilon}
    setting, given = call.first(ABSOLUTE), call.settings[name]
    step = None if setting is None else call.settings.get(setting)
    if setting and isinstance(step, (int, float)) and isinstance(given, (int, float)) and 0 < step <= given:
        # A step within the epsilon that it was given was of that scale too: it stays the same part of epsilon.
        changes[setting] = _rounded(step / given * epsilon / _unit(call, threat_model))
    return (Remedy(words=f"Leave {name} to the threat model.", attack=call.changed(**changes)),)


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
    inside = Remedy(words=words, code=f"{project}\nx_adv = x_adv.clamp({low:g}, {high:g})")
    call = call_of(attack)
    given = call is not None and call.first(EPSILONS) in call.settings
    return *(for_epsilon(attack, threat_model)[:1] if given else ()), inside, projected(attack)


def flag_of(attack: Attack, name: str) -> bool:
    """Return whether a setting of the attack is on, wherever it is kept."""
    call = call_of(attack)
    places = [
        {} if call is None else call.settings,
        getattr(getattr(attack, "function", None), "keywords", {}),
        {name: getattr(getattr(attack, "attack", None), name, None)},
    ]
    return any(place.get(name) is True for place in places)


def for_length(
    attack: Attack, *, steps: int, step: float, threat_model: ThreatModel, most: int | None = None
) -> tuple[Remedy, ...]:
    """Too few steps, or too small ones: ``steps`` of ``step`` epsilons were seen, and ``most`` steps of any sample.

    Settings that are known count for more than what was seen, and only those are proposed that make the path longer.
    """
    call, planned = call_of(attack), steps_of(attack) or most or steps
    early, set_to = steps < TAKEN * planned, _step_of(call, threat_model) or step
    taken = steps if early else planned
    relative, more = _rounded(TRAVEL / taken), TRAVEL / set_to
    unit = 10 if more > 10 else 1
    more = math.ceil(more / unit - 1e-9) * unit
    found = [_all_steps(steps, planned)] if early else []
    larger = _step_setting(call, relative, threat_model, seen=step) if relative > set_to else {}
    if call is None and relative > set_to:
        code = f"step_size = {TRAVEL:g} * epsilon / {taken}"
        code += "" if early else f"  # or {more} steps of {set_to:.3g} epsilon"
        words = (
            f"Take steps of {relative:g} epsilon (2.5 epsilon over the steps){'' if early else f', or {more} steps'}."
        )
        found.append(Remedy(words=words, code=code))
    if call is not None:
        for name, value in larger.items():
            found.append(Remedy(words=f"Take larger steps: {name} {value:g}.", attack=call.changed(**larger)))
        if (setting := call.first(STEPS)) is not None and not early and more > planned:
            found.append(Remedy(words=f"Take more steps: {setting} {more}.", attack=call.changed(**{setting: more})))
    return tuple(found or [_schedule(planned)])


def for_step(attack: Attack, *, steps: int, threat_model: ThreatModel) -> tuple[Remedy, ...]:
    """Steps leap over the ball: ``steps`` is how many were taken."""
    call, planned = call_of(attack), steps_of(attack) or steps
    relative, set_to = min(_rounded(TRAVEL / planned), 0.25), _step_of(call, threat_model)
    smaller = _step_setting(call, relative, threat_model) if set_to is None or relative < set_to else {}
    if call is not None and smaller:
        ((name, value),) = smaller.items()
        found = [Remedy(words=f"Take smaller steps: {name} {value:g}.", attack=call.changed(**smaller))]
    else:
        code = f"step_size = {relative:g} * epsilon  # 2.5 epsilon over the steps, and at most a quarter"
        found = [Remedy(words=f"Take steps of {relative:g} epsilon.", code=code)] if set_to is None else []
    return *found, _schedule(planned)


def for_more_steps(attack: Attack, *, steps: int, most: int | None = None) -> tuple[Remedy, ...]:
    """It was still improving when it ended, after ``steps`` steps, and ``most`` of any sample."""
    call, planned = call_of(attack), steps_of(attack) or most or steps
    name, more = None if call is None else call.first(STEPS), 4 * planned
    if steps < TAKEN * planned:
        return _all_steps(steps, planned), _schedule(planned)
    if call is not None and name is not None:
        return Remedy(words=f"Take more steps: {name} {more}.", attack=call.changed(**{name: more})), _schedule(more)
    return Remedy(words=f"Take more steps, {more} say.", code=f"steps = {more}"), _schedule(more)


def _all_steps(steps: int, planned: int) -> Remedy:
    return Remedy(
        words=f"Let it run to its last step: it took {steps} of {planned}, so more steps change nothing.",
        code="# without a break before the last step, or with one for rows that are solved only",
    )


def _schedule(steps: int) -> Remedy:
    return Remedy(
        words="Adapt the step size to the progress (APGD).", attack=f"robust_ext:APGD(steps={max(steps, 50)})"
    )


def steps_of(attack: Attack) -> int | None:
    """Return the number of steps that it is set to take; None where unknown."""
    if isinstance(attack, CallableAttack):
        try:
            parameters = inspect.signature(attack.function).parameters
        except (TypeError, ValueError):
            return None
        value = next((parameters[name].default for name in STEPS if name in parameters), None)
        return value if isinstance(value, int) else None
    call = call_of(attack)
    name = None if call is None else call.first(STEPS)
    value = None if call is None or name is None else call.value(name)
    return value if isinstance(value, int) and value > 0 else None


def _step_of(call: AttackCall | None, threat_model: ThreatModel) -> float | None:
    """The step that it is set to, in epsilons; None where that is not known, as of a function in a file."""
    if call is None or call.defaults is None:
        return None
    for names, unit in ((ABSOLUTE, _unit(call, threat_model) / threat_model.epsilon), (RELATIVE, 1.0)):
        value = None if (name := call.first(names)) is None else call.value(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value) * unit
    return None


def _unit(call: AttackCall, threat_model: ThreatModel) -> float:
    return threat_model.width if call.scope in UNIT_SPACE else 1.0


def _step_setting(
    call: AttackCall | None, relative: float, threat_model: ThreatModel, *, seen: float | None = None
) -> dict[str, float]:
    """The change of settings that makes the step ``relative`` epsilons; empty where there is no such setting.

    Where a function has a step of its own that is what was ``seen``, in epsilons, it is relative to epsilon.
    """
    if call is None:
        return {}
    absolute, name = call.first(ABSOLUTE), call.first(RELATIVE)
    if name is not None and (absolute is None or call.settings.get(absolute) is None):
        return {name: relative}
    if absolute is None:
        return {}
    value = call.value(absolute)
    if call.defaults is None and seen and isinstance(value, (int, float)) and abs(value / seen - 1) < ALIKE:
        return {absolute: relative}
    return {absolute: _rounded(relative * threat_model.epsilon / _unit(call, threat_model))}


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
