"""Defenses by name, with settings as text: ``hd(steps=5)``, ``aid(weights='aid.safetensors')``."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.specification import did_you_mean, parse_call
from robust_ext.defenses import trained
from robust_ext.defenses.adp import AdaptiveDenoising
from robust_ext.defenses.aid import AIDPurifier
from robust_ext.defenses.anti_adversary import AntiAdversary
from robust_ext.defenses.clc import ClosedLoopControl
from robust_ext.defenses.hd import HedgeDefense
from robust_ext.defenses.imf import IMF
from robust_ext.defenses.reverse import ContrastiveReversal
from robust_ext.defenses.soap import SOAP, flipped_crop
from robust_ext.defenses.sodef import SODEF
from robust_ext.defenses.transformations import (
    BitDepthReduction,
    JPEGCompression,
    MedianSmoothing,
    RandomizedSmoothing,
    RandomResizePad,
)
from robust_ext.models.adaptive import AdaptiveDefense

# Parameters that are no settings: the classifier, trained parts, what the evaluation decides, and functions.
_GIVEN = (
    "classifier",
    "discriminator",
    "layers",
    "features",
    "head",
    "projections",
    "encoder",
    "score",
    "view",
    "augment",
    "bounds",
    "seed",
)
_TEXT = re.compile(r"\s*(?P<name>[\w-]+)\s*(?P<arguments>\(.*\))?\s*", re.DOTALL)
_SCOPE = "defense:"
_FORM = "a name, or a name with settings as in hd(steps=5)"


@dataclass(frozen=True)
class _Entry:
    """What a name stands for.

    Args:
        make: The defense.
        parts: Loads its trained parts from a file, as arguments of ``make``; None where it needs none.
        view: Whether it has the settings of :func:`robust_ext.defenses.soap.flipped_crop`.
    """

    make: Callable[..., AdaptiveDefense]
    parts: Callable[[str | os.PathLike[str], nn.Module, Tensor], dict[str, Any]] | None = None
    view: bool = False

    @property
    def settings(self) -> list[str]:
        """Names of its settings."""
        own = [name for name in inspect.signature(self.make).parameters if name not in _GIVEN]
        return own + (["crop", "flip"] if self.view else []) + (["weights"] if self.parts else [])


_ENTRIES: Mapping[str, _Entry] = {
    "hd": _Entry(HedgeDefense),
    "anti-adversary": _Entry(AntiAdversary),
    "soap": _Entry(SOAP, view=True),
    "imf": _Entry(IMF, trained.load_for_imf),
    "aid": _Entry(AIDPurifier, trained.load_for_aid),
    "sodef": _Entry(SODEF, trained.load_for_sodef),
    "clc": _Entry(ClosedLoopControl, trained.load_for_clc),
    "reverse": _Entry(ContrastiveReversal, trained.load_for_reverse),
    "adp": _Entry(AdaptiveDenoising, trained.load_for_adp),
    "bit-depth": _Entry(BitDepthReduction),
    "median": _Entry(MedianSmoothing),
    "jpeg": _Entry(JPEGCompression),
    "resize-pad": _Entry(RandomResizePad),
    "randomized-smoothing": _Entry(RandomizedSmoothing),
}

NAMED = tuple(_ENTRIES)
"""Every name."""

TRAINED = tuple(name for name, entry in _ENTRIES.items() if entry.parts)
"""Names of the defenses that need trained parts from a file."""


def is_named(text: str) -> bool:
    """Whether a text is meant as a name: it has no colon before its settings.

    Example:
        >>> is_named("jpeg(quality=30)"), is_named("my_defense.py:make")
        (True, False)
    """
    return ":" not in text.partition("(")[0]


def named_defense(
    text: str,
    classifier: nn.Module,
    inputs: Tensor,
    *,
    weights: str | os.PathLike[str] | None = None,
    bounds: Sequence[float] = (0.0, 1.0),
    argument: str = "defense",
) -> AdaptiveDefense:
    """A defense of this project by its name.

    Args:
        text: One of :data:`NAMED`, with settings as keyword arguments in parentheses: those of its class, but for what
            the evaluation decides (bounds and seed). ``soap`` also takes ``crop`` and ``flip`` of its view, and those
            in :data:`TRAINED` take the file of their parts as ``weights``.
        classifier: What is defended, from inputs to logits, in eval mode.
        inputs: A few inputs ``(n, ...)``; trained parts are tried on them.
        weights: File of the trained parts, where the text does not name one.
        bounds: Of the inputs.
        argument: What error messages call the text.

    Raises:
        InvalidArgumentError: There is no such name or setting, or a file is missing, or not wanted, or of parts for
            another classifier.
        DataError: The file cannot be read, or holds something else.

    Example:
        >>> import torch
        >>> network = nn.Sequential(nn.Flatten(), nn.Linear(4, 3)).eval()
        >>> named_defense("hd(steps=5)", network, torch.rand(2, 1, 2, 2)).steps
        5
    """
    name, settings = _parsed(text, argument)
    entry = _ENTRIES[name]
    for key in settings:
        if key not in entry.settings:
            known = entry.settings
            raise InvalidArgumentError(
                argument, f"{name}({key}=...)", f"one of: {', '.join(known)}{did_you_mean(key, known)}"
            )
    file = settings.pop("weights", None)
    if entry.parts is None and weights is not None:
        expected = f"none for {name}, which has no trained parts; those that do: {', '.join(TRAINED)}"
        raise InvalidArgumentError("defense weights", str(weights), expected)
    if entry.view:
        settings["view"] = partial(
            flipped_crop, **{key: settings.pop(key) for key in ("crop", "flip") if key in settings}
        )
    if "bounds" in inspect.signature(entry.make).parameters:
        settings["bounds"] = bounds
    parts: dict[str, Any] = {}
    if entry.parts is not None:
        parts = entry.parts(_file(name, weights if file is None else file, argument), classifier, inputs)
    try:
        return entry.make(classifier, **parts, **settings)
    except TypeError as error:
        raise InvalidArgumentError(
            argument, f"{text} ({error})", "settings of the types that its class takes"
        ) from error


def _parsed(text: str, argument: str) -> tuple[str, dict[str, Any]]:
    match = _TEXT.fullmatch(text)
    if match is None:
        raise InvalidArgumentError(argument, repr(text), _FORM)
    name = match["name"]
    if name not in _ENTRIES:
        expected = f"one of {', '.join(NAMED)}, package.module:object or file.py:object{did_you_mean(name, NAMED)}"
        raise InvalidArgumentError(argument, repr(text), expected)
    try:
        spec = parse_call(f"{_SCOPE}{name.replace('-', '_')}{match['arguments'] or ''}", argument=argument)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(argument, str(error.got).replace(_SCOPE, ""), error.expected) from error
    return name, dict(spec.arguments)


def _file(name: str, file: object, argument: str) -> str | os.PathLike[str]:
    if isinstance(file, (str, os.PathLike)):
        return file
    command = f"python examples/train_defense.py --defense {name} --out FILE trains them"
    raise InvalidArgumentError(
        argument, name, f"its trained parts too, {name}(weights='FILE') or --defense-weights FILE; {command}"
    )
