"""Modules whose settings and buffers are declared: each once, as a field of the class."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from typing_extensions import Self, dataclass_transform

from robust_ext.core.foreign import teaching
from robust_ext.core.settings import check_setting, complete_docstring, declared, keep_words, setting

C = TypeVar("C")
_BUFFER, _HELP = "robust_ext.buffer", "robust_ext.help"


def buffer(help: str, *, dtype: torch.dtype = torch.float32, init: Literal[False] = False) -> Any:
    """Declare a buffer of a :func:`module_class`, no argument of its constructor, empty until something is assigned."""
    return dataclasses.field(init=init, metadata={_BUFFER: dtype, _HELP: help})


def positional(help: str, *, kw_only: Literal[False]) -> Any:
    """Declare a leading argument of the constructor of a :func:`module_class` that is no setting, such as a network."""
    return dataclasses.field(kw_only=kw_only, metadata={_HELP: help})


def given(help: str, *, default: Any = dataclasses.MISSING, default_factory: Any = dataclasses.MISSING) -> Any:
    """Declare a keyword of the constructor of a :func:`module_class` that is no setting of a user's.

    Args:
        help: What it is: a function, a module, or what an evaluation decides, as the bounds.
        default: Its value where none is given.
        default_factory: What makes that value; for modules and functions, which a class must not hold.
    """
    field: Any = dataclasses.field
    return field(default=default, default_factory=default_factory, metadata={_HELP: help})


class SettingsModule(nn.Module):
    """Base of modules with declared settings, which the constructor validates and sets as attributes.

    A subclass is a :func:`module_class`. What it makes of its settings it does in ``__post_init__``, where it calls
    this class's first.
    """

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Make the module ready for attributes, which a generated constructor sets at once."""
        made = super().__new__(cls)
        nn.Module.__init__(made)
        return made

    def __post_init__(self) -> None:
        """Validate each setting, and register the declared buffers.

        Raises:
            InvalidArgumentError: A setting is outside its range.
        """
        for name, info in declared(type(self)).items():
            setattr(self, name, check_setting(type(self), name, info, getattr(self, name)))
        for field in _fields(type(self)):
            if _BUFFER in field.metadata:
                self.register_buffer(field.name, torch.empty(0, dtype=field.metadata[_BUFFER]))

    @property
    def settings(self) -> dict[str, Any]:
        """Keyword arguments, besides networks, with which the constructor makes such a module; JSON values."""
        return {name: plain(getattr(self, name)) for name in declared(type(self))}


@dataclass_transform(kw_only_default=True, field_specifiers=(setting, buffer, given, positional, dataclasses.field))
def module_class(cls: type[C]) -> type[C]:
    """Give a subclass of :class:`SettingsModule` the constructor that its fields declare, and complete its docstring.

    Example:
        >>> @module_class
        ... class Scale(SettingsModule):
        ...     factor: float = setting(2.0, "Of the input.", above=0)
        ...
        ...     def forward(self, x):
        ...         return self.factor * x
        >>> Scale(factor=3)(1), Scale().settings
        (3.0, {'factor': 2.0})
        >>> Scale(factor=0)
        Traceback (most recent call last):
        ...
        robust_ext.core.errors.InvalidArgumentError: factor: got 0, expected a finite number in (0, 1e+09]
    """
    keep_words(cls)
    made = dataclasses.dataclass(kw_only=True, repr=False, eq=False)(cls)
    documented = {field.name: field.metadata[_HELP] for field in _fields(made) if _HELP in field.metadata}
    buffers = {field.name for field in _fields(made) if _BUFFER in field.metadata}
    complete_docstring(
        made,
        first={name: help for name, help in documented.items() if name not in buffers},
        attributes={name: help for name, help in documented.items() if name in buffers},
    )
    return teaching(made)


def plain(value: Any) -> Any:
    """A value of lists, dicts and what they hold only, as JSON has them."""
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, (list, tuple)) else value


def _fields(cls: type) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
