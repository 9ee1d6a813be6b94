"""What a shell completes of an option's value: names of attacks, data, models, detectors, defenses and suites.

Of the libraries of attacks and models only ART is imported for it, when one of its attacks is completed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from robust_ext.core.errors import RobustExtError
from robust_ext.core.settings import SettingInfo
from robust_ext.datasets.load import NAMES
from robust_ext.defenses.catalogue import NAMED as DEFENSES
from robust_ext.engine.executors import NAMES as EXECUTORS
from robust_ext.evaluations.mead.fitting import NAMED as DETECTORS
from robust_ext.evaluations.mead.suites import suite_names
from robust_ext.registry.base import Adapter, adapters

Completer = Callable[[str], list[str]]


def completer(name: str, info: SettingInfo) -> Completer | None:
    """What completes the values of an option; None where the shell completes files.

    Example:
        >>> from robust_ext.core.settings import declared
        >>> from robust_ext.engine.judge import JudgedSettings
        >>> completer("attack", declared(JudgedSettings)["seed"])("robust_ext:APG")
        ['robust_ext:APGD']
    """
    if info.choices is not None:
        return _among(lambda: info.choices or ())
    return _BY_NAME.get(name)


def _attacks(incomplete: str) -> list[str]:
    """``library:`` until there is a colon, then the attacks of the library."""
    library, colon, begun = incomplete.partition(":")
    known = adapters()
    if not colon:
        return [f"{name}:" for name in known if name.startswith(library)]
    if library not in known:
        return []
    try:
        names = known[library].attack_names()
    except RobustExtError:
        return []
    return [f"{library}:{name}" for name in sorted(names) if name.startswith(begun)]


def _among(words: Callable[[], Collection[str]]) -> Completer:
    def complete(incomplete: str) -> list[str]:
        return [word for word in words() if word.startswith(incomplete)]

    return complete


def _models() -> list[str]:
    return [
        "digits",
        *(f"{name}:" for name, one in adapters().items() if type(one).build_model is not Adapter.build_model),
    ]


_BY_NAME = {
    "attack": _attacks,
    "data": _among(lambda: NAMES),
    "train_data": _among(lambda: NAMES),
    "model": _among(_models),
    "surrogate": _among(_models),
    "detector": _among(lambda: DETECTORS),
    "defense": _among(lambda: DEFENSES),
    "executor": _among(lambda: EXECUTORS),
    "suite": _among(suite_names),
    "library": _among(lambda: list(adapters())),
}
