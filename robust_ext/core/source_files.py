"""Digests of the user's source files and of the files they import, found without running any of them.

Files of Python, of installed packages and of this package do not count: a run keeps their versions.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

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
    """Whether a file belongs to Python or to an installed package, which have versions."""
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
