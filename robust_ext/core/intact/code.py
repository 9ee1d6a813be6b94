"""Functions and classes at one moment: methods, functions of torch and of this project, and torch's global hooks."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter, is_
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import nn

_JUDGING = ("robust_ext.core", "robust_ext.models", "robust_ext.engine", "robust_ext.evaluations")
_TORCH = (torch, nn.functional, torch.linalg, builtins)
_FOLDER = str(Path(torch.__file__).parent)
_CONTENTS = attrgetter("__code__", "__defaults__", "__kwdefaults__")
_HOOKS = {
    name: value
    for name, value in vars(nn.modules.module).items()
    if name.startswith("_global_") and isinstance(value, dict)
}


@dataclass
class _Judges:
    """What was found when so many modules were loaded: the search takes longer than the comparison."""

    loaded: int = 0
    found: list[Any] = field(default_factory=list)
    functions: dict[str, FunctionType] = field(default_factory=dict)  # Theirs, but torch's, by name


_JUDGES = _Judges()


class CodeState:
    """What runs when networks with modules of these classes are queried and what comes back is judged."""

    def __init__(self, classes: Iterable[type]) -> None:
        owners: dict[int, Any] = {id(owner): owner for owner in _namespaces()}
        bases = {base for kind in classes for base in kind.__mro__ if base is not object}
        owners |= {id(base): base for base in bases}
        self._kept = [(owner, dict(vars(owner))) for owner in owners.values()]
        methods = {f"{kind.__name__}.{name}": value for kind in bases for name, value in vars(kind).items()}
        functions = {
            **_JUDGES.functions,
            **{name: one for name, one in methods.items() if isinstance(one, FunctionType)},
        }
        self._names, self._functions = list(functions), list(functions.values())
        self._code = list(map(_CONTENTS, self._functions))
        self._hooks = {name: dict(value) for name, value in _HOOKS.items()}

    def restore(self) -> list[str]:
        """Put everything back; what had been patched."""
        patched = []
        for owner, kept in self._kept:
            now = vars(owner)
            if len(now) == len(kept) and all(map(is_, now.values(), kept.values())):
                continue
            patched += [f"{owner.__name__}.{name}" for name in _restore(owner, now, kept)]
        if list(map(_CONTENTS, self._functions)) != self._code:
            for name, function, contents in zip(self._names, self._functions, self._code, strict=True):
                if _CONTENTS(function) != contents:
                    function.__code__, function.__defaults__, function.__kwdefaults__ = contents
                    patched.append(name)
        for name, kept in self._hooks.items():
            now = _HOOKS[name]
            if list(map(id, now.values())) != list(map(id, kept.values())):
                now.clear()
                now.update(kept)
                patched.append(f"torch's {name[1:].replace('_', ' ')}")
        return patched


def _namespaces() -> list[Any]:
    """Modules of torch and of this project, and this project's classes."""
    if _JUDGES.loaded != len(sys.modules):
        _JUDGES.loaded = len(sys.modules)
        own = [module for name, module in sys.modules.items() if name.startswith(_JUDGING)]
        classes = [
            value
            for module in own
            for value in vars(module).values()
            if isinstance(value, type) and value.__module__ == module.__name__
        ]
        owners: list[Any] = [*own, *classes]
        _JUDGES.functions = {
            f"{owner.__name__}.{name}": value
            for owner in owners
            for name, value in vars(owner).items()
            if isinstance(value, FunctionType)
        }
        _JUDGES.found = [*_TORCH, torch.Tensor, nn.Parameter, *owners]
    return _JUDGES.found


def _restore(owner: Any, now: Mapping[str, Any], kept: Mapping[str, Any]) -> list[str]:
    """Put back what was replaced, and take away what hides something; names of both."""
    replaced = [name for name, value in kept.items() if now.get(name) is not value and _counts(owner, name, value, now)]
    for name in replaced:
        setattr(owner, name, kept[name])
    hidden = owner.__mro__[1:] if isinstance(owner, type) else (builtins,)
    hiding = [
        name
        for name in now
        if name not in kept and callable(now[name]) and any(name in vars(place) for place in hidden)
    ]
    for name in hiding:
        delattr(owner, name)
    return replaced + hiding


def _counts(owner: Any, name: str, value: object, now: Mapping[str, Any]) -> bool:
    """Whether it matters that this attribute was replaced."""
    if isinstance(owner, type):
        return (callable(value) or hasattr(value, "__get__")) and not _of_torch(now.get(name))
    if owner in _TORCH:
        # Some classes stand for settings of torch.
        setting = owner is torch and isinstance(value, type)
        return callable(value) and not setting and not _of_torch(now.get(name))
    return not name.startswith("__")


def _of_torch(value: object) -> bool:
    """Whether a function is torch's own: parts of it that are imported late wrap others."""
    code = getattr(value, "__code__", None)
    return code is not None and code.co_filename.startswith(_FOLDER)
