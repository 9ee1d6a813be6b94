"""Defenses of any kind as test-time defenses of this project: by name, from an object, or from text that names one."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.core.bounds import check_bounds
from robust_ext.core.errors import DataError, InvalidArgumentError, ModelError
from robust_ext.core.foreign import foreign_code
from robust_ext.core.random import seeded_globals
from robust_ext.core.settings import declared
from robust_ext.core.specification import did_you_mean, parse_call
from robust_ext.core.target import module_device
from robust_ext.defenses.catalogue import NAMED, TRAINED
from robust_ext.models.adaptive import AdaptiveDefense
from robust_ext.models.adaptive_solution import Solution
from robust_ext.models.purifier import Purifier
from robust_ext.models.row_rng import RowRNG
from robust_ext.registry._common import named_object, same_logits, takes_classifier

_ACCEPTED = (
    "an AdaptiveDefense, a factory (classifier) -> AdaptiveDefense, a function that purifies inputs, a module from "
    f"inputs to logits, a name such as 'hd(steps=5)' ({', '.join(NAMED)}), or a string such as 'file.py:make'"
)
_CLASSIFIER = ("classifier", "model", "network", "static")
_TEXT = re.compile(r"\s*(?P<name>[\w-]+)\s*(?P<arguments>\(.*\))?\s*", re.DOTALL)
_SCOPE = "defense:"
_FORM = "a name, or a name with settings as in hd(steps=5)"


class FunctionPurifier(Purifier):
    """Any function from inputs to purified inputs ``(N, ...)``, in front of a classifier; one step.

    ``random`` states whether it draws, from the global generators of torch, numpy or ``random``.
    """

    def __init__(self, classifier: nn.Module, function: Callable[[Tensor], Tensor], *, random: bool = False) -> None:
        super().__init__(classifier, steps=1)
        self.function = function
        self.random = random
        self.needs_gradients = True

    def step(self, point: Tensor, *, x: Tensor, number: int, state: Mapping[str, Tensor], rng: RowRNG) -> Tensor:
        """What the function makes of the point, drawing from generators seeded by the samples' seeds."""
        with seeded_globals(rng.seeds[0]) if self.random else nullcontext():
            out = self.function(point)
        if not isinstance(out, Tensor) or out.shape != point.shape:
            shown = f"shape {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
            raise ModelError(f"the purifier returned {shown} for inputs of shape {tuple(point.shape)}")
        return out


class WholeDefense(AdaptiveDefense):
    """A module that is classifier and defense in one, from inputs to logits: what happens inside cannot be seen.

    ``classifier`` is the static one it is held against; ``random`` as for :class:`FunctionPurifier`.
    """

    def __init__(self, classifier: nn.Module, module: nn.Module, *, random: bool = False) -> None:
        super().__init__(classifier)
        self.module = module
        self.random = random
        self.needs_gradients = True

    def solve(self, x: Tensor, rng: RowRNG, *, record: bool) -> Solution:
        """Nothing: the module does it all."""
        return Solution(x, (x,), {"seed": torch.tensor(rng.seeds)})

    def readout(self, point: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """The module's logits, drawing from a generator seeded by the first sample's seed."""
        with seeded_globals(int(state["seed"][0])) if self.random else nullcontext():
            out: Tensor = self.module(point)
        return out


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
        obj: An :class:`AdaptiveDefense` of that classifier; a factory: a class, or a function whose first parameter is
            called ``classifier``, ``model``, ``network`` or ``static``, that makes any of these; a function or module
            that purifies inputs, or a module from inputs to logits; whether such draws is read off its attribute
            ``random`` (False without one). A string: a name of :data:`robust_ext.defenses.catalogue.NAMED`, with
            settings as in ``hd(steps=5)``, see :func:`named_defense`; or what names one of the others,
            ``package.module:object`` or ``file.py:object``.
        classifier: The static classifier.
        inputs: A few inputs ``(n, ...)``, to distinguish a purifier from a classifier.
        weights: File of trained parts, for names in :data:`robust_ext.defenses.catalogue.TRAINED`.
        bounds: Of the inputs, for names.
        argument: What error messages call it.

    Raises:
        InvalidArgumentError: It is none of these, or defends another classifier.
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
    if isinstance(obj, type) or takes_classifier(obj, *_CLASSIFIER):
        factory: Any = obj
        with foreign_code(argument, _name(obj), hint="it is called with the classifier alone"):
            made = factory(classifier)
        if isinstance(made, (str, type)) or takes_classifier(made, *_CLASSIFIER):
            raise InvalidArgumentError(argument, f"{_name(obj)}, which made {made!r}", _ACCEPTED)
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
    """A published defense by its name, one of :data:`robust_ext.defenses.catalogue.NAMED`, as in ``"hd(steps=5)"``.

    Settings in parentheses are those that its class declares, and for those in
    :data:`~robust_ext.defenses.catalogue.TRAINED` the file of their trained part as ``weights``, which is tried on the
    inputs ``(n, ...)``. Other arguments and errors are those of :func:`as_defense`.
    """
    name, settings = _parsed(text, argument)
    defense = NAMED[name]
    known = [*declared(defense), *(["weights"] if defense.part_class else [])]
    for key in settings:
        if key not in known:
            expected = f"one of: {', '.join(known)}{did_you_mean(key, known)}"
            raise InvalidArgumentError(argument, f"{name}({key}=...)", expected)
    file = settings.pop("weights", weights)
    if defense.part_class is not None:
        settings |= _part_arguments(defense, file, classifier, inputs, argument)
    elif weights is not None:
        expected = f"none for {name}, which has no trained parts; those that do: {', '.join(TRAINED)}"
        raise InvalidArgumentError("defense weights", str(weights), expected)
    if "bounds" in inspect.signature(defense).parameters:
        settings["bounds"] = bounds
    return defense(classifier, **settings)


def _parsed(text: str, argument: str) -> tuple[str, dict[str, Any]]:
    match = _TEXT.fullmatch(text)
    if match is None:
        raise InvalidArgumentError(argument, repr(text), _FORM)
    name = match["name"]
    if name not in NAMED:
        expected = f"one of {', '.join(NAMED)}, package.module:object or file.py:object{did_you_mean(name, NAMED)}"
        raise InvalidArgumentError(argument, repr(text), expected)
    try:
        spec = parse_call(f"{_SCOPE}{name.replace('-', '_')}{match['arguments'] or ''}", argument=argument)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(argument, str(error.got).replace(_SCOPE, ""), error.expected) from error
    return name, dict(spec.arguments)


def _part_arguments(
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


def _name(obj: object) -> str:
    return str(getattr(obj, "__name__", type(obj).__name__))


def _wrapped(obj: object, classifier: nn.Module, inputs: Tensor, argument: str) -> AdaptiveDefense:
    if not callable(obj):
        raise InvalidArgumentError(argument, type(obj).__name__, _ACCEPTED)
    random = bool(getattr(obj, "random", False))
    called_on = f"{_name(obj)}, on inputs of shape {tuple(inputs.shape)},"
    with torch.no_grad(), foreign_code(argument, called_on, hint=f"expected {_ACCEPTED}"):
        out = obj(inputs.clone())
    if isinstance(out, Tensor) and out.shape == inputs.shape:
        return FunctionPurifier(classifier, obj, random=random)
    if isinstance(obj, nn.Module) and isinstance(out, Tensor) and out.dim() == 2:
        return WholeDefense(classifier, obj, random=random)
    shown = f"shape {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
    raise InvalidArgumentError(argument, f"what returns {shown} for inputs {tuple(inputs.shape)}", _ACCEPTED)
