"""Attack objects of torchattacks read back: the settings with which they were made."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from robust_ext.adapters import wrapped
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.warning import warn

_MODES = ("model_training", "batchnorm_training", "dropout_training")
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
    """Return an object's settings that differ from its class's defaults, without those of its model.

    The number of classes and the normalization belong to the model the object was bound to and are left out; targets
    take inputs as they are. The device is left out too.

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
        warn(
            f"{type(attack).__name__}: set_normalization_used belongs to the model it was bound to and is left out; "
            "targets are attacked on inputs as they take them, and a network that needs normalized ones has to do that "
            "itself"
        )

    def read(key: str, parameter: inspect.Parameter) -> Any:
        if key in ("model", "n_classes"):
            return wrapped.MISSING
        noise = getattr(attack, "noise_func", None)
        if noise is not None and key in ("noise_type", "noise_sd"):
            return getattr(noise, key)
        return getattr(attack, _PLACES.get((type(attack).__name__, key), key), wrapped.MISSING)

    return wrapped.settings_of(attack, read)


def training_of(attack: Any) -> dict[str, bool]:
    """Return the values of ``set_model_training_mode``; empty where it was not called."""
    modes = {name: bool(getattr(attack, f"_{name}")) for name in _MODES}
    return modes if any(modes.values()) else {}
