"""Remedies for steps: too few, too small, too large, or still of use at the end."""

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
# Part of its steps that an attack takes at least, where it takes them all: a query may be left out.
EARLY = 0.9
# What a step that was seen may differ from the one that was set, as a part of it.
ALIKE = 0.1


def for_length(
    attack: Attack, *, steps: int, step: float, threat_model: ThreatModel, most: int | None = None
) -> tuple[Remedy, ...]:
    """Too few steps, or too small ones: ``steps`` of ``step`` epsilons were seen, and ``most`` steps of any sample.

    Settings that are known count for more than what was seen, and only those are proposed that make the path longer.
    """
    call, planned = call_of(attack), steps_of(attack) or most or steps
    early, set_to = steps < EARLY * planned, step_of(attack, threat_model) or step
    taken = steps if early else planned
    relative, more = _rounded(TRAVEL / taken), _round_steps(TRAVEL / set_to)
    found = [_all_steps(steps, planned)] if early else []
    larger = _step_setting(call, relative, threat_model, seen=step) if relative > set_to else {}
    if call is not None and larger:
        name, value = next(iter(larger.items()))
        found.append(Remedy(words=f"Take larger steps: {name} {value:g}.", attack=call.changed(**larger)))
    setting = None if call is None else call.first(STEPS)
    if call is not None and setting is not None and not early and more > planned:
        found.append(Remedy(words=f"Take more steps: {setting} {more}.", attack=call.changed(**{setting: more})))
    if call is None and relative > set_to:
        or_more = "" if early else f", or {more} steps"
        code = f"step_size = {TRAVEL:g} * epsilon / {taken}"
        code += "" if early else f"  # or {more} steps of {set_to:.3g} epsilon"
        found.append(
            Remedy(words=f"Take steps of {relative:g} epsilon (2.5 epsilon over the steps){or_more}.", code=code)
        )
    return tuple(found or [_schedule(planned)])


def for_step(attack: Attack, *, steps: int, threat_model: ThreatModel) -> tuple[Remedy, ...]:
    """Steps leap over the ball: ``steps`` is how many were taken."""
    call, planned = call_of(attack), steps_of(attack) or steps
    relative = min(_rounded(TRAVEL / planned), 0.25)
    set_to = step_of(attack, threat_model)
    smaller = _step_setting(call, relative, threat_model) if set_to is None or relative < set_to else {}
    found = []
    if call is not None and smaller:
        name, value = next(iter(smaller.items()))
        found.append(Remedy(words=f"Take smaller steps: {name} {value:g}.", attack=call.changed(**smaller)))
    elif set_to is None:
        code = f"step_size = {relative:g} * epsilon  # 2.5 epsilon over the steps, and at most a quarter"
        found.append(Remedy(words=f"Take steps of {relative:g} epsilon.", code=code))
    found.append(_schedule(planned))
    return tuple(found)


def for_more_steps(attack: Attack, *, steps: int, most: int | None = None) -> tuple[Remedy, ...]:
    """It was still improving when it ended, after ``steps`` steps, and ``most`` of any sample."""
    call, planned = call_of(attack), steps_of(attack) or most or steps
    name, more = None if call is None else call.first(STEPS), 4 * planned
    if steps < EARLY * planned:
        return _all_steps(steps, planned), _schedule(planned)
    if call is not None and name is not None:
        return Remedy(words=f"Take more steps: {name} {more}.", attack=call.changed(**{name: more})), _schedule(more)
    return Remedy(words=f"Take more steps, {more} say.", code=f"steps = {more}"), _schedule(more)


def _all_steps(steps: int, planned: int) -> Remedy:
    return Remedy(
        words=f"Let it go on to its last step: it took {steps} of {planned}, so that more of them change nothing.",
        code="# without a break before the last step, or with one for rows that are solved only",
    )


def steps_of(attack: Attack) -> int | None:
    """Return the number of steps that it is set to take; None where unknown."""
    if isinstance(attack, CallableAttack):
        try:
            parameters = inspect.signature(attack.function).parameters
        except (TypeError, ValueError):
            return None
        found = next((parameters[name].default for name in STEPS if name in parameters), None)
        return found if isinstance(found, int) else None
    return _planned(call_of(attack))


def step_of(attack: Attack, threat_model: ThreatModel) -> float | None:
    """The step that it is set to, in epsilons; None where that is not known, as of a function in a file."""
    call = call_of(attack)
    if call is None or call.defaults is None:
        return None
    absolute, relative = call.first(ABSOLUTE), call.first(RELATIVE)
    value = None if absolute is None else call.value(absolute)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value) * _unit(call, threat_model) / threat_model.epsilon
    value = None if relative is None else call.value(relative)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _unit(call: AttackCall, threat_model: ThreatModel) -> float:
    return threat_model.width if call.scope in UNIT_SPACE else 1.0


def _planned(call: AttackCall | None) -> int | None:
    name = None if call is None else call.first(STEPS)
    value = None if call is None or name is None else call.value(name)
    return value if isinstance(value, int) and value > 0 else None


def _step_setting(
    call: AttackCall | None, relative: float, threat_model: ThreatModel, *, seen: float | None = None
) -> dict[str, Any]:
    """The change of settings that makes the step ``relative`` epsilons; empty where there is no such setting.

    Where a function has a step of its own that is what was ``seen``, in epsilons, it is relative to epsilon.
    """
    if call is None:
        return {}
    absolute = call.first(ABSOLUTE)
    name = call.first(RELATIVE)
    if name is not None and (absolute is None or call.settings.get(absolute) is None):
        return {name: relative}
    if absolute is None:
        return {}
    value = call.value(absolute)
    if call.defaults is None and seen and isinstance(value, (int, float)) and abs(value / seen - 1) < ALIKE:
        return {absolute: relative}
    return {absolute: _rounded(relative * threat_model.epsilon / _unit(call, threat_model))}


def _schedule(steps: int) -> Remedy:
    return Remedy(words="Let the step follow the progress (APGD).", attack=f"robust_ext:APGD(steps={max(steps, 50)})")


def _round_steps(steps: float) -> int:
    """Up to a multiple of ten; small numbers to the next."""
    unit = 10 if steps > 10 else 1
    return math.ceil(steps / unit - 1e-9) * unit


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
