"""What compiled code refers to."""

from __future__ import annotations

import dis
from collections.abc import Iterator
from types import CodeType

_GLOBALS = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}


def global_names(code: CodeType) -> set[str]:
    """Names of the globals that a function uses, those in it included."""
    return {one.argval for part in _nested(code) for one in dis.get_instructions(part) if one.opname in _GLOBALS}


def imported_modules(code: CodeType, package: str) -> set[str]:
    """Dotted names that a function of a package imports, those in it included."""
    found: set[str] = set()
    for part in _nested(code):
        instructions = list(dis.get_instructions(part))
        for place, one in enumerate(instructions):
            if one.opname == "IMPORT_NAME":
                level, taken = (instructions[place - back].argval for back in (2, 1))
                above = package.split(".")[: max(len(package.split(".")) - (level or 0) + 1, 0)] if level else []
                module = ".".join([*above, *([one.argval] if one.argval else [])])
                found |= {module, *(f"{module}.{name}" for name in taken or () if name != "*")}
    return found - {""}


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)
