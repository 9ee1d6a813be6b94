"""``robust-ext run``: a study, one command with its options as a TOML table, ``[binarization]`` with ``eps = "8/255"``.

Keys are option names without the leading dashes. Values are texts, numbers, booleans for flags, and lists for
repeatable options; paths are relative to the current folder. Every result comes with the study that repeats it. A
study is data: it names no code and no cluster, and writes only inside the current folder, unless the user allows it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from robust_ext.core.errors import InvalidArgumentError, RobustExtError, printable
from robust_ext.core.files import make_folder, read_toml, replace_file, table_text
from robust_ext.core.objects import refusing_code
from robust_ext.core.specification import did_you_mean
from robust_ext.engine.context import current_context, run_context

FILE = "study.toml"
"""Name of the study in a run folder."""

_TRUST = "if you trust the study, robust-ext run --allow-code runs it"
_FORM = "write one table, as in [robust-accuracy] with keys such as model, data, attack and eps"


class Study(NamedTuple):
    """A command and its options, by their names without dashes."""

    command: str
    options: Mapping[str, Any]


def run_study(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE.toml", help="A table called as a command, with its options.")],
    out: Annotated[Path | None, typer.Option(help="Run folder, in place of the study's.", path_type=str)] = None,
    repair: Annotated[bool, typer.Option("--repair", help="Recompute damaged parts of the run folder.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check it, and print what it would cost; nothing is run or written.")
    ] = False,
    allow_code: Annotated[
        bool,
        typer.Option(
            "--allow-code",
            help="Let the study name code (file.py:object, package.module:object) or a cluster, and write anywhere.",
        ),
    ] = False,
    progress: Annotated[bool, typer.Option(help="Show a progress bar.")] = True,
) -> None:
    """Run the command in a TOML file; every result is printed with the study that repeats it."""
    group: Any = context.parent and context.parent.command
    commands = {name: one for name, one in group.commands.items() if name != context.info_name}
    study = read_study(file, commands)
    command = commands[study.command]
    given = {"out": out, "repair": repair or None, "dry-run": dry_run or None, "progress": None if progress else False}
    over = {key: value for key, value in given.items() if value is not None}
    for key, value in over.items():
        if key not in _by_key(command.params):
            raise InvalidArgumentError(f"--{key}", str(value), f"no such option for {study.command}, which has none")
    if not allow_code:
        _check_reach(study, file, replaced=over)
    arguments = study_arguments(Study(study.command, {**study.options, **over}), command.params)
    with nullcontext() if allow_code else refusing_code():
        try:
            with command.make_context(study.command, arguments, parent=context.parent) as inner:
                command.invoke(inner)
        except InvalidArgumentError as error:
            argument = error.argument.removeprefix("--")
            raise InvalidArgumentError(f"{file}: [{study.command}] {argument}", error.got, error.expected) from error
        except Exception as error:
            # Usage errors have other classes in every release of typer and click.
            if not hasattr(error, "format_message"):
                raise
            text = re.sub(r"--([\w-]+)", r"\1", error.format_message())
            raise RobustExtError(f"{file}: [{study.command}] {text}") from error


def read_study(file: Path, commands: Mapping[str, Any]) -> Study:
    """Read a study and check that it is a command with options of the right form.

    Raises:
        InvalidArgumentError: It does not have exactly one table, called as a command; a key is no option; or a value
            has another form.
        DataError: It cannot be read, or is not valid TOML.
    """
    content = read_toml(file, name=str(file), kind="study", see=_FORM)
    tables = [name for name, value in content.items() if isinstance(value, dict)]
    if len(content) != 1 or not tables:
        got = ", ".join(f"[{name}]" if name in tables else name for name in content) or "no table"
        raise InvalidArgumentError(str(file), got, f"one table, called as a command: {', '.join(commands)}")
    (name,) = tables
    if name not in commands:
        expected = f"a command: {', '.join(commands)}{did_you_mean(name, commands)}"
        raise InvalidArgumentError(str(file), f"[{name}]", expected)
    known, options = _by_key(commands[name].params), {}
    for written, value in content[name].items():
        key, where = written.replace("_", "-"), f"{file}: [{name}] {written}"
        if key not in known:
            listed = f"an option of {name}: {', '.join(known)}{did_you_mean(key, known)}"
            raise InvalidArgumentError(where, "an unknown key", listed)
        options[key] = _checked(value, known[key], where)
    return Study(name, options)


def study_arguments(study: Study, params: Sequence[Any]) -> list[str]:
    """Return a study as arguments of ``robust-ext``, without the command's name."""
    named: list[str] = []
    plain: list[str] = []
    # In the command's order, which counts for what has no name.
    for key, parameter in _by_key(params).items():
        if (value := study.options.get(key)) is None:
            continue
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
    study = Study(str(context.info_name), _given(context))
    repeating = (study.command, *study_arguments(study, context.command.params))
    try:
        with run_context(replace(current_context(), command=repeating)):
            yield
    except typer.Exit:
        # There is a result: the exit status is its outcome.
        _print_back(study, context.params)
        raise
    _print_back(study, context.params)


def _print_back(study: Study, values: Mapping[str, Any]) -> None:
    text = table_text(*study)
    if values.get("out") is not None:
        folder = Path(values["out"])
        make_folder(folder)
        replace_file(folder / FILE, f"# robust-ext run {FILE}, in the folder that paths begin in\n{text}\n")
        typer.echo(printable(f"robust-ext run {folder / FILE} repeats it."))
    elif "out" in values:
        typer.echo(f"\n# As a study, for robust-ext run FILE.toml\n{text}", err=True)


def _given(context: typer.Context) -> dict[str, Any]:
    """Return the options that the user gave, as values for TOML."""
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
    """Return the parameters of a command by their keys in a study."""
    return {one.opts[0].lstrip("-").replace("_", "-"): one for one in params if one.name not in ("help", "help_all")}


def _check_reach(study: Study, file: Path, *, replaced: Mapping[str, Any]) -> None:
    """Raise InvalidArgumentError if a study names a cluster, or writes outside the current folder and its own.

    Its own folder is allowed so that the study in a run folder repeats the run; ``replaced`` options do not count.
    """
    where, executor = f"{file}: [{study.command}]", str(study.options.get("executor", "local"))
    if executor.partition(":")[0] != "local":
        expected = f"local or local:N, as workers elsewhere run code here; {_TRUST}"
        raise InvalidArgumentError(f"{where} executor", executor, expected)
    for key in ("out", "json", "markdown", "png"):
        place = Path("" if key in replaced else str(study.options.get(key, "")))
        outside = place.is_absolute() or ".." in place.parts
        if outside and place.resolve() != file.parent.resolve():
            expected = f"a path inside the current folder; {_TRUST}, and --out replaces its run folder"
            raise InvalidArgumentError(f"{where} {key}", str(place), expected)


def _checked(value: Any, parameter: Any, where: str) -> Any:
    """Check that a value has the form that its option takes; the command line checks the rest."""
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
