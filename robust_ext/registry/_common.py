"""What turning an object into an attack, a detector or a defense has in common."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor, nn

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.foreign import foreign_code
from robust_ext.core.objects import resolve_object


def named_object(text: str, *, accepted: str, argument: str) -> object:
    """What ``package.module:object`` or ``file.py:object`` names, called where it ends in parentheses.

    InvalidArgumentError where there is none, or it is a text again; DataError where its import or its call raised.
    """
    found: object = resolve_object(text, argument=argument)
    if isinstance(found, str):
        raise InvalidArgumentError(argument, text, f"the name of {accepted}; it names a string")
    return found


def takes_classifier(obj: object, *names: str) -> bool:
    """Whether it is a function whose first parameter is called by one of the names."""
    if isinstance(obj, nn.Module) or not callable(obj):
        return False
    try:
        parameters = list(inspect.signature(obj).parameters)
    except (TypeError, ValueError):
        return False
    return bool(parameters) and parameters[0] in names


def same_logits(first: nn.Module, second: nn.Module, inputs: Tensor) -> bool:
    """Whether two classifiers have the same logits of inputs ``(n, ...)``, up to rounding."""
    with torch.no_grad(), foreign_code("classifier", type(first).__name__, hint="it must take the same inputs"):
        a, b = first(inputs), second(inputs)
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-5 * (1 + float(b.abs().max())))
