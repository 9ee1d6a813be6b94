"""Defenses of any kind as test-time defenses of this project."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.core.errors import InvalidArgumentError, ModelError
from robust_ext.core.random import seeded_globals
from robust_ext.defenses.named import TRAINED, is_named, named_defense
from robust_ext.models.adaptive import AdaptiveDefense
from robust_ext.models.adaptive_solution import Solution
from robust_ext.models.purifier import Purifier
from robust_ext.models.row_rng import RowRNG
from robust_ext.registry._common import named_object, same_logits, takes_classifier

_ACCEPTED = (
    "an AdaptiveDefense, a factory (classifier) -> AdaptiveDefense, a function that purifies inputs, a module from "
    "inputs to logits, a name of robust_ext.defenses.named.NAMED such as 'hd(steps=5)', or a string such as "
    "'file.py:make'"
)
_CLASSIFIER = ("classifier", "model", "network", "static")


class FunctionPurifier(Purifier):
    """Any function from inputs to purified inputs, in front of a classifier; one step.

    Args:
        classifier: From inputs to logits.
        function: From ``(N, ...)`` to ``(N, ...)``.
        random: Whether it draws, from the global generators of torch, numpy or ``random``.
    """

    def __init__(self, classifier: nn.Module, function: Callable[[Tensor], Tensor], *, random: bool = False) -> None:
        super().__init__(classifier, steps=1)
        self.function = function
        self.random = random
        self.needs_gradients = True

    def step(self, point: Tensor, *, x: Tensor, number: int, state: Mapping[str, Tensor], rng: RowRNG) -> Tensor:
        """What the function makes of the point, drawing from generators seeded by the rows' seeds."""
        with seeded_globals(rng.seeds[0]) if self.random else nullcontext():
            out = self.function(point)
        if not isinstance(out, Tensor) or out.shape != point.shape:
            shown = f"shape {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
            raise ModelError(f"the purifier returned {shown} for inputs of shape {tuple(point.shape)}")
        return out


class WholeDefense(AdaptiveDefense):
    """A module that is classifier and defense in one: what happens inside cannot be seen.

    Args:
        classifier: The static classifier it is held against.
        module: From inputs to logits.
        random: Whether it draws, from the global generators of torch, numpy or ``random``.
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
        """The module's logits, drawing from a generator seeded by the first row's seed."""
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
            ``random`` (False without one). A string: a name of :data:`robust_ext.defenses.named.NAMED`, with settings
            as in ``hd(steps=5)``; or what names one of the others, ``package.module:object`` or ``file.py:object``.
        classifier: The static classifier.
        inputs: A few inputs ``(n, ...)``, to tell a purifier from a classifier.
        weights: File of trained parts, for names in :data:`robust_ext.defenses.named.TRAINED`.
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
    if isinstance(obj, str) and is_named(obj):
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
        made: Any = obj
        return as_defense(made(classifier), classifier, inputs, argument=argument)
    if not callable(obj):
        raise InvalidArgumentError(argument, type(obj).__name__, _ACCEPTED)
    random = bool(getattr(obj, "random", False))
    with torch.no_grad():
        out = obj(inputs.clone())
    if isinstance(out, Tensor) and out.shape == inputs.shape:
        return FunctionPurifier(classifier, obj, random=random)
    if isinstance(obj, nn.Module) and isinstance(out, Tensor) and out.dim() == 2:
        return WholeDefense(classifier, obj, random=random)
    shown = f"shape {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
    raise InvalidArgumentError(argument, f"what returns {shown} for inputs {tuple(inputs.shape)}", _ACCEPTED)
