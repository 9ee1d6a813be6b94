"""Options of commands, made from declarations of settings: name, type, default, words and panel of each."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

import typer

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.settings import SettingInfo, Settings, check_setting, declared, default_of, setting_types

HIDDEN = "hidden"
"""The panel of options that no help shows."""

_PANELS = ("model", "data", "attack", "detector", "test", "run", HIDDEN)


def command(
    evaluation: type[Settings] | None = None, **defaults: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make what typer takes as a command of a function of groups of options.

    Every parameter of the function that is annotated with a class of settings gets an instance of it, made from the
    options of this class. ``settings`` gets those of the evaluation, as keywords.

    Args:
        evaluation: Settings that are options too.
        **defaults: Of this command, where they are others than declared.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        hints = typing.get_type_hints(function)
        groups = {name: kind for name, kind in hints.items() if isinstance(kind, type) and issubclass(kind, Settings)}
        classes = [*groups.values(), *([] if evaluation is None else [evaluation])]
        found = [pair for cls in classes for pair in _parameters(cls, defaults)]
        parameters = [parameter for _, parameter in sorted(found, key=lambda pair: _PANELS.index(pair[0]))]

        def run(**values: Any) -> None:
            given: dict[str, Any] = {name: cls(**_values(cls, values)) for name, cls in groups.items()}
            if evaluation is not None:
                given["settings"] = _values(evaluation, values)
            function(**given)

        run.__name__, run.__doc__ = function.__name__, function.__doc__
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run

    return decorate


def option_name(name: str, info: SettingInfo) -> str:
    """What a setting is called on the command line.

    Example:
        >>> from robust_ext.evaluations.binarization import BinarizationSettings
        >>> [option_name(name, info) for name, info in declared(BinarizationSettings).items()][:2]
        ['--inner-points', '--boundary-points']
    """
    return info.names.get("cli") or f"--{name.replace('_', '-')}"


def number(argument: str, text: str) -> float:
    """A number, or a fraction such as ``8/255``."""
    parts = text.split("/")
    try:
        values = [float(part) for part in parts]
    except ValueError as error:
        raise InvalidArgumentError(argument, repr(text), "a number or a fraction such as 8/255") from error
    if len(values) > 2 or (len(values) == 2 and values[1] == 0):
        raise InvalidArgumentError(argument, repr(text), "a number or a fraction such as 8/255")
    return values[0] if len(values) == 1 else values[0] / values[1]


def pair(argument: str, text: str) -> tuple[float, float]:
    """Two numbers separated by a comma."""
    parts = text.split(",")
    if len(parts) != 2:
        raise InvalidArgumentError(argument, repr(text), "two numbers, as in 0,1")
    return number(argument, parts[0]), number(argument, parts[1])


def _parameters(cls: type[Settings], defaults: Mapping[str, Any]) -> Iterator[tuple[str, inspect.Parameter]]:
    """The panel and the parameter of each setting, as typer reads them."""
    for name, info, kind in _shown(cls):
        default = defaults.get(name, default_of(cls, name))
        required = default is dataclasses.MISSING
        names = [option_name(name, info)] if "cli" in info.names else []
        panel = info.names.get("panel") or "test"
        option = typer.Option(
            *names, help=_words(info.help), rich_help_panel=panel.capitalize(), hidden=panel == HIDDEN
        )
        if typing.get_origin(kind) is tuple:
            kind, default = (list[str], default) if required else (list[str] | None, None)
        elif kind == int | str:
            kind = str
        parameter = inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if required else default,
            annotation=Annotated[kind, option],
        )
        yield panel, parameter


def _values(cls: type[Settings], values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a class among the options' values, checked under the options' names."""
    found = {}
    for name, info, kind in _shown(cls):
        value = values[name]
        if typing.get_origin(kind) is tuple:
            value = tuple(value or ())
        elif kind == int | str and re.fullmatch(r"[+-]?\d+", value):
            value = int(value)
        try:
            found[name] = check_setting(cls, name, info, value)
        except InvalidArgumentError as error:
            got = error.got if isinstance(error.got, str) else repr(error.got)
            raise InvalidArgumentError(option_name(name, info), got, error.expected) from None
    return found


def _shown(cls: type) -> Iterator[tuple[str, SettingInfo, Any]]:
    """Name, declaration and type of each setting that is an option."""
    kinds = setting_types(cls)
    for name, info in declared(cls).items():
        if info.names.get("cli", "") is not None:
            yield name, info, kinds[name]


def _words(text: str) -> str:
    """Words of a docstring for a terminal; brackets are no markup there."""
    from rich.markup import escape

    plain = re.sub(r":\w+:`[~.]?([^`]*)`", r"\1", text).replace("``", "")
    return escape(plain)
