"""The networks and source files that a function or an object reaches."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import os
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

_OWN = __name__.split(".")[0]
_INSTALLED = {"site-packages", "dist-packages"}

# How the names of modules begin that are files the user named.
LOADED = "robust_ext_file_"


class SourceFiles:
    """The contents of files and of everything they import, transitively.

    Each file is called by the name of its module as a path, so it does not matter where it lies.
    """

    def __init__(self) -> None:
        self.digests: dict[str, str] = {}
        self._folders: list[str] = []  # Of scripts, which find their neighbours
        self._seen: set[str] = set()
        importlib.invalidate_caches()

    def add_file(self, path: Path, *, module: str | None = None) -> None:
        """Add a file that runs as this module, or without one as a script."""
        if module is None:
            self._folders.append(str(path.parent))
            self._add([(path, path.name)])
        elif not is_installed(str(path)):
            self.add_module(module)
            self._add([(path, _label(module, path))])

    def add_module(self, name: str, *, folder: Path | None = None) -> bool:
        """Add a module by its dotted name, looked for in a folder too; whether there is one."""
        if folder is not None:
            self._folders.append(str(folder))
        if name.split(".")[0] == _OWN:
            return True
        found = list(self._walk(name))
        self._add([file for file in found if file is not None])
        return bool(found)

    def _walk(self, name: str, path: Sequence[str] | None = None, above: str = "") -> Iterator[tuple[Path, str] | None]:
        """The files of a module and of the packages it is in, with labels; None for one without a file that counts."""
        for part in name.split("."):
            spec = self._spec(part, path)
            if spec is None:
                return
            above = f"{above}/{part}".strip("/")
            counts = spec.has_location and spec.origin is not None and not is_installed(spec.origin)
            yield (Path(str(spec.origin)), _label(above, Path(str(spec.origin)))) if counts else None
            if spec.submodule_search_locations is None or (spec.has_location and not counts):
                return
            path = list(spec.submodule_search_locations)

    def _spec(self, part: str, path: Sequence[str] | None) -> ModuleSpec | None:
        if path is not None:
            return PathFinder.find_spec(part, path)
        found = (finder.find_spec(part, None) for finder in sys.meta_path if hasattr(finder, "find_spec"))
        return next((spec for spec in found if spec is not None), None) or PathFinder.find_spec(part, self._folders)

    def _add(self, waiting: list[tuple[Path, str]]) -> None:
        while waiting:
            path, label = waiting.pop()
            if str(path) in self._seen or not path.is_file():
                continue
            self._seen.add(str(path))
            content = path.read_bytes()
            digest = hashlib.blake2b(content, digest_size=8).hexdigest()
            # Two files of one name are told apart by their contents.
            self.digests[label] = "+".join(sorted(filter(None, (self.digests.get(label), digest))))
            for level, name, taken in _imports(content) if path.suffix == ".py" else ():
                waiting += self._imported(path, label, level, name, taken)

    def _imported(self, path: Path, label: str, level: int, name: str, taken: Sequence[str]) -> list[tuple[Path, str]]:
        """The files of one import statement of a file."""
        folder = path.parents[level - 1] if level else None
        above = "/".join(label.split("/")[:-level]) if level else ""
        found: list[tuple[Path, str] | None] = []
        for whole in dict.fromkeys([name, *(f"{name}.{one}".strip(".") for one in taken if one != "*")]):
            if whole and whole.split(".")[0] != _OWN:
                found += self._walk(whole, None if folder is None else [str(folder)], above)
        files = [file for file in found if file is not None]
        if "*" in taken:
            inits = [(file.parent, Path(of).parent) for file, of in files if file.stem == "__init__"]
            files += [(one, f"{folder}/{one.name}") for parent, folder in inits for one in parent.glob("*.py")]
        return files


def is_installed(path: str) -> bool:
    """Return whether a file belongs to Python or to an installed package, which have versions."""
    return bool(_INSTALLED.intersection(Path(path).parts)) or path.startswith(_library())


@cache
def _library() -> tuple[str, ...]:
    return tuple({sysconfig.get_path(key) + os.sep for key in ("stdlib", "platstdlib")})


def _label(module: str, path: Path) -> str:
    """The name of a module as a path."""
    folders = module.replace(".", "/")
    return f"{folders}/{path.name}" if path.stem == "__init__" else folders + "".join(path.suffixes)


@lru_cache(maxsize=4096)
def _imports(content: bytes) -> tuple[tuple[int, str, tuple[str, ...]], ...]:
    """The imports of a file: how many dots each begins with, the module, and the names taken from it."""
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()
    return tuple(found for node in ast.walk(tree) for found in _imported(node))


def _imported(node: ast.AST) -> Iterator[tuple[int, str, tuple[str, ...]]]:
    match node:
        case ast.Import():
            yield from ((0, alias.name, ()) for alias in node.names)
        case ast.ImportFrom():
            yield node.level, node.module or "", tuple(alias.name for alias in node.names)
        case ast.Call(
            func=ast.Attribute(attr="import_module" | "__import__") | ast.Name(id="import_module" | "__import__"),
            args=[ast.Constant(value=str(name)), *_],
        ):
            plain = name.lstrip(".")
            yield len(name) - len(plain), plain, ()


# Objects that are looked at before the rest is left alone.
_MOST = 10_000
_LIBRARIES = {"torch", "numpy", __name__.split(".")[0]}

Note = Callable[[float, Tensor], Tensor]
"""From the share of a network that is called and its input ``(N, ...)`` to that input, or another in its place."""


def reached_modules(root: object) -> dict[str, nn.Module]:
    """The networks that a function or an object holds, by where they were found.

    They are what attributes, closures, defaults, bound objects, containers and the globals that its code names hold,
    and the functions among these in turn. A module that is the root itself stands for its children, unless it is one
    of torch's; no other is looked into. What libraries hold is not looked for.

    Example:
        >>> held = functools.partial(max, other={"score": nn.Linear(2, 2)})
        >>> reached_modules(held)
        {'other.score': Linear(in_features=2, out_features=2, bias=True)}
    """
    found: dict[str, nn.Module] = {}
    seen, kept = set[int](), list[object]()
    waiting = deque([("", root)])
    while waiting and len(kept) < _MOST:
        name, value = waiting.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        kept.append(value)  # So that no other object gets the id of one that was seen
        if isinstance(value, nn.Module) and (value is not root or type(value).__module__.startswith("torch.nn")):
            found[name or type(value).__name__] = value
        else:
            waiting.extend((f"{name}.{key}".strip("."), one) for key, one in held(value))
    return found


@contextmanager
def outermost_calls(networks: Mapping[str, nn.Module], note: Mapping[str, Note]) -> Iterator[None]:
    """Notes each call of the networks and of their parts inside, where no other call of them is in progress.

    The note of a network gets 1 where the whole is called, and for a part its share of the network's parameters.
    """
    depth = 0

    def enter(module: nn.Module, args: tuple[Any, ...], *, called: Note, share: float) -> tuple[Any, ...]:
        nonlocal depth
        depth += 1
        # Others may come before the rows, as the time does before the state of an ODE.
        place = next((n for n, one in enumerate(args) if isinstance(one, Tensor) and one.dim()), None)
        if depth > 1 or place is None:
            return args
        return (*args[:place], called(share, args[place]), *args[place + 1 :])

    def leave(*_: object) -> None:
        nonlocal depth
        depth -= 1

    with ExitStack() as stack:
        hooked = set[int]()
        for name, network in networks.items():
            total = sum(p.numel() for p in network.parameters())
            for part in network.modules():
                if id(part) in hooked:
                    continue
                hooked.add(id(part))
                own = sum(p.numel() for p in part.parameters())
                share = 1.0 if part is network else own / max(total, 1)
                before = part.register_forward_pre_hook(functools.partial(enter, called=note[name], share=share))
                after = part.register_forward_hook(leave, always_call=True)
                stack.callback(before.remove)
                stack.callback(after.remove)
        yield


def held(value: Any) -> Iterator[tuple[str, object]]:
    """Return the members of a value by name: none from libraries, and for a function the globals that it names."""
    match value:
        case FunctionType():
            yield from _of_function(value)
        case MethodType():
            yield from (("", value.__self__), ("", value.__func__))
        case functools.partial() | functools.partialmethod():
            yield from (("", one) for one in (value.func, *value.args))
            yield from value.keywords.items()
        case staticmethod() | classmethod() | property() | functools.cached_property():
            yield from (("", getattr(value, key, None)) for key in ("__func__", "fget", "fset", "func"))
        case dict():
            yield from ((str(key), one) for key, one in value.items())
        case list() | tuple() | set():
            yield from ((str(number), one) for number, one in enumerate(value))
        case nn.Module():
            yield from value.named_children()
            yield from _of_object(value)
        case Tensor() | type() | ModuleType():
            return
        case _:
            if hasattr(value, "__wrapped__"):  # As what functools.lru_cache makes of a function has
                yield "", value.__wrapped__
            yield from _of_object(value)


def _of_function(function: FunctionType) -> Iterator[tuple[str, object]]:
    if is_library(function):
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # Not filled yet
            continue
    names = _names(function.__code__)
    for name in sorted(names & function.__globals__.keys()):
        value = function.__globals__[name]
        if not isinstance(value, ModuleType):
            yield name, value
        elif not is_library(value):
            # Of a module only what the code names.
            yield from ((f"{name}.{key}", vars(value)[key]) for key in sorted(names & vars(value).keys()))
    yield from (("", one) for one in function.__defaults__ or ())
    yield from (function.__kwdefaults__ or {}).items()
    yield from vars(function).items()


def _of_object(value: object) -> Iterator[tuple[str, object]]:
    if is_library(type(value)):
        return
    registers = vars(nn.Module()) if isinstance(value, nn.Module) else {}
    yield from ((name, one) for name, one in getattr(value, "__dict__", {}).items() if name not in registers)
    for kind in type(value).__mro__:
        if not is_library(kind):
            yield from (("", one) for one in vars(kind).values() if isinstance(one, FunctionType))


def _names(code: CodeType) -> set[str]:
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*map(_names, inner))


def is_library(value: Any) -> bool:
    """Return whether a function, class or module was written by somebody else than the user."""
    name = value.__name__ if isinstance(value, ModuleType) else value.__module__
    top = str(name).split(".")[0]
    if top == "__main__":
        return False
    file = getattr(sys.modules.get(top), "__file__", None)
    return top in _LIBRARIES or top in sys.stdlib_module_names or (file is not None and is_installed(file))
