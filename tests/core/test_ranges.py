"""Every declared setting of the project has a range, and what lies outside it is refused by name."""

import importlib
import math
import pkgutil
import types
import typing
from collections.abc import Sequence

import pytest

import robust_ext
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.modules import SettingsModule
from robust_ext.core.settings import LARGEST, Settings, check_setting, declared, default_of, setting_types

for module in pkgutil.walk_packages(robust_ext.__path__, "robust_ext."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)


def below(cls):
    return {cls, *(one for child in cls.__subclasses__() for one in below(child))}


DECLARED = [
    pytest.param(cls, name, id=f"{cls.__module__.removeprefix('robust_ext.')}.{cls.__name__}.{name}")
    for base in (Settings, SettingsModule)
    for cls in sorted(below(base), key=lambda one: (one.__module__, one.__qualname__))
    if cls.__module__.startswith("robust_ext.")
    for name in declared(cls)
]


def kinds_of(cls, name):
    """The plain types of a setting, those of its entries where it is a tuple, and whether it is one."""
    annotation = setting_types(cls)[name]
    kinds = set(typing.get_args(annotation)) if isinstance(annotation, types.UnionType) else {annotation}
    sequences = [kind for kind in kinds if typing.get_origin(kind) in (tuple, Sequence)]
    return ({typing.get_args(sequences[0])[0]}, True) if sequences else (kinds - {types.NoneType}, False)


def outside(info, kinds):
    """Values that no setting of these types and ends may have."""
    if info.check is not None:
        return [object()]
    if bool in kinds:
        return ["no", 2, 0.5]
    if kinds & {int, float}:
        low = info.minimum if info.above is None else info.above
        high = info.maximum if info.below is None else info.below
        low, high = -LARGEST if low is None else low, LARGEST if high is None else high
        step = 1 if float not in kinds else max(abs(high), 1) * 1e-6
        wrong = [math.nan, math.inf, -math.inf, 1e300, -1e300, low - step, high + step, True, [1]]
        wrong += [low] if info.above is not None else []
        return wrong + ([high] if info.below is not None else []) + ([1.5] if float not in kinds else [])
    if kinds == {str}:
        return [3, b"x", ["a"], *(["no such choice"] if info.choices else [])]
    return []


@pytest.mark.parametrize(("cls", "name"), DECLARED)
def test_what_lies_outside_is_refused(cls, name):
    info, default = declared(cls)[name], default_of(cls, name)
    kinds, several = kinds_of(cls, name)
    if default is not None and not hasattr(default, "__dataclass_fields__") and "MISSING" not in repr(default):
        check_setting(cls, name, info, default)
    # A name of a layer in a list may be empty: the input.
    empty = [""] if str in kinds and info.check is None and not several else []
    for value in [*outside(info, kinds), *empty]:
        with pytest.raises(InvalidArgumentError) as raised:
            check_setting(cls, name, info, (value,) if several and info.check is None else value)
        assert raised.value.argument.startswith(name)
