"""Objects written as text: ``package.module:name`` or ``path/to/file.py:make(depth=3)``.

What a file or module holds is only run because the user named it.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from robust_ext.core.errors import DataError, InvalidArgumentError
from robust_ext.core.foreign import foreign_code, raised
from robust_ext.core.reached import LOADED, SourceFiles
from robust_ext.core.specification import check_keywords, did_you_mean, match_form, parse_call

# Of the environment, so that it holds in the processes that a run starts too.
_REFUSED = "ROBUST_EXT_REFUSE_CODE"
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


def resolve_object(text: str, *, argument: str = "object") -> Any:
    """Load ``package.module:name`` or ``path/to/file.py:name`` (dots may follow); where parentheses end it, call it.

    Modules and the imports of a file are searched for in the usual places and then in the current folder, or the
    file's own. A file is loaded once as long as it does not change.

    Args:
        text: The text.
        argument: What error messages call it.

    Raises:
        InvalidArgumentError: The text has another form, there is no such file, module or name, the callable does not
            take these arguments, or this is inside :func:`refusing_code`.
        DataError: The import or the call raised.

    Example:
        >>> resolve_object("fractions:Fraction(numerator=3, denominator=4)")
        Fraction(3, 4)
    """
    match = match_form(text, argument)
    spec = parse_call(text, argument=argument)
    check_code(text, argument)
    found = _load(spec.scope, spec.name, text, argument)
    if match["arguments"] is None:
        return found
    if not callable(found):
        expected = f"no parentheses, because {spec.name} is of type {type(found).__name__} and no callable"
        raise InvalidArgumentError(argument, text, expected)
    check_keywords(found, spec.arguments, argument=argument, label=spec.name)
    with foreign_code(argument, text):
        return found(**spec.arguments)


@contextmanager
def refusing_code() -> Iterator[None]:
    """Inside the block, no code that a text names is loaded, here or in processes that are started.

    Example:
        >>> with refusing_code():
        ...     resolve_object("fractions:Fraction")
        Traceback (most recent call last):
        ...
        robust_ext.core.errors.InvalidArgumentError: object: got fractions:Fraction, which is code, expected a name...
    """
    before = os.environ.get(_REFUSED)
    os.environ[_REFUSED] = "1"
    try:
        yield
    finally:
        del os.environ[_REFUSED]
        if before is not None:
            os.environ[_REFUSED] = before


def check_code(text: str, argument: str) -> None:
    """Raise InvalidArgumentError inside :func:`refusing_code`; before a text is given to the loader of its code."""
    if os.environ.get(_REFUSED):
        expected = "a name of a library; if you trust the study, robust-ext run --allow-code runs what it names"
        raise InvalidArgumentError(argument, f"{text}, which is code", expected)


def loaded_files() -> dict[str, ModuleType]:
    """The modules of files that were loaded, by the names that only this process has for them."""
    return {name: module for name, module in sys.modules.copy().items() if name.startswith(LOADED)}


def module_scope(name: str) -> str:
    """The name of a module, as text that is the same everywhere: of a file that was loaded, that of the file."""
    file = getattr(sys.modules.get(name), "__file__", None)
    return Path(file).name if name.startswith(LOADED) and file is not None else name


def qualified_name(thing: Any) -> str:
    """Return the qualified name of a class or function, or of an object's class."""
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{module_scope(str(getattr(named, '__module__', None)))}.{named.__qualname__}"


def _load(scope: str, name: str, text: str, argument: str) -> Any:
    found: Any = _load_file(scope, argument) if scope.endswith(".py") else _load_module(scope, text, argument)
    where = scope
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            known = [entry for entry in dir(found) if not entry.startswith("_")]
            expected = f"a name that {where} defines{did_you_mean(part, known)}"
            raise InvalidArgumentError(argument, text, expected) from error
        where = f"{where}:{part}" if where == scope else f"{where}.{part}"
    return found


def _load_file(path: str, argument: str) -> ModuleType:
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise InvalidArgumentError(argument, path, f"an existing Python file; there is none at {file}")
    # The contents, also of what it imports, are part of the name: an edited file is loaded afresh in this process.
    files = SourceFiles()
    files.add_file(file)
    key = f"{file}\0{file.read_bytes()!r}\0{sorted(files.digests.items())}"
    unique = LOADED + hashlib.blake2b(key.encode(), digest_size=8).hexdigest()
    if unique in sys.modules:
        return sys.modules[unique]
    spec = importlib.util.spec_from_file_location(unique, file)
    if spec is None or spec.loader is None:
        raise InvalidArgumentError(argument, path, "a file that Python can import")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickle look a module up by its name while and after it is executed.
    sys.modules[unique] = module
    try:
        with _also_searched(file.parent):
            spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[unique]
        if isinstance(error, KeyboardInterrupt):
            raise
        raise _import_failure(path, argument, error) from error
    return module


def _load_module(scope: str, text: str, argument: str) -> ModuleType:
    if not _MODULE.fullmatch(scope):
        raise InvalidArgumentError(
            argument, text, "package.module:name, or path/to/file.py:name with a file that ends in .py"
        )
    try:
        with _also_searched(Path.cwd()):
            return importlib.import_module(scope)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        packages = [".".join(scope.split(".")[: count + 1]) for count in range(scope.count(".") + 1)]
        if isinstance(error, ModuleNotFoundError) and error.name in packages:
            expected = f"an importable module (there is no {error.name}), or a file written as path/to/file.py:name"
            raise InvalidArgumentError(argument, text, expected) from error
        raise _import_failure(scope, argument, error) from error


def _import_failure(what: str, argument: str, error: BaseException) -> DataError:
    return DataError(f"{argument}: importing {what} {raised(error, hint='correct it first')}")


@contextmanager
def _also_searched(folder: Path) -> Iterator[None]:
    """Let imports find what lies in ``folder``, after everything that is installed, and leave no compiled files there.

    Python takes a compiled file for a source of the same size and second, which may hold something else by then.
    """
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    sys.path.append(str(folder))
    try:
        yield
    finally:
        sys.dont_write_bytecode = before
        if str(folder) in sys.path:
            # Remove the last one: the user may have had the folder on the path before.
            del sys.path[len(sys.path) - 1 - sys.path[::-1].index(str(folder))]
