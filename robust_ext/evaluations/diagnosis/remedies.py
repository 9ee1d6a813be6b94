"""What to do about each fault, library by library: an attack ready to run, another view of the model, or code."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

from robust_ext.attacks.base import Attack, CallableAttack
from robust_ext.core.threat import ThreatModel
from robust_ext.evaluations.diagnosis.finding import Finding, Remedy
from robust_ext.evaluations.diagnosis.rewriting import (
    ABSOLUTE,
    EPSILONS,
    MARGIN_LOSSES,
    RELATIVE,
    STEPS,
    UNIT_SPACE,
    AttackCall,
    call_of,
)

# All steps together, in epsilons: across the ball, and half a radius more, as Madry et al. (2018) take.
TRAVEL = 2.5
# Draws that are averaged over: where gradients are noise, fewer leave them so.
DRAWS = 16
# Largest logit at which cross-entropy and its gradient are well apart from 0.
SMALL_LOGIT = 10.0
# Standard deviation of input noise, in epsilons: it blurs kinks and lets most draws stay near the point.
BLUR = 0.5
_BLACK_BOX = Remedy(
    words="Attack without gradients: what it finds was there all the time.", attack="robust_ext:Square(queries=2000)"
)


def of_model(fault: Finding, attack: Attack) -> tuple[Remedy, ...]:
    """What to do about a fault of the model so that this attack gets past it."""
    if fault.code in ("train_mode", "batch_dependent"):
        return (Remedy(words="Put the model into eval mode.", code="model.eval()", evaluate=True),)
    if fault.code == "random_output":
        return (_averaged(),)
    if fault.code == "saturated_loss":
        return for_loss(attack)
    if fault.code in ("cut_gradient", "zero_gradient", "non_finite_gradient", "wrong_gradient", "saturated_layer"):
        return (*fault.remedies, _BLACK_BOX) if fault.remedies else for_layer(fault.layer, attack)
    return fault.remedies


def for_layer(layer: str | None, attack: Attack) -> tuple[Remedy, ...]:
    """A layer stops or spoils the gradient."""
    if not layer:
        find = Remedy(
            words="Find the layer by probing the model, and attack with another backward pass there.",
            code="robust_ext.diagnose(model, attack, inputs, labels, threat_model)  # names the layer",
        )
        return find, _BLACK_BOX
    bpda = Remedy(
        words=f"Take the gradient of the identity in place of that of {layer} (BPDA).",
        options=("--bpda", layer),
        code=f'model = robust_ext.BPDA(model, layer="{layer}")',
        view={"bpda": layer},
    )
    return bpda, _blurred(attack), _BLACK_BOX


def for_loss(attack: Attack, *, scale: float | None = None) -> tuple[Remedy, ...]:
    """The loss is flat: one that is not, or smaller logits."""
    found = []
    call = call_of(attack)
    if call is not None:
        for name, value in MARGIN_LOSSES.get(call.scope, ()):
            if call.first((name,)) is not None and call.value(name) != value:
                words = "Raise the difference of logits, which does not saturate."
                found.append(Remedy(words=words, attack=call.changed(**{name: value})))
                break
    temperature = max(2.0, _rounded((scale or 100.0) / SMALL_LOGIT))
    words = f"Divide the logits by {temperature:g}, which changes no prediction, so that the loss has a gradient."
    cooled = _viewed(words, attack, code=f"model = lambda x: model(x) / {temperature:g}", temperature=temperature)
    margin = Remedy(
        words="Raise the difference of logits instead of cross-entropy.",
        code="label = logits.gather(1, y[:, None]).squeeze(1)\n"
        "other = logits.scatter(1, y[:, None], -torch.inf).amax(1)\n"
        "loss = (other - label).sum()"
        + ("\n# Foolbox: override get_loss_fn of the attack" if call and call.scope == "foolbox" else ""),
    )
    return *found, cooled, margin


def for_length(attack: Attack, *, steps: int, step: float, threat_model: ThreatModel) -> tuple[Remedy, ...]:
    """Too few steps, or too small ones: ``step`` in epsilons."""
    call = call_of(attack)
    planned = _planned(call) or steps
    relative, more = _rounded(TRAVEL / planned, 4), _round_steps(TRAVEL / step)
    found = []
    larger = _step_setting(call, relative, threat_model)
    if call is not None and larger:
        name, value = next(iter(larger.items()))
        found.append(Remedy(words=f"Take larger steps: {name} {value:g}.", attack=call.changed(**larger)))
    if call is not None and (setting := call.first(STEPS)) is not None:
        found.append(Remedy(words=f"Take more steps: {setting} {more}.", attack=call.changed(**{setting: more})))
    if not found:
        words = f"Take steps of {relative:g} epsilon (2.5 epsilon over the steps), or {more} steps."
        code = f"step_size = {TRAVEL:g} * epsilon / {planned}  # or {more} steps of {step:.3g} epsilon"
        found.append(Remedy(words=words, code=code))
    return tuple(found)


def for_step(attack: Attack, *, steps: int, threat_model: ThreatModel) -> tuple[Remedy, ...]:
    """Steps leap over the ball: ``steps`` is how many were taken."""
    call = call_of(attack)
    planned = _planned(call) or steps
    relative = min(_rounded(TRAVEL / planned, 4), 0.25)
    smaller = _step_setting(call, relative, threat_model)
    found = []
    if call is not None and smaller:
        name, value = next(iter(smaller.items()))
        found.append(Remedy(words=f"Take smaller steps: {name} {value:g}.", attack=call.changed(**smaller)))
    else:
        code = f"step_size = {relative:g} * epsilon  # 2.5 epsilon over the steps, and at most a quarter"
        found.append(Remedy(words=f"Take steps of {relative:g} epsilon.", code=code))
    found.append(_schedule(planned))
    return tuple(found)


def for_more_steps(attack: Attack, *, steps: int) -> tuple[Remedy, ...]:
    """It was still improving when it ended."""
    call = call_of(attack)
    name = None if call is None else call.first(STEPS)
    more = 4 * (_planned(call) or steps)
    if call is not None and name is not None:
        return Remedy(words=f"Take more steps: {name} {more}.", attack=call.changed(**{name: more})), _schedule(more)
    return Remedy(words=f"Take more steps, {more} say.", code=f"steps = {more}"), _schedule(more)


def for_flat(attack: Attack) -> tuple[Remedy, ...]:
    """Gradients came and were of no use."""
    return _blurred(attack), _BLACK_BOX


def for_direction(attack: Attack) -> tuple[Remedy, ...]:
    """It goes towards the label."""
    call = call_of(attack)
    found = []
    if call is not None and flag_of(attack, "targeted"):
        found.append(Remedy(words="Attack untargeted.", attack=call.changed(targeted=False)))
    code = "x = x + step_size * gradient.sign()  # up the loss of the true label; a targeted attack goes down"
    mended = Remedy(words="Go up the loss of the label that is given, not down.", code=code)
    aimed = _viewed("Give it the class that comes second, where aiming is what it does.", attack, aimed=True)
    return *found, mended, aimed


def for_epsilon(attack: Attack, epsilon: float) -> tuple[Remedy, ...]:
    """It has an epsilon of its own."""
    call = call_of(attack)
    name = None if call is None else next((name for name in EPSILONS if name in call.settings), None)
    if call is not None and name is not None:
        # Adapted libraries are given the threat model's; a function in a file is not.
        text = call.changed(**{name: None if call.defaults is not None else epsilon})
        return (Remedy(words=f"Leave {name} to the threat model.", attack=text),)
    code = f"def attack(model, x, y, epsilon): ...  # is given {epsilon:.4g}, in the units of the inputs"
    words = "Take epsilon from the threat model, in the units of the inputs."
    return Remedy(words=words, code=code), _projected(attack)


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
    own = for_epsilon(attack, threat_model.epsilon)[:1] if given else ()
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
    words = "Run it on a few samples in your own process, and mend what is raised there."
    return (Remedy(words=words, code="" if error else "assert torch.isfinite(x_adv).all()  # after each step"),)


def for_unmoved(attack: Attack) -> tuple[Remedy, ...]:
    """It returns the inputs."""
    words = "Begin at a random point of the ball, and look at the size of the first step."
    return (Remedy(words=words, code="x_adv = x + epsilon * (2 * torch.rand_like(x) - 1)"),)


def flag_of(attack: Attack, name: str) -> bool:
    """Whether a setting of the attack is on, wherever it is kept."""
    call = call_of(attack)
    places = [
        {} if call is None else call.settings,
        getattr(getattr(attack, "function", None), "keywords", {}),
        {name: getattr(getattr(attack, "attack", None), name, None)},
    ]
    return any(place.get(name) is True for place in places)


def steps_of(attack: Attack) -> int | None:
    """How many steps it is set to take; None where that is not known."""
    if isinstance(attack, CallableAttack):
        try:
            parameters = inspect.signature(attack.function).parameters
        except (TypeError, ValueError):
            return None
        found = next((parameters[name].default for name in STEPS if name in parameters), None)
        return found if isinstance(found, int) else None
    return _planned(call_of(attack))


def _planned(call: AttackCall | None) -> int | None:
    name = None if call is None else call.first(STEPS)
    value = None if call is None or name is None else call.value(name)
    return value if isinstance(value, int) and value > 0 else None


def _step_setting(call: AttackCall | None, relative: float, threat_model: ThreatModel) -> dict[str, Any]:
    """The change of settings that makes the step ``relative`` epsilons; empty where there is no such setting."""
    if call is None:
        return {}
    absolute = call.first(ABSOLUTE)
    name = call.first(RELATIVE)
    if name is not None and (absolute is None or call.settings.get(absolute) is None):
        return {name: relative}
    if absolute is None:
        return {}
    width = threat_model.width if call.scope in UNIT_SPACE else 1.0
    return {absolute: _rounded(relative * threat_model.epsilon / width, 4)}


def _viewed(words: str, attack: Attack, *, code: str = "", options: Sequence[str] = (), **view: Any) -> Remedy:
    """The attack on another view of the model: as a text where the attack has one."""
    call = call_of(attack)
    if call is None:
        return Remedy(words=words, code=code, view=view, options=tuple(options))
    return Remedy(words=words, code=code, attack=call.viewed(view))


def _projected(attack: Attack) -> Remedy:
    return _viewed("Move what it returns to the nearest point in ball and bounds.", attack, projected=True)


def _averaged() -> Remedy:
    return Remedy(
        words=f"Average over {DRAWS} draws of the model for each gradient (EoT).",
        options=("--eot", str(DRAWS)),
        code=f"model = robust_ext.EoT(model, draws={DRAWS})",
        view={"eot": DRAWS},
    )


def _blurred(attack: Attack) -> Remedy:
    words = f"Average the gradient over {DRAWS} points nearby (noise of {BLUR:g} epsilon)."
    return _viewed(words, attack, noise=BLUR, eot=DRAWS)


def _schedule(steps: int) -> Remedy:
    return Remedy(words="Let the step follow the progress (APGD).", attack=f"robust_ext:APGD(steps={max(steps, 50)})")


def _rounded(value: float, digits: int = 1) -> float:
    return float(f"{value:.{digits}g}")


def _round_steps(steps: float) -> int:
    """Up to a multiple of ten; small numbers to the next."""
    unit = 10 if steps > 10 else 1
    return math.ceil(steps / unit - 1e-9) * unit
