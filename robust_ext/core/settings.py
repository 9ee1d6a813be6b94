"""Settings declared once: type, default, range, words and host names of each, in one place.

A class of settings is a frozen dataclass whose fields are made by :func:`setting`. Its constructor validates them, and
the command line's options, the documentation and the Foolbox and ART classes are made from the same declarations.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from torch import Tensor
from typing_extensions import dataclass_transform

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.foreign import meant_instead, teaching
from robust_ext.core.objects import qualified_name
from robust_ext.core.specification import did_you_mean
from robust_ext.core.validation import check_choice, check_integer, check_number

C = TypeVar("C")
S = TypeVar("S", bound="Settings")
# Upper ends of numbers without a declared one, and of seeds.
LARGEST, LARGEST_SEED = 10**9, 2**63 - 1
_KEY = "robust_ext"
_WIDTH = 112
_SECTION = re.compile(r"\n\n    (?:Attributes|Returns|Raises|Example):")


@dataclass(frozen=True)
class SettingInfo:
    """The declaration of one setting besides its type and default; see :func:`setting`."""

    help: str
    minimum: float | None
    maximum: float | None
    above: float | None
    below: float | None
    choices: tuple[str, ...] | None
    check: Callable[[Any], Any] | None
    trial: Any
    names: Mapping[str, str | None]


def setting(
    default: Any = dataclasses.MISSING,
    help: str = "",
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    below: float | None = None,
    choices: tuple[str, ...] | None = None,
    check: Callable[[Any], Any] | None = None,
    trial: Any = dataclasses.MISSING,
    **names: str | None,
) -> Any:
    """Declare one field of a :func:`settings_class`; by keywords alone, as type checkers look for ``default``.

    Args:
        default: Its value where none is given; left out for a required setting.
        help: One or more sentences: what it is, in which units.
        minimum: Lowest value, itself allowed.
        maximum: Highest value, itself allowed; :data:`LARGEST` where neither it nor ``below`` is given.
        above: Lower end, itself not allowed.
        below: Upper end, itself not allowed.
        choices: The strings that are accepted, any but the empty one where left out; of a number, those accepted
            besides (``"auto"``); of a tuple, those that it may hold.
        check: Checks a value and returns it, in place of the checks that follow from its type.
        trial: A value with which an attack runs fast, for tests of every attack.
        **names: Its name in a host library or on the command line, where that differs (``foolbox="steps"``,
            ``art="max_iter"``, ``cli="--C"``); None hides it there. ``panel`` is the command line's panel that shows
            it, ``"test"`` where left out.

    Returns:
        A ``dataclasses.field``.
    """
    info = SettingInfo(help, minimum, maximum, above, below, choices, check, trial, types.MappingProxyType(names))
    return dataclasses.field(default=default, metadata={_KEY: info})


class Settings:
    """Base of classes of settings: validation, a description, plain values."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    label: ClassVar[str]

    def __post_init__(self) -> None:
        """Validate each setting; a subclass that checks more calls this first.

        Raises:
            InvalidArgumentError: A setting is outside its range.
        """
        for name, info in declared(type(self)).items():
            object.__setattr__(self, name, check_setting(type(self), name, info, getattr(self, name)))

    @property
    def description(self) -> str:
        """The class with all its settings, as in ``APGD(steps=100, ...)``; the same in every process."""
        shown = ", ".join(f"{name}={_shown(value)}" for name, value in self.to_dict().items())
        return f"{type(self).__name__}({shown})"

    def __repr__(self) -> str:
        return self.description

    def _set(self, name: str, value: object) -> None:
        """Set an attribute that follows from the settings; for ``__post_init__``, as the class is frozen."""
        object.__setattr__(self, name, value)

    def to_dict(self) -> dict[str, Any]:
        """All settings by name."""
        return {name: getattr(self, name) for name in declared(type(self))}


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(setting, dataclasses.field))
def settings_class(cls: type[C]) -> type[C]:
    """Make a subclass of :class:`Settings` a frozen keyword-only dataclass, its docstring completed with ``Args:``.

    A setting of its base that is declared again without words has another default (or ``trial``) and is otherwise that
    of the base.

    Example:
        >>> @settings_class
        ... class Search(Settings):
        ...     steps: int = setting(default=100, help="Gradients a run takes.", minimum=1, art="max_iter")
        >>> Search(steps=5).description
        'Search(steps=5)'
        >>> Search(steps=0)
        Traceback (most recent call last):
        ...
        robust_ext.core.errors.InvalidArgumentError: steps: got 0, expected an integer of at least 1
    """
    keep_words(cls)
    made = teaching(dataclass(frozen=True, kw_only=True, repr=False, eq=False)(cls))
    complete_docstring(made)
    return made


def keep_words(cls: type) -> None:
    """Give settings that are declared again without words those of the base, and all else but default and trial."""
    for name, info in declared(cls.__base__ or object).items():
        again: Any = cls.__dict__.get(name)
        if (own := getattr(again, "metadata", {}).get(_KEY)) and not own.help:
            trial = info.trial if own.trial is dataclasses.MISSING else own.trial
            again.metadata = types.MappingProxyType({_KEY: dataclasses.replace(info, trial=trial)})


def complete_docstring(cls: type, *, first: Mapping[str, str] = {}, attributes: Mapping[str, str] = {}) -> None:
    """Add ``Args:`` to the docstring of a class, unless it has them: the settings it declares.

    Args:
        cls: The class.
        first: Arguments before the settings, with what they are.
        attributes: What goes under ``Attributes:``, before what stands there.
    """
    # From Python 3.13 on, docstrings have no indentation.
    text = textwrap.indent(inspect.cleandoc(cls.__doc__ or ""), " " * 4).lstrip()
    lines = [*map(_documented, first, first.values())]
    lines += [_documented(name, info.help) for name, info in declared(cls).items()]
    if not lines or "Args:" in text:
        return
    found = _SECTION.search(text)
    head, rest = (text[: found.start()], text[found.start() :]) if found else (text, "")
    made = "\n\n    Args:\n" + "\n".join(lines)
    if attributes:
        made += "\n\n    Attributes:\n" + "\n".join(map(_documented, attributes, attributes.values()))
        rest = rest.removeprefix("\n\n    Attributes:")
    cls.__doc__ = head + made + rest


def declared(cls: type) -> Mapping[str, SettingInfo]:
    """The settings that a class declares, by name, in order."""
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    return {field.name: field.metadata[_KEY] for field in fields if _KEY in field.metadata}


@functools.cache
def setting_types(cls: type) -> Mapping[str, Any]:
    """The annotated types of a class's settings, resolved."""
    hints = typing.get_type_hints(cls)
    return {name: hints[name] for name in declared(cls)}


def default_of(cls: type, name: str) -> Any:
    """The default of a setting; ``dataclasses.MISSING`` where it is required."""
    return cls.__dataclass_fields__[name].default  # type: ignore[attr-defined]


def make_settings(cls: type[S], options: Mapping[str, Any], *, base: S | None = None, **fixed: Any) -> S:
    """Settings from keywords, as a caller wrote them; InvalidArgumentError for an unknown one or outside its range.

    The others are those of ``base``, or the defaults; ``fixed`` are fields of the class that are no settings.
    """
    known = declared(cls)
    if base is not None and not isinstance(base, cls):
        raise InvalidArgumentError("settings", type(base).__name__, f"{cls.__name__}(...), or None for the defaults")
    for name in options:
        if name not in known:
            nearest = meant_instead(name, known) or did_you_mean(name, known)
            listed = f"a setting of {cls.label}: {', '.join(known)}{nearest}"
            raise InvalidArgumentError(name, "an unknown setting", listed)
    given = {} if base is None else {field.name: getattr(base, field.name) for field in dataclasses.fields(base)}
    return cls(**{**given, **fixed, **options})


def trial_settings(cls: type) -> dict[str, Any]:
    """The values with which a class of attacks runs fast, of those settings that state one."""
    return {name: info.trial for name, info in declared(cls).items() if info.trial is not dataclasses.MISSING}


def check_setting(cls: type, name: str, info: SettingInfo, value: Any) -> Any:
    """The value of a setting, checked against its declaration.

    ``int``, ``float``, ``bool``, ``str``, sequences of them as in ``tuple[float, ...]``, classes, and each ``| None``,
    are checked; values of other types are left as they are.

    Raises:
        InvalidArgumentError: It is outside its range.
    """
    annotation = setting_types(cls)[name]
    kinds = set(typing.get_args(annotation)) if isinstance(annotation, types.UnionType) else {annotation}
    if value is None and type(None) in kinds:
        return None
    if info.check is not None:
        return info.check(value)
    for kind in kinds:
        if typing.get_origin(kind) in (tuple, Sequence):
            return _check_tuple(name, info, value, typing.get_args(kind)[0])
    if isinstance(value, str) and not value and str in kinds:
        raise InvalidArgumentError(name, "an empty text", "a text that is not empty")
    return _check_plain(name, info, value, kinds - {type(None)})


def _check_plain(name: str, info: SettingInfo, value: Any, kinds: set[Any]) -> Any:
    if bool in kinds and not isinstance(value, bool):
        raise InvalidArgumentError(name, value, "True or False")
    numeric = kinds & {int, float} and bool not in kinds
    if info.choices is not None and str in kinds and (isinstance(value, str) or kinds <= {str}):
        if numeric and value not in info.choices:
            choices = " or ".join(map(repr, info.choices))
            raise InvalidArgumentError(name, repr(value), f"{choices} or an integer of at least {info.minimum}")
        return check_choice(name, value, info.choices)
    if numeric:
        return _check_numeric(name, info, value, integer=float not in kinds)
    classes = tuple(kind for kind in kinds if isinstance(kind, type) and kind is not Any)
    if len(classes) == len(kinds) and not isinstance(value, classes):
        words = " or ".join(sorted(kind.__name__ for kind in classes))
        raise InvalidArgumentError(name, type(value).__name__, f"an object of the class {words}")
    return value


def _check_tuple(name: str, info: SettingInfo, value: Any, kind: Any) -> tuple[Any, ...]:
    # Arrays without dimensions are collections by their methods, and cannot be iterated over.
    flat = isinstance(value, Collection) and getattr(value, "ndim", 1) != 0
    if isinstance(value, (str, bytes, Mapping)) or not flat:
        entries = "numbers" if info.choices is None else f"some of {', '.join(info.choices)}"
        raise InvalidArgumentError(name, repr(value), f"a tuple of {entries}")
    return tuple(_check_plain(name, info, entry, {kind}) for entry in value)


def _check_numeric(name: str, info: SettingInfo, value: Any, *, integer: bool) -> int | float:
    if integer:
        # Every integer setting declares its lower end.
        minimum, maximum = int(info.minimum or 0), None if info.maximum is None else int(info.maximum)
        check_integer(name, value, minimum=minimum, maximum=maximum)
        return check_integer(name, value, minimum=minimum, maximum=LARGEST if maximum is None else maximum)
    lowest = info.minimum if info.above is None else info.above
    highest = info.maximum if info.below is None else info.below
    return check_number(
        name,
        value,
        minimum=-LARGEST if lowest is None else lowest,
        maximum=LARGEST if highest is None else highest,
        open_minimum=info.above is not None,
        open_maximum=info.below is not None,
    )


def _shown(value: object) -> str:
    """A value as text that is the same in every process: a callable by where it is defined, a tensor by its shape."""
    description = getattr(value, "description", None)
    if isinstance(description, str):
        return description
    if callable(value):
        return qualified_name(value)
    return f"tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


def _documented(name: str, help: str) -> str:
    wrap: Callable[..., str] = textwrap.fill
    return wrap(f"{name}: {help}", _WIDTH, initial_indent=" " * 8, subsequent_indent=" " * 12, break_on_hyphens=False)
