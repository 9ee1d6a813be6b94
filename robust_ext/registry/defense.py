"""The conversion of objects and names to test-time defenses, with their trained parts."""

from __future__ import annotations

import dataclasses
import inspect
import os
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.core.errors import DataError, InvalidArgumentError, ModelError
from robust_ext.core.modules import SettingsModule
from robust_ext.core.reached import reached_modules
from robust_ext.core.settings import declared
from robust_ext.core.specification import did_you_mean
from robust_ext.core.target import module_device
from robust_ext.core.validation import check_bounds, check_integer
from robust_ext.defenses.catalogue import NAMED, TRAINED
from robust_ext.models.adaptive import AdaptiveDefense
from robust_ext.models.function_purifier import STATED, FunctionPurifier, WholeDefense, called_alone
from robust_ext.registry.base import made_by, named_call, named_object, same_logits, takes_classifier

_ACCEPTED = (
    "an AdaptiveDefense, a factory (classifier) -> AdaptiveDefense, a function that purifies inputs, a module from "
    f"inputs to logits, a name such as 'hd(steps=5)' ({', '.join(NAMED)}), or a string such as 'file.py:make'"
)


def as_defense(
    obj: object,
    classifier: nn.Module,
    inputs: Tensor,
    *,
    weights: str | os.PathLike[str] | None = None,
    bounds: Sequence[float] = (0.0, 1.0),
    argument: str = "defense",
) -> AdaptiveDefense:
    """Turn anything that defends at test time into an :class:`AdaptiveDefense` of a classifier.

    Args:
        obj: An :class:`AdaptiveDefense` of that classifier; a factory of any of these: a class, or a function whose
            first parameter is called ``classifier``, ``model``, ``network`` or ``static``; a function or module that
            purifies inputs, or a module from inputs to logits, with the attributes that :func:`robust_ext.purifier`
            sets; it may take gradients inside. As a string: a name of
            :data:`robust_ext.defenses.catalogue.NAMED`, with settings as in ``hd(steps=5)``, see
            :func:`named_defense`; or ``package.module:object`` or ``file.py:object``.
        classifier: The static classifier.
        inputs: A few inputs ``(n, ...)``, to distinguish a purifier from a classifier.
        weights: File of trained parts, for names in :data:`robust_ext.defenses.catalogue.TRAINED`.
        bounds: Of the inputs, for names.
        argument: What error messages call it.

    Raises:
        InvalidArgumentError: ``obj`` is something else, or defends another classifier.
        DataError: Trained parts cannot be read.

    Example:
        >>> network = nn.Sequential(nn.Flatten(), nn.Linear(4, 3)).eval()
        >>> as_defense(lambda x: x.round(), network, torch.rand(2, 1, 2, 2))(torch.rand(5, 1, 2, 2)).shape
        torch.Size([5, 3])
    """
    check_bounds(bounds)
    # A name has no colon before its settings.
    if isinstance(obj, str) and ":" not in obj.partition("(")[0]:
        return named_defense(obj, classifier, inputs, weights=weights, bounds=bounds, argument=argument)
    if weights is not None:
        expected = f"no weights for a defense of your own; names that take them: {', '.join(TRAINED)}"
        raise InvalidArgumentError("defense weights", str(weights), expected)
    if isinstance(obj, str):
        found = named_object(obj, accepted=_ACCEPTED, argument=argument)
        return as_defense(found, classifier, inputs, argument=argument)
    if isinstance(obj, AdaptiveDefense):
        if not same_logits(obj.classifier, classifier, inputs):
            name = type(obj).__name__
            raise InvalidArgumentError(
                argument, f"{name} of a classifier with other logits", "a defense of this very classifier, or its class"
            )
        return obj
    if isinstance(obj, type) or takes_classifier(obj):
        made = made_by(obj, classifier, accepted=_ACCEPTED, argument=argument)
        for name in STATED:
            if name in getattr(obj, "__dict__", {}) and not hasattr(made, name):
                setattr(made, name, getattr(obj, name))
        return as_defense(made, classifier, inputs, argument=argument)
    return _wrapped(obj, classifier, inputs, argument)


def named_defense(
    text: str,
    classifier: nn.Module,
    inputs: Tensor,
    *,
    weights: str | os.PathLike[str] | None = None,
    bounds: Sequence[float] = (0.0, 1.0),
    argument: str = "defense",
) -> AdaptiveDefense:
    """Make a published defense by its name in :data:`robust_ext.defenses.catalogue.NAMED`, as in ``"hd(steps=5)"``.

    Parentheses hold settings that its class declares; ``weights``, the file of its trained part, for those in
    :data:`~robust_ext.defenses.catalogue.TRAINED`; and its parts that are networks or functions, as text that names
    one, ``package.module:object`` or ``file.py:make()``, or as a dict of settings. The trained part is tried on the
    inputs ``(n, ...)``. Other arguments and errors are those of :func:`as_defense`.
    """
    otherwise = "package.module:object or file.py:object"
    name, settings = named_call(text, NAMED, argument=argument, otherwise=otherwise)
    defense = NAMED[name]
    parts = _parts_of(defense)
    known = [*declared(defense), *parts, *(["weights"] if defense.part_class else [])]
    for key in settings:
        if key not in known:
            expected = f"one of: {', '.join(known)}{did_you_mean(key, known)}"
            raise InvalidArgumentError(argument, f"{name}({key}=...)", expected)
    file = settings.pop("weights", weights)
    given = {key: settings.pop(key) for key in parts if key in settings}
    parameters = inspect.signature(defense).parameters
    complete = all(key in given or parameters[key].default is not inspect.Parameter.empty for key in parts)
    if defense.part_class is not None and not (file is None and complete):
        settings |= _trained_arguments(defense, file, classifier, inputs, argument)
    elif weights is not None:
        expected = f"none for {name}, which has no trained parts; those that do: {', '.join(TRAINED)}"
        raise InvalidArgumentError("defense weights", str(weights), expected)
    for key, value in given.items():
        factory = defense.__dataclass_fields__[key].default_factory
        default = settings.get(key, None if factory is dataclasses.MISSING else factory())
        settings[key] = _made_part(f"{argument}: {key}", value, parts[key], default, module_device(classifier))
    if "bounds" in parameters:
        settings["bounds"] = bounds
    return defense(classifier, **settings)


def _wrapped(obj: object, classifier: nn.Module, inputs: Tensor, argument: str) -> AdaptiveDefense:
    if not callable(obj):
        raise InvalidArgumentError(argument, type(obj).__name__, _ACCEPTED)
    size = getattr(obj, "group_size", None)
    stated: dict[str, Any] = {"random": bool(getattr(obj, "random", False)), "group_size": size}
    if size is not None:
        name = getattr(obj, "__name__", type(obj).__name__)
        check_integer(f"{argument}: group_size of {name}", size, minimum=1)
        # A whole group.
        inputs = inputs[torch.arange(size) % len(inputs)]
    out = called_alone(obj, inputs, reached_modules(obj).values())
    if isinstance(out, Tensor) and out.shape == inputs.shape:
        made = FunctionPurifier(classifier, obj, **stated)
        made.look_for_trajectory(inputs)
        return made
    if isinstance(obj, nn.Module) and isinstance(out, Tensor) and out.dim() == 2:
        return WholeDefense(classifier, obj, **stated)
    shown = f"shape {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
    raise InvalidArgumentError(argument, f"what returns {shown} for inputs {tuple(inputs.shape)}", _ACCEPTED)


def _parts_of(defense: type[AdaptiveDefense]) -> dict[str, Any]:
    """Return the parameters, with types, that are neither settings nor the classifier nor set by an evaluation."""
    hints = typing.get_type_hints(defense)
    left_out = {*declared(defense), "classifier", "bounds", "seed"}
    fields = (one for one in dataclasses.fields(defense) if one.init and one.metadata and one.name not in left_out)
    return {one.name: hints[one.name] for one in fields}


def _made_part(argument: str, value: object, kind: Any, default: object, device: torch.device) -> object:
    """Return a part of a defense from text that names it, or from settings that override those of the ``default``."""
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


def _trained_arguments(
    defense: type[AdaptiveDefense], file: object, classifier: nn.Module, inputs: Tensor, argument: str
) -> dict[str, Any]:
    """Read a defense's trained part from a file, try it on inputs, and return arguments of the constructor."""
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
