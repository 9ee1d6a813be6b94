"""Shared parts of the adapters of model libraries."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from statistics import fmean

from torch import nn

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.foreign import foreign_code
from robust_ext.core.specification import did_you_mean
from robust_ext.models.normalized import Normalized
from robust_ext.registry.base import AdaptedModel

BOUNDS = (0.0, 1.0)


def check_listed(library: str, name: str, known: Collection[str]) -> None:
    """Raise InvalidArgumentError with the nearest names unless the library has a model of this name."""
    if name not in known:
        expected = f"one of its {len(known)} models{did_you_mean(name, known) or f', as {sorted(known)[0]}'}"
        raise InvalidArgumentError("model", f"{library}:{name}", expected)


def making(text: str, *, hint: str = "check its settings") -> AbstractContextManager[None]:
    """Explain what a library raises while it makes a model."""
    return foreign_code("model", text, hint=hint)


def fetched(setting: str) -> str:
    """Return the advice for weights that a library cannot load."""
    return (
        "these weights have to be in the library's own cache, or within reach of a network for it to fetch them; "
        f"without {setting} they are random, and a state dict of yours is loaded by --weights"
    )


def normalized(
    network: nn.Module, *, mean: Sequence[float], std: Sequence[float], input_shape: tuple[int, ...]
) -> AdaptedModel:
    """Put the normalisation that a library declares in front of its network, in eval mode, for inputs in [0, 1].

    With another number of channels than the library's, each is normalised by the mean of its numbers.
    """
    if len(mean) != input_shape[0]:
        mean, std = [fmean(mean)], [fmean(std)]
    module = Normalized(network, mean=tuple(mean), std=tuple(std)).eval()
    return AdaptedModel(module=module, bounds=BOUNDS, input_shape=input_shape)
