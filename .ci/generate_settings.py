"""Write what is made from the declarations of settings: keywords for type checkers, and docs/settings*.md.

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
from robust_ext.evaluations.evaluate.settings import EvaluateSettings
from robust_ext.evaluations.mead.settings import MeadSettings
from robust_ext.evaluations.robust_accuracy.settings import RobustAccuracySettings

ROOT = Path(__file__).parents[1]
EVALUATIONS: dict[str, type[Settings]] = {
    "binarization": BinarizationSettings,
    "mead": MeadSettings,
    "robust_accuracy": RobustAccuracySettings,
    "adaptive": AdaptiveSettings,
    "diagnosis": DiagnosisSettings,
    "evaluate": EvaluateSettings,
}
_COMMANDS = {"adaptive": "test-time", "diagnosis": "diagnose"}
_PAGE = """\
# Settings

All settings of the evaluations, as their classes declare them; those of [attacks](settings_attacks.md),
[detectors](settings_detectors.md) and [defenses](settings_defenses.md) have pages of their own.
`.ci/generate_settings.py` writes these pages. In Python settings are keywords (`binarization_test(..., kappa=0.99)`);
on the command line the evaluations' are options of the same names (`--kappa 0.99`), and an attack's go into its
parentheses (`--attack "robust_ext:APGD(steps=50)"`). `robust-ext COMMAND --help-all` also lists the options of model,
data and run, see [the command line](command_line.md). What each default rests on: [the case for each
default](evidence/defaults.md).
"""
# Pages of classes that are chosen by name.
_CATALOGUES = {"attacks": ATTACKS, "detectors": PUBLISHED, "defenses": DEFENSES}
_BLOCKS = """
Principles and building blocks are the columns of table 1 of Croce et al. 2022: input purification (IP) and model
adaptation (MA); iterative algorithm (IA), auxiliary network (AN), randomness (R) and external data (ED). In Python they
are `building_blocks` of each class.

"""


def generate() -> dict[Path, str]:
    """The text of each file."""
    docs = ROOT / "docs"
    return {
        ROOT / "robust_ext" / "evaluations" / "options.py": _options(),
        docs / "settings.md": _page(),
        **{docs / f"settings_{title}.md": _catalogue_page(title) for title in _CATALOGUES},
    }


def _options() -> str:
    """A class of keywords for each evaluation, for type checkers."""
    kinds = {one for cls in EVALUATIONS.values() for kind in setting_types(cls).values() for one in _parts(kind)}
    own = sorted(kind for kind in kinds if isinstance(kind, type) and kind.__module__.startswith("robust_ext."))
    lines = [
        '"""Keywords of every evaluation that are its settings; written by .ci/generate_settings.py."""',
        "",
        "from __future__ import annotations",
        "",
        "from collections.abc import Sequence",
        "from typing import TYPE_CHECKING, Literal, TypedDict",
        "",
        "if TYPE_CHECKING:",
        *(f"    from {kind.__module__} import {kind.__name__}" for kind in own),
    ]
    for cls in EVALUATIONS.values():
        lines += ["", "", f"class {cls.__name__.removesuffix('Settings')}Options(TypedDict, total=False):"]
        lines += [f'    """Settings of {cls.label}; each may be left out, see :class:`{cls.__name__}`."""', ""]
        for (name, info), kind in zip(declared(cls).items(), setting_types(cls).values(), strict=True):
            lines.append(f"    {name}: {_annotation(kind, info)}")
    return "\n".join(lines) + "\n"


def _parts(kind: Any) -> list[Any]:
    return [kind, *typing.get_args(kind)]


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
    parts = [_PAGE]
    for name, cls in EVALUATIONS.items():
        command = _COMMANDS.get(name, name.replace("_", "-"))
        parts.append(f"\n## {cls.__name__}, `robust-ext {command}`\n\n{_table(cls)}")
    return "".join(parts)


def _catalogue_page(title: str) -> str:
    """The page of the settings of all attacks, detectors or defenses."""
    head = f"# Settings of {title}\n\nHow settings are given: [settings](settings.md).\n"
    classes = (cls for cls in _CATALOGUES[title] if declared(cls))
    head += _blocks() if title == "defenses" else ""
    return head + "".join(f"\n## {cls.__name__}\n\n{_summary(cls)}\n\n{_table(cls)}" for cls in classes)


def _blocks() -> str:
    """Principles and building blocks of every defense, as in table 1 of Croce et al. 2022."""
    columns = ("IP", "MA", "IA", "AN", "R", "ED")
    lines = [("defense", "name", *columns), ("---",) * 8]
    for one in DEFENSES:
        marks = ("•" if column in one.building_blocks else "" for column in columns)
        lines.append((one.__name__, f"`{one.name}`", *marks))
    return _BLOCKS + "".join("| " + " | ".join(line) + " |\n" for line in lines)


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
