"""Attacks as texts whose settings can be changed, from any library."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from robust_ext.attacks.adapted import AdaptedAttack
from robust_ext.attacks.base import Attack
from robust_ext.attacks.native import NativeAttack
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.settings import declared, default_of
from robust_ext.core.specification import parse_call
from robust_ext.registry.base import adapters

_TITLES = {"ART": "art", "torchattacks": "torchattacks", "adv-lib": "adv_lib"}


@dataclass(frozen=True, kw_only=True)
class AttackCall:
    """An attack as ``scope:name(settings)``.

    ``defaults`` are those of all settings it takes; None where they are not known, as of a function in a file. ``view``
    are settings of :class:`robust_ext.attacks.adapted.AdaptedAttack`, where it is run through that.
    """

    scope: str
    name: str
    settings: Mapping[str, Any]
    defaults: Mapping[str, Any] | None = None
    view: Mapping[str, Any] = field(default_factory=dict)

    def first(self, names: Sequence[str]) -> str | None:
        """Return the first of these settings that was given, or else that it takes."""
        given = [name for name in names if self.settings.get(name) is not None]
        return next(iter([*given, *(name for name in names if name in (self.defaults or {}))]), None)

    def value(self, name: str) -> Any:
        """Return the value of a setting."""
        return self.settings.get(name, (self.defaults or {}).get(name))

    def changed(self, **changes: Any) -> str:
        """Return the text with other settings; those changed to None are left out."""
        settings = {key: value for key, value in {**self.settings, **changes}.items() if value is not None}
        text = _call(f"{self.scope}:{self.name}", settings)
        return _call("robust_ext:AdaptedAttack", {"attack": text, **self.view}) if self.view else text

    def viewed(self, view: Mapping[str, Any]) -> str:
        """Return the text of the attack with further settings of ``view``."""
        return replace(self, view={**self.view, **view}).changed()


def _call(name: str, settings: Mapping[str, Any]) -> str:
    shown = ", ".join(f"{key}={value!r}" for key, value in settings.items())
    return f"{name}({shown})" if shown else name


def call_of(attack: Attack) -> AttackCall | None:
    """Return an attack as a text, where it was made from one or can be."""
    if isinstance(attack, AdaptedAttack):
        inside = call_of(attack.attack)
        view = {name: one for name, one in attack.adaptation.items() if one != default_of(AdaptedAttack, name)}
        return None if inside is None else replace(inside, view={**inside.view, **view})
    defaults = _defaults(attack)
    for text in (attack.code_text, attack.name):
        try:
            spec = None if text is None else parse_call(text)
        except InvalidArgumentError:
            continue
        if spec is not None and (text == attack.code_text or spec.scope in adapters()):
            return AttackCall(scope=spec.scope, name=spec.name, settings=spec.arguments, defaults=defaults)
    if defaults is None:
        return None
    if isinstance(attack, NativeAttack):
        scope, values = "robust_ext", attack.to_dict()
    elif hasattr(attack, "settings"):
        scope, values = _TITLES.get(getattr(attack, "title", ""), ""), {**defaults, **attack.settings}
    else:
        host = getattr(attack, "attack", None)
        scope, values = "foolbox", {key: getattr(host, key, value) for key, value in defaults.items()}
    settings = {key: value for key, value in values.items() if value is not defaults[key] and value != defaults[key]}
    if not scope or not all(map(_literal, settings.values())):
        return None
    return AttackCall(scope=scope, name=_made_of(attack).__name__, settings=settings, defaults=defaults)


def call_of_text(text: str) -> AttackCall | None:
    """Return the call in the text of an attack, with its view where the text adapts it."""
    try:
        spec = parse_call(text)
    except InvalidArgumentError:
        return None
    inside = spec.arguments.get("attack")
    if (spec.scope, spec.name) != ("robust_ext", "AdaptedAttack") or not isinstance(inside, str):
        return AttackCall(scope=spec.scope, name=spec.name, settings=spec.arguments)
    call = call_of_text(inside)
    view = {key: value for key, value in spec.arguments.items() if key != "attack"}
    return None if call is None else replace(call, view={**call.view, **view})


def _made_of(attack: Attack) -> Any:
    """The class or function that holds the settings; None for a function of the user's."""
    if isinstance(attack, NativeAttack):
        return type(attack)
    made_of = getattr(attack, "made_of", None)
    if made_of is None and type(attack).__module__.startswith("robust_ext.adapters."):
        host = getattr(attack, "attack", None)
        # Foolbox repeats an attack by an object around it, which no text names.
        return None if host is None or hasattr(host, "times") else type(host)
    return made_of


def _defaults(attack: Attack) -> Mapping[str, Any] | None:
    made_of = _made_of(attack)
    if made_of is None:
        return None
    if isinstance(attack, NativeAttack):
        return {name: default_of(made_of, name) for name in declared(made_of)}
    return {name: parameter.default for name, parameter in inspect.signature(made_of).parameters.items()}


def _literal(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_literal, value))
    return value is None or isinstance(value, (bool, int, float, str))
