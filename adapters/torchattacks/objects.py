"""Attack objects of torchattacks read back: the settings with which they were made."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import Any

from robust_ext.adapters.torchattacks.library import torchattacks
from robust_ext.core.errors import InvalidArgumentError

_LOGGER = logging.getLogger(__name__)
_MISSING = object()
# Where an object keeps a setting under another name.
_PLACES: Mapping[tuple[str, str], str] = {
    ("APGD", "rho"): "thr_decr",
    ("APGDT", "rho"): "thr_decr",
    ("Pixle", "max_iterations"): "max_patches",
    ("Pixle", "x_dimensions"): "p1_x_dimensions",
    ("Pixle", "y_dimensions"): "p1_y_dimensions",
    ("Square", "resc_schedule"): "rescale_schedule",
}


def settings_of(attack: Any) -> dict[str, Any]:
    """The settings of an object that differ from the defaults of its class, without what belongs to its model.

    The number of classes and the normalization belong to the model the object was bound to and are left out; targets
    take inputs as they are. The device does too.

    Raises:
        InvalidArgumentError: It is in a targeted mode.
    """
    if attack.targeted:
        raise InvalidArgumentError(
            "attack",
            f"torchattacks' {type(attack).__name__} in mode {attack.attack_mode!r}",
            "the default mode (set_mode_default()): any class but the true one counts, and labels are true labels",
        )
    if attack.normalization_used is not None:
        _LOGGER.warning(
            "%s: set_normalization_used belongs to the model it was bound to and is left out; targets are attacked on "
            "inputs as they take them, and a network that needs normalized ones has to do that itself",
            type(attack).__name__,
        )
    settings = {}
    for key, parameter in inspect.signature(type(attack)).parameters.items():
        value = _read(attack, key)
        if key not in ("model", "n_classes") and value is not _MISSING and not _same(value, parameter.default):
            settings[key] = value
    return settings


def training_of(attack: Any) -> dict[str, bool]:
    """What the object was told by ``set_model_training_mode``; empty where it was told nothing."""
    modes = {name: bool(getattr(attack, f"_{name}")) for name in _MODES}
    return modes if any(modes.values()) else {}


_MODES = ("model_training", "batchnorm_training", "dropout_training")


def is_attack(value: object) -> bool:
    """Whether it is an attack object of torchattacks."""
    return isinstance(value, torchattacks.attack.Attack)


def _read(attack: Any, key: str) -> Any:
    noise = getattr(attack, "noise_func", None)
    if noise is not None and key in ("noise_type", "noise_sd"):
        return getattr(noise, key)
    return getattr(attack, _PLACES.get((type(attack).__name__, key), key), _MISSING)


def _same(value: Any, default: Any) -> bool:
    return value is default or (type(value) is type(default) and bool(value == default))
