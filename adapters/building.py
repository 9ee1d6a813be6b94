"""This project's own attacks as classes of a host library, made from their declarations."""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from robust_ext.attacks.native import NativeAttack
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.settings import declared, default_of, setting_types
from robust_ext.core.validation import check_integer

_WIDTH = 116


@dataclass(frozen=True, kw_only=True)
class HostParameter:
    """One parameter of the constructor of a host's class.

    Args:
        name: In the host's words.
        annotation: Its type.
        default: Its value where none is given; ``inspect.Parameter.empty`` for a required one.
        help: One or more sentences.
        setting: The attack's setting whose value it is; None for those the host's class deals with itself.
    """

    name: str
    annotation: Any
    default: Any
    help: str
    setting: str | None = None

    def parameter(self, kind: Any) -> inspect.Parameter:
        """Return the parameter of a signature."""
        return inspect.Parameter(self.name, kind, default=self.default, annotation=self.annotation)


SEED = HostParameter(
    name="seed",
    annotation=int | None,
    default=None,
    help="Of all draws, the same in every call; None: what the host's global seed makes of them.",
)


def host_parameters(attack_class: type[NativeAttack], host: str) -> list[HostParameter]:
    """Return an attack's settings under their names in a host, ``"foolbox"`` or ``"art"``, where they have one."""
    kinds, found = setting_types(attack_class), []
    for setting, info in declared(attack_class).items():
        name, default = info.names.get(host, setting), default_of(attack_class, setting)
        if name is not None:
            default = inspect.Parameter.empty if default is dataclasses.MISSING else default
            annotation = kinds[setting]
            found.append(
                HostParameter(name=name, annotation=annotation, default=default, help=info.help, setting=setting)
            )
    return found


def draws(attack_class: type[NativeAttack]) -> bool:
    """Return whether an attack may draw random numbers, and so has a seed."""
    return attack_class.traits.seeds != "none"


def cannot_aim(attack: NativeAttack) -> str | None:
    """Return why an attack with its settings cannot be targeted; None where it can."""
    objective = getattr(attack, "objective", "ace")
    if objective != "ace":
        return f"{objective!r} looks at no labels to aim at; only 'ace' does"
    return None if attack.aims else "it cannot aim at a class"


def make_constructor(parameters: Iterable[inspect.Parameter]) -> Callable[..., None]:
    """Make an ``__init__`` with these parameters after ``self`` that passes their values by name to ``self._start``."""
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    signature = inspect.Signature([own, *parameters], return_annotation=None)

    def construct(self: Any, *arguments: Any, **keywords: Any) -> None:
        bound = signature.bind(self, *arguments, **keywords)
        bound.apply_defaults()
        values = dict(bound.arguments)
        del values["self"]
        self._start(**values)

    construct.__name__ = "__init__"
    construct.__signature__ = signature  # type: ignore[attr-defined]
    return construct


def make_docstring(attack_class: type[NativeAttack], parameters: Iterable[HostParameter], *, first: str = "") -> str:
    """Make the docstring of an attack's class with a host's parameters; ``first`` opens it."""
    text = inspect.cleandoc(attack_class.__doc__ or "")
    for section in ("\n\nArgs:", "\n\nExample:", "\n\nRaises:"):
        text = text.partition(section)[0]
    summary, _, rest = text.partition("\n\n")
    see = f"See :class:`{attack_class.__module__}.{attack_class.__name__}`."
    parts = [f"{first}{summary}", *([rest] if rest else []), see]
    lines = [_entry(parameter) for parameter in parameters]
    return "\n\n".join(parts) + "\n\nArgs:\n" + "\n".join(lines) + "\n"


def _entry(parameter: HostParameter) -> str:
    return textwrap.fill(
        f"{parameter.name}: {parameter.help}",
        _WIDTH,
        initial_indent=" " * 4,
        subsequent_indent=" " * 8,
        break_on_hyphens=False,
    )


def build_attack(attack_class: type[NativeAttack], values: Mapping[str, Any], names: Mapping[str, str]) -> NativeAttack:
    """Make the attack with these settings; errors use the host's ``names`` of them."""
    try:
        return attack_class(**values)
    except InvalidArgumentError as error:
        if names.get(error.argument, error.argument) == error.argument:
            raise
        raise InvalidArgumentError(names[error.argument], error.got, error.expected) from error


def check_seed(seed: int | None) -> int | None:
    """Return a seed when it is None or an integer that torch takes."""
    return None if seed is None else check_integer("seed", seed, minimum=0, maximum=2**63 - 1)
