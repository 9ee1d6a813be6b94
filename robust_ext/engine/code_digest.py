"""Digests of code: what attacks, models, detectors and defenses consist of besides weights.

The contents of source files count, with those of all files that they import, and what objects hold: closures, defaults,
attributes, the globals that functions name, and the functions themselves as they are in this process. A function of a
script or notebook, which has no file that stays the same, counts by the latter alone.
"""

from __future__ import annotations

import dis
import hashlib
import json
import re
import sys
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from robust_ext.attacks.adapted import AdaptedAttack
from robust_ext.attacks.base import Attack
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.objects import module_scope, qualified_name
from robust_ext.core.reached import SourceFiles, held, is_installed, is_library
from robust_ext.core.specification import parse_call
from robust_ext.core.target import PassCounter
from robust_ext.engine.identity import attributes, is_plain, model_digest, tensor_bytes

Code = dict[str, str]
"""Digests by the name of a source file; ``values`` is that of everything else."""

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
# What changes while it is used.
_PASSED_OVER = (PassCounter, torch.Generator, np.random.Generator, np.random.RandomState)
# Objects that are looked at before the rest is left alone.
_MOST = 20_000


def module_code(*modules: nn.Module) -> Code:
    """The code of modules and of those in them, without weights."""
    return _code(list(modules), weights=False)


def object_code(value: object) -> Code:
    """The code of any object, with what it holds."""
    return _code([value])


def attack_code(attack: Attack) -> Code:
    """The code of an attack; of one that a text names, :func:`text_code` of the text."""
    if attack.code_text is not None:
        return text_code(attack.code_text)
    if isinstance(attack, AdaptedAttack):
        # The attack inside may be named by a text too.
        return {**attack_code(attack.attack), "adapted": _hashed(repr(attack.adaptation))}
    return object_code(attack)


def text_code(text: str, *, argument: str = "attack") -> Code:
    """The code that ``file.py:name(...)`` or ``package.module:name(...)`` names, without importing any of it.

    Raises:
        InvalidArgumentError: The text has another form, or there is no such file or module.
    """
    spec = parse_call(text, argument=argument)
    files = SourceFiles()
    if spec.scope.endswith(".py"):
        path = Path(spec.scope).expanduser().resolve()
        if not path.is_file():
            raise InvalidArgumentError(argument, spec.scope, f"an existing Python file; there is none at {path}")
        files.add_file(path)
    elif not files.add_module(spec.scope, folder=Path.cwd()):
        expected = f"an importable module (there is no {spec.scope}), or a file written as path/to/file.py:name"
        raise InvalidArgumentError(argument, text, expected)
    return {**dict(sorted(files.digests.items())), "values": _hashed(f"{spec.name} {sorted(spec.arguments.items())!r}")}


def code_digest(code: Mapping[str, str]) -> str:
    """One fingerprint of digests by name."""
    return _hashed(json.dumps(code, sort_keys=True))


def _code(roots: Collection[object], *, weights: bool = True) -> Code:
    files, tokens = SourceFiles(), list[str]()
    seen, waiting = dict[int, object](), deque[tuple[str, object]](("", root) for root in roots)
    while waiting and len(tokens) < _MOST:
        name, value = waiting.popleft()
        if id(value) in seen:
            continue
        try:
            if not is_plain(value):
                seen[id(value)] = value  # Kept, so that no other object gets its id
            tokens.append(f"{name} {_token(value, weights=weights)}")
            waiting.extend((f"{name}.{key}".strip("."), one) for key, one in _inside(value))
            _add_file(files, value)
        except Exception:  # Objects of anyone's may raise anything where they are looked at.
            tokens.append(f"{name} closed {type(value).__qualname__}")
    return {**dict(sorted(files.digests.items())), "values": _hashed("\n".join(tokens))}


def _token(value: Any, *, weights: bool) -> str:
    """A text for a value, which is the same in every process, without what it holds."""
    kind = qualified_name(type(value))
    match value:
        case FunctionType():
            return f"function {qualified_name(value)} {'' if is_library(value) else _compiled(value.__code__)}"
        case type() | ModuleType():
            return f"{module_scope(value.__name__) if isinstance(value, ModuleType) else qualified_name(value)}"
        case nn.Module():
            return f"network {model_digest(value) if weights else kind}"
        case Tensor():
            return f"{kind} {value.dtype} {tuple(value.shape)} {_hashed(tensor_bytes(value))}"
        case np.ndarray() if not value.dtype.hasobject:
            return f"{kind} {value.dtype} {value.shape} {_hashed(value.tobytes())}"
        case set() | frozenset():
            return f"{kind} {sorted(_token(one, weights=weights) for one in value)}"
        case dict() | list() | tuple() if not is_plain(value):
            return f"{kind} {len(value)}"
    opened = hasattr(value, "__dict__") and type(value).__name__ not in ("SimpleNamespace", "Namespace")
    if isinstance(value, _PASSED_OVER) or opened or hasattr(type(value), "__next__"):
        return f"{kind} {getattr(value, '__name__', '')}"
    return f"{kind} {_ADDRESS.sub('', repr(value))}"


def _inside(value: Any) -> Iterator[tuple[str, object]]:
    """Return the members of a value by name."""
    kind = type(value)
    if is_plain(value) or isinstance(value, (*_PASSED_OVER, ModuleType, set, frozenset)):
        return
    if isinstance(value, nn.Module):
        for part in value.modules():
            yield "", type(part)
            yield "", getattr(part, "code", None)  # Of scripted and traced modules
            yield from (("", hook) for hook in (*part._forward_pre_hooks.values(), *part._forward_hooks.values()))
            yield from ((key, one) for key, one in attributes(part) if _is_code(one))
    elif isinstance(value, type):
        for base in value.__mro__ if not is_library(value) else ():
            members = vars(base).items() if not is_library(base) else ()
            yield from ((key, one) for key, one in members if key[:2] != "__" or isinstance(one, FunctionType))
    else:
        yield "", kind
        # The points of a purifier's last call, see FunctionPurifier.
        yield from ((key, one) for key, one in held(value) if key != "trajectory" or not isinstance(one, list))
        if is_library(kind) and kind.__module__.split(".")[0] not in ("torch", *sys.stdlib_module_names):
            yield from ((key, one) for key, one in getattr(value, "__dict__", {}).items() if key[:1] != "_")


def _is_code(value: object) -> bool:
    """Return whether an attribute of a network is part of what it computes, not a setting, a network or a result."""
    if is_plain(value) or isinstance(value, (Tensor, nn.Module, *_PASSED_OVER)):
        return False
    inside = value.values() if isinstance(value, Mapping) else value
    # Containers of tensors are results.
    return not (isinstance(inside, Collection) and any(isinstance(one, Tensor) for one in inside))


def _add_file(files: SourceFiles, value: Any) -> None:
    """The file that a function, class or module of a user lies in."""
    if isinstance(value, FunctionType):
        scope = value.__globals__
    elif isinstance(value, (type, ModuleType)):
        scope = vars(value if isinstance(value, ModuleType) else sys.modules[value.__module__])
    else:
        return
    name, file = str(scope.get("__name__")), scope.get("__file__")
    if name == "__main__" and isinstance(value, FunctionType):
        for module in _imports(value.__code__):
            files.add_module(module)
    if name == "__main__" or name.split(".")[0] == __name__.split(".")[0] or file is None or is_installed(file):
        return
    files.add_file(Path(file), module=name if module_scope(name) == name else None)


def _imports(code: CodeType) -> Iterator[str]:
    """The modules that a function imports when it is called."""
    yield from (str(one.argval) for one in dis.get_instructions(code) if one.opname == "IMPORT_NAME")
    yield from (name for one in code.co_consts if isinstance(one, CodeType) for name in _imports(one))


def _compiled(code: CodeType) -> str:
    """The compiled code of a function, which does not depend on where it is written."""
    consts = [_compiled(one) if isinstance(one, CodeType) else _token(one, weights=True) for one in code.co_consts]
    return _hashed(f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {code.co_freevars} {consts}")


def _hashed(text: str | bytes) -> str:
    return hashlib.blake2b(text.encode() if isinstance(text, str) else text, digest_size=8).hexdigest()
