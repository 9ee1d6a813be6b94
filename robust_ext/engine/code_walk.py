"""What objects consist of: classes, functions and the values they hold, as texts that are the same in every process."""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import sys
import types
from collections import deque
from collections.abc import Callable, Collection, Mapping
from functools import _lru_cache_wrapper, cached_property, partial, partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from robust_ext.core.objects import module_scope, qualified_name
from robust_ext.core.source_files import SourceFiles
from robust_ext.core.target import PassCounter
from robust_ext.engine.code_owner import is_users, module_globals, owner_of
from robust_ext.engine.compiled_code import global_names, imported_modules
from robust_ext.engine.identity import attributes, is_plain, model_digest, tensor_bytes

# Names of files, or of what is defined in a script, and a digest of each.
Code = dict[str, str]

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...))
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
# What changes while it is used.
_PASSED_OVER = (PassCounter, torch.Generator, np.random.Generator, np.random.RandomState, type(os.environ))
# Modules of the standard library whose objects are what their texts show.
_SHOWN = {"pathlib", "pathlib._local", "fractions", "decimal", "datetime"}
_NOT_SHOWN = {"__dict__", "__weakref__", "__doc__", "__module__", "_abc_impl"}
_MEMBERS = (types.FunctionType, property, classmethod, staticmethod, cached_property)
# Of objects that hold others, and so on.
_DEPTH = 80


def hashed(text: str | bytes) -> str:
    """A short fingerprint."""
    return hashlib.blake2b(text.encode() if isinstance(text, str) else text, digest_size=8).hexdigest()


class CodeWalk:
    """The code that is reached from some objects: of files by their contents, of anything else by name."""

    def __init__(self) -> None:
        self._files = SourceFiles()
        self._entries: Code = {}
        self._tokens: dict[int, str] = {}
        self._kept: list[object] = []  # So that no other object gets the id of one that was seen
        self._depth = 0
        self._noted: set[tuple[int, str]] = set()
        self._later: deque[Callable[[], None]] = deque()  # Functions and classes that are not looked into yet

    @property
    def code(self) -> Code:
        """A digest of each."""
        while self._later:
            self._later.popleft()()
        return dict(sorted({**self._files.digests, **self._entries}.items()))

    def add(self, name: str, value: object) -> None:
        """A value that has a name of its own, and all the code that it consists of."""
        self._note(name, self._token(value))

    def add_module(self, module: nn.Module) -> None:
        """A network without its weights: the classes in it, and the functions and objects that they hold."""
        for part in module.modules():
            self._token(type(part))
            name, text = qualified_name(type(part)), getattr(part, "code", None)
            if isinstance(text, str):  # Scripted and traced modules are of torch's classes.
                self._note(name, text)
            installed = owner_of(module_globals(type(part))) == "installed"
            for key, held in attributes(part):
                # What packages keep beside settings differs between processes; what a user put there counts.
                if _is_code(held) and (not installed or is_users(held)):
                    self.add(f"{key} of {name}", held)
            for hook in (*part._forward_pre_hooks.values(), *part._forward_hooks.values()):
                self.add(f"hooks of {name}", hook)

    def _note(self, name: str, token: str, *, of: object = None) -> None:
        """Add to what has a name; only once where it is ``of`` something that may be met again."""
        if of is None or (id(of), name) not in self._noted:
            self._noted.add((id(of), name))
            self._entries[name] = hashed(self._entries.get(name, "") + token)

    def _token(self, value: object) -> str:
        """A text for a value; what a class or function consists of is noted apart."""
        if type(value) in _PLAIN:
            return f"{type(value).__name__}:{value!r}"
        if id(value) not in self._tokens:
            if self._depth == _DEPTH:
                return f"deep {qualified_name(type(value))}"
            self._kept.append(value)
            # For what leads back to itself.
            self._tokens[id(value)] = f"again {qualified_name(type(value))}"
            self._depth += 1
            token = next((of for kinds, of in _KINDS if isinstance(value, kinds)), CodeWalk._instance)
            try:
                self._tokens[id(value)] = hashed(f"{self._token(type(value))} {token(self, value)}")
            except Exception:  # Objects of anyone's may raise anything where they are looked at.
                self._tokens[id(value)] = f"closed {qualified_name(type(value))}"
            self._depth -= 1
        return self._tokens[id(value)]

    def _items(self, found: Mapping[Any, Any]) -> str:
        pairs = sorted(((self._token(key), value) for key, value in found.items()), key=lambda pair: pair[0])
        return f"{{{', '.join(f'{key}={self._token(value)}' for key, value in pairs)}}}"

    def _sequence(self, value: Collection[object]) -> str:
        tokens = list(map(self._token, value))
        return f"{type(value).__name__} {sorted(tokens) if isinstance(value, (set, frozenset)) else tokens}"

    def _tensor(self, value: Tensor) -> str:
        return f"tensor {value.dtype} {tuple(value.shape)} {hashed(tensor_bytes(value))}"

    def _array(self, value: Any) -> str:
        held = self._token(value.tolist()) if value.dtype.hasobject else hashed(value.tobytes())
        return f"array {value.dtype} {value.shape} {held}"

    def _network(self, value: nn.Module) -> str:
        self.add_module(value)
        return f"network {model_digest(value)}"

    def _partial(self, value: Any) -> str:
        return f"partial {self._token(value.func)} {self._token(value.args)} {self._items(value.keywords)}"

    def _wrapper(self, value: Any) -> str:
        """Properties, class methods, cached and bound functions: what they are made of."""
        names = ("__func__", "__self__", "fget", "fset", "func", "__wrapped__")
        return f"{type(value).__name__} {[self._token(getattr(value, name, None)) for name in names]}"

    def _module(self, value: types.ModuleType) -> str:
        """A module that code refers to: of a user's, its functions, classes and numbers as they are in this process."""
        scope = module_scope(value.__name__)
        for key, one in sorted(vars(value).items()) if self._home(vars(value)) == "file" else ():
            if isinstance(one, _PLAIN) and not key.startswith("__"):
                self._note(f"{scope}.{key}", self._token(one), of=vars(value))
            elif getattr(one, "__module__", None) == value.__name__ and isinstance(one, (types.FunctionType, type)):
                self._token(one)
        return f"module {scope}"

    def _home(self, scope: Mapping[str, Any]) -> str:
        """Whose code a module is, by its globals; a file that is the user's is added."""
        kind, name = owner_of(scope), str(scope.get("__name__"))
        if kind == "file":
            self._files.add_file(Path(scope["__file__"]), module=None if module_scope(name) != name else name)
            if name in sys.modules:
                self._files.check(sys.modules[name])
        return kind

    def _class(self, value: type) -> str:
        self._later.append(partial(self._look_into_class, value))
        return f"class {qualified_name(value)}"

    def _look_into_class(self, value: type) -> None:
        for base in value.__mro__:
            if self._home(module_globals(base)) in ("file", "script"):
                members = [self._member(*one) for one in sorted(vars(base).items(), key=lambda item: item[0])]
                self._note(qualified_name(base), " ".join(filter(None, members)), of=base)

    def _member(self, name: str, value: object) -> str:
        special = name.startswith("__") and not isinstance(value, _MEMBERS)
        return "" if special or name in _NOT_SHOWN else f"{name}={self._token(value)}"

    def _function(self, value: types.FunctionType) -> str:
        cells = dict(zip(value.__code__.co_freevars, value.__closure__ or (), strict=True))
        held = {key: self._cell(cell) for key, cell in cells.items() if key != "__class__"}
        more = [self._token(value.__defaults__), self._token(value.__kwdefaults__), self._items(vars(value))]
        self._later.append(partial(self._look_into, value, held))
        return f"function {qualified_name(value)} {held} {more}"

    def _look_into(self, value: types.FunctionType, held: Mapping[str, str]) -> None:
        # By where it was written: functools.wraps copies __module__ to functions of others.
        home, name = self._home(value.__globals__), qualified_name(value)
        if home in ("file", "script"):
            for key, token in held.items():
                self._note(f"{key} of {name}", token)
            self._referenced(value)
            # Of a file too: it may have changed since this process imported it.
            self._note(name if home == "script" else "compiled code", self._compiled(value.__code__))

    def _cell(self, cell: Any) -> str:
        try:
            return self._token(cell.cell_contents)
        except ValueError:
            return "empty"

    def _referenced(self, function: types.FunctionType) -> None:
        """The globals that a function uses; of a script, also what it imports."""
        known = function.__globals__
        for name in sorted(global_names(function.__code__) & known.keys()):
            token = self._token(known[name])
            if not isinstance(known[name], (types.FunctionType, types.ModuleType, type)):
                self._note(f"{module_scope(str(known.get('__name__')))}.{name}", token, of=known)
        if owner_of(known) == "script":
            for name in sorted(imported_modules(function.__code__, str(known.get("__package__") or ""))):
                self._files.add_module(name)

    def _compiled(self, code: types.CodeType) -> str:
        """Compiled code, wherever it was written."""
        consts = [
            self._compiled(one) if isinstance(one, types.CodeType) else self._token(one) for one in code.co_consts
        ]
        counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        table = getattr(code, "co_exceptiontable", b"")
        return hashed(f"{code.co_code.hex()} {table.hex()} {counts} {names} {consts}")

    def _instance(self, value: object) -> str:
        kind = type(value)
        home, token = owner_of(module_globals(kind)), f"{self._token(kind)} {getattr(value, '__name__', '')!s}"
        held = {**_slots(value), **getattr(value, "__dict__", {})}
        if isinstance(value, _PASSED_OVER) or (home == "library" and hasattr(kind, "__next__")):
            return token
        if not held or kind.__module__ in _SHOWN:
            return f"{token} {_ADDRESS.sub('', repr(value))}"
        if home == "library" and not isinstance(value, (types.SimpleNamespace, argparse.Namespace)):
            return token
        if home in ("own", "installed"):
            held = {key: one for key, one in held.items() if key[:1] != "_"}
        else:
            for key, one in held.items():
                self.add(f"{key} of {qualified_name(value)}", one)
        return f"{token} {self._items(held)}"


_KINDS: tuple[tuple[Any, Callable[[CodeWalk, Any], str]], ...] = (
    (nn.Module, CodeWalk._network),
    (Tensor, CodeWalk._tensor),
    ((np.ndarray, np.generic), CodeWalk._array),
    (type, CodeWalk._class),
    (types.FunctionType, CodeWalk._function),
    ((partial, partialmethod), CodeWalk._partial),
    (types.ModuleType, CodeWalk._module),
    (types.CodeType, CodeWalk._compiled),
    ((*_MEMBERS, types.MethodType, _lru_cache_wrapper), CodeWalk._wrapper),
    (_PASSED_OVER, CodeWalk._instance),
    (Mapping, CodeWalk._items),
    ((list, tuple, set, frozenset, deque), CodeWalk._sequence),
)


def _slots(value: object) -> dict[str, Any]:
    names = [name for base in type(value).__mro__ for name in _as_tuple(base.__dict__.get("__slots__", ()))]
    return {name: getattr(value, name) for name in names if name[:2] != "__" and hasattr(value, name)}


def _as_tuple(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _is_code(value: object) -> bool:
    """Whether an attribute of a network is part of what it computes, not a setting, a network or a result."""
    if is_plain(value) or isinstance(value, (Tensor, nn.Module, *_PASSED_OVER)):
        return False
    inside = value.values() if isinstance(value, Mapping) else value
    # Containers of tensors are results.
    return not (isinstance(inside, Collection) and any(isinstance(one, Tensor) for one in inside))
