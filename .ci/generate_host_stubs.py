"""Write the stubs of the Foolbox and ART classes, which are made when they are imported, for type checkers and editors.

``python .ci/generate_host_stubs.py`` writes; with ``--check`` it writes nothing, and fails where a file is not current.
"""

from __future__ import annotations

import inspect
import math
import sys
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from robust_ext.adapters.art import attacks as art_attacks
from robust_ext.adapters.foolbox import attacks as foolbox_attacks

ROOT = Path(__file__).parents[1]
_HEAD = '''\
"""{doc}; written by .ci/generate_host_stubs.py."""

from typing import Any

{imports}
'''
_IMPORTS = {
    "foolbox": """\
from robust_ext.adapters.foolbox.native import NativeFixedEpsilonAttack as NativeFixedEpsilonAttack
from robust_ext.adapters.foolbox.native import NativeMinimizationAttack as NativeMinimizationAttack
from robust_ext.adapters.foolbox.native import NativeNormlessAttack as NativeNormlessAttack
from robust_ext.adapters.foolbox.objectives import WithObjective as WithObjective
from robust_ext.adapters.foolbox.objectives import with_objective as with_objective

def foolbox_classes(attack_class: Any) -> dict[str, Any]: ...""",
    "art": """\
from robust_ext.adapters.art.native import NativeEvasionAttack as NativeEvasionAttack
from robust_ext.adapters.art.objectives import ObjectiveLoss as ObjectiveLoss
from robust_ext.adapters.art.objectives import objective_estimator as objective_estimator

def art_class(attack_class: Any) -> Any: ...""",
}
_KNOWN = (bool, int, float, str)


def generate() -> dict[Path, str]:
    """The text of each file."""
    modules = {"foolbox": foolbox_attacks, "art": art_attacks}
    return {ROOT / "adapters" / host / "attacks.pyi": _stub(host, module) for host, module in modules.items()}


def _stub(host: str, module: Any) -> str:
    title = {"foolbox": "Foolbox", "art": "ART"}[host]
    parts = [_HEAD.format(doc=f"This project's own attacks as {title} attacks", imports=_IMPORTS[host])]
    made: set[str] = set()
    for name in module.__all__:
        cls = getattr(module, name)
        if getattr(cls, "__module__", "") != module.__name__:
            continue
        parts.append(f"\n{name} = {cls.__name__}\n" if cls.__name__ in made else f"\n{_class(cls)}")
        made.add(cls.__name__)
    text = "".join(parts)
    return text.replace("import Any\n", "import Any\n\nfrom torch import Tensor\n", 1) if "Tensor" in text else text


def _class(cls: Any) -> str:
    core = f"{cls.core.__module__}.{cls.core.__name__}"
    lines = [f"class {cls.__name__}({cls.__base__.__name__}):", f'    """See :class:`{core}`."""', ""]
    if "__init__" not in vars(cls):
        return "\n".join(lines[:-1]) + "\n"
    parameters = inspect.signature(cls).parameters.values()
    lines += ["    def __init__(", "        self,"]
    lines += ["        *,"] * all(entry.kind is inspect.Parameter.KEYWORD_ONLY for entry in parameters)
    lines += [f"        {_parameter(entry)}," for entry in parameters]
    return "\n".join([*lines, "    ) -> None: ..."]) + "\n"


def _parameter(entry: inspect.Parameter) -> str:
    shown = f"{entry.name}: {_annotation(entry.annotation)}"
    return shown if entry.default is inspect.Parameter.empty else f"{shown} = {_default(entry.default)}"


def _annotation(kind: Any) -> str:
    if isinstance(kind, types.UnionType):
        parts = [_annotation(part) for part in typing.get_args(kind)]
        return "Any" if "Any" in parts else " | ".join(parts)
    if kind in _KNOWN or kind is Tensor:
        return str(kind.__name__)
    if typing.get_origin(kind) is tuple:
        return f"tuple[{', '.join(_annotation(part) for part in typing.get_args(kind))}]"
    if kind is Ellipsis:
        return "..."
    return "None" if kind is type(None) else "Any"


def _default(value: Any) -> str:
    if isinstance(value, float) and math.isinf(value):
        return "..."
    if isinstance(value, tuple):
        return f"({', '.join(map(_default, value))}{',' * (len(value) == 1)})"
    return f'"{value}"' if isinstance(value, str) else repr(value)


def main(arguments: Iterable[str]) -> int:
    """Write the files, or with ``--check`` name those that are not current."""
    files = generate()
    stale = [path for path, text in files.items() if not path.exists() or path.read_text("utf-8") != text]
    for path in stale:
        if "--check" in arguments:
            sys.stderr.write(f"{path.relative_to(ROOT)} is not current: run python .ci/generate_host_stubs.py\n")
        else:
            path.write_text(files[path], encoding="utf-8")
    return int(bool(stale) and "--check" in arguments)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
