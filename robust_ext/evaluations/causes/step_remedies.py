"""What to do about steps: too few, too small, too large, or still of use when they ended."""

from __future__ import annotations

import inspect
import math
from typing import Any

from robust_ext.attacks.base import Attack, CallableAttack
from robust_ext.core.threat import ThreatModel
from robust_ext.evaluations.causes.finding import Remedy
from robust_ext.evaluations.causes.rewriting import ABSOLUTE, RELATIVE, STEPS, UNIT_SPACE, AttackCall, call_of

# All steps together, in epsilons: across the ball, and half a radius more, as Madry et al. (2018) take.
TRAVEL = 2.5


def for_length(attack: Attack, *, steps: int, step: float, threat_model: ThreatModel) -> tuple[Remedy, ...]:
    """Too few steps, or too small ones: ``step`` in epsilons."""
    call = call_of(attack)
    planned = _planned(call) or steps
    relative, more = _rounded(TRAVEL / planned), _round_steps(TRAVEL / step)
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
    relative = min(_rounded(TRAVEL / planned), 0.25)
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
    return {absolute: _rounded(relative * threat_model.epsilon / width)}


def _schedule(steps: int) -> Remedy:
    return Remedy(words="Let the step follow the progress (APGD).", attack=f"robust_ext:APGD(steps={max(steps, 50)})")


def _round_steps(steps: float) -> int:
    """Up to a multiple of ten; small numbers to the next."""
    unit = 10 if steps > 10 else 1
    return math.ceil(steps / unit - 1e-9) * unit


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
