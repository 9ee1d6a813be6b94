"""Suites of arms: those that come with the project, and your own in TOML files.

A file is data: its attacks are those of libraries, and your own code only where that is allowed.

A file holds a ``description`` and tables ``[[arms]]``. Each has

- ``attack``: text as on the command line, such as ``"foolbox:LinfPGD(steps=40)"``, with settings for inputs in [0, 1];
- ``norm`` (left out for attacks that no norm limits) and ``epsilons``, one arm each, for inputs in [0, 1] (left out for
  attacks that look for the smallest perturbation);
- ``label``, what tables call it; ``objective`` and ``algorithm``, labels that arms are put together by;
- ``objectives`` and ``algorithms``: lists that fill in the attack's settings of these names, one arm each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Any

from robust_ext.attacks.running import UnitSpaceAttack
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.files import read_toml
from robust_ext.core.specification import did_you_mean, parse_call
from robust_ext.core.threat import ThreatModel, check_epsilon
from robust_ext.core.validation import check_bounds
from robust_ext.evaluations.arms import Arm, check_arms
from robust_ext.registry.base import adapters

_TEXTS = ("attack", "norm", "label", "objective", "algorithm")
_LISTS = ("epsilons", "objectives", "algorithms")
# Arms of a file; each of the paper's has 134.
_MOST_ARMS = 2_000


def suite_names() -> list[str]:
    """Names of the suites that come with the project.

    Example:
        >>> suite_names()
        ['paper-cifar10', 'paper-mnist', 'quick', 'white-box']
    """
    return sorted(file.name.removesuffix(".toml") for file in _folder().iterdir() if file.name.endswith(".toml"))


def as_arms(attacks: object, threat_model: ThreatModel, *, allow_code: bool = False) -> tuple[list[Arm], list[str]]:
    """Arms of a suite's name or file, an :class:`Arm`, an attack, or a list of these; and the suites' names.

    Attacks get the threat model's norm and epsilon; budgets of suites are stretched to its bounds. Files of suites may
    name code where ``allow_code`` is set.
    """
    arms: list[Arm] = []
    suites: list[str] = []
    for one in attacks if isinstance(attacks, (list, tuple)) else [attacks]:
        if isinstance(one, Arm):
            arms.append(one)
        elif isinstance(one, str) and (one.endswith(".toml") or ":" not in one):
            suites.append(one)
            arms += load_suite(one, bounds=threat_model.bounds, allow_code=allow_code)
        else:
            arms.append(Arm(attack=one, norm=threat_model.norm, epsilon=threat_model.epsilon))
    return check_arms(arms), suites


def load_suite(name: str, *, bounds: tuple[float, float] = (0.0, 1.0), allow_code: bool = False) -> list[Arm]:
    """The arms of a suite that comes with the project, or of a ``.toml`` file.

    Budgets and the attacks' settings, which are for inputs in [0, 1], are stretched to the bounds.

    Raises InvalidArgumentError where there is no such suite, an arm is not as described above, or names code
    (``module:callable``, ``file.py:callable``) without ``allow_code``; DataError where the file cannot be read.

    Example:
        >>> [arm.name for arm in load_suite("white-box")][0]
        'OrthogonalPGD linf 0.03125'
    """
    limits = check_bounds(bounds)
    try:
        return _load_suite(name, limits, allow_code=allow_code)
    except InvalidArgumentError as error:
        if str(name) in str(error):
            raise
        raise InvalidArgumentError(f"suite {name}: {error.argument}", error.got, error.expected) from error


def _load_suite(name: str, bounds: tuple[float, float], *, allow_code: bool) -> list[Arm]:
    (low, high), known = bounds, suite_names()
    if not isinstance(name, str) or (not name.endswith(".toml") and name not in known):
        near = did_you_mean(name, known) if isinstance(name, str) else ""
        raise InvalidArgumentError("suite", name, f"one of {', '.join(known)}, or a file NAME.toml{near}")
    file = Path(name) if name.endswith(".toml") else _folder().joinpath(f"{name}.toml")
    content = read_toml(file, name=name, kind="suite", see="see robust_ext.evaluations.mead.suites")
    unknown, tables = sorted(set(content) - {"description", "arms"}), content.get("arms")
    if unknown or not isinstance(tables, list):
        raise InvalidArgumentError("suite", f"{name} with {', '.join(unknown) or 'no arms'}", "tables [[arms]]")
    lists = [_check_table(table, name) for table in tables]
    count = sum(math.prod(map(len, one)) for one in lists)
    if count > _MOST_ARMS:
        raise InvalidArgumentError("suite", f"{name} with {count} arms", f"at most {_MOST_ARMS}")
    for table in () if allow_code else tables:
        _check_library(table["attack"], name)
    made = check_arms(
        _arm(table, name, high - low, *chosen)
        for table, values in zip(tables, lists, strict=True)
        for chosen in product(*values)
    )
    if (low, high) == (0.0, 1.0):
        return made
    # Attacks on a detector have settings relative to epsilon alone: what a detector is given is in its own bounds.
    return [arm if arm.resolved.traits.detector else replace(arm, attack=UnitSpaceAttack(arm.resolved)) for arm in made]


def _check_table(table: Any, name: str) -> list[list[Any]]:
    """Return epsilons, objectives and algorithms of a table of a suite's file, ``[None]`` where it has none."""
    if not isinstance(table, Mapping) or not isinstance(table.get("attack"), str):
        raise InvalidArgumentError("suite", f"{name}: an arm without the text 'attack'", 'attack = "library:Name()"')
    keys = (*_TEXTS, *_LISTS)
    if unknown := sorted(set(table) - set(keys)):
        expected = f"one of {', '.join(keys)}{did_you_mean(unknown[0], keys)}"
        raise InvalidArgumentError("suite", f"{name}: the key {unknown[0]} of an arm", expected)
    lists = [table.get(key, [None]) for key in _LISTS]
    for key, values in zip(_LISTS, lists, strict=True):
        if not isinstance(values, list) or not values:
            raise InvalidArgumentError("suite", f"{name}: {key} = {values!r}", "a list of at least one value")
    words = [*(table.get(key) for key in _TEXTS), *lists[1], *lists[2]]
    if wrong := [word for word in words if word is not None and not isinstance(word, str)]:
        raise InvalidArgumentError("suite", f"{name}: {wrong[0]!r} of an arm", "text in quotation marks")
    return lists


def _arm(
    table: Mapping[str, Any], name: str, width: float, epsilon: object, objective: str | None, algorithm: str | None
) -> Arm:
    chosen = {"objective": objective, "algorithm": algorithm}
    attack, settings = table["attack"], ", ".join(f"{key}={value!r}" for key, value in chosen.items() if value)
    if settings:
        head, _, rest = attack.partition("(")
        inside = rest.rpartition(")")[0].strip()
        attack = f"{head}({inside}{', ' if inside else ''}{settings})"
    words = [table.get("label") or (algorithm or table.get("algorithm") or "").upper()]
    if objective is not None:
        words.append({"fisher-rao": "FR", "gini": "Gini"}.get(objective, objective.upper()))
    return Arm(
        attack=attack,
        norm=table.get("norm"),
        epsilon=None if epsilon is None else check_epsilon(epsilon, argument=f"{name}: an epsilon") * width,
        label="-".join(word for word in words if word) or None,
        objective=objective or table.get("objective"),
        algorithm=algorithm or table.get("algorithm"),
    )


def _check_library(attack: str, name: str) -> None:
    """Raise where an attack is not one of an installed library."""
    spec = parse_call(attack, argument="attack")
    if isinstance(inside := spec.arguments.get("attack"), str):
        _check_library(inside, name)
    surrogates = spec.arguments.get("surrogates", ())
    for network in surrogates.values() if isinstance(surrogates, Mapping) else [surrogates] if surrogates else ():
        _check_library(str(network), name)
    if spec.scope not in adapters():
        raise InvalidArgumentError(
            "suite",
            f"{name} with the attack {attack!r}, which is code",
            f"an attack of {', '.join(sorted(adapters()))}; if you trust the file, --allow-code (allow_code=True) "
            "runs what it names",
        )


def parse_arm(text: str) -> list[Arm]:
    """Arms from the command line: ``NORM:EPSILON[,EPSILON...]=ATTACK``, ``NORM=ATTACK`` or ``none=ATTACK``.

    Budgets are in the units of the inputs and may be fractions.

    Example:
        >>> [arm.group for arm in parse_arm("linf:8/255,0.1=robust_ext:ObjectivePGD(steps=40)")]
        ['linf 8/255', 'linf 0.1']
    """
    budget, found, attack = text.partition("=")
    norm, _, epsilons = budget.partition(":")
    if not found or not attack:
        raise InvalidArgumentError("arm", text, "NORM:EPSILON=ATTACK, as in linf:8/255=foolbox:LinfPGD(steps=40)")
    kind = None if norm.strip() == "none" else norm.strip()
    if not epsilons:
        return [Arm(attack=attack, norm=kind)]
    return [Arm(attack=attack, norm=kind, epsilon=_fraction(part)) for part in epsilons.split(",")]


def _fraction(text: str) -> float:
    above, _, below = text.partition("/")
    try:
        return float(above) / (float(below) if below else 1.0)
    except (ValueError, ZeroDivisionError) as error:
        raise InvalidArgumentError("arm", text, "a number or a fraction such as 8/255") from error


def _folder() -> Any:
    return resources.files("robust_ext.evaluations.mead").joinpath("suites")
