"""Attacks, models and datasets written as text: ``foolbox:LinfPGD(steps=40)``, ``package.module:make(depth=3)``.

Arguments are literals read from the syntax tree, never evaluated; what a file or module holds is only run because the
user named it.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from robust_ext.errors import DataError, InvalidArgumentError

_CALL = re.compile(
    r"\s*(?P<scope>[^:].*?)\s*:\s*(?P<name>[^\W\d]\w*(?:\.[^\W\d]\w*)*)\s*(?P<arguments>\(.*\))?\s*", re.DOTALL
)
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_FORM = "scope:name or scope:name(key=value, ...), as in foolbox:LinfPGD(steps=40) or file.py:make(depth=3)"
_LITERALS = (
    "keyword arguments whose values are numbers, fractions such as 8/255, strings, True, False, None, or lists, tuples "
    "and dicts of these"
)


@dataclass(frozen=True, kw_only=True)
class CallSpec:
    """A name with arguments, as parsed.

    Args:
        scope: What stands before the colon: a library, a module or a file.
        name: What stands after it; may have dots.
        arguments: Keyword arguments, literals only.
        text: The text it was parsed from.
    """

    scope: str
    name: str
    arguments: Mapping[str, Any]
    text: str


def parse_call(text: str, *, argument: str = "attack") -> CallSpec:
    """Parse ``scope:name(key=literal, ...)``; the parentheses may be left out.

    Args:
        text: The text.
        argument: What error messages call it.

    Raises:
        InvalidArgumentError: The text has another form, or an argument is not a literal.

    Example:
        >>> spec = parse_call("foolbox:LinfPGD(steps=40, abs_stepsize=2/255)")
        >>> spec.scope, spec.name, spec.arguments["steps"], round(spec.arguments["abs_stepsize"], 5)
        ('foolbox', 'LinfPGD', 40, 0.00784)
    """
    match = _match(text, argument)
    arguments = _parse_arguments(match["arguments"] or "()", text, argument)
    return CallSpec(scope=match["scope"], name=match["name"], arguments=arguments, text=text)


def load_object(text: str, *, argument: str = "object") -> Any:
    """Load ``package.module:name`` or ``path/to/file.py:name``; ``name`` may have dots.

    Modules and the imports of a file are searched for in the usual places and then in the current folder, or the
    file's own. A file is loaded once as long as it does not change.

    Args:
        text: The text, without parentheses.
        argument: What error messages call it.

    Raises:
        InvalidArgumentError: The text has another form, or there is no such file, module or name.
        DataError: The file or module raised while it was imported.

    Example:
        >>> load_object("math:pi")
        3.141592653589793
    """
    match = _match(text, argument)
    if match["arguments"] is not None:
        raise InvalidArgumentError(
            argument, text, "a name without parentheses, as in package.module:name or file.py:name"
        )
    return _load(match["scope"], match["name"], text, argument)


def resolve_object(text: str, *, argument: str = "object") -> Any:
    """Load an object as :func:`load_object` does and, where the text ends in parentheses, call it.

    Raises:
        InvalidArgumentError: As in :func:`load_object`, or the callable does not take these arguments.
        DataError: The import or the call raised.

    Example:
        >>> resolve_object("fractions:Fraction(numerator=3, denominator=4)")
        Fraction(3, 4)
    """
    match = _match(text, argument)
    spec = parse_call(text, argument=argument)
    found = _load(spec.scope, spec.name, text, argument)
    if match["arguments"] is None:
        return found
    if not callable(found):
        raise InvalidArgumentError(
            argument, text, f"no parentheses, because {spec.name} is {_article(found)} and no callable"
        )
    check_keywords(found, spec.arguments, argument=argument, label=spec.name)
    try:
        return found(**spec.arguments)
    except Exception as error:
        raise DataError(f"{argument}: {text} raised {type(error).__name__}: {error}; check its arguments") from error


def check_keywords(
    function: Callable[..., Any],
    keywords: Mapping[str, Any],
    *,
    argument: str,
    label: str,
    hidden: Collection[str] = ("self",),
) -> None:
    """Check that ``function`` takes these keyword arguments and needs no others.

    Args:
        function: Any callable; one without a readable signature takes everything.
        keywords: What it is to be called with.
        argument: What error messages call the whole.
        label: What error messages call the function.
        hidden: Parameters filled in by somebody else.

    Raises:
        InvalidArgumentError: A keyword is unknown or a required one is missing; the text lists the accepted ones.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    accepted = [name for name, parameter in parameters.items() if parameter.kind in kinds and name not in hidden]
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    for name in keywords:
        if name not in accepted and not takes_all:
            listed = ", ".join(accepted) or "no arguments"
            raise InvalidArgumentError(
                argument, f"{label}({name}=...)", f"one of: {listed}{did_you_mean(name, accepted)}"
            )
    missing = [
        name for name in accepted if parameters[name].default is inspect.Parameter.empty and name not in keywords
    ]
    if missing:
        raise InvalidArgumentError(argument, f"{label} without {missing[0]}", f"{label}({missing[0]}=..., ...)")


def did_you_mean(name: str, known: Collection[str]) -> str:
    """A clause naming the known names nearest to ``name``; empty when none is near.

    Example:
        >>> did_you_mean("LinfPDG", ["LinfPGD", "FGSM"])
        '; did you mean LinfPGD?'
    """
    lowered = {entry.lower(): entry for entry in known}
    near = difflib.get_close_matches(name.lower(), lowered, n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(lowered[entry] for entry in near)}?" if near else ""


def _match(text: str, argument: str) -> re.Match[str]:
    if not isinstance(text, str):
        raise InvalidArgumentError(argument, type(text).__name__, f"text of the form {_FORM}")
    match = _CALL.fullmatch(text)
    if match is None:
        raise InvalidArgumentError(argument, repr(text), _FORM)
    return match


def _parse_arguments(source: str, text: str, argument: str) -> dict[str, Any]:
    # The parser and the walk below raise these for nonsense and for nesting deeper than they can follow.
    try:
        call = ast.parse(f"f{source}", mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise InvalidArgumentError(argument, repr(text), _FORM)
        if call.args:
            shown = ast.unparse(call.args[0])
            raise InvalidArgumentError(
                argument, f"{text} with the positional argument {shown}", f"a name for it, key={shown}"
            )
        names = [_keyword(keyword) for keyword in call.keywords]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise ValueError(f"{twice[0]} is set twice")
        return {name: _literal(keyword.value) for name, keyword in zip(names, call.keywords, strict=True)}
    except InvalidArgumentError:
        raise
    except (SyntaxError, ValueError, TypeError, ArithmeticError, RecursionError, MemoryError) as error:
        raise InvalidArgumentError(argument, f"{text} ({error})", _LITERALS) from error


def _keyword(keyword: ast.keyword) -> str:
    if keyword.arg is None:
        raise ValueError("** is not supported")
    return keyword.arg


def _literal(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=bool() | int() | float() | str() | None):
            return node.value
        case ast.UnaryOp(op=ast.USub()):
            return -_number(node.operand)
        case ast.UnaryOp(op=ast.UAdd()):
            return _number(node.operand)
        case ast.BinOp(op=ast.Div()):
            return _number(node.left) / _number(node.right)
        case ast.List():
            return [_literal(entry) for entry in node.elts]
        case ast.Tuple():
            return tuple(_literal(entry) for entry in node.elts)
        case ast.Dict():
            if None in node.keys:
                raise ValueError("** is not supported")
            return {_literal(key): _literal(value) for key, value in zip(node.keys, node.values, strict=True) if key}
    raise ValueError(f"{ast.unparse(node)} is not a literal")


def _number(node: ast.expr) -> int | float:
    value = _literal(node)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{ast.unparse(node)} is not a number")
    return value


def _load(scope: str, name: str, text: str, argument: str) -> Any:
    found: Any = _load_file(scope, argument) if scope.endswith(".py") else _load_module(scope, text, argument)
    where = scope
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            known = [entry for entry in dir(found) if not entry.startswith("_")]
            expected = f"a name that {where} defines{did_you_mean(part, known)}"
            raise InvalidArgumentError(argument, text, expected) from error
        where = f"{where}:{part}" if where == scope else f"{where}.{part}"
    return found


def _load_file(path: str, argument: str) -> ModuleType:
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise InvalidArgumentError(argument, path, f"an existing Python file; there is none at {file}")
    stat = file.stat()
    # The change time is part of the name, so that an edited file is loaded afresh in a long-lived process.
    key = hashlib.blake2b(f"{file}\0{stat.st_mtime_ns}\0{stat.st_size}".encode(), digest_size=8).hexdigest()
    unique = f"robust_ext_file_{key}"
    if unique in sys.modules:
        return sys.modules[unique]
    spec = importlib.util.spec_from_file_location(unique, file)
    if spec is None or spec.loader is None:
        raise InvalidArgumentError(argument, path, "a file that Python can import")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickle look a module up by its name while and after it is executed.
    sys.modules[unique] = module
    try:
        with _also_searched(file.parent):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[unique]
        raise _import_failure(path, argument, error) from error
    return module


def _load_module(scope: str, text: str, argument: str) -> ModuleType:
    if not _MODULE.fullmatch(scope):
        raise InvalidArgumentError(
            argument, text, "package.module:name, or path/to/file.py:name with a file that ends in .py"
        )
    try:
        with _also_searched(Path.cwd()):
            return importlib.import_module(scope)
    except (Exception, SystemExit) as error:
        packages = [".".join(scope.split(".")[: count + 1]) for count in range(scope.count(".") + 1)]
        if isinstance(error, ModuleNotFoundError) and error.name in packages:
            expected = f"an importable module (there is no {error.name}), or a file written as path/to/file.py:name"
            raise InvalidArgumentError(argument, text, expected) from error
        raise _import_failure(scope, argument, error) from error


def _import_failure(what: str, argument: str, error: BaseException) -> DataError:
    hint = "; move what it runs below `if __name__ == '__main__':`" if isinstance(error, SystemExit) else ""
    return DataError(
        f"{argument}: importing {what} raised {type(error).__name__}: {error}{hint or '; correct it first'}"
    )


@contextmanager
def _also_searched(folder: Path) -> Iterator[None]:
    """Let imports find what lies in ``folder``, after everything that is installed."""
    sys.path.append(str(folder))
    try:
        yield
    finally:
        if str(folder) in sys.path:
            # Remove the last one: the user may have had the folder on the path before.
            del sys.path[len(sys.path) - 1 - sys.path[::-1].index(str(folder))]


def _article(obj: object) -> str:
    return f"of type {type(obj).__name__}"
