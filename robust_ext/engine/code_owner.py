"""Whose code a module is."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

from robust_ext.core.source_files import is_installed

_OURS = __name__.split(".")[0]


def module_globals(kind: type) -> Mapping[str, Any]:
    """Of the module that a class is written in."""
    name = str(kind.__module__)
    return vars(sys.modules[name]) if name in sys.modules else {"__name__": name}


def owner_of(scope: Mapping[str, Any]) -> str:
    """Whose code a module is, by its globals: own, library (of Python), installed, file (a user's) or script.

    A script is ``__main__`` and whatever is in no file: an interpreter's, a notebook's.
    """
    name, file = str(scope.get("__name__")), scope.get("__file__")
    top = name.split(".")[0]
    if top == _OURS or name == "__main__":
        return "own" if top == _OURS else "script"
    if file is None or not Path(file).is_file():
        if top in sys.stdlib_module_names:
            return "library"
        above = getattr(sys.modules.get(top), "__file__", None)
        return "installed" if above is not None and is_installed(above) else "script"
    if is_installed(file):
        return "library" if top in sys.stdlib_module_names else "installed"
    return "file"


def is_users(value: object) -> bool:
    """Whether a callable or object is written by a user, or wraps what is."""
    while isinstance(value, (partial, MethodType)):
        value = value.func if isinstance(value, partial) else value.__func__
    scope = value.__globals__ if isinstance(value, FunctionType) else module_globals(type(value))
    return owner_of(scope) in ("file", "script")
