"""Commands made from declarations of settings: name, type, default, help and completion of each option."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from robust_ext.cli.run import printed_back
from robust_ext.core.errors import InvalidArgumentError, RobustExtError
from robust_ext.core.settings import SettingInfo, Settings, check_setting, declared, default_of, setting_types
from robust_ext.datasets.load import NAMES
from robust_ext.defenses.catalogue import NAMED as DEFENSES
from robust_ext.engine.estimate import EstimatedError
from robust_ext.engine.executors import NAMES as EXECUTORS
from robust_ext.evaluations.mead.fitting import NAMED as DETECTORS
from robust_ext.evaluations.mead.suites import suite_names
from robust_ext.registry.base import Adapter, adapters
from robust_ext.reports.timing import estimate_text

_Function = Callable[..., None]
_RARER = {
    "planting": "Planting",
    "readout": "Readout",
    "depth": "Depth",
    "verdict": "Verdict",
    "detection": "Detector, in detail",
    "cost": "Cost",
}
PANELS = ("model", "data", "attack", "detector", "test", "run", "workers", *_RARER)
"""Panels in the order of ``--help``; only ``--help-all`` shows those from ``planting`` on."""
_SENTENCE = re.compile(r"(?<=[\w)\"])\. (?=[A-Z0-9\"])")


def command(evaluation: type[Settings] | None = None, **defaults: Any) -> Callable[[_Function], _Function]:
    """Turn a function of groups of options into a command for typer.

    Each parameter that is annotated with a class of settings gets an instance of it, made from the options of that
    class; ``settings`` gets those of the evaluation, as keywords. ``defaults`` override declared defaults.
    """

    def decorate(function: _Function) -> _Function:
        hints = typing.get_type_hints(function)
        groups = {name: kind for name, kind in hints.items() if isinstance(kind, type) and issubclass(kind, Settings)}
        classes = [*groups.values(), *([] if evaluation is None else [evaluation])]
        found = [one for cls in classes for one in _parameters(cls, defaults)]
        found.sort(key=lambda one: PANELS.index(one[0]))
        own = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
        help_texts = {parameter.name: text for _, parameter, text in found}
        more = _help_all(help_texts, {panel for panel, _, _ in found})
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
    """Run a command; code of users or libraries that ends the process, or reads from it, is an error."""
    try:
        function(**given)
    except (SystemExit, EOFError) as error:
        done = "ended the process" if isinstance(error, SystemExit) else "read from standard input or a short file"
        raise RobustExtError(
            f"{type(error).__name__}({error}): code that was called {done}, and there is no result; let it return"
        ) from error


def _is_path(kind: Any) -> bool:
    return Path in (kind, *typing.get_args(kind))


def option_name(name: str, info: SettingInfo) -> str:
    """Return the name of a setting on the command line."""
    return info.names.get("cli") or f"--{name.replace('_', '-')}"


def number(argument: str, text: str) -> float:
    """Parse a number, or a fraction such as ``8/255``."""
    over, fraction, under = text.partition("/")
    try:
        return float(over) / (float(under) if fraction else 1.0)
    except (ValueError, ZeroDivisionError) as error:
        raise InvalidArgumentError(argument, repr(text), "a number or a fraction such as 8/255") from error


def numbers(argument: str, text: str) -> list[float]:
    """Parse numbers or fractions with commas between them."""
    return [number(argument, part) for part in text.split(",")]


def labelled(texts: Sequence[str]) -> dict[str, str]:
    """Return attacks by label, of ``LABEL=library:Name()``; without a label an attack is its own."""
    found = {}
    for text in texts:
        label, equals, rest = text.partition("=")
        own = equals and ":" not in label and "(" not in label
        found[label.strip() if own else text] = rest if own else text
    if len(found) < len(texts):
        expected = "a label of its own for each, LABEL=library:Name()"
        raise InvalidArgumentError("--attack", ", ".join(texts), expected)
    return found


def _parameters(cls: type[Settings], defaults: Mapping[str, Any]) -> Iterator[tuple[str, inspect.Parameter, str]]:
    """Yield panel, typer's parameter and full help text of each setting."""
    for name, info, kind in _shown(cls):
        default = defaults.get(name, default_of(cls, name))
        required = default is dataclasses.MISSING
        # Brackets are markup in a terminal, and roles of Sphinx are noise there.
        text = escape(re.sub(r":\w+:`[~.]?([^`]*)`", r"\1", info.help).replace("``", ""))
        panel, option_text = info.names.get("panel") or "test", option_name(name, info)
        option: Any
        if not option_text.startswith("-"):
            option = typer.Argument(metavar=option_text, help=text)
        else:
            if kind is bool and default is True:
                option_text = f"{option_text}/--no-{option_text.removeprefix('--')}"
            option = typer.Option(
                option_text,
                help=first_sentence(text),
                rich_help_panel=panel_title(panel),
                hidden=panel in _RARER,
                autocompletion=_completer(name, info),
                path_type=str if _is_path(kind) else None,
            )
        if typing.get_origin(kind) is tuple:
            kind, default = (list[str], default) if required else (list[str] | None, None)
        elif str in typing.get_args(kind) and kind != str | None:
            kind = str
        default = inspect.Parameter.empty if required else default
        keyword = inspect.Parameter.KEYWORD_ONLY
        yield panel, inspect.Parameter(name, keyword, default=default, annotation=Annotated[kind, option]), text


def _values(cls: type[Settings], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a class among the options' values, checked under the options' names."""
    found = {}
    for name, info, kind in _shown(cls):
        value = values[name]
        if typing.get_origin(kind) is tuple:
            value = _tuple(cls, name, typing.get_args(kind)[0], value)
        elif _is_path(kind) and value is not None:
            if not value:
                # As a path, it would be the current folder.
                raise InvalidArgumentError(option_name(name, info), "''", "a name; '.' is the current folder")
            value = Path(value)
        elif kind == int | str and re.fullmatch(r"[+-]?\d+", value):
            # A number of thousands of digits, which Python does not read, stays a text and is refused.
            with suppress(ValueError):
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
    """Return the values of a repeatable option; a text may hold several numbers with commas between them."""
    if not texts:
        default = default_of(cls, name)
        return () if default is dataclasses.MISSING else tuple(default)
    return tuple(texts) if kind is not float else tuple(one for text in texts for one in numbers(name, text))


def _shown(cls: type) -> Iterator[tuple[str, SettingInfo, Any]]:
    """Yield name, declaration and type of each setting that is an option."""
    kinds = setting_types(cls)
    for name, info in declared(cls).items():
        if info.names.get("cli", "") is not None:
            yield name, info, kinds[name]


def panel_title(panel: str) -> str:
    """Return the title of a panel."""
    return _RARER.get(panel, panel.capitalize())


def first_sentence(text: str) -> str:
    """Return the first sentence, with a full stop if more follow.

    Example:
        >>> first_sentence("Points of class 0. The paper's are 999.")
        'Points of class 0.'
    """
    first, *more = _SENTENCE.split(text, maxsplit=1)
    return f"{first}." if more else first


def _help_all(texts: Mapping[str, str], panels: Collection[str]) -> list[inspect.Parameter]:
    """Return the parameter of ``--help-all``, full help texts of all options; none if ``--help`` shows everything."""
    rarer = [_RARER[panel].partition(",")[0].lower() for panel in PANELS if panel in panels and panel in _RARER]

    def show(context: typer.Context, value: bool) -> None:
        if value:
            for parameter in context.command.params:
                if parameter.name in texts:
                    parameter.help, parameter.hidden = texts[parameter.name], False  # type: ignore[attr-defined]
            typer.echo(context.get_help())
            raise typer.Exit

    if not rarer:
        return []
    text = f"The same in full, with rarer options: {', '.join(dict.fromkeys(rarer))}."
    option = typer.Option("--help-all", callback=show, is_eager=True, expose_value=False, help=text)
    keyword = inspect.Parameter.KEYWORD_ONLY
    return [inspect.Parameter("help_all", keyword, default=False, annotation=Annotated[bool, option])]


def _completer(name: str, info: SettingInfo) -> Callable[[str], list[str]] | None:
    """Return the completion of an option's value for typer; None to complete files."""
    words = _WORDS.get(name) if info.choices is None else lambda _: info.choices or ()
    # Typer requires the name of this parameter.
    return words and (lambda incomplete: [word for word in words(incomplete) if word.startswith(incomplete)])


def _attacks(begun: str) -> list[str]:
    """Return ``library:`` until there is a colon, then the attacks of that library, the only one imported."""
    library, colon, _ = begun.partition(":")
    if not colon or library not in adapters():
        return [f"{name}:" for name in adapters()]
    try:
        return [f"{library}:{name}" for name in sorted(adapters()[library].attack_names())]
    except RobustExtError:
        return []


def _models(_: str) -> list[str]:
    makers = (name for name, one in adapters().items() if type(one).build_model is not Adapter.build_model)
    return ["digits", *(f"{name}:" for name in makers)]


_WORDS: dict[str, Callable[[str], Collection[str]]] = {
    "attack": _attacks,
    "model": _models,
    "surrogate": _models,
    "data": lambda _: NAMES,
    "train_data": lambda _: NAMES,
    "detector": lambda _: DETECTORS,
    "defense": lambda _: DEFENSES,
    "executor": lambda _: EXECUTORS,
    "suite": lambda _: suite_names(),
    "library": lambda _: list(adapters()),
}
