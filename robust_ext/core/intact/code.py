"""Functions and classes at one moment: methods, functions of torch and of this project, and torch's global hooks."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from operator import attrgetter, is_
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import nn

from robust_ext.core.intact.bookkeeping import assigns

_JUDGING = ("robust_ext.core", "robust_ext.models", "robust_ext.engine", "robust_ext.evaluations")
_TORCH = (torch, nn.functional, torch.linalg, builtins)
_FOLDER = str(Path(torch.__file__).parent)
_CONTENTS = tuple(map(attrgetter, ("__code__", "__defaults__", "__kwdefaults__")))
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
    functions: list[tuple[str, FunctionType]] = field(default_factory=list)  # Theirs, but torch's, with names


_JUDGES = _Judges()


class CodeState:
    """What runs when networks with modules of these classes are queried and what comes back is judged."""

    def __init__(self, classes: Iterable[type]) -> None:
        bases = {base for kind in classes for base in kind.__mro__ if base is not object}
        written = [sys.modules.get(kind.__module__) for kind in bases if not kind.__module__.startswith("torch.")]
        own = {id(owner): owner for owner in _namespaces()}
        added = {id(owner): owner for owner in (*bases, *written) if owner is not None and id(owner) not in own}
        self._kept = [(owner, vars(owner).copy()) for owner in (*own.values(), *added.values())]
        self._functions = _JUDGES.functions + _functions(added.values())
        self._code = self._contents()
        self._hooks = {name: dict(value) for name, value in _HOOKS.items()}

    def restore(self) -> list[str]:
        """Put everything back; what had been patched."""
        patched = []
        for owner, kept in self._kept:
            now = vars(owner)
            if len(now) == len(kept) and all(map(is_, now.values(), kept.values())):
                continue
            patched += [f"{owner.__name__}.{name}" for name in _restore(owner, now, kept)]
        found = self._contents()
        if found != self._code:  # Compared one by one they take longer, and nearly always all are the same.
            pairs = zip(zip(*found, strict=True), zip(*self._code, strict=True), strict=True)
            for (name, function), (new, contents) in zip(self._functions, pairs, strict=True):
                if new != contents:
                    function.__code__, function.__defaults__, function.__kwdefaults__ = contents
                    patched.append(name)
        for name, kept in self._hooks.items():
            now = _HOOKS[name]
            if list(map(id, now.values())) != list(map(id, kept.values())):
                now.clear()
                now.update(kept)
                patched.append(f"torch's {name[1:].replace('_', ' ')}")
        return patched

    def _contents(self) -> list[list[Any]]:
        """Code, defaults and keyword defaults of each function, by part."""
        functions = [function for _, function in self._functions]
        return [list(map(part, functions)) for part in _CONTENTS]


# What the first guards inside :func:`settled` found, by the number of modules loaded then and the networks' classes.
_SETTLED: ContextVar[dict[tuple[int, frozenset[type]], CodeState] | None] = ContextVar("robust_ext_code", default=None)


@contextmanager
def settled() -> Iterator[None]:
    """Inside the block guards compare with what the first of them found, so that it is not looked at before each.

    What is changed between them, as by a thread that an attack left running, is put back by the next one.
    """
    token = _SETTLED.set({})
    try:
        yield
    finally:
        _SETTLED.reset(token)


def code_state(classes: Iterable[type]) -> CodeState:
    """The code that counts for networks with modules of these classes, as it is now, or has to be."""
    found, states = frozenset(classes), _SETTLED.get()
    if states is None:
        return CodeState(found)
    key = len(sys.modules), found
    if key not in states:
        states[key] = CodeState(found)
    return states[key]


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
        _JUDGES.functions = _functions(owners)
        _JUDGES.found = [*_TORCH, torch.Tensor, nn.Parameter, *owners]
    return _JUDGES.found


def _functions(owners: Iterable[Any]) -> list[tuple[str, FunctionType]]:
    """Each once, however many modules import it, with its first name."""
    found: dict[FunctionType, str] = {}
    for owner in owners:
        for name, value in vars(owner).items():
            if isinstance(value, FunctionType):
                found.setdefault(value, f"{owner.__name__}.{name}")
    return [(name, function) for function, name in found.items()]


def _restore(owner: Any, now: Mapping[str, Any], kept: Mapping[str, Any]) -> list[str]:
    """Put back what was replaced, and take away what hides something; names of both."""
    replaced = [
        name
        for name, value in kept.items()
        if (new := now.get(name)) is not value and not _of_torch(new) and _counts(owner, name, value)
    ]
    for name in replaced:
        setattr(owner, name, kept[name])
    hiding = [name for name, value in now.items() if name not in kept and _hides(owner, name, value)]
    for name in hiding:
        delattr(owner, name)
    return replaced + hiding


def _counts(owner: Any, name: str, value: object) -> bool:
    """Whether it matters that this attribute was replaced."""
    special = name.startswith("__")
    if isinstance(owner, type):
        return _runs(value) or not (special or assigns(owner, name))
    if owner in _TORCH:
        # Some classes stand for settings of torch.
        return callable(value) and not (owner is torch and isinstance(value, type))
    # In files with networks of a user there may be anything.
    return not special if owner.__name__.startswith(_JUDGING) else isinstance(value, FunctionType)


def _hides(owner: Any, name: str, value: object) -> bool:
    """Whether something new stands before what was found under this name: a builtin, a base's method, a parameter."""
    if not isinstance(owner, type):
        return callable(value) and hasattr(builtins, name) and owner.__name__.startswith(_JUDGING)
    if _of_torch(value) or not (_runs(value) or isinstance(value, torch.Tensor)):
        return False
    inherited = any(name in vars(base) for base in owner.__mro__[1:])
    return inherited or (issubclass(owner, nn.Module) and not name.startswith("__"))


def _runs(value: object) -> bool:
    return callable(value) or hasattr(value, "__get__")


def _of_torch(value: object) -> bool:
    """Whether a function is torch's own: parts of it that are imported late wrap others."""
    code = getattr(value, "__code__", None)
    return code is not None and code.co_filename.startswith(_FOLDER)
