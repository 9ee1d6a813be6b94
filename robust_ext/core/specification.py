"""Calls written as text: ``foolbox:LinfPGD(steps=40)``. Arguments are literals of the syntax tree, never evaluated."""

from __future__ import annotations

import ast
import difflib
import inspect
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from robust_ext.core.errors import InvalidArgumentError

_CALL = re.compile(
    r"\s*(?P<scope>[^:].*?)\s*:\s*(?P<name>[^\W\d]\w*(?:\.[^\W\d]\w*)*)\s*(?P<arguments>\(.*\))?\s*", re.DOTALL
)
# Of models, which are also called by folders and by what hubs call them.
_ANY_NAME = re.compile(
    r"\s*(?P<scope>[^:()]*[^:()\s])\s*:\s*(?P<name>[^()]*[^()\s])\s*(?P<arguments>\(.*\))?\s*", re.DOTALL
)
FORM = "scope:name or scope:name(key=value, ...), as in foolbox:LinfPGD(steps=40) or file.py:make(depth=3)"
_LITERALS = (
    "keyword arguments whose values are numbers, fractions such as 8/255, strings, True, False, None, or lists, tuples "
    "and dicts of these"
)


@dataclass(frozen=True, kw_only=True)
class CallSpec:
    """A name with arguments, as parsed from ``text``.

    ``scope`` is what stands before the colon (a library, a module or a file), ``name`` what stands after it, and
    ``arguments`` the keyword arguments, literals only.
    """

    scope: str
    name: str
    arguments: Mapping[str, Any]
    text: str


def parse_call(text: str, *, argument: str = "attack", any_name: bool = False) -> CallSpec:
    """Parse ``scope:name(key=literal, ...)``; the parentheses may be left out.

    Args:
        text: The text.
        argument: What error messages call it.
        any_name: Whether the name may be any text without parentheses; else names of Python with dots between them.

    Raises:
        InvalidArgumentError: The text has another form, or an argument is not a literal.

    Example:
        >>> spec = parse_call("foolbox:LinfPGD(steps=40, abs_stepsize=2/255)")
        >>> spec.scope, spec.name, spec.arguments["steps"], round(spec.arguments["abs_stepsize"], 5)
        ('foolbox', 'LinfPGD', 40, 0.00784)
    """
    match = match_form(text, argument, _ANY_NAME if any_name else _CALL)
    arguments = _parse_arguments(match["arguments"] or "()", text, argument)
    return CallSpec(scope=match["scope"], name=match["name"], arguments=arguments, text=text)


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
            expected = f"one of: {listed}{did_you_mean(name, accepted)}"
            raise InvalidArgumentError(argument, f"{label}({name}=...)", expected)
    for name in accepted:
        if parameters[name].default is inspect.Parameter.empty and name not in keywords:
            raise InvalidArgumentError(argument, f"{label} without {name}", f"{label}({name}=..., ...)")


def did_you_mean(name: str, known: Collection[str]) -> str:
    """A clause naming the known names nearest to ``name``; empty when none is near.

    Example:
        >>> did_you_mean("LinfPDG", ["LinfPGD", "FGSM"])
        '; did you mean LinfPGD?'
    """
    lowered = {entry.lower(): entry for entry in known}
    near = difflib.get_close_matches(name.lower(), lowered, n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(lowered[entry] for entry in near)}?" if near else ""


def match_form(text: str, argument: str, form: re.Pattern[str] = _CALL) -> re.Match[str]:
    """The groups ``scope``, ``name`` and ``arguments`` (None without parentheses) of a text of this form."""
    if not isinstance(text, str):
        raise InvalidArgumentError(argument, type(text).__name__, f"text of the form {FORM}")
    match = form.fullmatch(text)
    if match is None:
        raise InvalidArgumentError(argument, repr(text), FORM)
    return match


def _parse_arguments(source: str, text: str, argument: str) -> dict[str, Any]:
    # The parser and the walk below raise these for nonsense and for nesting deeper than they can follow.
    try:
        call = ast.parse(f"f{source}", mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise InvalidArgumentError(argument, repr(text), FORM)
        if call.args:
            shown = ast.unparse(call.args[0])
            got = f"{text} with the positional argument {shown}"
            raise InvalidArgumentError(argument, got, f"a name for it, key={shown}")
        found: dict[str, Any] = {}
        for keyword in call.keywords:
            if keyword.arg is None or keyword.arg in found:
                raise ValueError("** is not supported" if keyword.arg is None else f"{keyword.arg} is set twice")
            found[keyword.arg] = _literal(keyword.value)
        return found
    except InvalidArgumentError:
        raise
    except (SyntaxError, ValueError, TypeError, ArithmeticError, RecursionError, MemoryError) as error:
        raise InvalidArgumentError(argument, f"{text} ({error})", _LITERALS) from error


def _literal(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=float() as number) if math.isinf(number):
            raise ValueError("a number is too large for floating point; norms are written 'inf'")
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
