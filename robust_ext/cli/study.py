"""Studies: a command with its options as one TOML table, ``[binarization]`` with ``eps = "8/255"``.

Keys are the options' names without dashes in front, values what stands on the command line: texts, numbers, truth
values for options without a value, and lists for those that may be repeated. Paths begin where those of the command
line do, in the folder that the command is run in. A study is data: only where that is allowed it names code or a
cluster, or writes outside of this folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.files import make_folder, replace_file
from robust_ext.core.printable import printable
from robust_ext.core.specification import did_you_mean
from robust_ext.core.toml import read_toml, table_text
from robust_ext.engine.context import current_context, run_context

FILE = "study.toml"
"""What the study in a run folder is called."""

_WRITTEN = ("out", "json", "markdown")
_TRUST = "if you trust the study, robust-ext run --allow-code runs it"
_FORM = "write one table, as in [robust-accuracy] with keys such as model, data, attack and eps"


@dataclass(frozen=True, kw_only=True)
class Study:
    """A command and the options that are given to it, by their names without dashes."""

    command: str
    options: Mapping[str, Any]

    @property
    def text(self) -> str:
        """It as TOML."""
        return table_text(self.command, self.options)


def read_study(path: Path, commands: Mapping[str, Any]) -> Study:
    """The study of a file, checked to be a command with options that it has.

    Raises:
        InvalidArgumentError: It has no table, several, or one that is no command; or a key is no option, or its value
            has another form.
        DataError: It cannot be read, or is no valid TOML.
    """
    content = read_toml(path, name=str(path), kind="study", see=_FORM)
    tables = [name for name, value in content.items() if isinstance(value, dict)]
    if len(content) != 1 or not tables:
        got = ", ".join(f"[{name}]" if name in tables else name for name in content) or "no table"
        raise InvalidArgumentError(str(path), got, f"one table, called as a command: {', '.join(commands)}")
    (name,) = tables
    if name not in commands:
        raise InvalidArgumentError(
            str(path), f"[{name}]", f"a command: {', '.join(commands)}{did_you_mean(name, commands)}"
        )
    known = _by_key(commands[name].params)
    options = {}
    for written, value in content[name].items():
        key = written.replace("_", "-")
        where = f"{path}: [{name}] {written}"
        if key not in known:
            listed = f"an option of {name}: {', '.join(known)}{did_you_mean(key, known)}"
            raise InvalidArgumentError(where, "an unknown key", listed)
        options[key] = _checked(value, known[key], where)
    return Study(command=name, options=options)


def check_reach(study: Study, path: Path) -> None:
    """Raise InvalidArgumentError where a study names a cluster, or a place to write to outside of the current folder.

    The folder that the study lies in is allowed, so that the study of a run folder repeats the run.
    """
    where = f"{path}: [{study.command}]"
    executor = str(study.options.get("executor", "local"))
    if executor.partition(":")[0] != "local":
        expected = f"local or local:N, as workers elsewhere run code here; {_TRUST}"
        raise InvalidArgumentError(f"{where} executor", executor, expected)
    for key in _WRITTEN:
        place = Path(str(study.options.get(key, "")))
        outside = place.is_absolute() or ".." in place.parts
        if outside and place.resolve() != path.parent.resolve():
            expected = f"a path inside the current folder; {_TRUST}, and --out replaces its run folder"
            raise InvalidArgumentError(f"{where} {key}", str(place), expected)


def study_arguments(study: Study, params: Sequence[Any]) -> list[str]:
    """A study as arguments of ``robust-ext``, without the command's name."""
    named: list[str] = []
    plain: list[str] = []
    known = _by_key(params)
    for key, value in study.options.items():
        parameter = known[key]
        if isinstance(value, bool):
            named += [parameter.opts[0]] if value else parameter.secondary_opts[:1]
            continue
        texts = [str(one) for one in (value if isinstance(value, list) else [value])]
        if parameter.opts[0].startswith("-"):
            named += [f"{parameter.opts[0]}={text}" for text in texts]
        else:
            plain += texts
    return [*named, "--", *plain] if plain else named


@contextmanager
def printed_back(context: typer.Context) -> Iterator[None]:
    """Print the study that repeats a command when it has a result: into its run folder, or else to stderr."""
    study = Study(command=str(context.info_name), options=_given(context))
    repeating = (study.command, *study_arguments(study, context.command.params))
    try:
        with run_context(replace(current_context(), command=repeating)):
            yield
    except typer.Exit:
        # A result of which the exit status states what it found.
        _print_back(study, context.params)
        raise
    _print_back(study, context.params)


def _print_back(study: Study, values: Mapping[str, Any]) -> None:
    if "out" not in values:
        return
    if values["out"] is None:
        typer.echo(f"\n# As a study, for robust-ext run FILE.toml\n{study.text}", err=True)
        return
    folder = Path(values["out"])
    make_folder(folder)
    replace_file(folder / FILE, f"# robust-ext run {FILE}, in the folder that paths begin in\n{study.text}\n")
    typer.echo(printable(f"robust-ext run {folder / FILE} repeats it."))


def _given(context: typer.Context) -> dict[str, Any]:
    """The options that were given, as values of TOML."""
    found = {}
    for key, parameter in _by_key(context.command.params).items():
        name = parameter.name
        source = context.get_parameter_source(name)
        if name in context.params and name != "repair" and source is not None and source.name != "DEFAULT":
            value = context.params[name]
            if isinstance(value, (list, tuple)):
                value = [str(one) for one in value]
            found[key] = value if isinstance(value, (bool, int, float, list)) else str(value)
    return found


def _by_key(params: Sequence[Any]) -> dict[str, Any]:
    """Parameters of a command by their keys in a study."""
    return {
        parameter.opts[0].lstrip("-").replace("_", "-"): parameter
        for parameter in params
        if parameter.name not in ("help", "help_all")
    }


def _checked(value: Any, parameter: Any, where: str) -> Any:
    """A value of the form that its option takes; what it holds is checked as on the command line."""
    several = getattr(parameter, "multiple", False) or parameter.nargs != 1
    if getattr(parameter, "is_flag", False):
        if not isinstance(value, bool):
            raise InvalidArgumentError(where, repr(value), "true or false")
        return value
    entries = value if isinstance(value, list) else [value]
    if (isinstance(value, list) and not several) or not all(type(one) in (str, int, float) for one in entries):
        expected = "a text, a number, or a list of these" if several else "a text or a number"
        raise InvalidArgumentError(where, repr(value), expected)
    return value
