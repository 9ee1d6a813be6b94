"""The conversion of objects and names to attacks."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from robust_ext.attacks.base import Attack, CallableAttack, called
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.objects import check_code
from robust_ext.core.specification import did_you_mean, parse_call
from robust_ext.core.validation import check_name
from robust_ext.registry import base as libraries
from robust_ext.registry.base import named_object

_ACCEPTED = (
    "an Attack, a string such as 'foolbox:LinfPGD(steps=40)' or 'file.py:attack', an attack object of an adapted "
    "library, a tuple (attack class, {settings}), or a callable (model, x, y) -> x_adv"
)
_LOADER: ContextVar[Callable[[str, str], Attack] | None] = ContextVar("robust_ext_attack_loader", default=None)
_EXTRAS = ("threat_model", "epsilon", "generator", "targeted")


def as_attack(obj: object, *, name: str | None = None, argument: str = "attack") -> Attack:
    """Turn anything that attacks into an :class:`Attack`.

    Args:
        obj: An :class:`Attack`; a string, ``library:Name(settings)``, ``package.module:object`` or
            ``file.py:object``; an attack object or class of an adapted library, or a tuple of such a class and its
            settings; a callable ``(model, x, y) -> x_adv``.
        name: What tables call it. Left out, a string is its own name and an object has the one it brings.
        argument: What error messages call it.

    Raises:
        InvalidArgumentError: ``obj`` is something else, or its settings are not accepted.
        MissingDependencyError: It belongs to a library that is not installed.

    Example:
        >>> as_attack(lambda model, x, y: x, name="nothing")
        CallableAttack(nothing)
    """
    if name is not None:
        check_name(argument, name)
    if isinstance(obj, Attack):
        return obj if name is None else _renamed(obj, name)
    if isinstance(obj, str):
        return _from_text(obj, name, argument)
    for adapter in libraries.adapters().values():
        adapted = adapter.adapt_attack(obj, name=name)
        if adapted is not None:
            return adapted
    if isinstance(obj, type):
        raise InvalidArgumentError(
            argument, f"the class {obj.__name__}", f"an object: {obj.__name__}(...), or {_ACCEPTED}"
        )
    if callable(obj):
        _check_callable(obj, argument)
        return CallableAttack(obj, name=name)
    raise InvalidArgumentError(argument, type(obj).__name__, _ACCEPTED)


@contextmanager
def attacks_from_text(load: Callable[[str, str], Attack]) -> Iterator[None]:
    """Inside the block, call ``load`` with each text that names code instead of a library's attack, and with a name."""
    token = _LOADER.set(load)
    try:
        yield
    finally:
        _LOADER.reset(token)


def _renamed(attack: Attack, name: str) -> Attack:
    renamed = copy.copy(attack)
    object.__setattr__(renamed, "name", name)  # Own attacks are frozen dataclasses.
    return renamed


def _from_text(text: str, name: str | None, argument: str) -> Attack:
    spec = parse_call(text, argument=argument)
    adapter = libraries.adapters().get(spec.scope)
    if adapter is not None:
        return adapter.build_attack(spec.name, spec.arguments, name=name or text)
    load = _LOADER.get()
    if load is None:
        attack = _load(text, name or text, argument)
    else:
        check_code(text, argument)
        attack = load(text, name or text)
    object.__setattr__(attack, "code_text", text)
    return attack


def _load(text: str, name: str, argument: str) -> Attack:
    try:
        found = named_object(text, accepted=_ACCEPTED, argument=argument)
    except InvalidArgumentError as error:
        near = did_you_mean(parse_call(text, argument=argument).scope, list(libraries.adapters()))
        if not near:
            raise
        raise InvalidArgumentError(argument, text, f"a library or module that exists{near}") from error
    return as_attack(found, name=name, argument=argument)


def _check_callable(function: Callable[..., Any], argument: str) -> None:
    try:
        signature = inspect.signature(called(function))
    except (TypeError, ValueError):
        return
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    extras = [one.name for one in signature.parameters.values() if one.name in _EXTRAS and one.kind in by_name]
    try:
        signature.bind(None, None, None, **dict.fromkeys(extras))
    except TypeError as error:
        shown = getattr(function, "__name__", type(function).__name__) + str(signature)
        expected = "a callable (model, x, y) -> x_adv; it may also take threat_model, epsilon, generator and targeted"
        raise InvalidArgumentError(argument, shown, expected) from error
