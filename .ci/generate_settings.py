"""Write what is made from the declarations of settings: keywords for type checkers, and docs/settings.md.

``python .ci/generate_settings.py`` writes; with ``--check`` it writes nothing, and fails where a file is not current.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from robust_ext.attacks.catalogue import ATTACKS
from robust_ext.core.settings import SettingInfo, Settings, declared, setting_types
from robust_ext.defenses.catalogue import DEFENSES
from robust_ext.detectors.catalogue import PUBLISHED
from robust_ext.evaluations.adaptive.settings import AdaptiveSettings
from robust_ext.evaluations.binarization.settings import BinarizationSettings
from robust_ext.evaluations.diagnosis.settings import DiagnosisSettings
from robust_ext.evaluations.mead.settings import MeadSettings
from robust_ext.evaluations.robust_accuracy.settings import RobustAccuracySettings

ROOT = Path(__file__).parents[1]
EVALUATIONS: dict[str, type[Settings]] = {
    "binarization": BinarizationSettings,
    "mead": MeadSettings,
    "robust_accuracy": RobustAccuracySettings,
    "adaptive": AdaptiveSettings,
    "diagnosis": DiagnosisSettings,
}
_COMMANDS = {"adaptive": "test-time", "diagnosis": "diagnose"}
_PAGE = """\
# Settings

All settings of the evaluations and of the project's attacks, detectors and defenses, as their classes declare them.
This page is written by `.ci/generate_settings.py`. In Python they are keywords (`binarization_test(..., kappa=0.99)`);
on the command line the evaluations' have options of the same names (`--kappa 0.99`), and an attack's stand in its
parentheses (`--attack "robust_ext:APGD(steps=50)"`). `robust-ext COMMAND --help-all` also lists the options of model,
data and run, see [the command line](command_line.md). What each default rests on: [the case for each
default](theory/defaults.md).
"""


def generate() -> dict[Path, str]:
    """The text of each file."""
    files = {
        ROOT / "robust_ext" / "evaluations" / name / "options.py": _options(cls) for name, cls in EVALUATIONS.items()
    }
    return {**files, ROOT / "docs" / "settings.md": _page()}


def _options(cls: type[Settings]) -> str:
    fields = [
        f"    {name}: {_annotation(kind, info)}"
        for (name, info), kind in zip(declared(cls).items(), setting_types(cls).values(), strict=True)
    ]
    body = "\n".join(fields)
    imports = ["from collections.abc import Sequence"] if "Sequence[" in body else []
    own = _own_classes(cls)
    literal = "Literal, TypedDict" if "Literal[" in body else "TypedDict"
    name = cls.__name__.removesuffix("Settings")
    lines = [
        f'"""Keywords of :class:`{cls.__name__}`; written by .ci/generate_settings.py."""',
        "",
        "from __future__ import annotations",
        "",
        *imports,
        f"from typing import {literal}",
        *(["", *own] if own else []),
        "",
        "",
        f"class {name}Options(TypedDict, total=False):",
        f'    """Settings of {cls.label}; each may be left out."""',
        "",
        body,
    ]
    return "\n".join(lines) + "\n"


def _own_classes(cls: type[Settings]) -> list[str]:
    """Imports of this project's classes that a setting may be given as."""
    kinds = {one for kind in setting_types(cls).values() for one in (kind, *typing.get_args(kind))}
    own = [kind for kind in kinds if isinstance(kind, type) and kind.__module__.startswith("robust_ext.")]
    return sorted(f"from {kind.__module__} import {kind.__name__}" for kind in own)


def _annotation(kind: Any, info: SettingInfo) -> str:
    """The type of a keyword: a string of few choices as such, any sequence for a tuple."""
    if isinstance(kind, types.UnionType):
        return " | ".join(_annotation(one, info) for one in typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        return f"Sequence[{_annotation(typing.get_args(kind)[0], info)}]"
    if kind is str and info.choices is not None:
        return "Literal[" + ", ".join(f'"{choice}"' for choice in info.choices) + "]"
    return "None" if kind is type(None) else str(kind.__name__)


def _page() -> str:
    parts = [_PAGE, "\n## Evaluations\n"]
    for name, cls in EVALUATIONS.items():
        command = _COMMANDS.get(name, name.replace("_", "-"))
        parts.append(f"\n### {cls.__name__}, `robust-ext {command}`\n\n{_table(cls)}")
    for title, classes in (("Attacks", ATTACKS), ("Detectors", PUBLISHED), ("Defenses", DEFENSES)):
        parts.append(f"\n## {title}\n")
        parts += [f"\n### {cls.__name__}\n\n{_summary(cls)}\n\n{_table(cls)}" for cls in classes if declared(cls)]
    return "".join(parts)


def _summary(cls: type) -> str:
    return _markdown((cls.__doc__ or "").strip().split("\n\n")[0])


def _table(cls: type) -> str:
    rows = [
        (
            f"`{name}`",
            f"`{_written_type(cls, name)}`",
            _default(cls, name),
            _range(info),
            _markdown(info.help),
        )
        for name, info in declared(cls).items()
    ]
    lines = [("setting", "type", "default", "range", "meaning"), ("---",) * 5, *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def _written_type(cls: type, name: str) -> str:
    """The type of a setting as its class writes it."""
    written = (inspect.get_annotations(one).get(name) for one in cls.__mro__)
    return next(str(kind) for kind in written if kind is not None)


def _default(cls: type, name: str) -> str:
    field = cls.__dataclass_fields__[name]  # type: ignore[attr-defined]
    if field.default_factory is not dataclasses.MISSING:
        return f"`{field.default_factory()!r}`"
    if field.default is dataclasses.MISSING:
        return "required"
    return f"`{getattr(field.default, '__name__', None) or repr(field.default)}`"


def _range(info: SettingInfo) -> str:
    words = [
        f"{sign} {limit:g}"
        for sign, limit in (("≥", info.minimum), (">", info.above), ("≤", info.maximum), ("<", info.below))
        if limit is not None
    ]
    return ", ".join([*words, *(f'`"{choice}"`' for choice in info.choices or ())])


def _markdown(text: str) -> str:
    """Words of a docstring as Markdown on one line."""
    text = re.sub(r":\w+:`[~.]?([^`]*)`", r"`\1`", " ".join(text.split()))
    return text.replace("``", "`")


def main(arguments: Iterable[str]) -> int:
    """Write the files, or with ``--check`` name those that are not current."""
    stale = [path for path, text in generate().items() if not path.exists() or path.read_text("utf-8") != text]
    for path in stale:
        if "--check" in arguments:
            sys.stderr.write(f"{path.relative_to(ROOT)} is not current: run python .ci/generate_settings.py\n")
        else:
            path.write_text(generate()[path], encoding="utf-8")
    return int(bool(stale) and "--check" in arguments)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
