"""Parts of the published defenses beside their settings: trained ones from files, others from text that names them."""

from __future__ import annotations

import dataclasses
import inspect
import os
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.core.errors import DataError, InvalidArgumentError, ModelError
from robust_ext.core.modules import SettingsModule
from robust_ext.core.settings import declared
from robust_ext.core.specification import did_you_mean
from robust_ext.core.target import module_device
from robust_ext.models.adaptive import AdaptiveDefense
from robust_ext.registry._common import named_object


def parts_of(defense: type[AdaptiveDefense]) -> dict[str, Any]:
    """What a constructor takes besides settings, the classifier and what an evaluation decides, with its types."""
    hints = typing.get_type_hints(defense)
    left_out = {*declared(defense), "classifier", "bounds", "seed"}
    fields = (one for one in dataclasses.fields(defense) if one.init and one.metadata and one.name not in left_out)
    return {one.name: hints[one.name] for one in fields}


def is_complete(defense: type[AdaptiveDefense], given: Mapping[str, object]) -> bool:
    """Whether all that a trained part would be used for is given."""
    parameters = inspect.signature(defense).parameters
    return all(name in given or parameters[name].default is not inspect.Parameter.empty for name in parts_of(defense))


def default_part(defense: type[AdaptiveDefense], name: str) -> object:
    """What a part is where none is given; None where it has no default."""
    factory = defense.__dataclass_fields__[name].default_factory
    return None if factory is dataclasses.MISSING else factory()


def made_part(argument: str, value: object, kind: Any, default: object, device: torch.device) -> object:
    """A part of a defense from text that names it, or from settings that differ from those of the ``default``."""
    if isinstance(value, Mapping):
        if not isinstance(default, SettingsModule):
            raise InvalidArgumentError(argument, repr(value), "package.module:object or file.py:object")
        known = default.settings
        for name in value:
            if name not in known:
                expected = f"settings among {', '.join(known)}{did_you_mean(str(name), known)}"
                raise InvalidArgumentError(argument, repr(name), expected)
        return type(default)(**{**known, **value})
    wanted = f"a {kind.__name__}" if isinstance(kind, type) and issubclass(kind, nn.Module) else "a function or module"
    found = named_object(value, accepted=wanted, argument=argument) if isinstance(value, str) else value
    if not (callable(found) if kind is Any else isinstance(found, kind)):
        raise InvalidArgumentError(
            argument, repr(value), f"{wanted}, as package.module:object, file.py:object or file.py:make()"
        )
    return found.to(device).eval() if isinstance(found, nn.Module) else found


def trained_arguments(
    defense: type[AdaptiveDefense], file: object, classifier: nn.Module, inputs: Tensor, argument: str
) -> dict[str, Any]:
    """What a defense's constructor takes of its trained part, read from a file and tried on a few inputs."""
    if not isinstance(file, (str, os.PathLike)):
        command = f"python examples/train_defense.py --defense {defense.name} --out FILE trains them"
        expected = f"its trained parts too, {defense.name}(weights='FILE') or --defense-weights FILE; {command}"
        raise InvalidArgumentError(argument, defense.name, expected)
    if not Path(file).is_file():
        raise DataError(f"{file}: no such file; examples/train_defense.py writes files of trained parts")
    part = defense.part_class.load(file).to(module_device(classifier))
    try:
        with torch.no_grad():
            return defense.part_arguments(part, classifier, inputs)
    except (RuntimeError, ModelError, InvalidArgumentError) as error:
        raise InvalidArgumentError(
            "weights", f"{file}, which does not fit ({error})", "parts that were trained for this classifier"
        ) from error
