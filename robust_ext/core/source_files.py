"""Digests of source files and of the files they import, found without running any of them.

Files of the standard library, of installed packages (site-packages) and of this package do not count: their versions
are kept with a run.
"""

from __future__ import annotations

import ast
import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from importlib.machinery import BYTECODE_SUFFIXES, EXTENSION_SUFFIXES, SOURCE_SUFFIXES
from pathlib import Path
from types import ModuleType
from typing import Any

from robust_ext.core.errors import DataError

_OWN = __name__.split(".")[0]
# In the order in which Python looks for them.
_SUFFIXES = (*EXTENSION_SUFFIXES, *SOURCE_SUFFIXES, *BYTECODE_SUFFIXES)
_INSTALLED = {"site-packages", "dist-packages"}

# How the names of modules begin that are files the user named.
LOADED = "robust_ext_file_"
# What modules' files held when they were seen first, by the specification, which a reload replaces.
_KNOWN: dict[int, tuple[Any, str]] = {}

# How many dots it begins with, the module, and the names taken from it.
Import = tuple[int, str, tuple[str, ...]]


class SourceFiles:
    """The contents of files and of everything they import, transitively.

    Each file is called by the name of its module as a path, wherever it lies.
    """

    def __init__(self) -> None:
        self.digests: dict[str, str] = {}
        self._path = [Path(entry) if entry else Path.cwd() for entry in sys.path]
        self._folders: list[Path] = []
        self._seen: dict[str, str] = {}  # Digests of contents by path
        self._waiting: list[tuple[Path, str, bytes]] = []
        self._listed: dict[Path, frozenset[str]] = {}

    def add_file(self, path: Path, *, module: str | None = None) -> None:
        """A file that is run: as this module, or without one as a script, which finds its neighbours."""
        if is_installed(str(path)):
            return
        if module is None:
            self._folders = list(dict.fromkeys([*self._folders, path.parent]))
            self._add(path, path.name)
        else:
            parts = module.split(".")
            for count in range(1, len(parts)):
                folder = path.parents[len(parts) - 1 - count + (path.stem == "__init__")]
                self._add(folder / "__init__.py", "/".join([*parts[:count], "__init__.py"]))
            self._add(path, "/".join(parts) + _tail(path))
        self._follow()

    def add_module(self, name: str, *, folder: Path | None = None) -> bool:
        """A module by its dotted name, and the packages it is in, looked for in a folder too; whether it was found."""
        if folder is not None:
            self._folders = list(dict.fromkeys([*self._folders, folder]))
        found = self._absolute(name)
        self._follow()
        return found

    def _absolute(self, name: str, *, starred: bool = False) -> bool:
        parts = name.split(".")
        if parts[0] == _OWN or parts[0] in sys.builtin_module_names:
            return True
        return self._walk(parts, [*self._path, *self._folders], "", starred=starred)

    def _import(self, found: Import, *, path: Path, label: str) -> None:
        """What an import statement of a file imports."""
        level, module, names = found
        taken = [".".join(filter(None, (module, name))) for name in names if name != "*"]
        for name in dict.fromkeys([module, *taken]):
            if level:
                folder, above = path.parent, _join(label, *[".."] * level)
                for _ in range(level - 1):
                    folder = folder.parent
                self._walk(name.split(".") if name else [], [folder], above, starred="*" in names)
            elif name:
                self._absolute(name, starred="*" in names)

    def _walk(self, parts: Sequence[str], entries: Sequence[Path], above: str, *, starred: bool) -> bool:
        """Add a module and the packages it is in, as far as its dotted name leads to files."""
        for number, part in enumerate(parts):
            file, inside = self._find(part, entries)
            if file is None and not inside and not number:
                file, inside = _editable(part)
            if file is None and not inside:
                return False
            if file is not None and is_installed(str(file)):
                return True
            above, entries = _join(above, part), inside
            if file is not None:
                self._add(file, above + _tail(file))
        for folder in entries if starred else ():
            for beside in sorted(folder.glob("*.py")):
                self._add(beside, _join(above, beside.name))
        return True

    def _find(self, part: str, entries: Sequence[Path]) -> tuple[Path | None, list[Path]]:
        """A module's file and its folders, if it is a package; a namespace package has folders only."""
        portions = []
        for entry in entries:
            names = self._names(entry)
            inside = self._names(entry / part) if part in names else frozenset()
            for suffix in _SUFFIXES:
                if f"__init__{suffix}" in inside:
                    return entry / part / f"__init__{suffix}", [entry / part]
            for suffix in _SUFFIXES:
                if f"{part}{suffix}" in names:
                    return entry / f"{part}{suffix}", []
            portions += [entry / part] * (part in names and (entry / part).is_dir())
        return None, portions

    def _names(self, folder: Path) -> frozenset[str]:
        if folder not in self._listed:
            self._listed[folder] = frozenset(one.name for one in folder.iterdir()) if folder.is_dir() else frozenset()
        return self._listed[folder]

    def _add(self, path: Path, label: str) -> None:
        path = path.absolute()
        if str(path) in self._seen or not path.is_file():
            return
        content = path.read_bytes()
        digest = self._seen[str(path)] = hashlib.blake2b(content, digest_size=8).hexdigest()
        # Two files of one name are told apart by their contents.
        self.digests[label] = "+".join(sorted(filter(None, (self.digests.get(label), digest))))
        self._waiting.append((path, label, content))

    def _follow(self) -> None:
        """Add what the files that were added import."""
        if not self._waiting:
            return
        while self._waiting:
            path, label, content = self._waiting.pop()
            for found in _imports(content) if path.suffix in SOURCE_SUFFIXES else ():
                self._import(found, path=path, label=label)
        self.check_imported()

    def check(self, module: ModuleType) -> None:
        """Raise DataError where this process still runs what a file that was added held earlier."""
        spec = vars(module).get("__spec__")
        origin = str(getattr(spec, "origin", None))
        digest = self._seen.get(origin)
        if digest is not None and _KNOWN.setdefault(id(spec), (spec, digest))[1] != digest:
            raise DataError(
                f"{origin}: changed since this process imported it, which still runs what it held then; import it anew "
                "(importlib.reload), or start a new process"
            )

    def check_imported(self) -> None:
        """The same of all modules of this process."""
        for name, module in list(sys.modules.items()):
            # Files that the user named are loaded anew where they change.
            if isinstance(module, ModuleType) and not name.startswith(LOADED):
                self.check(module)


def is_installed(path: str) -> bool:
    """Whether a file belongs to Python or to an installed package, which have versions."""
    return bool(_INSTALLED.intersection(Path(path).parts)) or path.startswith(_library())


@cache
def _library() -> tuple[str, ...]:
    return tuple({sysconfig.get_path(key) + os.sep for key in ("stdlib", "platstdlib")})


def _editable(part: str) -> tuple[Path | None, list[Path]]:
    """A module of a project that setuptools installed as editable, whose folder is not on the path."""
    for finder in sys.meta_path:
        if "__editable__" in getattr(finder, "__module__", ""):
            spec = finder.find_spec(part, None)
            if spec is not None:
                file = Path(spec.origin) if spec.has_location and spec.origin else None
                return file, [Path(one) for one in spec.submodule_search_locations or ()]
    return None, []


def _join(*parts: str) -> str:
    """A label of parts, without ``..`` where that can be."""
    found = os.path.normpath("/".join(filter(None, parts)))
    return "" if found == "." else found


def _tail(path: Path) -> str:
    """What follows a module's name as a path."""
    return f"/{path.name}" if path.name.startswith("__init__.") else "".join(path.suffixes)


@lru_cache(maxsize=4096)
def _imports(content: bytes) -> tuple[Import, ...]:
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()
    return tuple(found for node in ast.walk(tree) for found in _imported(node))


def _imported(node: ast.AST) -> Iterator[Import]:
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
