"""Options of commands, made from declarations of settings: name, type, default, words and panel of each."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from robust_ext.cli.completion import completer
from robust_ext.cli.help import PANELS, first_sentence, help_all, is_rare, panel_title, terminal_words
from robust_ext.cli.study import printed_back
from robust_ext.core.errors import InvalidArgumentError, RobustExtError
from robust_ext.core.settings import SettingInfo, Settings, check_setting, declared, default_of, setting_types
from robust_ext.engine.estimate import EstimatedError
from robust_ext.reports.timing import estimate_text

_Function = Callable[..., None]


def command(evaluation: type[Settings] | None = None, **defaults: Any) -> Callable[[_Function], _Function]:
    """Make what typer takes as a command of a function of groups of options.

    Every parameter of the function that is annotated with a class of settings gets an instance of it, made from the
    options of this class; ``settings`` gets those of the evaluation, as keywords. Defaults are those of this command,
    where they are others than declared. What was given is printed back, see :mod:`robust_ext.cli.study`.
    """

    def decorate(function: _Function) -> _Function:
        hints = typing.get_type_hints(function)
        groups = {name: kind for name, kind in hints.items() if isinstance(kind, type) and issubclass(kind, Settings)}
        classes = [*groups.values(), *([] if evaluation is None else [evaluation])]
        found = [one for cls in classes for one in _parameters(cls, defaults)]
        found.sort(key=lambda one: PANELS.index(one[0]))
        words = {parameter.name: text for _, parameter, text in found}
        own = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
        more = help_all(words, {panel for panel, _, _ in found})
        parameters = [own, *(parameter for _, parameter, _ in found), *more]

        def run(context: typer.Context, **values: Any) -> None:
            given: dict[str, Any] = {name: cls(**_values(cls, values)) for name, cls in groups.items()}
            if evaluation is not None:
                given["settings"] = _values(evaluation, values)
            try:
                with printed_back(context):
                    _call(function, given)
            except EstimatedError as found:
                typer.echo(estimate_text(found.estimate), nl=False)

        run.__name__, run.__doc__ = function.__name__, function.__doc__
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run

    return decorate


def _call(function: _Function, given: Mapping[str, Any]) -> None:
    """Run a command to its end; code of users or libraries that ends the process, or reads from it, is an error."""
    try:
        function(**given)
    except (SystemExit, EOFError) as error:
        done = "ended the process" if isinstance(error, SystemExit) else "read from standard input or a short file"
        raise RobustExtError(
            f"{type(error).__name__}({error}): code that was called {done}, and there is no result; let it return"
        ) from error


def option_name(name: str, info: SettingInfo) -> str:
    """What a setting is called on the command line."""
    return info.names.get("cli") or f"--{name.replace('_', '-')}"


def number(argument: str, text: str) -> float:
    """A number, or a fraction such as ``8/255``."""
    over, fraction, under = text.partition("/")
    try:
        return float(over) / (float(under) if fraction else 1.0)
    except (ValueError, ZeroDivisionError) as error:
        raise InvalidArgumentError(argument, repr(text), "a number or a fraction such as 8/255") from error


def _parameters(cls: type[Settings], defaults: Mapping[str, Any]) -> Iterator[tuple[str, inspect.Parameter, str]]:
    """The panel, the parameter as typer reads it, and all words of each setting."""
    for name, info, kind in _shown(cls):
        default = defaults.get(name, default_of(cls, name))
        required = default is dataclasses.MISSING
        panel, words = info.names.get("panel") or "test", terminal_words(info.help)
        names = [option_name(name, info)]
        option: Any
        if not names[0].startswith("-"):
            # What has no dashes stands by itself on the command line.
            option = typer.Argument(metavar=names[0], help=words)
        else:
            path: dict[str, Any] = {}
            if Path in (kind, *typing.get_args(kind)):
                path = {"parser": _path, "metavar": "PATH"}
            if kind is bool and default is True:
                names = [f"{names[0]}/--no-{names[0].removeprefix('--')}"]
            option = typer.Option(
                *names,
                help=first_sentence(words),
                rich_help_panel=panel_title(panel),
                hidden=is_rare(panel),
                autocompletion=completer(name, info),
                **path,
            )
        if typing.get_origin(kind) is tuple:
            kind, default = (list[str], default) if required else (list[str] | None, None)
        elif str in typing.get_args(kind) and kind != str | None:
            kind = str
        default = inspect.Parameter.empty if required else default
        keyword = inspect.Parameter.KEYWORD_ONLY
        yield panel, inspect.Parameter(name, keyword, default=default, annotation=Annotated[kind, option]), words


def _path(text: str) -> Path:
    """A path; an empty text, which would be the current folder, is refused."""
    if not text:
        raise typer.BadParameter("got '', expected a name; '.' is the current folder")
    return Path(text)


def _values(cls: type[Settings], values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a class among the options' values, checked under the options' names."""
    found = {}
    for name, info, kind in _shown(cls):
        value = values[name]
        if typing.get_origin(kind) is tuple:
            value = _tuple(cls, name, typing.get_args(kind)[0], value)
        elif kind == int | str and re.fullmatch(r"[+-]?\d+", value):
            value = int(value)
        elif kind == float | str:
            with suppress(ValueError):
                value = float(value)
        try:
            found[name] = check_setting(cls, name, info, value)
        except InvalidArgumentError as error:
            got = error.got if isinstance(error.got, str) else repr(error.got)
            raise InvalidArgumentError(option_name(name, info), got, error.expected) from None
    return found


def _tuple(cls: type[Settings], name: str, kind: Any, texts: Sequence[str] | None) -> tuple[Any, ...]:
    """The values of a repeatable option; of numbers, one text may hold several with commas between them."""
    if not texts:
        default = default_of(cls, name)
        return () if default is dataclasses.MISSING else tuple(default)
    if kind is not float:
        return tuple(texts)
    return tuple(number(name, part) for text in texts for part in text.split(","))


def _shown(cls: type) -> Iterator[tuple[str, SettingInfo, Any]]:
    """Name, declaration and type of each setting that is an option."""
    kinds = setting_types(cls)
    for name, info in declared(cls).items():
        if info.names.get("cli", "") is not None:
            yield name, info, kinds[name]
